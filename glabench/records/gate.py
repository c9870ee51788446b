"""The gate: decides on new measurements against a baseline, and says so where it cannot tell."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from glabench.errors import ExitCode
from glabench.records.comparison import (
    SIGNIFICANCE,
    by_cell,
    errors,
    peak_memory,
    quotient,
    samples_of,
    time_ms,
)
from glabench.records.diagnosis import Diagnosis, diagnose
from glabench.records.record import Record
from glabench.records.statistics import PROCESS_SPREAD, Ratio, compare_samples, false_discovery, median_of_known
from glabench.sweeps.model import Cell

# An interval this wide lets an unchanged cell be blamed, or a slow-down of just the limit be missed, once in 200 times.
_CONFIDENCE = 0.99
# Pairs of old and new code that confirm a suspicion. Where samples scatter by 3 % and processes by 0.5 %, three leave
# one in fifteen slow-downs by 5 % unclear, four one in thirty.
CONFIRMING_ROUNDS = 4
_FIRST_CALL_SLACK_S = 1.0
_YARDSTICK_SPREAD = 0.03
_BAD_TIMES = frozenset({Diagnosis.HOT, Diagnosis.SHARED})
_UNTRUSTED = _BAD_TIMES | {Diagnosis.UNSETTLED, Diagnosis.OUTLIERS}
_ERROR_SLACK = 1e-6  # an error of nothing may become this


class Outcome(StrEnum):
    """What the gate says of a cell, the worst last."""

    FINE = "fine"
    UNCLEAR = "unclear"
    REGRESSION = "regression"
    FAILED = "failed"
    ACCURACY = "accuracy"


_EXIT = {
    Outcome.FINE: ExitCode.OK,
    Outcome.REGRESSION: ExitCode.REGRESSION,
    Outcome.FAILED: ExitCode.CELL_FAILED,
    Outcome.ACCURACY: ExitCode.ACCURACY,
}
_ORDER = list(Outcome)


@dataclass(frozen=True)
class Limits:
    """By how much a cell may become worse, as shares: 0.05 allows 5 % more."""

    slowdown: float = 0.05
    memory: float = 0.02
    error: float = 0.5
    first_call: float = 0.5


@dataclass(frozen=True)
class Finding:
    """What the gate says of a cell, or of all first calls of a backend, and why.

    After a second look `first_ratio` is the ratio that the first one found, and `cleared` says that the second did not
    share its suspicion.
    """

    name: str
    outcome: Outcome
    reason: str
    cell: Cell | None = None
    ratio: Ratio | None = None
    before_ms: float | None = None
    now_ms: float | None = None
    memory_ratio: float | None = None
    first_ratio: Ratio | None = None
    cleared: bool = False

    def to_json(self) -> dict[str, Any]:
        """One flat dict."""
        ratio = self.ratio
        return {
            "name": self.name,
            "outcome": str(self.outcome),
            "reason": self.reason,
            "ratio": ratio.ratio if ratio else None,
            "ratio_low": ratio.low if ratio else None,
            "ratio_high": ratio.high if ratio else None,
            "before_ms": self.before_ms,
            "now_ms": self.now_ms,
            "memory_ratio": self.memory_ratio,
            "first_ratio": self.first_ratio.ratio if self.first_ratio else None,
            "cleared": self.cleared,
        }


def worst(findings: Iterable[Finding]) -> Outcome:
    """The worst outcome."""
    return max((finding.outcome for finding in findings), key=_ORDER.index, default=Outcome.FINE)


def exit_code(findings: Sequence[Finding], strict: bool) -> ExitCode:
    """0 fine, 1 regression, 4 a cell failed, 5 accuracy; what is unclear passes unless `strict`, and is then 6."""
    outcome = worst(findings)
    if outcome is Outcome.UNCLEAR:
        return ExitCode.UNCLEAR if strict else ExitCode.OK
    return _EXIT[outcome]


def judge_time(ratio: Ratio, p_value: float, limit: float) -> Outcome:
    """Fine: shown to be within the limit. Regression: shown to be slower, and not shown to be within the limit.

    So a slow-down of the limit itself is caught as surely as the interval holds the truth, and a change that is within
    the limit passes once it is known well enough. Unclear: neither is shown.
    """
    if ratio.high <= 1 + limit:
        return Outcome.FINE
    return Outcome.REGRESSION if ratio.low > 1 and p_value < SIGNIFICANCE else Outcome.UNCLEAR


def check_cells(
    before: Sequence[Sequence[Record]],
    now: Sequence[Sequence[Record]],
    limits: Limits,
    yardstick: str | None = None,
    paired: bool = False,
) -> list[Finding]:
    """A finding for every cell that the baseline has a time of, but for the yardstick's own.

    With a yardstick, times are divided by that backend's in the same round and shape.
    """
    cells_before = {cell: timed for cell, records in by_cell(before).items() if (timed := _timed(records))}
    cells_now = by_cell(now)
    held = [cell for cell in cells_before if cell.backend != yardstick]
    findings: dict[Cell, Finding] = {}
    ratios: dict[Cell, Ratio] = {}
    doubts: dict[Cell, str] = {}
    for cell in held:
        problem = _broken(cell, cells_now.get(cell, []))
        if problem is not None:
            findings[cell] = problem
            continue
        try:
            ratios[cell] = _time_ratio(cell, cells_before, cells_now, yardstick, paired)
        except _CannotTellError as reason:
            doubts[cell] = str(reason)
    adjusted = dict(zip(ratios, false_discovery([r.p_value for r in ratios.values()]), strict=True))
    for cell in held:
        if cell in findings:
            continue
        ratio = ratios.get(cell)
        if ratio is None:
            time, words = Outcome.UNCLEAR, doubts[cell]
        else:
            time = judge_time(ratio, adjusted[cell], limits.slowdown)
            words = f"time x {ratio.ratio:.3f} ({ratio.low:.3f} to {ratio.high:.3f}), allowed {1 + limits.slowdown:.3g}"
        findings[cell] = _found(cell, (time, words), ratio, cells_before[cell], cells_now[cell], limits)
    return [findings[cell] for cell in held]


def _timed(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.samples_ms]


def _broken(cell: Cell, records: Sequence[Record]) -> Finding | None:
    """What is wrong with a cell that has no time now."""
    if not records:
        return Finding(str(cell), Outcome.FAILED, "it was not measured", cell)
    bad = next((record for record in records if not record.samples_ms), None)
    if bad is None:
        return None
    outcome = Outcome.ACCURACY if bad.status == "inaccurate" else Outcome.FAILED
    return Finding(str(cell), outcome, f"{bad.status}: {bad.reason}", cell)


def _found(
    cell: Cell,
    time: tuple[Outcome, str],
    ratio: Ratio | None,
    before: Sequence[Record],
    now: Sequence[Record],
    limits: Limits,
) -> Finding:
    """The worst of what time, memory and accuracy say, with every reason that is not fine."""
    reasons = [time]
    memory = quotient(peak_memory(now), peak_memory(before))
    if memory is not None and memory > 1 + limits.memory:
        reasons.append((Outcome.REGRESSION, f"peak memory x {memory:.3f}, allowed {1 + limits.memory:.3g}"))
    errors_before, errors_now = errors(before), errors(now)
    for name, error in errors_now.items():
        allowed = errors_before.get(name, 0.0) * (1 + limits.error) + _ERROR_SLACK
        if error > allowed:
            was = errors_before.get(name, 0.0)
            reasons.append((Outcome.ACCURACY, f"error of {name} {was:.1e} -> {error:.1e}, allowed {allowed:.1e}"))
    outcome = max((outcome for outcome, _ in reasons), key=_ORDER.index)
    shown = [words for found, words in reasons if found is not Outcome.FINE] or [time[1]]
    return Finding(str(cell), outcome, "; ".join(shown), cell, ratio, time_ms(before), time_ms(now), memory)


class _CannotTellError(Exception):
    """A cell's times cannot be compared, or there is no yardstick that can be trusted; the message says why."""


