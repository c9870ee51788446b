"""Two sets of samples as a ratio: with a bootstrap interval, and with a rank test. No shape of distribution is assumed.

Samples of one process depend on each other (clocks, memory placement), and so do not say how far another process would
be off. Both are allowed for: samples are resampled in blocks as long as they remember, rounds (each a process of its
own) are resampled as a whole, and every round carries a spread between processes that is assumed from what validating
the harness gave (docs/method.md). Where rounds differ by more than that, as on a machine that is shared, the interval
is at least Student's, from what they show: few rounds drawn again never leave their own range.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers: TypeAlias = NDArray[np.float64]

Rounds: TypeAlias = Sequence[Sequence[float]]

# Standard deviation of the medians of fresh processes, as a share.
PROCESS_SPREAD = 0.004
_DRAWS = 1000
_MOST_SAMPLES = 400  # of a round; more are thinned out evenly
_MOST_BLOCKS = 20  # of a round, in the rank test
# Few rounds differ by chance: only a variance beyond so many times the assumed one is taken from them.
_SLACK = 2.0
_ASSUMED_FREEDOM = 30.0


def median_of_known(values: Iterable[float | None]) -> float | None:
    """The median of what is known; None if nothing is."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


@dataclass(frozen=True)
class Ratio:
    """b over a: the estimate, its interval, and the rank test's p value (two-sided)."""

    ratio: float
    low: float
    high: float
    p_value: float

    def __str__(self) -> str:
        return f"{self.ratio:.3f} ({self.low:.3f} to {self.high:.3f})"


def compare_samples(
    a: Rounds,
    b: Rounds,
    paired: bool = False,
    confidence: float = 0.95,
    seed: int = 0,
    spread: float = PROCESS_SPREAD,
) -> Ratio:
    """The ratio of b's time to a's.

    Each is a row of rounds, each round the samples of one process, in the order in which they were taken. `paired`:
    round i of a and of b ran next to each other, so that what drifts between rounds is common to both. `spread` is the
    standard deviation between rounds that every round carries besides what the samples show. Raises ValueError for a
    side without samples, or for pairs that do not match.
    """
    if not a or not b or not all(map(len, [*a, *b])):
        raise ValueError("each side needs at least one round, and each round a sample")
    if paired and len(a) != len(b):
        raise ValueError("pairs need as many rounds on either side")
    import numpy as np

    generator = np.random.default_rng(seed)
    logs_a, logs_b = ([np.log(_thinned(samples)) for samples in side] for side in (a, b))
    center = _mean_median(logs_b) - _mean_median(logs_a)
    drawn_a, drawn_b = (np.stack([_median_draws(x, generator) for x in side]) for side in (logs_a, logs_b))
    if paired:
        drawn, spread = [drawn_b - drawn_a], math.sqrt(2) * spread
        draws = _resampled_rounds(drawn[0], spread, generator)
    else:
        drawn = [drawn_a, drawn_b]
        draws = _resampled_rounds(drawn_b, spread, generator)
        draws = draws - _resampled_rounds(drawn_a, spread, generator)
    tail = 50 * (1 - confidence)
    low, high = np.percentile(draws, (tail, 100 - tail))
    width = _observed_half_width(drawn, spread, confidence)
    low, high = min(low, center - width), max(high, center + width)
    return Ratio(math.exp(center), math.exp(low), math.exp(high), _rank_test(logs_a, logs_b, paired))


