"""Linear attention whose state decays by one number per head: one that depends on the data, or a constant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from glabench.ops.base import Spec, check_width, wide
from glabench.ops.gates import GATES, OF_CHANNELS
from glabench.ops.gla import Gla
from glabench.ops.linear import KINDS, SIZES, Linear, projections
from glabench.ops.segments import pair_numbers
from glabench.sweeps.model import Cell
from glabench.sweeps.parameters import Value, choices

if TYPE_CHECKING:
    from torch import Generator, Tensor

_SCALAR_GATES = tuple(name for name in GATES if name not in OF_CHANNELS)
# K and V of RetNet's heads.
_RETNETS = (256, 512)


class SimpleGla(Gla):
    """GLA with a gate g [B, T, H] per token and head (final paper, Table 2, "data-dependent scalar decay")."""

    name = "simple-gla"
    equation = "S_t = exp(g_t) S_{t-1} + k_t^T v_t,  o_t = q_t S_t / sqrt(K)"
    parameters = (
        *SIZES,
        choices("gate", "Distribution of the gates; the default is GLA's own.", _SCALAR_GATES, _SCALAR_GATES[0]),
        *KINDS,
    )
    reference_name = "chunked recurrence with a scalar gate"

    def inputs(self, cell: Cell) -> dict[str, Spec]:
        tensors = super().inputs(cell)
        g = tensors["g"]
        return tensors | {"g": Spec(g.dims[:3], g.shape[:3], wide(cell))}

    def make(self, name: str, x: Tensor, cell: Cell, generator: Generator) -> Tensor:
        made = super().make(name, x[..., None] if name == "g" else x, cell, generator)
        return made[..., 0] if name == "g" else made

    def layer_parameters(self, cell: Cell) -> int:
        """As without gates, an output gate, and a gate per head."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        return projections(H * V, H, K, V, outputs=3) + H * V * H

    def reference(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return super().reference({**inputs, "g": inputs["g"][..., None].expand_as(inputs["q"])})


class Retention(Linear):
    """Linear attention with a constant decay per head, 1 - 2^(-5 - h) in head h (RetNet; version 3, section 2.2).

    A part is a whole sequence, because a head's number says how it decays.
    """

    name = "retention"
    independent = ("batch",)
    equation = "S_t = (1 - 2^(-5-h)) S_{t-1} + k_t^T v_t,  o_t = q_t S_t / sqrt(K)"
    reference_name = "chunked recurrence with a constant gate"

    def published(self, width: int) -> dict[str, Value]:
        """Heads of K = 256 and V = 512, as in RetNet."""
        K, V = _RETNETS
        check_width(width, K)
        return {"heads": width // K, "key_dim": K, "value_dim": V}

    def layer_parameters(self, cell: Cell) -> int:
        """As without gates, with an output gate.

        Values have the model's width in total, as GLA's. RetNet's have twice that, and its own head dims are taken so.
        """
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        width = H * K if (K, V) == _RETNETS else H * V
        return projections(width, H, K, V, outputs=3)

    def forward_flops(self, cell: Cell) -> int:
        """As without gates, plus KV per token and head for the state's decay."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        return cell.tokens * H * 5 * K * V

    def reference_numbers(self, cell: Cell) -> int:
        """As without gates, for all heads."""
        H, K = cell.sizes("heads", "key_dim")
        return super().reference_numbers(cell) + (H - 1) * pair_numbers(cell, K, H)

    def gates(self, head: Tensor) -> Tensor:
        """The logarithm of each head's decay, for heads 0 to H - 1."""
        return (-(2 ** (-5 - head))).log1p()

    def reference(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        import torch

        q = inputs["q"]
        gates = self.gates(torch.arange(q.shape[2], device=q.device, dtype=q.dtype))
        return super().reference({**inputs, "g": gates[:, None].expand_as(q)})


class Lightning(Retention):
    """The same with a decay of exp(-8 h / H) in head h, as in the first layer of a model (Lightning Attention-2)."""

    name = "lightning"
    equation = "S_t = exp(-8 h / H) S_{t-1} + k_t^T v_t,  o_t = q_t S_t / sqrt(K)"

    def published(self, width: int) -> dict[str, Value]:
        """Heads of 128, as in TransNormerLLM."""
        check_width(width, 128)
        return {"heads": width // 128, "key_dim": 128, "value_dim": 128}

    def gates(self, head: Tensor) -> Tensor:
        return -8 / len(head) * head


SIMPLE_GLA = SimpleGla()
RETENTION = Retention()
LIGHTNING = Lightning()
