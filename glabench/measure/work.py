"""What a meter has to know of a cell besides how to time it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from glabench.backends import Backend, Counts
from glabench.measure.accuracy import BOUNDS, Accuracy, check_accuracy, small_cell
from glabench.measure.at_size import Results, check_parts, find_changed
from glabench.measure.contexts import shadowed
from glabench.measure.outcome import own_check
from glabench.measure.spot_checks import Kinds, SpotChecks
from glabench.measure.workload import Workload, prepare
from glabench.ops import Op
from glabench.ops.base import Spec, torch_dtype
from glabench.plain import shown
from glabench.sweeps.model import Cell


class Work(Protocol):
    """What the cells of one backend are. Whatever a backend raises goes through."""

    def prepare(self, cell: Cell) -> Workload:
        """The cell made ready, on its device."""

    def check_kind(self, cell: Cell, outputs: object) -> None:
        """Raises TypeError for what a call returned if kind, shape or dtype are not right, whatever the values are."""

    def check_gradients(self, cell: Cell, gradients: Sequence[object]) -> None:
        """As `check_kind`, for gradients; there are none without a backward."""

    def check(self, cell: Cell, results: Results, seed: int | None) -> Accuracy:
        """How right the cell's first call was, and what else the kind of work looks at.

        `seed` draws what is looked at closely; with None, a cheaper check that does not look at the cell's own size.
        """

    def spot_checks(self, cell: Cell, workload: Workload, goes_back: bool) -> SpotChecks:
        """What looks at the results of timed calls.

        Of a forward of training, `goes_back` says whether a backward can follow a timed call.
        """

    def launch(self, cell: Cell, workload: Workload) -> str | None:
        """How the cell is launched, in a line."""

    def counts(self, cell: Cell) -> Counts:
        """What a perfect implementation computes and moves in one pass."""

    def least(self, cell: Cell) -> Counts:
        """What every implementation has to compute and move in one pass."""

    def written_share(self, cell: Cell) -> float:
        """The share of the bytes of `least` that is written."""

    def executes(self, cell: Cell) -> Counts | None:
        """What this implementation computes and moves, if that is known."""

    def state_bytes(self, cell: Cell) -> int | None:
        """What a sequence needs to go on, if that is known."""

    def layer_parameters(self, cell: Cell) -> int | None:
        """Parameters of a layer with the op, if that is known."""


class OpWork:
    """An op computed by a backend, held against the op's reference in float64."""

    def __init__(self, op: Op, backend: Backend) -> None:
        self._op = op
        self._backend = backend
        # Cells that share their small cell share its check.
        self._checked: dict[Cell, Accuracy] = {}

    def prepare(self, cell: Cell) -> Workload:
        return prepare(self._op, self._backend, cell)

    def check_kind(self, cell: Cell, outputs: object) -> None:
        specs = self._op.outputs(cell)
        needs_graph = cell.pass_ != "infer"
        if len(specs) == 1:
            self._check_tensor(cell, "the output", self._op.output(cell), outputs, needs_graph)
        elif type(outputs) is not tuple or len(outputs) != len(specs):  # a subclass may compute when it is read
            raise TypeError(f"the call must return a tuple of {len(specs)} tensors: {', '.join(specs)}")
        else:
            for (name, spec), x in zip(specs.items(), outputs, strict=True):
                self._check_tensor(cell, f"the output '{name}'", spec, x, needs_graph)

    def check_gradients(self, cell: Cell, gradients: Sequence[object]) -> None:
        inputs = [(name, spec) for name, spec in self._op.inputs(cell).items() if not spec.is_index]
        for (name, spec), x in zip(inputs, gradients, strict=False):
            self._check_tensor(cell, f"the gradient of {name}", spec, x, needs_graph=False)

    def _check_tensor(self, cell: Cell, name: str, spec: Spec, output: object, needs_graph: bool) -> None:
        import torch

        dtype = torch_dtype(spec.dtype or cell.dtype)
        found = f"a {type(output).__name__}"
        # No subclass or method of its own, which may compute later, and no tensor without memory of its own.
        if type(output) is torch.Tensor and (hidden := shadowed(output)):
            found = f"a tensor with its own {', '.join(hidden)}"
        elif type(output) is torch.Tensor:
            is_plain = output.layout is torch.strided and output.device.type == cell.device
            if is_plain and output.shape == spec.shape and output.dtype == dtype:
                if needs_graph and not output.requires_grad:
                    raise TypeError(f"{name} does not require gradients, so the forward left nothing for a backward")
                return
            kind = "tensor" if is_plain else f"tensor ({output.layout}, on {output.device})"
            found = f"a {kind} {list(output.shape)} in {_name(output.dtype)}"
        raise TypeError(f"{name} must be a plain tensor {list(spec.shape)} in {_name(dtype)}, but is {found}")

    def check(self, cell: Cell, results: Results, seed: int | None) -> Accuracy:
        key = small_cell(self._op, cell)
        if key not in self._checked:
            self._checked[key] = check_accuracy(self._op, self._backend, key)
        small = self._checked[key]
        if seed is None or small.problem is not None:
            return small
        return self._check_at_size(cell, results, seed, small)

    @own_check()
    def _check_at_size(self, cell: Cell, results: Results, seed: int, small: Accuracy) -> Accuracy:
        pristine = replace(results, inputs=self._op.make_inputs(cell), grad_outputs=self._op.make_grad_outputs(cell))
        if changed := find_changed(results, pristine):
            return replace(small, fault=f"the first call changed its input: {', '.join(changed)}")
        return replace(small, at_size=check_parts(self._op, cell, pristine, small.bound, seed))

    def spot_checks(self, cell: Cell, workload: Workload, goes_back: bool) -> SpotChecks:
        kinds = Kinds(partial(self.check_kind, cell), partial(self.check_gradients, cell))
        return SpotChecks(self._op, cell, workload, BOUNDS[cell.dtype], kinds, goes_back and cell.pass_ == "fwd")

    def launch(self, cell: Cell, workload: Workload) -> str | None:
        said = self._backend.launch(dict(workload.inputs), cell.copy())
        if said is None or isinstance(said, str):
            return said
        raise TypeError(f"{self._backend.name}: launch returned {shown(said)}; it must be a line, or None")

    def counts(self, cell: Cell) -> Counts:
        return Counts(self._op.flops(cell), self._op.moved_bytes(cell))

    def least(self, cell: Cell) -> Counts:
        return Counts(self._op.least_flops(cell), self._op.least_moved_bytes(cell))

    def written_share(self, cell: Cell) -> float:
        return self._op.written_share(cell)

    def executes(self, cell: Cell) -> Counts | None:
        return self._backend.executes(cell.copy())

    def state_bytes(self, cell: Cell) -> int | None:
        return self._op.state_bytes(cell)

    def layer_parameters(self, cell: Cell) -> int | None:
        return self._op.layer_parameters(cell)


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
