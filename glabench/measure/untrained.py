"""The check of a model that is to be trained: its logits and gradients, before, against the same model's in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from glabench.measure.accuracy import relative_error, worst_gradient
from glabench.ops import Op
from glabench.ops.base import REFERENCE
from glabench.records import Record
from glabench.sweeps.model import Cell, Parameters

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from glabench.models import LanguageModel

# Rows that are compared, and the largest relative errors by type: of their logits, and of a parameter's gradient. Norms
# behind mixers divide outputs that are nearly zero by themselves, which makes rounding as large as they are: in half
# precision, right kernels were off by up to 0.6 in one parameter of a new model. So only what is mostly wrong is found.
_ROWS = 2
_BOUNDS = {"fp64": 1e-9, "fp32": 1e-4, "fp16": 2e-2, "bf16": 3e-2}
_GRADIENT_BOUNDS = {"fp64": 1e-6, "fp32": 1e-2, "fp16": 0.9, "bf16": 0.9}


class Trained(Protocol):
    """A backend that makes a model of a cell, which is called under its `autocast`."""

    def build(self, cell: Cell) -> LanguageModel: ...

    def autocast(self, cell: Cell) -> torch.autocast: ...


def compared(record: Record, op: Op, backend: Trained, plain: Trained, cell: Cell) -> Record:
    """The record with the errors of an untrained model's logits and gradients; `inaccurate` if one is too large.

    The gradients are of the mean cross-entropy of targets that are drawn. What is expected is of the same model in
    float64, with the reference of its mixers' op. `plain` makes it, by a class of the suite, because a plugin's may
    override anything.
    """
    few = replace(cell, batch=min(cell.batch, _ROWS))
    inputs = op.make_inputs(few)
    exact = replace(few, dtype="fp64", parameters=Parameters({**few.parameters, "kernel": REFERENCE}))
    logits, gradients = _of_model(backend, few, inputs)
    expected, expected_gradients = _of_model(plain, exact, inputs)
    worst, gradient = worst_gradient(gradients, expected_gradients)
    errors = {"logits": relative_error(logits, expected), "gradient": gradient}
    bounds = {"logits": _BOUNDS[cell.dtype], "gradient": _GRADIENT_BOUNDS[cell.dtype]}
    record = replace(record, rel_error=errors, accuracy_reference=op.reference_name)
    wrong = [f"{name} {x:.1e} (allowed {bounds[name]:.0e})" for name, x in errors.items() if not x <= bounds[name]]
    if not wrong:
        return record
    reason = f"relative error against {op.reference_name}: {', '.join(wrong)}; the worst gradient is {worst}'s"
    return replace(record, status="inaccurate", reason=reason)


def _of_model(backend: Trained, cell: Cell, inputs: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """A new model's logits, and the gradients of all its parameters by name."""
    import torch
    import torch.nn.functional as F

    from glabench.models.parts import widened

    model = backend.build(cell)
    with backend.autocast(cell):
        logits: Tensor = model(*inputs.values())
    rows = widened(logits.flatten(0, -2))
    generator = torch.Generator().manual_seed(cell.seed)
    targets = torch.randint(rows.shape[-1], (len(rows),), generator=generator).to(rows.device)
    F.cross_entropy(rows, targets).backward()  # type: ignore[no-untyped-call]
    found = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in model.named_parameters()}
    return logits.detach(), found
