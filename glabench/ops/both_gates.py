"""Linear attention whose state's columns decay too: gates of values, alone or beside gates of keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from glabench.ops.base import Spec, wide
from glabench.ops.gla import Gla
from glabench.ops.linear import projections
from glabench.ops.segments import CHUNK, held_tokens, pair_numbers
from glabench.sweeps.model import Cell

if TYPE_CHECKING:
    from torch import Generator, Tensor


class GlaBoth(Gla):
    """GLA with a second gate gv [B, T, H, V] per value channel: beta beside alpha (version 3, eq. 12 to 17)."""

    name = "gla-both"
    equation = "S_t = diag(exp g_t) S_{t-1} diag(exp gv_t) + k_t^T v_t,  o_t = q_t S_t / sqrt(K)"
    reference_name = "chunked recurrence with gates of keys and values"

    def inputs(self, cell: Cell) -> dict[str, Spec]:
        tensors = super().inputs(cell)
        v = tensors["v"]
        return tensors | {"gv": Spec(v.dims, v.shape, wide(cell))}

    def make(self, name: str, x: Tensor, cell: Cell, generator: Generator) -> Tensor:
        return super().make("g" if name == "gv" else name, x, cell, generator)

    def layer_parameters(self, cell: Cell) -> int:
        """As with gates of keys, and the gates of values through 16 channels."""
        H, V = cell.sizes("heads", "value_dim")
        return super().layer_parameters(cell) + 16 * 2 * H * V

    def forward_flops(self, cell: Cell) -> int:
        """As without gates, plus 2KV per token and head for the state's decays."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        return cell.tokens * H * 6 * K * V

    def reference_numbers(self, cell: Cell) -> int:
        """As with gates of keys, and pairs of rows for each value channel, and all states of a segment."""
        K, V = cell.sizes("key_dim", "value_dim")
        states = 4 * held_tokens(cell, max(K, V)) // CHUNK * K * V
        return super().reference_numbers(cell) + pair_numbers(cell, V) + states


class GlaValues(GlaBoth):
    """The second gate alone, gv [B, T, H, V]: beta without alpha (version 3, section 3.3)."""

    name = "gla-values"
    equation = "S_t = S_{t-1} diag(exp gv_t) + k_t^T v_t,  o_t = q_t S_t / sqrt(K)"
    reference_name = "chunked recurrence with gates of values"

    def inputs(self, cell: Cell) -> dict[str, Spec]:
        return {name: spec for name, spec in super().inputs(cell).items() if name != "g"}

    def layer_parameters(self, cell: Cell) -> int:
        """As without gates, an output gate, and the gates of values through 16 channels."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        return projections(H * V, H, K, V, outputs=3) + 16 * 2 * H * V

    def forward_flops(self, cell: Cell) -> int:
        """As without gates, plus KV per token and head for the state's decay."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        return cell.tokens * H * 5 * K * V


GLA_BOTH = GlaBoth()
GLA_VALUES = GlaValues()
