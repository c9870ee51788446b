"""Linear attention without gates, and what GLA shares with it (GLA paper, final version, section 2)."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import TYPE_CHECKING, ClassVar

from glabench.ops.base import BYTES, Op, Spec, check_width, wide
from glabench.ops.segments import pair_numbers
from glabench.ops.softmax import PREFIX, STATE, returns_states, takes_states
from glabench.sweeps.model import Cell
from glabench.sweeps.parameters import Parameter, Value, extra, integers

if TYPE_CHECKING:
    from torch import Generator, Tensor

_HEADS = ("batch", "seqlen", "heads")
# Tokens of a packed document, on average.
_DOCUMENT = 700


SIZES = (
    integers("heads", "Heads H.", 4),
    integers("key_dim", "Key head dim K.", 128),
    integers("value_dim", "Value head dim V.", 256),
)
KINDS = (
    extra("inputs", "Kind of q, k, v and of the output's gradient.", "normal", ("correlated", "orthogonal")),
    extra("packed", "All tokens of the batch in one row, as documents of 700 on average.", "off", ("on",), True),
    STATE,
    PREFIX,
)


def projections(width: int, H: int, K: int, V: int, outputs: int) -> int:
    """Parameters of projections from or to the model's width: two for keys, and `outputs` for values."""
    return width * H * (2 * K + outputs * V)


class Linear(Op):
    """Linear attention with matrix-valued states, without normalization: q, k [B, T, H, K]; v, o [B, T, H, V].

    If packed, the tensors are [1, B T, H, ...], and `cu_seqlens` [N + 1] has the borders of N documents. `initial` and
    `final` are states [N, H, K, V] in float32, one per sequence or document.
    """

    name = "linear"
    equation = "S_t = S_{t-1} + k_t^T v_t,  o_t = q_t S_t / sqrt(K)"
    parameters: ClassVar[tuple[Parameter, ...]] = (*SIZES, *KINDS)
    aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {"head_dim": ("key_dim", "value_dim")}
    independent: ClassVar[tuple[str, ...]] = ("batch", "heads")
    reference_name = "chunked recurrence without a gate"

    def published(self, width: int) -> dict[str, Value]:
        """Four heads; their keys have half the width in total, their values all of it (version 3, section 4.2)."""
        check_width(width, 8)
        return {"heads": 4, "key_dim": width // 8, "value_dim": width // 4}

    def inputs(self, cell: Cell) -> dict[str, Spec]:
        K = cell.sizes("key_dim")[0]
        values = self.output(cell)
        keys = Spec((*_HEADS, "key_dim"), (*values.shape[:3], K))
        tensors = {"q": keys, "k": keys, "v": values}
        if takes_states(cell):
            tensors["initial"] = self._states(cell)
        if cell.get("packed"):
            tensors["cu_seqlens"] = Spec(("borders",), (_documents(cell) + 1,), "int64")
        return tensors

    def output(self, cell: Cell) -> Spec:
        H, V = cell.sizes("heads", "value_dim")
        lead = (1, cell.tokens) if cell.get("packed") else (cell.batch, cell.seqlen)
        return Spec((*_HEADS, "value_dim"), (*lead, H, V))

    def outputs(self, cell: Cell) -> dict[str, Spec]:
        found = super().outputs(cell)
        return found | ({"final": self._states(cell)} if returns_states(cell) else {})

    def _states(self, cell: Cell) -> Spec:
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        first = ("documents", _documents(cell)) if cell.get("packed") else ("batch", cell.batch)
        return Spec((first[0], "heads", "key_dim", "value_dim"), (first[1], H, K, V), wide(cell))

    def make_indices(self, cell: Cell) -> dict[str, Tensor]:
        """The borders of documents, drawn from the cell's seed: every place in the row is as likely as any other."""
        if not cell.get("packed"):
            return {}
        import torch

        draw = Random(f"documents {cell.seed}")
        borders = [0, *sorted(draw.sample(range(1, cell.tokens), _documents(cell) - 1)), cell.tokens]
        return {"cu_seqlens": torch.tensor(borders, device=cell.device)}

    def make(self, name: str, x: Tensor, cell: Cell, generator: Generator) -> Tensor:  # noqa: ARG002
        """Correlated: channels of q sum to 0, those of k share a mean. Orthogonal: q and k are positive, v mostly."""
        kind = cell.get("inputs")
        if kind == "correlated":
            return x - x.mean(-1, keepdim=True) if name == "q" else x + 3 if name == "k" else x
        if kind == "orthogonal":
            return x.abs() if name in ("q", "k") else x + 3 if name == "v" else x
        return x

    def make_grad_outputs(self, cell: Cell, other: int = 0) -> dict[str, Tensor]:
        """Orthogonal: every row is orthogonal to that of the output, as behind a norm."""
        made = super().make_grad_outputs(cell, other)
        if cell.get("inputs") == "orthogonal" and cell.has_backward:
            import torch

            inputs = self.make_inputs(cell, other)
            borders = inputs.pop("cu_seqlens", None)
            packed = {} if borders is None else {"cu_seqlens": borders}
            rows = made["o"]
            # One row of the batch at a time, because a reference needs memory.
            for number in range(len(rows)):
                own = slice(number, number + 1)
                states = slice(None) if packed else own
                wider = {n: x[states if n == "initial" else own].float() for n, x in inputs.items()}
                with torch.no_grad():
                    o = self.reference(wider | packed)[0]
                share = (rows[own] * o).sum(-1, keepdim=True) / o.square().sum(-1, keepdim=True).clamp(min=1e-30)
                rows[own] = (rows[own] - share * o).to(rows.dtype)
        return made

    def forward_flops(self, cell: Cell) -> int:
        """Per token and head: 2KV to add k^T v to the state, 2KV for q times the state."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        return cell.tokens * H * 4 * K * V

    def least_flops(self, cell: Cell) -> int:
        """Of a short sequence, scores between all pairs of tokens take fewer operations than states."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        shortest = 1 if cell.get("packed") else cell.seqlen
        forward = cell.tokens * H * min(4 * K * V, (shortest + 1) * (K + V))
        return forward * self.flops(cell) // self.forward_flops(cell)

    def state_bytes(self, cell: Cell) -> int:
        """A state of K times V per head."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        return H * K * V * BYTES[wide(cell)]

    def layer_parameters(self, cell: Cell) -> int:
        """Projections to keys, queries, values and output; values have the model's width in total."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        return projections(H * V, H, K, V, outputs=2)

    def reference_numbers(self, cell: Cell) -> int:
        """Besides the tensors, pairs of rows in a chunk, for each key channel."""
        (K,) = cell.sizes("key_dim")
        return super().reference_numbers(cell) // 2 + pair_numbers(cell, K)

    def reference(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The output, and the states after the last token of each sequence."""
        from glabench.ops.recurrence import gated_recurrence, packed_recurrence

        q, k, v, g, gv = inputs["q"], inputs["k"], inputs["v"], inputs.get("g"), inputs.get("gv")
        if "cu_seqlens" in inputs:
            return packed_recurrence(q, k, v, g, inputs["cu_seqlens"].tolist(), inputs.get("initial"), gv)
        return gated_recurrence(q, k, v, g, inputs.get("initial"), gv)


def _documents(cell: Cell) -> int:
    """How many documents a packed row has."""
    return min(cell.tokens, max(2, round(cell.tokens / _DOCUMENT)))


LINEAR = Linear()
