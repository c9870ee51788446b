"""Compares two sets of samples: a ratio with an interval, from the medians of rounds.

Samples of one process depend on each other (clocks, memory placement), and do not show how far another process would
differ. So each round (one process) counts as one value, its median, whose variance is that of medians of blocks as long
as the samples' correlation. Every round also gets an assumed spread between processes, which `glabench validate`
measured (docs/method.md). If rounds differ by more than that, as on a shared machine, their own variance counts, with
Student's few degrees of freedom. Sides measured on different occasions get the spread between occasions on top, which
more rounds do not make smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import median
from typing import TYPE_CHECKING, Any, TypeAlias

from glabench.correlation import correlation_length

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers: TypeAlias = NDArray[np.float64]

Rounds: TypeAlias = Sequence[Sequence[float]]

# Standard deviation of the medians of fresh processes, as a share.
PROCESS_SPREAD = 0.004
_DRAWS = 400
_MOST_SAMPLES = 400  # per round; more are thinned out evenly
# Degrees of freedom that an assumed spread is worth. With fewer, too many slow-downs of noisy cells are unclear; with
# more, too many unchanged cells are blamed if processes differ by more than assumed.
_ASSUMED_FREEDOM = 4.0
# Processes also differ by a fixed time per call, because what lies between two kernels takes them longer: by up to a
# microsecond per kernel, in all cells of a process (docs/method.md). It is measured on cells shorter than this, if a
# backend has so many of them; before that, its standard deviation is assumed. Milliseconds.
SHORT_MS, _LEAST_SHORT, ASSUMED_FIXED_MS = 0.25, 5, 0.001
# A few rounds may differ by chance: beyond the assumed variance times this, it is theirs alone that counts.
_SLACK = 2.0


def median_of_known(values: Iterable[float | None]) -> float | None:
    """The median of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


@dataclass(frozen=True)
class Ratio:
    """b divided by a: the estimate and its interval."""

    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.ratio:.3f} ({self.interval})"

    @property
    def interval(self) -> str:
        """The ends of the interval, without the digits of numbers that say no more than that nothing is known."""
        return f"{_show_end(self.low)} to {_show_end(self.high)}"

    def over(self, other: Ratio) -> Ratio:
        """The ratio divided by another one, whose interval widens this one's."""
        return Ratio(self.ratio / other.ratio, self.low / other.high, self.high / other.low)


def _show_end(end: float) -> str:
    return "<0.001" if end < 0.001 else ">1000" if end > 1000 else f"{end:.3f}"


@dataclass(frozen=True)
class Spread:
    """How far the times of an occasion (a machine at a time) are from those of others: standard deviations, as shares.

    `shift` is that of what all cells of an occasion have in common, `scatter` that of single cells around it.
    """

    shift: float
    scatter: float
    # How many it was measured on; 0: assumed.
    occasions: int = 0
    cells: int = 0
    # The degrees of freedom of the scatter.
    freedom: int = 0
    # By backend, of a part of each call's time that is the same in short and long cells, ms.
    fixed_ms: Mapping[str, float] = field(default_factory=dict)

    @property
    def measured(self) -> float:
        """That of one cell."""
        return math.hypot(self.shift, self.scatter)

    @property
    def total(self) -> float:
        """That of one cell, larger as far as few occasions may have shown too little, at 99 %."""
        if self.occasions == 0 or self.measured == 0:
            return self.measured
        shift, scatter = self.shift**2 / self.measured**2, self.scatter**2 / self.measured**2
        freedom = 1 / (shift**2 / (self.occasions - 1) + scatter**2 / max(1, self.freedom))
        return self.measured * max(1.0, _student(freedom, 0.99) / _student(math.inf, 0.99))

    def at(self, backend: str, ms: float) -> float:
        """That of a cell of a backend that takes so many ms, as `total` is that of a long one."""
        fixed = self.fixed_ms.get(backend)
        if fixed is None:
            fixed = ASSUMED_FIXED_MS
        elif self.occasions:  # all cells of an occasion share it
            fixed *= _student(self.occasions - 1, 0.99) / _student(math.inf, 0.99)
        return math.hypot(self.total, fixed / ms)

    @property
    def largest_shift(self) -> float:
        """The largest ratio of all cells of two occasions that these explain, at 99 %."""
        freedom = self.occasions - 1 if self.occasions else math.inf
        return math.exp(math.sqrt(2) * self.shift * _student(freedom, 0.99))


