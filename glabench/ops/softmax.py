"""Causal softmax attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from glabench.ops.base import BYTES, Op, Spec, check_width
from glabench.sweeps.model import Cell
from glabench.sweeps.parameters import Value, integers

if TYPE_CHECKING:
    from torch import Tensor

_ROWS_AT_ONCE = 512


class Softmax(Op):
    """Every token attends to itself and to all tokens before it: q, k, v, o [B, T, H, D]."""

    name = "softmax"
    equation = "o = softmax(q k^T / sqrt(D), causal) v"
    parameters = (
        integers("heads", "Heads H.", 16),
        integers("head_dim", "Head dim: K and V together.", 64),
    )
    independent = ("batch", "heads")
    reference_name = "softmax attention"

    def published(self, width: int) -> dict[str, Value]:
        """Heads of dim 64."""
        check_width(width, 64)
        return {"heads": width // 64, "head_dim": 64}

    def inputs(self, cell: Cell) -> dict[str, Spec]:
        H, D = cell.sizes("heads", "head_dim")
        spec = Spec(("batch", "seqlen", "heads", "head_dim"), (cell.batch, cell.seqlen, H, D))
        return {"q": spec, "k": spec, "v": spec}

    def output(self, cell: Cell) -> Spec:
        return self.inputs(cell)["v"]

    def forward_flops(self, cell: Cell) -> int:
        """Per head and pair of a token with itself or an earlier token: 2D for the score, 2D for its share of o."""
        H, D = cell.sizes("heads", "head_dim")
        return cell.batch * H * (cell.seqlen * (cell.seqlen + 1) // 2) * 4 * D

    def state_bytes(self, cell: Cell) -> int:
        """The keys and values of all tokens."""
        H, D = cell.sizes("heads", "head_dim")
        return 2 * cell.seqlen * H * D * BYTES[cell.dtype]

    def layer_parameters(self, cell: Cell) -> int:
        """Four square projections: queries, keys, values, output."""
        H, D = cell.sizes("heads", "head_dim")
        return 4 * (H * D) ** 2

    def reference_numbers(self, cell: Cell) -> int:
        """Besides the tensors, the scores of some rows."""
        return super().reference_numbers(cell) // 2 + 8 * _ROWS_AT_ONCE * cell.seqlen

    def reference(self, inputs: Mapping[str, Tensor]) -> Tensor:
        import torch

        from glabench.ops.recompute import recomputed

        q, k, v = (inputs[name].transpose(1, 2) for name in ("q", "k", "v"))

        def rows(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
            n, end = q.shape[2], k.shape[2]
            scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
            future = torch.ones(n, end, dtype=torch.bool, device=q.device).triu(end - n + 1)
            return (scores.masked_fill(future, -math.inf).softmax(-1) @ v,)

        T = q.shape[2]
        outputs = []
        for start in range(0, T, _ROWS_AT_ONCE):
            end = min(start + _ROWS_AT_ONCE, T)
            pieces = (q[:, :, start:end], k[:, :, :end], v[:, :, :end])
            # Keeps the scores of only one block at a time, in the backward too.
            (out,) = rows(*pieces) if T <= _ROWS_AT_ONCE else recomputed(rows, *pieces)
            outputs.append(out)
        return torch.cat(outputs, 2).transpose(1, 2)


SOFTMAX = Softmax()
