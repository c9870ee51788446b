"""Gated linear attention, and linear attention without gates (GLA paper, final version, section 4.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from glabench.ops.base import Op, Spec, wide
from glabench.ops.gates import GATES
from glabench.sweeps.model import Cell
from glabench.sweeps.parameters import Parameter, Value, choices, integers

if TYPE_CHECKING:
    from torch import Generator, Tensor

_HEADS = ("batch", "seqlen", "heads")


class Linear(Op):
    """Linear attention with matrix-valued states, without normalization: q, k [B, T, H, K]; v, o [B, T, H, V]."""

    name: ClassVar[str] = "linear"
    equation: ClassVar[str] = "S_t = S_{t-1} + k_t^T v_t,  o_t = q_t S_t / sqrt(K)"
    parameters: ClassVar[tuple[Parameter, ...]] = (
        integers("heads", "Heads H.", 4),
        integers("key_dim", "Key head dim K.", 128),
        integers("value_dim", "Value head dim V.", 256),
    )
    aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {"head_dim": ("key_dim", "value_dim")}
    independent: ClassVar[tuple[str, ...]] = ("batch", "heads")
    reference_name: ClassVar[str] = "chunked recurrence without a gate"

    def published(self, width: int) -> dict[str, Value]:
        """Four heads; their keys have half the width in total, their values all of it (version 3, section 4.2)."""
        return {"heads": 4, "key_dim": max(1, width // 8), "value_dim": max(1, width // 4)}

    def inputs(self, cell: Cell) -> dict[str, Spec]:
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        lead = (cell.batch, cell.seqlen, H)
        keys = Spec((*_HEADS, "key_dim"), (*lead, K))
        return {"q": keys, "k": keys, "v": Spec((*_HEADS, "value_dim"), (*lead, V))}

    def output(self, cell: Cell) -> Spec:
        return self.inputs(cell)["v"]

    def forward_flops(self, cell: Cell) -> int:
        """Per token and head: 2KV to add k^T v to the state, 2KV for q times the state."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        return cell.tokens * H * 4 * K * V

    def least_flops(self, cell: Cell) -> int:
        """Of a short sequence, scores between all pairs of tokens take fewer operations than states."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        forward = cell.tokens * H * min(4 * K * V, (cell.seqlen + 1) * (K + V))
        return forward * self.flops(cell) // self.forward_flops(cell)

    def reference_numbers(self, cell: Cell) -> int:
        """Besides the tensors, pairs of rows in a chunk, for each key channel."""
        (K,) = cell.sizes("key_dim")
        return super().reference_numbers(cell) // 2 + 8 * min(cell.seqlen, 1024) * 16 * K

    def reference(self, inputs: Mapping[str, Tensor]) -> Tensor:
        from glabench.ops.recurrence import gated_recurrence

        return gated_recurrence(inputs["q"], inputs["k"], inputs["v"], inputs.get("g"))


class Gla(Linear):
    """Gated linear attention: adds g [B, T, H, K], a data-dependent gate per token, head and key channel."""

    name: ClassVar[str] = "gla"
    equation: ClassVar[str] = "S_t = diag(exp g_t) S_{t-1} + k_t^T v_t,  o_t = q_t S_t / sqrt(K)"
    parameters: ClassVar[tuple[Parameter, ...]] = (
        *Linear.parameters,
        choices("gate", "Distribution of the gates; the default is GLA's own.", tuple(GATES), next(iter(GATES))),
    )
    reference_name: ClassVar[str] = "chunked recurrence"

    def inputs(self, cell: Cell) -> dict[str, Spec]:
        tensors = super().inputs(cell)
        q = tensors["q"]
        return tensors | {"g": Spec(q.dims, q.shape, wide(cell))}

    def make(self, name: str, x: Tensor, cell: Cell, generator: Generator) -> Tensor:
        return GATES[str(cell.get("gate"))](x, generator) if name == "g" else x

    def forward_flops(self, cell: Cell) -> int:
        """As without gates, plus KV per token and head for the state's decay."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        return cell.tokens * H * 5 * K * V


LINEAR = Linear()
GLA = Gla()
