"""Prepares a cell for measuring: its inputs, the call bound to them, and the pass as steps that can be timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from glabench.backends import Backend
from glabench.measure.contexts import active_contexts, shadowed
from glabench.ops import Op
from glabench.ops.base import as_tuple
from glabench.sweeps.model import Cell

if TYPE_CHECKING:
    from torch import Tensor


# All that decides where each of a tensor's values is in memory.
Layout = tuple[object, ...]


@dataclass(frozen=True)
class Workload:
    """A forward call on fixed inputs, and the gradients of its outputs."""

    forward: Callable[[], Tensor | tuple[Tensor, ...]]
    inputs: Mapping[str, Tensor]
    grad_outputs: Mapping[str, Tensor]
    # Where all of these lay before the backend had them.
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    # The same memory, as objects that the backend never had: what it does to those above changes nothing here. Empty if
    # there is no backend.
    own_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    own_grad_outputs: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def disorder(self) -> str | None:
        """What the backend has done to the suite's tensors or to torch that would help it, or hide its errors."""
        if entered := entered_contexts():  # first, because what is active could undo itself below
            return entered
        tensors = _named(self.inputs, self.grad_outputs)
        if changed := [name for name, x in tensors.items() if _is_changed(x)]:
            return f"the backend changed the type or the methods of its input: {', '.join(changed)}"
        now = _layouts(tensors, _named(self.own_inputs, self.own_grad_outputs))
        if moved := [name for name, layout in self.layouts.items() if layout != now[name]]:
            return f"the backend moved its input in memory: {', '.join(moved)}"
        return None

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
    grad_outputs = op.make_grad_outputs(cell)
    # `data` shares the memory but not the version, so that a change is seen only by reading the values.
    own = [{name: x.data for name, x in tensors.items()} for tensors in (inputs, grad_outputs)]
    layouts = _layouts(_named(inputs, grad_outputs), _named(*own))
    # Of what the suite counts with, the backend gets copies.
    forward = backend.bind(dict(inputs), cell.copy())
    torch.set_grad_enabled(True)  # whatever the backend left behind
    return Workload(forward, inputs, grad_outputs, layouts, *own)


def entered_contexts() -> str | None:
    """That contexts of torch are active which the suite has not entered, as a sentence; None if there are none."""
    contexts = active_contexts()
    return f"the backend entered a context of torch and did not leave it: {', '.join(contexts)}" if contexts else None


def _named(inputs: Mapping[str, Tensor], grad_outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {**inputs, **{f"the gradient of {name}": x for name, x in grad_outputs.items()}}


def _is_changed(x: Tensor) -> bool:
    import torch

    return type(x) is not torch.Tensor or bool(shadowed(x))


def _layouts(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Layout]:
    """Of tensors that a backend has, and the addresses of the suite's own objects for them, which may be moved."""
    return {name: (x.data_ptr(), own[name].data_ptr(), x.shape, x.stride(), x.dtype) for name, x in tensors.items()}


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
