"""The gated delta rule: a token replaces what the state holds for its key, and the state decays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from glabench.ops.base import Spec, check_width
from glabench.ops.gla import Gla
from glabench.ops.linear import SIZES, Linear, projections
from glabench.ops.simple_gla import SimpleGla
from glabench.sweeps.model import Cell
from glabench.sweeps.parameters import Value

if TYPE_CHECKING:
    from torch import Generator, Tensor


class _Delta(Linear):
    """What the two kinds of gates share. q and k have rows of norm 1; beta [B, T, H] is between 0 and 1."""

    def inputs(self, cell: Cell) -> dict[str, Spec]:
        tensors = super().inputs(cell)
        q = tensors["q"]
        return tensors | {"beta": Spec(q.dims[:3], q.shape[:3])}

    def make(self, name: str, x: Tensor, cell: Cell, generator: Generator) -> Tensor:
        import torch.nn.functional as F

        if name in ("q", "k"):
            return F.normalize(x, dim=-1)
        return x.sigmoid() if name == "beta" else super().make(name, x, cell, generator)

    def forward_flops(self, cell: Cell) -> int:
        """Per token and head: KV for the decay, 2KV to read the key's value, 2KV to replace it, 2KV for q."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        return cell.tokens * H * 7 * K * V

    def reference(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        from glabench.ops.recurrence import delta_recurrence

        q, g = inputs["q"], inputs["g"]
        gates = g[..., None].expand_as(q) if g.ndim < q.ndim else g
        return delta_recurrence(q, inputs["k"], inputs["v"], gates, inputs["beta"])


def _gate(of: type[Gla]) -> tuple[Any, ...]:
    return tuple(each for each in of.parameters if each.name == "gate")


class GatedDelta(_Delta, SimpleGla):
    """The gated delta rule with a gate per token and head (Gated DeltaNet)."""

    name = "gated-delta"
    equation = "S_t = (I - b_t k_t^T k_t) exp(g_t) S_{t-1} + b_t k_t^T v_t,  o_t = q_t S_t / sqrt(K)"
    parameters = (*SIZES, *_gate(SimpleGla))
    reference_name = "chunked delta rule with a scalar gate"

    def published(self, width: int) -> dict[str, Value]:
        """Heads of K = 256 and V = 512; their keys have three quarters of the width in total."""
        check_width(width, 1024)
        return {"heads": 3 * width // 1024, "key_dim": 256, "value_dim": 512}

    def layer_parameters(self, cell: Cell) -> int:
        """Keys have three quarters of the width; an output gate, beta and a gate per head, convolutions of 4 tokens."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        width = 4 * H * K // 3
        return projections(width, H, K, V, outputs=3) + 2 * H * (width + 1) + 4 * H * (2 * K + V)


class Kda(_Delta, Gla):
    """The gated delta rule with a gate per token, head and key channel (Kimi Delta Attention)."""

    name = "kda"
    equation = "S_t = (I - b_t k_t^T k_t) diag(exp g_t) S_{t-1} + b_t k_t^T v_t,  o_t = q_t S_t / sqrt(K)"
    parameters = (*SIZES, *_gate(Gla))
    reference_name = "chunked delta rule"

    def published(self, width: int) -> dict[str, Value]:
        """Heads of 128."""
        check_width(width, 128)
        return {"heads": width // 128, "key_dim": 128, "value_dim": 128}

    def layer_parameters(self, cell: Cell) -> int:
        """Both gates through as many channels as a head has, beta, convolutions of 4 tokens (Kimi Linear)."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        width = H * V
        gates = V * (2 * width + H * (K + V))
        return projections(width, H, K, V, outputs=2) + gates + width * H + 4 * H * (2 * K + V)


GATED_DELTA = GatedDelta()
KDA = Kda()