def spread_over(
    occasions: Sequence[Mapping[Any, float]], backend_of: Callable[[Any], str] | None = None
) -> Spread | None:
    """The spread over two or more occasions, each the times (ms) of its cells, by all cells that two or more have.

    Logarithms of times are a cell's, plus an occasion's, plus the scatter: fitted by least squares, to all cells but
    the short ones (SHORT_MS) if these connect all occasions. None if not even all cells do, or if no degree of freedom
    is left for the scatter. The shift contains the error of its estimate, so it is too large if few cells connect the
    occasions. If the backend of a cell is known, short cells show the backend's fixed time per call.
    """
    import numpy as np

    times_of: dict[Any, dict[int, float]] = {}
    for n, times in enumerate(occasions):
        for cell, ms in times.items():
            times_of.setdefault(cell, {})[n] = math.log(ms)
    shared = {cell: (list(each), np.array(list(each.values()))) for cell, each in times_of.items() if len(each) > 1}
    short = {cell: logs for cell, logs in shared.items() if logs[1].mean() < math.log(SHORT_MS)}
    long = [logs for cell, logs in shared.items() if cell not in short]
    fitted = _fit_occasions(long, len(occasions)) or _fit_occasions(list(shared.values()), len(occasions))
    if fitted is None:
        return None
    spread, shifts = fitted
    if backend_of is None:
        return spread
    squares: dict[str, list[float]] = {}
    for cell, (places, logs) in short.items():
        rest = logs - logs.mean() - (shifts[places] - shifts[places].mean())
        of_one = float((rest**2).sum()) / (len(places) - 1) * math.exp(2 * logs.mean())
        squares.setdefault(backend_of(cell), []).append(of_one)
    fixed = {name: math.sqrt(sum(each) / len(each)) for name, each in squares.items() if len(each) >= _LEAST_SHORT}
    return replace(spread, fixed_ms=fixed)


def _fit_occasions(shared: Sequence[tuple[list[int], Numbers]], size: int) -> tuple[Spread, Numbers] | None:
    """The spread over `size` occasions, and the shift of each, from the occasions and logarithms of cells' times."""
    import numpy as np

    # Normal equations for the occasions alone: a cell's own share is the mean of what is left of its times.
    left, right = np.zeros((size, size)), np.zeros(size)
    for places, logs in shared:
        left[np.ix_(places, places)] += np.eye(len(places)) - 1 / len(places)
        right[places] += logs - logs.mean()
    freedom = sum(len(places) for places, _ in shared) - len(shared) - (size - 1)
    if size < 2 or freedom < 1 or np.linalg.matrix_rank(left) < size - 1:
        return None
    shifts: Numbers = np.linalg.lstsq(left, right, rcond=None)[0].astype(np.float64)
    shifts -= shifts.mean()
    rest = [logs - logs.mean() - (shifts[places] - shifts[places].mean()) for places, logs in shared]
    shift = math.sqrt(float((shifts**2).sum()) / (size - 1))
    scatter = math.sqrt(sum(float((each**2).sum()) for each in rest) / freedom)
    return Spread(shift, scatter, size, len(shared), freedom), shifts


