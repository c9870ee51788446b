"""Compares two sets of samples: a ratio with a bootstrap interval, and a rank test. Assumes no distribution.

Samples of one process depend on each other (clocks, memory placement), and do not show how far another process would
differ. So samples are resampled in blocks as long as their correlation, and rounds (one process each) as a whole. Every
round also gets an assumed spread between processes, which `glabench validate` measured (docs/method.md). If rounds
differ by more than that, as on a shared machine, the interval is at least as wide as Student's, because resampling a
few rounds never leaves their range.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, TypeAlias

from glabench.correlation import correlation_length

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers: TypeAlias = NDArray[np.float64]

Rounds: TypeAlias = Sequence[Sequence[float]]

# Standard deviation of the medians of fresh processes, as a share.
PROCESS_SPREAD = 0.004
_DRAWS = 1000
_MOST_SAMPLES = 400  # per round; more are thinned out evenly
_MOST_BLOCKS = 20  # per round, in the rank test
# A few rounds may differ by chance: their variance counts only if it exceeds the assumed one by this factor.
_SLACK = 2.0
_ASSUMED_FREEDOM = 30.0


def median_of_known(values: Iterable[float | None]) -> float | None:
    """The median of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


@dataclass(frozen=True)
class Ratio:
    """b divided by a: the estimate, its interval, and the rank test's p value (two-sided)."""

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

    Each side is a list of rounds; a round is the samples of one process, in the order in which they were taken.
    `paired`: round i of a and of b ran one after the other, so that drift between rounds is common to both. `spread` is
    the assumed standard deviation between processes, as a share. Raises ValueError for a side or round without samples,
    and for pairs that do not match.
    """
    if not a or not b or not all(map(len, [*a, *b])):
        raise ValueError("each side needs at least one round, and each round a sample")
    if paired and len(a) != len(b):
        raise ValueError("pairs need the same number of rounds on both sides")
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


def _median_draws(x: Numbers, generator: np.random.Generator) -> Numbers:
    """The medians of a round resampled in blocks, one per draw. Blocks wrap around from the end to the start."""
    import numpy as np

    n, length = len(x), correlation_length(x)
    starts = generator.integers(0, n, size=(_DRAWS, -(-n // length)))
    places = (starts[:, :, None] + np.arange(length)).reshape(_DRAWS, -1)[:, :n] % n
    medians: Numbers = np.median(x[places], axis=1)
    return medians


def _resampled_rounds(drawn: Numbers, spread: float, generator: np.random.Generator) -> Numbers:
    """The mean over rounds drawn with replacement, plus the spread between processes: [rounds, draws] to [draws]."""
    import numpy as np

    rounds = len(drawn)
    chosen = generator.integers(0, rounds, size=drawn.shape)
    mean: Numbers = np.take_along_axis(drawn, chosen, axis=0).mean(axis=0)
    return mean + generator.normal(0, spread / math.sqrt(rounds), size=mean.shape)


def _observed_half_width(sides: Sequence[Numbers], spread: float, confidence: float) -> float:
    """Half the width of Student's interval from the variance between rounds, if it exceeds the assumed one; else 0.

    Each side is [rounds, draws] of medians: the means over draws are the rounds' values, the variance over draws is
    what the samples explain. The degrees of freedom are Satterthwaite's: many if little of the variance comes from
    these few rounds alone.
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
    """The p value of the Mann-Whitney test on medians of blocks, which are at least as long as the correlation.

    Pairs are aligned first, by subtracting the middle of both rounds' medians.
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

    blocks = max(1, min(_MOST_BLOCKS, len(x) // correlation_length(x)))
    return np.array([np.median(block) for block in np.array_split(x, blocks)])


def false_discovery(p_values: Sequence[float]) -> list[float]:
    """p values adjusted for the number of tests (Benjamini-Hochberg), which bounds the share of false alarms."""
    if not p_values:
        return []
    from scipy.stats import false_discovery_control

    return [float(p) for p in false_discovery_control(p_values)]
