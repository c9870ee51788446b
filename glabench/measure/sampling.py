"""When to stop sampling: the median's confidence interval, a time limit, a number of samples."""

import math
import time
from collections.abc import Callable, Sequence

from glabench.measure.settings import Settings

_Z95 = 1.96


class ClockError(Exception):
    """The clock gave a time that no call can take."""


def median_interval(ordered: Sequence[float]) -> tuple[float, float]:
    """A 95 % confidence interval of the median from sorted samples, by ranks: no shape of distribution is assumed.

    The ranks are those of the binomial(n, 1/2) distribution in its normal approximation, rounded outwards.
    """
    n = len(ordered)
    spread = _Z95 * math.sqrt(n) / 2
    low = max(0, math.floor(n / 2 - spread) - 1)
    high = min(n - 1, math.ceil(n / 2 + spread))
    return ordered[low], ordered[high]


def relative_half_width(samples: Sequence[float]) -> float:
    """Half of the median's interval over the median."""
    ordered = sorted(samples)
    low, high = median_interval(ordered)
    middle = ordered[len(ordered) // 2]
    return (high - low) / 2 / middle if middle > 0 else math.inf


def _possible(sample_ms: float) -> float:
    if not 0 < sample_ms < math.inf:
        raise ClockError(f"the clock says that a call took {sample_ms:g} ms; it jumped or stands still, measure again")
    return sample_ms


class _Elapsed:
    """Seconds since it was made; a clock that goes back stands still for a while instead."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = clock()
        self._elapsed = 0.0

    def seconds(self) -> float:
        now = self._clock()
        self._elapsed += max(0.0, now - self._last)
        self._last = now
        return self._elapsed


def collect_samples(
    sample: Callable[[], float], settings: Settings, clock: Callable[[], float] = time.monotonic
) -> tuple[tuple[float, ...], str]:
    """Calls `sample` (which returns milliseconds) until enough is known; returns all samples and why it stopped.

    The reason is `precision`, `time limit` or `sample limit`. At least three samples are taken whatever they cost.
    Raises ClockError for a sample that no call can take: samples are never dropped, so none can be trusted then.
    """
    time_since_start = _Elapsed(clock)
    samples: list[float] = []
    while True:
        samples.append(_possible(sample()))
        n, elapsed = len(samples), time_since_start.seconds()
        # Checking after every sample would favour a lucky streak; checks come at every tenth.
        enough = n >= settings.min_samples and n % 10 == 0 and elapsed >= settings.least_time_s
        if enough and relative_half_width(samples) <= settings.precision:
            return tuple(samples), "precision"
        if n >= settings.max_samples:
            return tuple(samples), "sample limit"
        if n >= 3 and elapsed > settings.time_limit_s:
            return tuple(samples), "time limit"