def _time_ratio(
    cell: Cell,
    before: Mapping[Cell, Sequence[Record]],
    now: Mapping[Cell, Sequence[Record]],
    yardstick: str | None,
    paired: bool,
) -> Ratio:
    ways = {record.timing for record in (*before[cell], *now[cell])}
    if len(ways) > 1:
        raise _CannotTellError(f"timed in different ways: {', '.join(sorted(map(str, ways)))}")
    doubts = {doubt.name.lower() for record in before[cell] for doubt in diagnose(record) if doubt in _BAD_TIMES}
    if doubts:
        raise _CannotTellError(f"the baseline cannot be trusted here: {', '.join(sorted(doubts))}; make it anew")
    if yardstick is None:
        return compare_samples(samples_of(before[cell]), samples_of(now[cell]), paired, _CONFIDENCE)
    beside = yardstick_of(cell, yardstick, before)
    sides = []
    for cells, when in ((before, "in the baseline"), (now, "now")):
        times = _trusted_times(beside, cells.get(beside, []), len(cells[cell]), when)
        pairs = zip(samples_of(cells[cell]), times, strict=True)
        sides.append([[ms / unit for ms in samples] for samples, unit in pairs])
    # Both a cell and its yardstick carry the spread between processes.
    return compare_samples(sides[0], sides[1], paired, _CONFIDENCE, spread=2**0.5 * PROCESS_SPREAD)


