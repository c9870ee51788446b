"""Hyena's operator of order 2: a long convolution between two gates, without its projections and the filter's MLP."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from glabench.ops.base import BYTES, Op, Spec, wide
from glabench.sweeps.model import Cell
from glabench.sweeps.parameters import Value, integers

if TYPE_CHECKING:
    from torch import Generator, Tensor

# Filters fall to a hundredth over so much of the sequence, by channel (the authors' code).
_FASTEST, _SLOWEST = 0.3, 1.5
# Of the layer: tokens of the convolution before, what the filter's MLP is given of a place, and that MLP's inner width.
SHORT, FEATURES, HIDDEN = 3, 3, 64


class Hyena(Op):
    """q, k, v, o [B, D, T]; h [D, T], the filter, which all sequences share, and `skip` [D], both float32."""

    name = "hyena"
    equation = "o_t = q_t (sum_{i <= t} h_{t-i} k_i v_i + skip k_t v_t)"
    parameters = (integers("inner", "Channels D.", 1024),)
    independent = ("batch", "inner")
    small: ClassVar[Mapping[str, int]] = {"inner": 128}
    reference_name = "convolution by FFT"

    def published(self, width: int) -> dict[str, Value]:
        """The model's width."""
        return {"inner": width}

    def inputs(self, cell: Cell) -> dict[str, Spec]:
        (D,) = cell.sizes("inner")
        channels = self.output(cell)
        return {
            "q": channels,
            "k": channels,
            "v": channels,
            "h": Spec(("inner", "seqlen"), (D, cell.seqlen), wide(cell)),
            "skip": Spec(("inner",), (D,), wide(cell)),
        }

    def output(self, cell: Cell) -> Spec:
        (D,) = cell.sizes("inner")
        return Spec(("batch", "inner", "seqlen"), (cell.batch, D, cell.seqlen))

    def make(self, name: str, x: Tensor, cell: Cell, generator: Generator) -> Tensor:  # noqa: ARG002
        """Filters decay as those of the authors do when training begins; their squares sum to about 1."""
        if name != "h":
            return x
        decays = filter_decays(x)
        return x * decays / decays.square().sum(-1, keepdim=True).sqrt()

    def forward_flops(self, cell: Cell) -> int:
        """Per channel, 2 for each pair of a token with itself or an earlier one; per token, 4 for gates and skip."""
        (D,) = cell.sizes("inner")
        return cell.batch * D * cell.seqlen * (cell.seqlen + 1 + 4)

    def least_flops(self, cell: Cell) -> int:
        """Per token and channel 2 for the gates and, by whatever transform, at least 1 for the filter.

        Skip may be a part of the filter.
        """
        (D,) = cell.sizes("inner")
        return cell.tokens * D * 3 * self.flops(cell) // self.forward_flops(cell)

    def state_bytes(self, cell: Cell) -> int:
        """The products k v of all tokens; those of the convolution before are not included."""
        (D,) = cell.sizes("inner")
        return cell.seqlen * D * BYTES[cell.dtype]

    def layer_parameters(self, cell: Cell) -> int:
        """Four square projections with biases, short convolutions, the filter's MLP with its frequencies, skip."""
        (D,) = cell.sizes("inner")
        mlp = (FEATURES + 1) * HIDDEN + 2 * (HIDDEN + 1) * HIDDEN + HIDDEN * D + HIDDEN
        return 4 * D * D + 4 * D + 3 * D * (SHORT + 1) + mlp + D

    def reference(self, inputs: Mapping[str, Tensor]) -> Tensor:
        q, u = inputs["q"], inputs["k"] * inputs["v"]
        return q * (convolved(u, inputs["h"]) + inputs["skip"][:, None] * u)


def convolved(u: Tensor, h: Tensor) -> Tensor:
    """y_t = sum_{i <= t} h_{t-i} u_i: u and y [..., D, T], h [D, T], all float32 or all float64, by FFT.

    Both have zeros behind them, so that nothing comes round.
    """
    import torch

    T = u.shape[-1]
    spectrum = torch.fft.rfft(u, n=2 * T) * torch.fft.rfft(h, n=2 * T)
    y: Tensor = torch.fft.irfft(spectrum, n=2 * T)[..., :T]
    return y


def filter_decays(like: Tensor, longest: int | None = None) -> Tensor:
    """Factors of filters `like` [D, T]: 100^(-t / (c longest)), c from 1.5 in the first channel to 0.3 in the last.

    `longest`: the tokens of the longest sequence, by default T.
    """
    import torch

    D, T = like.shape
    least, most = (math.log(100) / share for share in (_SLOWEST, _FASTEST))
    rates = torch.linspace(least, most, D, device=like.device, dtype=like.dtype)
    places = torch.arange(T, device=like.device, dtype=like.dtype) / (longest or T)
    return (-rates[:, None] * places).exp()


HYENA = Hyena()
