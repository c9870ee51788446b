"""Sampling: when to stop (the median's confidence interval, a time limit, a number of samples), which samples count."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from glabench.correlation import correlation_length, highest_correlation
from glabench.measure.settings import Settings
from glabench.measure.timer import Sample

_Z95 = 1.96
# Of a normal distribution: the standard deviation divided by the median deviation, and that of the median of many
# samples divided by that of their mean.
_MAD, _MEDIAN = 1.4826, 1.2533
# How far above its estimate the correlation of neighbours is taken to be. With 3, at most 5 % of the medians of stops
# by precision are off by more than the precision, up to a correlation of 0.95 (tests/suite/test_timing.py).
_DEVIATIONS = 3.0
# A sample whose mean SM clock is below this share of the device's maximum was throttled (as in nvbench). If most
# samples are, the work itself causes that clock, and none is thrown out.
THROTTLED_BELOW = 0.75
_FEWEST_SAMPLES = 3


@dataclass(frozen=True)
class Samples:
    """The samples that count, those thrown out because the clock was throttled, and why sampling stopped."""

    kept: tuple[Sample, ...]
    thrown_out: tuple[Sample, ...]
    stop_reason: str


class ClockError(Exception):
    """The clock gave an impossible time."""


def relative_half_width(samples: Sequence[float]) -> float:
    """Half the width of the median's 95 % interval, divided by the median.

    Neighbouring samples depend on each other, and few samples do not show how much. So they are taken to be as
    dependent as they can be: their correlation length is the larger of the measured one and that of a first-order
    autoregression with the highest correlation of neighbours that they leave possible.
    """
    import numpy as np

    x = np.asarray(samples, dtype=np.float64)
    n, middle = len(x), float(np.median(x))
    if middle <= 0 or n < 2:
        return math.inf
    rho = highest_correlation(x, _DEVIATIONS)
    length = max(correlation_length(x), (1 + rho) / (1 - rho))
    spread = _Z95 * math.sqrt(n * length) / 2
    if n / 2 >= spread:
        # By ranks, without assuming a distribution: quantiles of the binomial(n, 1/2) distribution, widened by the
        # correlation, in its normal approximation, rounded outwards.
        ordered = np.sort(x)
        low, high = max(0, math.floor(n / 2 - spread) - 1), min(n - 1, math.ceil(n / 2 + spread))
        return float(ordered[high] - ordered[low]) / 2 / middle
    # Too few samples for ranks: from the steps between neighbours, as if samples were normal.
    deviation = _MAD * float(np.median(np.abs(np.diff(x)))) / math.sqrt(2 * (1 - rho))
    return _Z95 * _MEDIAN * deviation * math.sqrt(length / n) / middle


def _possible(sample: Sample) -> Sample:
    if not 0 < sample.ms < math.inf:
        raise ClockError(f"the clock gave {sample.ms:g} ms for a call; it jumped or stands still, so measure again")
    return sample


class _Elapsed:
    """Seconds since construction. If the clock jumps back, the jump is ignored."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = clock()
        self._elapsed = 0.0

    def seconds(self) -> float:
        now = self._clock()
        self._elapsed += max(0.0, now - self._last)
        self._last = now
        return self._elapsed


def is_throttled(sample: Sample, max_clock_mhz: float | None) -> bool:
    """Whether the clock was held back during a sample; False if either clock is unknown."""
    if sample.sm_clock_mhz is None or max_clock_mhz is None:
        return False
    return sample.sm_clock_mhz < THROTTLED_BELOW * max_clock_mhz


def collect_samples(
    sample: Callable[[], Sample],
    settings: Settings,
    max_clock_mhz: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Samples:
    """Calls `sample` until the settings say that it is enough.

    The reason for stopping is `precision`, `time limit` or `sample limit`. At least three samples are taken, however
    long they take. Raises ClockError for an impossible time, because such a clock's other times are suspect, too.
    """
    time_since_start = _Elapsed(clock)
    taken: list[Sample] = []
    kept: list[float] = []
    while True:
        taken.append(_possible(sample()))
        if not is_throttled(taken[-1], max_clock_mhz):
            kept.append(taken[-1].ms)
        counted = _counted(taken, kept)
        n, elapsed = len(counted), time_since_start.seconds()
        # Only every tenth sample, because testing after every sample would favour a lucky streak.
        enough = n >= settings.min_samples and len(taken) % 10 == 0 and elapsed >= settings.least_time_s
        if enough and relative_half_width(counted) <= settings.precision:
            return _sorted_out(taken, max_clock_mhz, "precision")
        if len(taken) >= settings.max_samples:
            return _sorted_out(taken, max_clock_mhz, "sample limit")
        if len(taken) >= _FEWEST_SAMPLES and elapsed > settings.time_limit_s:
            return _sorted_out(taken, max_clock_mhz, "time limit")


def _counted(taken: Sequence[Sample], kept: list[float]) -> Sequence[float]:
    return kept if 2 * len(kept) >= len(taken) else [sample.ms for sample in taken]


def _sorted_out(taken: Sequence[Sample], max_clock_mhz: float | None, stop_reason: str) -> Samples:
    thrown_out = tuple(sample for sample in taken if is_throttled(sample, max_clock_mhz))
    if 2 * len(thrown_out) > len(taken):
        return Samples(tuple(taken), (), stop_reason)
    kept = tuple(sample for sample in taken if not is_throttled(sample, max_clock_mhz))
    return Samples(kept, thrown_out, stop_reason)
