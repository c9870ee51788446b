"""How long samples remember each other: neighbouring samples of one process share clocks and memory placement."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers: TypeAlias = NDArray[np.float64]


def centred_ranks(x: Numbers) -> Numbers:
    """The ranks of numbers, less their mean; equal numbers share a rank."""
    import numpy as np

    _, places, counts = np.unique(x, return_inverse=True, return_counts=True)
    middles = np.cumsum(counts) - (counts + 1) / 2
    ranks: Numbers = middles[places] - (len(x) - 1) / 2
    return ranks


def correlation_length(x: Numbers) -> int:
    """The correlation length in samples, at least 1: the integrated autocorrelation of the samples' ranks.

    The sum ends where the autocorrelation first falls below zero, at most at a fifth of the samples.
    """
    import numpy as np

    n = len(x)
    ranks = centred_ranks(x)
    power = float(ranks @ ranks)
    if n < 10 or power == 0:
        return 1
    spectrum = np.fft.rfft(ranks, 2 * n)
    correlation = np.fft.irfft(spectrum * spectrum.conj())[: n // 5] / power
    below = np.flatnonzero(correlation < 0)
    positive = correlation[1 : below[0] if len(below) else len(correlation)]
    return max(1, min(n // 5, math.ceil(1 + 2 * float(positive.sum()))))


def highest_correlation(x: Numbers, deviations: float) -> float:
    """The highest correlation of neighbours, from 0 to 0.98, that samples leave possible.

    This is their own, corrected for its bias in short series, plus a number of its standard deviations.
    """
    ranks = centred_ranks(x)
    power = float(ranks @ ranks)
    if power == 0:
        return 0.0
    own = float(ranks[1:] @ ranks[:-1]) / power
    return min(max(0.0, own + 1 / len(x) + deviations / math.sqrt(len(x))), 0.98)
