"""The machine as a whole: the shift that the cells of two sides have in common, and verdicts in its light."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from glabench.verdicts.findings import Verdict
from glabench.verdicts.statistics import Ratio, median_ratio

_PASSING = (Verdict.FASTER, Verdict.SAME, Verdict.NOT_SLOWER)


def judge_ratio(ratio: Ratio, limit: float) -> Verdict:
    """The verdict on a ratio; docs/method.md gives the rules.

    `limit` 0.05 allows 5 % more time. A slow-down as large as the limit is caught whenever the interval contains the
    true ratio. A smaller change passes once it is known precisely enough.
    """
    if 1 / (1 + limit) <= ratio.low and ratio.high <= 1 + limit:
        return Verdict.SAME
    if ratio.low > 1:
        return Verdict.SLOWER
    if ratio.high < 1:
        return Verdict.FASTER
    return Verdict.NOT_SLOWER if ratio.high <= 1 + limit else Verdict.UNCLEAR


@dataclass(frozen=True)
class Machine:
    """How much slower the new side is as a whole: ratios of times."""

    # The median of all cells.
    whole: Ratio
    # What the medians of all backends have in common, which a change of one backend does not explain.
    shared: Ratio
    # The largest ratio that the spread between occasions explains.
    explained: float

    @classmethod
    def of(cls, ratios: Mapping[str, Sequence[float]], explained: float) -> Machine | None:
        """The machine that the ratios of cells, by backend, show; None for too few cells."""
        whole = median_ratio([ratio for found in ratios.values() for ratio in found])
        if whole is None:
            return None
        middles = [median(found) for found in ratios.values()]
        shared = max(1.0, min(middles)) if whole.ratio > 1 else min(1.0, max(middles))
        # As uncertain as the median of all cells: a single backend may have few.
        error = Ratio(1.0, whole.low / whole.ratio, whole.high / whole.ratio)
        return cls(whole, Ratio(shared, shared * error.low, shared * error.high), explained)

    @property
    def differs(self) -> bool:
        """Whether the shift is more than occasions explain."""
        return self.whole.low > self.explained or self.whole.high < 1 / self.explained

    def judge(self, ratio: Ratio, limit: float) -> tuple[Verdict, str | None]:
        """The verdict on a cell, and why it is another one than its ratio alone would give.

        If the machine differs, a cell is slower only if it is so relative to what all backends share, and passes only
        if it also does so relative to the median of all cells. Everything else is unclear.
        """
        alone = judge_ratio(ratio, limit)
        if not self.differs:
            return alone, None
        beside = ratio.over(self.shared if alone is Verdict.SLOWER else self.whole)
        found = judge_ratio(beside, limit)
        if found is alone:
            return alone, None
        passes = alone in _PASSING and found in _PASSING
        verdict = Verdict.NOT_SLOWER if passes else Verdict.UNCLEAR
        return verdict, f"{found} relative to the machine as a whole (×{beside})"

    def to_json(self) -> dict[str, Any]:
        """The machine as plain data."""
        whole = self.whole
        ends = {"ratio": whole.ratio, "ratio_low": whole.low, "ratio_high": whole.high}
        return {**ends, "shared_ratio": self.shared.ratio, "explained": self.explained, "differs": self.differs}

    def __str__(self) -> str:
        share = self.whole.ratio - 1
        word = "slower" if share > 0 else "faster"
        if not self.differs:
            explained = f"occasions explain up to {self.explained - 1:.1%}"
            size = f"{abs(share):.1%}"
            change = "the same" if size == "0.0%" else f"{size} {word}"
            return f"the median cell is {change} (×{self.whole}); {explained}"
        return (
            f"the machine as a whole, or most of the code, is {abs(share):.1%} {word} (×{self.whole}), more than the "
            f"{self.explained - 1:.1%} that occasions explain: verdicts against this base may be off by as much"
        )
