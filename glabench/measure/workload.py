"""Prepares a cell for measuring: its inputs, the call bound to them, and the pass as steps that can be timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from glabench.backends import Backend
from glabench.ops import Op
from glabench.sweeps.model import Cell

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Workload:
    """A forward call on fixed inputs, the inputs to differentiate, and the output's gradient."""

    forward: Callable[[], Tensor]
    inputs: Mapping[str, Tensor]
    grad_output: Tensor

    def gradients(self, output: Tensor) -> tuple[Tensor, ...]:
        """The gradients of all inputs, without accumulating into `.grad`."""
        import torch

        return torch.autograd.grad(output, tuple(self.inputs.values()), self.grad_output)


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
    inputs = {name: x.requires_grad_(trains) for name, x in op.make_inputs(cell).items()}
    forward = backend.bind(dict(inputs), cell)
    torch.set_grad_enabled(True)  # whatever the backend left behind
    return Workload(forward, inputs, op.make_grad_output(cell))


def steps_of(workload: Workload, cell: Cell) -> Steps:
    """The steps of the cell's pass on its workload."""

    def both() -> tuple[Tensor, ...]:
        output = workload.forward()
        return (output, *workload.gradients(output))

    if not cell.has_backward:
        return Steps(None, workload.forward, None)
    if cell.pass_ == "fwd+bwd":
        return Steps(None, both, workload.forward)
    held: list[Tensor] = []

    def forward_first() -> None:
        held[:] = [workload.forward()]

    return Steps(forward_first, lambda: workload.gradients(held[0]), workload.forward)
