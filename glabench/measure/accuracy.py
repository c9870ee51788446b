"""The accuracy of a cell at a small size: its whole output and all gradients, compared with the op's reference."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from glabench.backends import Backend
from glabench.measure.at_size import Results, Worst, describe, least_number
from glabench.measure.outcome import is_out_of_memory
from glabench.measure.workload import Workload, prepare
from glabench.ops import Op
from glabench.ops.base import as_tuple
from glabench.sweeps.model import Cell, Parameters

if TYPE_CHECKING:
    from torch import Tensor

# Largest relative error ||x - ref|| / ||ref|| that a correct implementation may have, by type of the operands. bfloat16
# and float16 have 8 and 11 bits and results are rounded a few times; float32 products may run in tf32 (11 bits).
BOUNDS: Mapping[str, float] = {"bf16": 1e-2, "fp16": 3e-3, "fp32": 2e-3, "fp64": 1e-9}
MOST_TOKENS = 256
# On a GPU, which computes the reference in no time, so many heads are compared: autotuned kernels are tuned anew for
# another number of heads, which takes some half a minute.
_HEADS_ON_A_GPU = 16
_IN_BLOCK, _FEW = re.compile(r"^blocks\.\d+\."), 64


@dataclass(frozen=True)
class Accuracy:
    """Relative error per tensor (`o`, and `dq`, `dk`, ... if the pass has a backward), the reference and the bound.

    `at_size` holds the worst errors at the cell's own size, by tensor; it is empty if only the small cell was compared.
    """

    rel_error: Mapping[str, float]
    reference: str
    bound: float
    at_size: Mapping[str, Worst] = field(default_factory=dict)
    # What else is wrong, in one line.
    fault: str | None = None

    @property
    def errors(self) -> dict[str, float]:
        """All errors by name; those at the cell's own size end in `_at_size`."""
        return {**self.rel_error, **{f"{name}_at_size": worst.error for name, worst in self.at_size.items()}}

    @property
    def problem(self) -> str | None:
        """One line that names the tensors whose error exceeds its bound; None if there are none."""
        if self.fault is not None:
            return self.fault
        wrong = {name: error for name, error in self.rel_error.items() if not error <= self.bound}
        if wrong:
            shown = ", ".join(f"{name} {error:.1e}" for name, error in wrong.items())
            return f"relative error beyond {self.bound:.0e} against {self.reference}: {shown}"
        return describe(self.at_size, "relative error at the cell's own size")


def worst_gradient(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[str, float]:
    """The parameter whose gradient is the most wrong, by name, and its relative error.

    Parameters of a few numbers count together with those of all blocks, because their gradient, as of Mamba-2's A, may
    be nearly zero in one of them. One that is not there at all has an error of 1 nevertheless.
    """
    import torch

    kinds: dict[str, list[str]] = {}
    for name, x in expected.items():
        kinds.setdefault(_IN_BLOCK.sub("blocks.*.", name) if x.numel() <= _FEW else name, []).append(name)
    errors = {}
    for kind, names in kinds.items():
        wrong = sum(float((found[name].double() - expected[name]).square().sum()) for name in names)
        right = sum(float(expected[name].double().square().sum()) for name in names)
        is_missing = any(not found[name].any() and expected[name].any() for name in names)
        error = math.sqrt(wrong / max(right, torch.finfo(torch.float64).tiny))
        errors[kind] = max(error, 1.0) if is_missing else error
    worst = max(errors, key=lambda kind: errors[kind] if math.isfinite(errors[kind]) else math.inf)
    return worst, errors[worst]


def small_cell(op: Op, cell: Cell) -> Cell:
    """The cell that is compared with the reference for `cell`: the same kind of inputs, at a small size."""
    most = dict(op.small)
    if cell.device == "cuda" and "heads" in most:
        most["heads"] = max(most["heads"], _HEADS_ON_A_GPU)
    fewer = {name: min(size, int(cell.parameters[name])) for name, size in most.items() if name in cell.parameters}
    return replace(
        cell,
        batch=min(cell.batch, 2),
        seqlen=min(cell.seqlen, MOST_TOKENS),
        pass_="infer" if cell.pass_ == "infer" else "fwd+bwd",
        parameters=Parameters({**cell.parameters, **fewer}),
    )


def relative_error(x: Tensor, reference: Tensor, least: float = 0.0) -> float:
    """||x - reference|| / ||reference|| in float64, for tensors of one shape. NaN or inf in x gives NaN or inf.

    A reference whose numbers are smaller than `least` in the root mean square counts as if they were `least`.
    """
    wide = reference.double()
    size = max(wide.norm().item(), max(least, 1e-30) * math.sqrt(wide.numel()))
    return float((x.double() - wide).norm().item() / size)


def _results(workload: Workload, with_gradients: bool) -> dict[str, Tensor]:
    outputs = workload.forward()
    gradients = workload.gradients(outputs) if with_gradients else ()
    return {name: x.detach() for name, x in Results.of(workload, as_tuple(outputs), gradients).by_error.items()}


def check_accuracy(op: Op, backend: Backend, cell: Cell) -> Accuracy:
    """Compares a backend's output and gradients with the op's reference, on the small cell that stands for `cell`."""
    small = small_cell(op, cell)
    with _named_after(small):
        workload = prepare(op, backend, small)
        if small.device == "cuda":
            _poison_free_memory()
        found = _results(workload, small.has_backward)
    for name, spec in op.outputs(small).items():
        if found[name].shape != spec.shape:
            raise TypeError(f"the output must have the shape {spec.shape}, not {tuple(found[name].shape)}")
    # From values that the backend never had, because it may have changed its own.
    pristine = op.make_inputs(small).items()
    wide = {name: x.double().requires_grad_(small.has_backward) if x.is_floating_point() else x for name, x in pristine}
    given = {name: x.double() for name, x in op.make_grad_outputs(small).items()}
    exact = Workload(lambda: as_tuple(op.reference(wide))[: len(given)], wide, given)
    expected = _results(exact, small.has_backward)
    errors = {name: relative_error(x, expected[name], least_number(small)) for name, x in found.items()}
    heads = f", heads: {small.parameters['heads']}" if "heads" in small.parameters else ""
    return Accuracy(errors, f"{op.reference_name} in float64, {small.seqlen} tokens{heads}", BOUNDS[cell.dtype])


@contextmanager
def _named_after(small: Cell) -> Iterator[None]:
    """Says of what a backend raises that it did so at the small size, and not at the cell's own."""
    try:
        yield
    except Exception as problem:
        if is_out_of_memory(problem):
            raise
        said = f"in the check of {small.seqlen} tokens: {type(problem).__name__}: {problem}"
        raise RuntimeError(said) from problem


def _poison_free_memory() -> None:
    """Fills the memory of the next allocations with NaN, so that output that was never written cannot look correct."""
    import torch

    sizes = [2**9] * 64 + [2**18] * 64 + [2**22] * 16
    blocks = [torch.full((size // 4,), math.nan, device="cuda") for size in sizes]
    torch.cuda.synchronize()
    del blocks


def first_nonfinite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor that holds a NaN or an infinity; None if all are finite."""
    for name, x in tensors.items():
        # Minimum and maximum instead of a mask, which would need more memory than may be left.
        low, high = x.detach().aminmax()
        if not (math.isfinite(low.item()) and math.isfinite(high.item())):
            return name
    return None
