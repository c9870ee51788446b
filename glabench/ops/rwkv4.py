"""The mixer of RWKV-4 without its projections: a weighted mean of values, of which old ones count less."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from glabench.ops.base import BYTES, Op, Spec, wide
from glabench.sweeps.model import Cell
from glabench.sweeps.parameters import Value, integers

if TYPE_CHECKING:
    from torch import Generator, Tensor

# Tokens at a time in the reference, all pairs of them for each channel.
_CHUNK = 16


class Rwkv4(Op):
    """k, v, o [B, T, D]; w and u [D] in float32: the rate of forgetting is e^w, and a token adds u to its own key."""

    name = "rwkv4"
    equation = (
        "o_t = (sum_{i < t} exp(k_i - (t-1-i) e^w) v_i + exp(u + k_t) v_t) / (the same sum of weights without values)"
    )
    parameters = (integers("inner", "Channels D.", 1024),)
    independent = ("batch", "inner")
    small: ClassVar[Mapping[str, int]] = {"inner": 128}
    reference_name = "chunked recurrence of the weighted mean"

    def published(self, width: int) -> dict[str, Value]:
        """The model's width."""
        return {"inner": width}

    def inputs(self, cell: Cell) -> dict[str, Spec]:
        (D,) = cell.sizes("inner")
        shared = Spec(("inner",), (D,), wide(cell))
        return {"k": self.output(cell), "v": self.output(cell), "w": shared, "u": shared}

    def output(self, cell: Cell) -> Spec:
        (D,) = cell.sizes("inner")
        return Spec(("batch", "seqlen", "inner"), (cell.batch, cell.seqlen, D))

    def make(self, name: str, x: Tensor, cell: Cell, generator: Generator) -> Tensor:  # noqa: ARG002
        """w and u about as when training begins: rates from e^-5 to e^3, u about log 0.3."""
        if name == "w":
            return first_rates(x) + 0.1 * x
        return x * 0.5 + math.log(0.3) if name == "u" else x

    def forward_flops(self, cell: Cell) -> int:
        """Per token and channel: 3 for the own weight and value, 3 to add them to each of two sums, a division."""
        (D,) = cell.sizes("inner")
        return cell.tokens * D * 8

    def state_bytes(self, cell: Cell) -> int:
        """Two sums and the exponent that both are relative to; the last token of the layer's shift is not included."""
        (D,) = cell.sizes("inner")
        return 3 * D * BYTES[wide(cell)]

    def layer_parameters(self, cell: Cell) -> int:
        """Four square projections, w, u, and three weights per channel for the token before."""
        (D,) = cell.sizes("inner")
        return 4 * D * D + 5 * D

    def reference_numbers(self, cell: Cell) -> int:
        """Besides the tensors, pairs of tokens in a chunk."""
        return super().reference_numbers(cell) + 8 * cell.seqlen * (_CHUNK + 2)

    def reference(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The output, and the states after the last token [B, 3, D]: both sums, and the exponent they are relative to.

        `initial` may be among the inputs; zeros are an empty state.
        """
        import torch

        k, v, rate, u = inputs["k"], inputs["v"], inputs["w"].exp(), inputs["u"]
        state = inputs.get("initial", k.new_zeros(k.shape[0], 3, k.shape[2]))
        values, weights, exponent = state.unbind(1)
        exponent = exponent.masked_fill(weights == 0, -math.inf)
        outputs = []
        for keys, own in zip(torch.split(k, _CHUNK, 1), torch.split(v, _CHUNK, 1), strict=True):
            C = keys.shape[1]
            t = torch.arange(C, device=k.device, dtype=k.dtype)
            age = (t[:, None] - 1 - t[None, :])[..., None]
            # Exponents [B, C, C + 1, D]: of tokens, the own one with u, and of the state.
            of_tokens = keys[:, None] - age.clamp(min=0) * rate
            of_tokens = torch.where(age == -1, keys[:, None] + u, of_tokens).masked_fill(age < -1, -math.inf)
            of_state = exponent[:, None] - t[:, None] * rate
            most = torch.maximum(of_tokens.amax(2), of_state).detach()
            shares = (of_tokens - most[:, :, None]).exp()
            share = (of_state - most).exp()
            above = (shares * own[:, None]).sum(2) + share * values[:, None]
            outputs.append(above / (shares.sum(2) + share * weights[:, None]))

            left = keys - (C - 1 - t)[:, None] * rate
            kept = exponent - C * rate
            new = torch.maximum(left.amax(1), kept).detach()
            shares, share = (left - new[:, None]).exp(), (kept - new).exp()
            values = (shares * own).sum(1) + share * values
            weights, exponent = shares.sum(1) + share * weights, new
        return torch.cat(outputs, 1), torch.stack((values, weights, exponent), 1)


def first_rates(like: Tensor) -> Tensor:
    """w [D] of a model's middle layer before training: from -5 in the first channel to 3 in the last (RWKV-4)."""
    import torch

    D = like.shape[0]
    places = torch.arange(D, device=like.device, dtype=like.dtype) / max(D - 1, 1)
    return 8 * places**1.35 - 5


RWKV4 = Rwkv4()
