"""Gated linear attention (GLA paper, final version, section 4.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from glabench.ops.base import Spec, wide
from glabench.ops.gates import GATES
from glabench.ops.linear import KINDS, SIZES, Linear, projections
from glabench.sweeps.model import Cell
from glabench.sweeps.parameters import choices

if TYPE_CHECKING:
    from torch import Generator, Tensor


class Gla(Linear):
    """Gated linear attention: adds g [B, T, H, K], a data-dependent gate per token, head and key channel."""

    name = "gla"
    equation = "S_t = diag(exp g_t) S_{t-1} + k_t^T v_t,  o_t = q_t S_t / sqrt(K)"
    parameters = (
        *SIZES,
        choices("gate", "Distribution of the gates; the default is GLA's own.", tuple(GATES), next(iter(GATES))),
        *KINDS,
    )
    reference_name = "chunked recurrence"

    def inputs(self, cell: Cell) -> dict[str, Spec]:
        tensors = super().inputs(cell)
        q = tensors["q"]
        return tensors | {"g": Spec(q.dims, q.shape, wide(cell))}

    def make(self, name: str, x: Tensor, cell: Cell, generator: Generator) -> Tensor:
        return GATES[str(cell.get("gate"))](x, generator) if name == "g" else super().make(name, x, cell, generator)

    def layer_parameters(self, cell: Cell) -> int:
        """As without gates, an output gate, and the gates through 16 channels (final paper, section 4.4)."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        width = H * V
        return projections(width, H, K, V, outputs=3) + 16 * (width + H * K)

    def forward_flops(self, cell: Cell) -> int:
        """As without gates, plus KV per token and head for the state's decay."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        return cell.tokens * H * 5 * K * V


GLA = Gla()
