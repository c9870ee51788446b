"""The accuracy check: outputs and gradients at a small size, against the op's float64 reference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from glabench.backends import Backend
from glabench.measure.workload import Workload, prepare
from glabench.ops import Op
from glabench.sweeps.model import Cell, Parameters

if TYPE_CHECKING:
    from torch import Tensor

# Largest relative error ||x - ref|| / ||ref|| of a sound implementation with operands of that type: bfloat16 and
# float16 carry 8 and 11 bits and a result passes a few roundings; float32 products may run as tf32 (11 bits).
BOUNDS: Mapping[str, float] = {"bf16": 1e-2, "fp16": 3e-3, "fp32": 2e-3, "fp64": 1e-9}
MOST_TOKENS = 256


@dataclass(frozen=True)
class Accuracy:
    """Relative error per tensor (`o`; `dq`, `dk`, ... where the pass has a backward), and what it was held against."""

    rel_error: Mapping[str, float]
    reference: str
    bound: float

    @property
    def problem(self) -> str | None:
        """One line on the tensors that are beyond the bound; None if all are within."""
        wrong = {name: error for name, error in self.rel_error.items() if not error <= self.bound}
        if not wrong:
            return None
        shown = ", ".join(f"{name} {error:.1e}" for name, error in wrong.items())
        return f"relative error beyond {self.bound:.0e} against {self.reference}: {shown}"


def small_cell(op: Op, cell: Cell) -> Cell:
    """The cell that stands for `cell` in the check: the same kind of inputs, few tokens, heads and sequences."""
    fewer = {name: min(size, int(cell.parameters[name])) for name, size in op.small.items() if name in cell.parameters}
    return replace(
        cell,
        batch=min(cell.batch, 2),
        seqlen=min(cell.seqlen, MOST_TOKENS),
        pass_="fwd+bwd" if cell.has_backward else cell.pass_,
        parameters=Parameters({**cell.parameters, **fewer}),
    )


def relative_error(x: Tensor, reference: Tensor) -> float:
    """||x - reference|| / ||reference|| in float64; NaN and infinities in x give NaN or infinity."""
    wide = reference.double()
    size = wide.norm().item()
    difference = (x.double() - wide).norm().item()
    return difference / size if size > 0 else math.inf if difference > 0 or math.isnan(difference) else 0.0


def _results(workload: Workload, with_gradients: bool) -> dict[str, Tensor]:
    output = workload.forward()
    results = {"o": output.detach()}
    if with_gradients:
        gradients = workload.gradients(output)
        results |= {f"d{name}": x for name, x in zip(workload.inputs, gradients, strict=True)}
    return results


def check_accuracy(op: Op, backend: Backend, cell: Cell) -> Accuracy:
    """Runs the small cell and its reference; `cell` may be the small cell itself."""
    small = small_cell(op, cell)
    workload = prepare(op, backend, small)
    if small.device == "cuda":
        _poison_free_memory()
    found = _results(workload, small.has_backward)
    wide = {name: x.detach().double().requires_grad_(small.has_backward) for name, x in workload.inputs.items()}
    exact = Workload(lambda: op.reference(wide), wide, workload.grad_output.double())
    expected = _results(exact, small.has_backward)
    errors = {name: relative_error(x, expected[name]) for name, x in found.items()}
    return Accuracy(errors, f"{op.reference_name} in float64, {small.seqlen} tokens", BOUNDS[cell.dtype])


def output_error_at_size(op: Op, cell: Cell, workload: Workload, output: Tensor) -> float:
    """Relative error of the first tokens of the last part (sequence and head, or channel) of a cell's own output.

    All ops are causal, so the first tokens' reference needs no others. The small cell cannot show a wrong offset into
    a large tensor; this does.
    """
    specs = op.inputs(cell)
    parts = {name: op.last_part(x.detach(), specs[name], MOST_TOKENS) for name, x in workload.inputs.items()}
    expected = op.reference({name: x.double() for name, x in parts.items()})
    return relative_error(op.last_part(output.detach(), op.output(cell), MOST_TOKENS), expected)


def _poison_free_memory() -> None:
    """Fills memory that the next allocations get with NaN, so that an output nobody wrote cannot pass by luck."""
    import torch

    sizes = [2**9] * 64 + [2**18] * 64 + [2**22] * 16
    blocks = [torch.full((size // 4,), math.nan, device="cuda") for size in sizes]
    torch.cuda.synchronize()
    del blocks


def first_nonfinite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor that holds a NaN or an infinity."""
    for name, x in tensors.items():
        # Two numbers a tensor instead of a mask: a mask of a large tensor costs memory that the cell may not have.
        low, high = x.detach().aminmax()
        if not (math.isfinite(low.item()) and math.isfinite(high.item())):
            return name
    return None
