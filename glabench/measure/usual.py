"""How large the parts of a result usually are: errors of parts that are small by chance are relative to that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from glabench.ops import Op
from glabench.ops.base import Spec

if TYPE_CHECKING:
    from torch import Tensor

# What a row is, by its dimension.
ROW_NAMES = {"seqlen": "token", "documents": "document"}
# What is usual is found from about so many parts.
_USUAL_PARTS = 64
# What a result says is usual may be so many times what the reference says of a few parts.
_MOST = 10.0


@dataclass(frozen=True)
class Usual:
    """What a tensor's parts usually are: the median norm of a part and, if it has rows, of each row (T)."""

    part: float
    rows: Tensor | None

    @classmethod
    def of(cls, x: Tensor, op: Op, spec: Spec) -> Usual:
        """Of some parts of a result, because all may be many. What is not finite counts as 0.

        Medians, because the result may be wrong: a few huge parts must not hide what is wrong in others.
        """
        import torch

        x = x.detach()
        own = [name for name in spec.dims if name in op.independent]
        most = max(1, int(_USUAL_PARTS ** (1 / max(1, len(own)))))
        for dim, name in enumerate(spec.dims):
            if name in own:
                indices = torch.linspace(0, x.shape[dim] - 1, min(most, x.shape[dim]), device=x.device)
                x = x.index_select(dim, indices.long())
        row = row_of(op, spec)
        inner = [dim for dim, name in enumerate(spec.dims) if name not in own and name != row]
        wide = torch.promote_types(x.dtype, torch.float32)
        norms = torch.linalg.vector_norm(x, dim=inner, keepdim=True, dtype=wide) if inner else x.to(wide).abs()
        norms = norms.double().nan_to_num(nan=0.0, posinf=0.0)
        if row is None:
            return cls(float(norms.median()), None)
        at = spec.dims.index(row)
        rows = norms.movedim(at, -1).reshape(-1, x.shape[at])
        return cls(float(rows.norm(dim=-1).median()), rows.median(dim=0).values)

    def at_most(self, expected: Sequence[Tensor], op: Op, spec: Spec) -> Usual:
        """The same, but no more than ten times what is usual of some parts of the reference.

        Because a result in which a few parts are huge, where they are looked at here, would hide all errors elsewhere.
        """
        import torch

        own = [Usual.of(x, op, spec) for x in expected]
        part = min(self.part, _MOST * median(each.part for each in own))
        rows = [each.rows for each in own if each.rows is not None]
        if self.rows is None or not rows:
            return Usual(part, self.rows)
        most = _MOST * torch.stack(rows).median(dim=0).values
        return Usual(part, torch.minimum(self.rows, most.to(self.rows.dtype)))


def row_of(op: Op, spec: Spec) -> str | None:
    """The dimension whose indices are the rows of a tensor's parts."""
    return next((name for name in ROW_NAMES if name in spec.dims and name not in op.independent), None)
