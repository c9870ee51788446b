"""The parts of a comparison: verdicts, limits, and the finding of one cell."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from glabench.errors import ExitCode, UsageError
from glabench.records.metrics import BY_NAME, METRICS, TIME
from glabench.sweeps.model import Cell
from glabench.verdicts.statistics import Ratio


class Verdict(StrEnum):
    """The verdicts on a cell, worst last."""

    FASTER = "faster"
    # The whole interval of the ratio is within the limit, on both sides of 1.
    SAME = "same"
    # Neither of these, but the whole interval is below the limit.
    NOT_SLOWER = "not slower"
    # One side has no time, and this is no failure.
    NOT_COMPARED = "not compared"
    UNCLEAR = "unclear"
    SLOWER = "slower"
    LARGER = "larger"
    # There is no time now, although the base has one.
    FAILED = "failed"
    INACCURATE = "inaccurate"


# Verdicts that fail a check. UNCLEAR fails only a strict check.
FAILING: frozenset[Verdict] = frozenset({Verdict.SLOWER, Verdict.LARGER, Verdict.FAILED, Verdict.INACCURATE})
EXIT_CODES: Mapping[Verdict, ExitCode] = {
    Verdict.UNCLEAR: ExitCode.UNCLEAR,
    Verdict.SLOWER: ExitCode.REGRESSION,
    Verdict.LARGER: ExitCode.REGRESSION,
    Verdict.FAILED: ExitCode.CELL_FAILED,
    Verdict.INACCURATE: ExitCode.ACCURACY,
}
_ORDER = list(Verdict)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst of several verdicts."""
    return max(verdicts, key=_ORDER.index)


@dataclass(frozen=True)
class Limits:
    """The share by which each metric may become worse: 0.05 allows 5 %. Metrics without a limit are not judged."""

    by_metric: Mapping[str, float]

    @classmethod
    def of(cls, **changes: float | None) -> "Limits":
        """The default limits with changes by the metric's name; a metric set to None is not judged.

        Raises UsageError for a metric that is unknown or has no better and worse, for a number that is no share, and
        for time set to None.
        """
        for name, limit in changes.items():
            is_number = isinstance(limit, int | float) and 0 <= limit < math.inf
            is_share = name != TIME.name if limit is None else is_number
            if name not in BY_NAME or BY_NAME[name].better is None or not is_share:
                names = ", ".join(metric.name for metric in METRICS if metric.better)
                raise UsageError(
                    f"limits: {name}={limit} is not a limit (allowed: a share from 0 up, such as 0.05, for {names}; "
                    "None for all but time)"
                )
        limits = {metric.name: metric.limit for metric in METRICS} | changes
        return cls({name: limit for name, limit in limits.items() if limit is not None})

    @classmethod
    def of_comparison(cls, same_within: float) -> "Limits":
        """The limits of a comparison: sums such as that of first calls are not judged.

        They depend on which kernels were in the compile cache, and stored runs do not record that.
        """
        return cls.of(**{metric.name: None for metric in METRICS if metric.total}, time=same_within)

    @property
    def time(self) -> float:
        """The limit for the time."""
        return self.by_metric[TIME.name]

    def __str__(self) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {100 * limit:.3g} %" for name, limit in self.by_metric.items())


@dataclass(frozen=True)
class Finding:
    """The result for one cell, or for a sum over all cells of a backend, such as its first calls (`cell` is None)."""

    name: str
    # The verdict of every metric that was judged.
    judged: Mapping[str, Verdict]
    cell: Cell | None = None
    backend: str | None = None
    # New time divided by base time; None if either is unknown or cannot be trusted.
    ratio: Ratio | None = None
    # The share by which the time may grow.
    limit: float | None = None
    # Base and new value over all rounds, by the metric's name.
    values: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)
    # Reasons for the verdict besides the ratio.
    remarks: tuple[str, ...] = ()
    # After a second look: the ratio of the first look.
    first_ratio: Ratio | None = None
    # Whether a second look cleared the cell.
    cleared: bool = False

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all metrics."""
        return worst(self.judged.values())

    @property
    def reason(self) -> str:
        """All reasons for the verdict, in one line."""
        words = [] if self.ratio is None else [f"time ×{self.ratio}, allowed {1 + (self.limit or 0):.3g}"]
        return "; ".join([*words, *self.remarks])

    @property
    def is_suspect(self) -> bool:
        """Whether the time is not shown to be within the limit, so that a second look may clear it."""
        is_too_slow = self.ratio is not None and self.judged.get(TIME.name) in (Verdict.UNCLEAR, Verdict.SLOWER)
        return is_too_slow and self.verdict in (Verdict.UNCLEAR, Verdict.SLOWER, Verdict.LARGER)

    def quotient(self, metric: str) -> float | None:
        """A metric's new value divided by its base value; None if either is unknown or the base is 0."""
        base, new = self.values.get(metric, (None, None))
        return new / base if base and new is not None else None

    def to_json(self) -> dict[str, Any]:
        """The finding as one flat dict."""
        ratio, first = self.ratio, self.first_ratio
        values = {
            f"{BY_NAME[name].field}_{side}": value
            for name, sides in self.values.items()
            for side, value in zip(("base", "new"), sides, strict=True)
        }
        return {
            "name": self.name,
            "verdict": str(self.verdict),
            "reason": self.reason,
            "ratio": ratio.ratio if ratio else None,
            "ratio_low": ratio.low if ratio else None,
            "ratio_high": ratio.high if ratio else None,
            "first_ratio": first.ratio if first else None,
            "cleared": self.cleared,
            **(self.cell.to_json() if self.cell else {"backend": self.backend}),
            **values,
        }