def compare_samples(
    a: Rounds,
    b: Rounds,
    paired: bool = False,
    confidence: float = 0.95,
    processes: float = PROCESS_SPREAD,
    occasions: float = 0.0,
) -> Ratio:
    """The ratio of b's time to a's.

    Each side is a list of rounds; a round is the samples of one process, in the order in which they were taken.
    `paired`: round i of a and of b ran one after the other, so that drift between rounds is common to both. `processes`
    and `occasions` are standard deviations, as shares: between processes, and between the occasions on which the sides
    were measured. Raises ValueError for a side or round without samples, and for pairs that do not match.
    """
    sides = _medians(a, b, paired)
    center = float(sides[-1][:, 0].mean()) - (0 if paired else float(sides[0][:, 0].mean()))
    # Of the mean of pairs, or of the difference of both sides' means.
    each = sum(1 / len(side) for side in sides)
    of_process = (2 if paired else 1) * processes**2
    assumed = sum((float(side[:, 1].mean()) + of_process) / len(side) for side in sides)
    squares, seen = _deviations(sides)
    variance, freedom = assumed, _ASSUMED_FREEDOM
    if seen:
        freedom += seen
        observed = squares / seen * each
        variance = max(assumed, (_ASSUMED_FREEDOM * assumed + seen * observed) / freedom)
        if observed > (by_chance := _SLACK * assumed):
            # What was assumed does not hold here: Satterthwaite's degrees of freedom fall to those of the rounds.
            variance = observed
            freedom = min(freedom, observed**2 / (by_chance**2 / freedom + (observed - by_chance) ** 2 / seen))
    of_occasions = 2 * occasions**2
    freedom *= (variance + of_occasions) ** 2 / variance**2
    width = _student(freedom, confidence) * math.sqrt(variance + of_occasions)
    return Ratio(*(math.exp(center + step) for step in (0, -width, width)))


def excess_variance(a: Rounds, b: Rounds, paired: bool) -> float | None:
    """The variance between the medians of processes that their samples do not explain; None for single rounds."""
    sides = _medians(a, b, paired)
    squares, seen = _deviations(sides)
    of_samples = sum(float(side[:, 1].sum()) for side in sides) / sum(map(len, sides))
    return max(0.0, squares / seen - of_samples) / (2 if paired else 1) if seen else None


def _medians(a: Rounds, b: Rounds, paired: bool) -> list[Numbers]:
    """Both sides, or the differences of pairs: per round the median of the logarithms, and its variance."""
    if not a or not b or not all(map(len, [*a, *b])):
        raise ValueError("each side needs at least one round, and each round a sample")
    if paired and len(a) != len(b):
        raise ValueError("pairs need the same number of rounds on both sides")
    import numpy as np

    side_a, side_b = (np.array([_log_median(tuple(samples)) for samples in side]) for side in (a, b))
    return [side_b + side_a * (-1, 1)] if paired else [side_a, side_b]


def _deviations(sides: Sequence[Numbers]) -> tuple[float, int]:
    """The sum of squared deviations of rounds from their side's mean, and its degrees of freedom."""
    squares = sum(float(side[:, 0].var()) * len(side) for side in sides)
    return squares, sum(len(side) - 1 for side in sides)


@lru_cache(maxsize=256)
def _log_median(samples: tuple[float, ...]) -> tuple[float, float]:
    """The median of a round's logarithms, and its variance: that of medians of the round resampled in blocks.

    Blocks wrap around from the end to the start.
    """
    import numpy as np

    generator = np.random.default_rng(0)
    x: Numbers = np.log(np.asarray(samples, dtype=np.float64)[:: -(-len(samples) // _MOST_SAMPLES)])
    n, length = len(x), correlation_length(x)
    starts = generator.integers(0, n, size=(_DRAWS, -(-n // length)))
    places = (starts[:, :, None] + np.arange(length)).reshape(_DRAWS, -1)[:, :n] % n
    return float(np.median(x)), float(np.median(x[places], axis=1).var())


def _student(freedom: float, confidence: float) -> float:
    """Half the width of Student's interval, in standard deviations."""
    from scipy.stats import t

    return float(t.ppf((1 + confidence) / 2, freedom))


def median_ratio(ratios: Sequence[float]) -> Ratio | None:
    """The median of ratios with its 95 % interval, by ranks; None if they are too few for that (fewer than six)."""
    from scipy.stats import quantile_test

    interval = quantile_test(ratios, p=0.5).confidence_interval(0.95) if ratios else None
    if interval is None or not (math.isfinite(interval.low) and math.isfinite(interval.high)):
        return None
    return Ratio(median(ratios), float(interval.low), float(interval.high))