def yardstick_of(cell: Cell, backend: str, cells: Iterable[Cell]) -> Cell:
    """The backend's cell of the same batch, length, pass and type: that of the same heads, else the only one.

    Raises an error, which makes the cell unclear, if there is none or the choice is not plain.
    """
    beside = [
        other
        for other in cells
        if other.backend == backend
        and (other.batch, other.seqlen, other.pass_, other.dtype, other.device)
        == (cell.batch, cell.seqlen, cell.pass_, cell.dtype, cell.device)
    ]
    heads = (cell.heads, cell.key_dim, cell.value_dim)
    same = [other for other in beside if (other.heads, other.key_dim, other.value_dim) == heads]
    chosen = same or beside
    if len(chosen) != 1:
        how_many = "no" if not chosen else f"{len(chosen)}"
        raise _CannotTellError(f"{how_many} cells of {backend} at this batch, length, pass and dtype to measure it by")
    return chosen[0]


def _trusted_times(cell: Cell, records: Sequence[Record], rounds: int, when: str) -> list[float]:
    """The yardstick's median in each round, if it can be trusted."""
    if len(records) != rounds or not all(record.time_ms for record in records):
        raise _CannotTellError(f"the yardstick {cell} has no time {when}")
    doubts = sorted({doubt.name.lower() for record in records for doubt in diagnose(record) if doubt in _UNTRUSTED})
    if doubts:
        raise _CannotTellError(f"the yardstick {cell} cannot be trusted {when}: {', '.join(doubts)}")
    times = [record.time_ms for record in records if record.time_ms]
    if max(times) > (1 + _YARDSTICK_SPREAD) * min(times):
        raise _CannotTellError(f"the yardstick {cell} varies by more than {_YARDSTICK_SPREAD:.0%} {when}")
    return times


def check_first_calls(
    before: Sequence[Sequence[Record]], now: Sequence[Sequence[Record]], limits: Limits, yardstick: str | None = None
) -> dict[str, Finding]:
    """A finding for every backend, by its name: all its first calls of the first round, which compiles everything.

    One cell's first call says little: what it compiles depends on the cells before it.
    """
    first_before, first_now = (
        {r.cell: r.first_call_s for r in side[0] if r.first_call_s is not None and r.samples_ms}
        for side in (before, now)
    )
    common = [cell for cell in first_before if cell in first_now and cell.backend != yardstick]
    findings = {}
    for backend in dict.fromkeys(cell.backend for cell in common):
        was, later = (
            sum(seconds[cell] for cell in common if cell.backend == backend) for seconds in (first_before, first_now)
        )
        allowed = was * (1 + limits.first_call) + _FIRST_CALL_SLACK_S
        outcome = Outcome.FINE if later <= allowed else Outcome.REGRESSION
        reason = f"{was:.1f} s -> {later:.1f} s, allowed {allowed:.1f} s"
        findings[backend] = Finding(f"first calls of {backend}", outcome, reason)
    return findings


def suspects(findings: Iterable[Finding], limits: Limits) -> list[Cell]:
    """The cells whose time is not shown to be within the limit, and which one more round may clear."""
    return [
        finding.cell
        for finding in findings
        if finding.cell is not None
        and finding.ratio is not None
        and finding.ratio.high > 1 + limits.slowdown
        and finding.outcome in (Outcome.REGRESSION, Outcome.UNCLEAR)
    ]


def confirmed(suspected: Finding, again: Finding | None, how: str) -> Finding:
    """A suspicion after a second look: what that says counts, and both are told; `how` says how it was taken.

    The ratio to the baseline stays beside it: far from 1 for all cells, it says that the machine has changed.
    """
    if again is None:
        return replace(suspected, reason=f"{suspected.reason}; {how}, which gave nothing to compare")
    reason = f"{again.reason}, {how}; before that: {suspected.reason}"
    cleared = again.outcome is Outcome.FINE
    return replace(again, reason=reason, first_ratio=suspected.ratio, cleared=cleared)


def summary(findings: Sequence[Finding]) -> str:
    """One line: how many findings have which outcome."""
    counts = {outcome: sum(f.outcome is outcome for f in findings) for outcome in reversed(_ORDER)}
    return ", ".join(f"{number} {outcome}" for outcome, number in counts.items() if number)


def middle_ratio(findings: Iterable[Finding]) -> float | None:
    """The median ratio of all cells to the baseline: far from 1, it is the machine that changed and not a kernel."""
    first = [finding.first_ratio or finding.ratio for finding in findings]
    return median_of_known(ratio.ratio if ratio is not None else None for ratio in first)
