"""Hyena's long convolution in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

from glabench.backends.base import Backend
from glabench.ops.base import BYTES, wide
from glabench.sweeps.model import Cell

if TYPE_CHECKING:
    from torch import Tensor


class HyenaFft(Backend):
    """By torch's FFT, as the authors' code has it without kernels of its own.

    All of it is in float32: rounded to bf16, products k v would make skip's gradient wrong by more than 1 %.
    """

    name, op, title = "hyena-fft", "hyena", "Hyena's convolution, FFT in PyTorch"
    packages: ClassVar[tuple[str, ...]] = ("torch",)

    def working_bytes(self, cell: Cell) -> int:
        """Per channel six rows of 2T numbers: inputs with zeros behind them, spectra and their product."""
        (D,) = cell.sizes("inner")
        passes = 2 if cell.has_backward else 1
        return passes * 6 * 2 * cell.tokens * D * BYTES[wide(cell)]

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor]:  # noqa: ARG002
        from glabench.ops.hyena import convolved

        h, skip = inputs["h"], inputs["skip"]

        def forward() -> Tensor:
            q, u = inputs["q"], inputs["k"].to(h.dtype) * inputs["v"]
            return (q * (convolved(u, h) + skip[:, None] * u)).to(q.dtype)

        return forward
