"""Causal softmax attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from glabench.ops.base import BYTES, Op, Spec, check_width
from glabench.sweeps.model import Cell
from glabench.sweeps.parameters import Value, count_or, extra, integers

if TYPE_CHECKING:
    from torch import Tensor

_ROWS_AT_ONCE = 512
PREFIX = count_or("prefix", "Tokens before the call, whose keys and values, or whose state, it is given.", "none", True)
STATE = extra(
    "state", "Whether a call takes initial states and returns final ones.", "none", ("in", "out", "both"), True
)  # fmt: skip


def takes_states(cell: Cell) -> bool:
    """Whether a call is given initial states; those of a prefix are such."""
    return cell.get("state") in ("in", "both") or cell.get("prefix") is not None


def returns_states(cell: Cell) -> bool:
    """Whether a call returns final states, with which it can go on."""
    return cell.get("state") in ("out", "both") or cell.get("prefix") is not None


def keys_of(cell: Cell) -> int:
    """The keys of a sequence: those of its tokens and of a prefix."""
    return cell.seqlen + (cell.get("prefix") or 0)


class Softmax(Op):
    """Every token attends to itself and to all tokens before it: q, k, v, o [B, T, H, D].

    With a prefix of P tokens, as of a cache when a model generates, k and v are [B, P + T, H, D].
    """

    name = "softmax"
    equation = "o = softmax(q k^T / sqrt(D), causal) v"
    parameters = (
        integers("heads", "Heads H.", 16),
        integers("head_dim", "Head dim: K and V together.", 64),
        PREFIX,
    )
    independent = ("batch", "heads")
    small: ClassVar[Mapping[str, int]] = {"heads": 2, "prefix": 300}
    reference_name = "softmax attention"

    def published(self, width: int) -> dict[str, Value]:
        """Heads of dim 64."""
        check_width(width, 64)
        return {"heads": width // 64, "head_dim": 64}

    def inputs(self, cell: Cell) -> dict[str, Spec]:
        H, D = cell.sizes("heads", "head_dim")
        q = kv = Spec(("batch", "seqlen", "heads", "head_dim"), (cell.batch, cell.seqlen, H, D))
        if cell.get("prefix"):
            kv = Spec(("batch", "keys", "heads", "head_dim"), (cell.batch, keys_of(cell), H, D))
        return {"q": q, "k": kv, "v": kv}

    def output(self, cell: Cell) -> Spec:
        return self.inputs(cell)["q"]

    def forward_flops(self, cell: Cell) -> int:
        """Per head and pair of a token with itself or an earlier token: 2D for the score, 2D for its share of o."""
        H, D = cell.sizes("heads", "head_dim")
        T, keys = cell.seqlen, keys_of(cell)
        return cell.batch * H * (T * (keys - T) + T * (T + 1) // 2) * 4 * D

    def state_bytes(self, cell: Cell) -> int:
        """The keys and values of all tokens."""
        H, D = cell.sizes("heads", "head_dim")
        return 2 * keys_of(cell) * H * D * BYTES[cell.dtype]

    def layer_parameters(self, cell: Cell) -> int:
        """Four square projections: queries, keys, values, output."""
        H, D = cell.sizes("heads", "head_dim")
        return 4 * (H * D) ** 2

    def reference_numbers(self, cell: Cell) -> int:
        """Besides the tensors, the scores of some rows."""
        return super().reference_numbers(cell) // 2 + 8 * min(_ROWS_AT_ONCE, cell.seqlen) * keys_of(cell)

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
        prefix = k.shape[2] - T
        outputs = []
        for start in range(0, T, _ROWS_AT_ONCE):
            end = min(start + _ROWS_AT_ONCE, T)
            pieces = (q[:, :, start:end], k[:, :, : prefix + end], v[:, :, : prefix + end])
            # Keeps the scores of only one block at a time, in the backward too.
            (out,) = rows(*pieces) if T <= _ROWS_AT_ONCE else recomputed(rows, *pieces)
            outputs.append(out)
        return torch.cat(outputs, 2).transpose(1, 2)


SOFTMAX = Softmax()
