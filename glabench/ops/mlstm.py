"""The mLSTM with a sigmoid input gate, without a normalizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from glabench.ops.base import BYTES, Op, Spec, check_width, wide
from glabench.ops.linear import projections
from glabench.ops.segments import pair_numbers
from glabench.sweeps.model import Cell
from glabench.sweeps.parameters import Value, integers

if TYPE_CHECKING:
    from torch import Generator, Tensor


class Mlstm(Op):
    """A matrix-valued state per head with scalar gates: q, k [B, H, T, K]; v, o [B, H, T, V]; i, f [B, H, T]."""

    name = "mlstm"
    equation = "S_t = sigmoid(f_t) S_{t-1} + sigmoid(i_t) k_t^T v_t,  o_t = q_t S_t / sqrt(K)"
    parameters = (
        integers("heads", "Heads H.", 4),
        integers("key_dim", "Key head dim K.", 128),
        integers("value_dim", "Value head dim V.", 256),
    )
    aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {"head_dim": ("key_dim", "value_dim")}
    independent = ("batch", "heads")
    reference_name = "chunked recurrence with a scalar gate"

    def published(self, width: int) -> dict[str, Value]:
        """Heads of K = 256 and V = 512, as in xLSTM 7B."""
        check_width(width, 512)
        return {"heads": width // 512, "key_dim": 256, "value_dim": 512}

    def inputs(self, cell: Cell) -> dict[str, Spec]:
        H, K = cell.sizes("heads", "key_dim")
        dims, lead = ("batch", "heads", "seqlen"), (cell.batch, H, cell.seqlen)
        keys, gates = Spec((*dims, "key_dim"), (*lead, K)), Spec(dims, lead, wide(cell))
        return {"q": keys, "k": keys, "v": self.output(cell), "i": gates, "f": gates}

    def output(self, cell: Cell) -> Spec:
        H, V = cell.sizes("heads", "value_dim")
        return Spec(("batch", "heads", "seqlen", "value_dim"), (cell.batch, H, cell.seqlen, V))

    def make(self, name: str, x: Tensor, cell: Cell, generator: Generator) -> Tensor:  # noqa: ARG002
        """Forget gates around sigmoid(4.5), in the middle of those that xLSTM starts with."""
        return x.add_(4.5) if name == "f" else x

    def forward_flops(self, cell: Cell) -> int:
        """As GLA: per token and head KV for the decay, 2KV to add k^T v, 2KV for q times the state."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        return cell.tokens * H * 5 * K * V

    def least_flops(self, cell: Cell) -> int:
        """Of a short sequence, scores between all pairs of tokens take fewer operations than states."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        forward = cell.tokens * H * min(4 * K * V, (cell.seqlen + 1) * (K + V))
        return forward * self.flops(cell) // self.forward_flops(cell)

    def state_bytes(self, cell: Cell) -> int:
        """A state of K times V per head."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        return H * K * V * BYTES[wide(cell)]

    def layer_parameters(self, cell: Cell) -> int:
        """Values have the model's width; an output gate, two gates per head (xLSTM 7B)."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        width = H * V
        return projections(width, H, K, V, outputs=3) + 2 * H * (width + 1)

    def reference_numbers(self, cell: Cell) -> int:
        """Besides the tensors, pairs of rows in a chunk, for each key channel."""
        (K,) = cell.sizes("key_dim")
        return super().reference_numbers(cell) // 2 + pair_numbers(cell, K)

    def reference(self, inputs: Mapping[str, Tensor]) -> Tensor:
        import torch.nn.functional as F

        from glabench.ops.recurrence import gated_recurrence

        q, k, v = (inputs[name].transpose(1, 2) for name in ("q", "k", "v"))
        i, f = (F.logsigmoid(inputs[name]).transpose(1, 2)[..., None] for name in ("i", "f"))
        return gated_recurrence(q, k * i.exp(), v, f.expand_as(q))[0].transpose(1, 2)


MLSTM = Mlstm()
