"""The check of a model that is to be trained: its logits, before, against the same model's in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from glabench.backends import Backend
from glabench.measure.accuracy import relative_error
from glabench.ops import Op
from glabench.ops.base import REFERENCE
from glabench.records import Record
from glabench.sweeps.model import Cell, Parameters

if TYPE_CHECKING:
    from torch import Tensor

# Rows whose logits are compared, and their largest relative error by type.
_ROWS = 2
_BOUNDS = {"fp64": 1e-9, "fp32": 1e-4, "fp16": 2e-2, "bf16": 3e-2}


def with_logits(record: Record, op: Op, backend: Backend, plain: Backend, cell: Cell) -> Record:
    """The record with the error of the backend's logits for a cell, `inaccurate` if it is too large.

    A call of the backend is a forward of an untrained model from the cell's seed. The expected logits are those of the
    same model in float64, with the reference of its mixers' op. `plain` makes it, by a class of the suite, because a
    plugin's may override anything.
    """
    import torch

    few = replace(cell, batch=min(cell.batch, _ROWS))
    inputs = op.make_inputs(few)
    exact = replace(few, dtype="fp64", parameters=Parameters({**few.parameters, "kernel": REFERENCE}))

    def logits(model: Backend, of: Cell) -> Tensor:
        result = model.bind(inputs, of)()
        assert isinstance(result, torch.Tensor)
        return result

    with torch.no_grad():
        error = relative_error(logits(backend, few), logits(plain, exact))
    record = replace(record, rel_error={"logits": error}, accuracy_reference=op.reference_name)
    if error <= _BOUNDS[cell.dtype]:
        return record
    reason = f"relative error beyond {_BOUNDS[cell.dtype]:.0e} against {op.reference_name}: {error:.1e}"
    return replace(record, status="inaccurate", reason=reason)