def _thinned(samples: Sequence[float]) -> Numbers:
    import numpy as np

    return np.asarray(samples, dtype=np.float64)[:: -(-len(samples) // _MOST_SAMPLES)]


def _mean_median(rounds: Sequence[Numbers]) -> float:
    import numpy as np

    return float(np.mean([np.median(x) for x in rounds]))


def memory_length(x: Numbers) -> int:
    """For how many samples a sample is remembered: the integrated autocorrelation of the ranks, at least 1.

    The sum ends where the autocorrelation first falls below zero, and at a fifth of the samples.
    """
    import numpy as np
    from scipy.stats import rankdata

    n = len(x)
    ranks = rankdata(x) - (n + 1) / 2
    power = float(ranks @ ranks)
    if n < 10 or power == 0:
        return 1
    spectrum = np.fft.rfft(ranks, 2 * n)
    correlation = np.fft.irfft(spectrum * spectrum.conj())[: n // 5] / power
    below = np.flatnonzero(correlation < 0)
    positive = correlation[1 : below[0] if len(below) else len(correlation)]
    return max(1, min(n // 5, math.ceil(1 + 2 * float(positive.sum()))))


def _median_draws(x: Numbers, generator: np.random.Generator) -> Numbers:
    """Medians of a round resampled in blocks, one a draw; blocks run over the end to the start."""
    import numpy as np

    n, length = len(x), memory_length(x)
    starts = generator.integers(0, n, size=(_DRAWS, -(-n // length)))
    places = (starts[:, :, None] + np.arange(length)).reshape(_DRAWS, -1)[:, :n] % n
    medians: Numbers = np.median(x[places], axis=1)
    return medians


def _resampled_rounds(drawn: Numbers, spread: float, generator: np.random.Generator) -> Numbers:
    """The mean over rounds drawn with replacement, [rounds, draws] to [draws], with the spread between processes."""
    import numpy as np

    rounds = len(drawn)
    chosen = generator.integers(0, rounds, size=drawn.shape)
    mean: Numbers = np.take_along_axis(drawn, chosen, axis=0).mean(axis=0)
    return mean + generator.normal(0, spread / math.sqrt(rounds), size=mean.shape)


def _observed_half_width(sides: Sequence[Numbers], spread: float, confidence: float) -> float:
    """Half of Student's interval from what differs between rounds, if that is more than is assumed; else 0.

    Each side is [rounds, draws] of medians: their means are the rounds, their variance is what samples explain. The
    degrees of freedom are Satterthwaite's: many where little of the variance is known from these few rounds alone.
    """
    from scipy.stats import t

    seen = sum(len(side) - 1 for side in sides)
    if seen == 0:
        return 0.0
    variance = sum(float(((side.mean(axis=1) - side.mean()) ** 2).sum()) for side in sides) / seen
    of_samples = sum(float(side.var(axis=1).sum()) for side in sides) / sum(map(len, sides))
    assumed = _SLACK * (spread**2 + of_samples)
    if variance <= assumed:
        return 0.0
    freedom = variance**2 / (assumed**2 / _ASSUMED_FREEDOM + (variance - assumed) ** 2 / seen)
    error = math.sqrt(variance * sum(1 / len(side) for side in sides))
    return error * float(t.ppf((1 + confidence) / 2, freedom))


def _rank_test(a: Sequence[Numbers], b: Sequence[Numbers], paired: bool) -> float:
    """Mann and Whitney's test over medians of blocks, which are longer than the samples' memory.

    Pairs are aligned first: what both rounds of a pair have in common is taken off.
    """
    import numpy as np
    from scipy.stats import mannwhitneyu

    if paired:
        middles = [(np.median(x) + np.median(y)) / 2 for x, y in zip(a, b, strict=True)]
        a, b = ([x - m for x, m in zip(side, middles, strict=True)] for side in (a, b))
    first, second = (np.concatenate([_block_medians(x) for x in side]) for side in (a, b))
    return float(mannwhitneyu(first, second, alternative="two-sided").pvalue)


def _block_medians(x: Numbers) -> Numbers:
    import numpy as np

    blocks = max(1, min(_MOST_BLOCKS, len(x) // memory_length(x)))
    return np.array([np.median(block) for block in np.array_split(x, blocks)])


def false_discovery(p_values: Sequence[float]) -> list[float]:
    """p values adjusted for the number of tests, by Benjamini and Hochberg: the share of false alarms among alarms."""
    if not p_values:
        return []
    from scipy.stats import false_discovery_control

    return [float(p) for p in false_discovery_control(p_values)]
