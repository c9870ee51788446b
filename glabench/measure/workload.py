"""Prepares a cell for measuring: its inputs, the call bound to them, and the pass as steps that can be timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from glabench.backends import Backend
from glabench.ops import Op
from glabench.ops.base import as_tuple
from glabench.sweeps.model import Cell

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Workload:
    """A forward call on fixed inputs, and the gradients of its outputs."""

    forward: Callable[[], Tensor | tuple[Tensor, ...]]
    inputs: Mapping[str, Tensor]
    grad_outputs: Mapping[str, Tensor]

    @cached_property
    def differentiable(self) -> dict[str, Tensor]:
        """The inputs that have gradients: all but indices."""
        return {name: x for name, x in self.inputs.items() if x.is_floating_point()}

    def gradients(self, outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The gradients of the differentiable inputs, without accumulating into `.grad`."""
        import torch

        # Zeros for an input that the outputs do not depend on, as the gate of a single token.
        return torch.autograd.grad(as_tuple(outputs), *self._arguments, allow_unused=True, materialize_grads=True)

    # Ready once, because calls are timed.
    @cached_property
    def _arguments(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return tuple(self.differentiable.values()), tuple(self.grad_outputs.values())


@dataclass(frozen=True)
class Steps:
    """A pass as functions. `prepare`, if any, runs before each timed `call` and is not timed."""

    prepare: Callable[[], object] | None
    call: Callable[[], object]
    # The forward alone, if the pass has a backward.
    forward: Callable[[], object] | None


def prepare(op: Op, backend: Backend, cell: Cell) -> Workload:
    """Makes the cell's inputs from its seed and binds the backend to them.

    Inputs require gradients in every pass except `infer`.
    """
    import torch

    trains = cell.pass_ != "infer"
    made = op.make_inputs(cell)
    inputs = {name: x.requires_grad_(trains and x.is_floating_point()) for name, x in made.items()}
    forward = backend.bind(dict(inputs), cell)
    torch.set_grad_enabled(True)  # whatever the backend left behind
    return Workload(forward, inputs, op.make_grad_outputs(cell))


def steps_of(workload: Workload, cell: Cell) -> Steps:
    """The steps of the cell's pass on its workload."""

    def both() -> tuple[Tensor, ...]:
        outputs = workload.forward()
        return (*as_tuple(outputs), *workload.gradients(outputs))

    if not cell.has_backward:
        return Steps(None, workload.forward, None)
    if cell.pass_ == "fwd+bwd":
        return Steps(None, both, workload.forward)
    held: list[Tensor | tuple[Tensor, ...]] = []

    def forward_first() -> None:
        held[:] = [workload.forward()]

    return Steps(forward_first, lambda: workload.gradients(held[0]), workload.forward)
