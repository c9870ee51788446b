"""The engine of `compare` and `check`: compares two sides, each with some rounds, and gives a finding per cell."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import geometric_mean, median
from typing import Any, TypeAlias

from glabench.errors import UsageError
from glabench.records import WRONG, Record
from glabench.records.diagnosis import Diagnosis, diagnose
from glabench.records.environment import device_name, measured_code
from glabench.records.metrics import ERROR, FIRST_CALL, METRICS, PEAK, TIME, Metric, Row
from glabench.records.run import rows_of
from glabench.sweeps.model import Cell
from glabench.verdicts.comparison import Comparison
from glabench.verdicts.findings import Finding, Limits, Verdict
from glabench.verdicts.machine import Machine, judge_ratio
from glabench.verdicts.occasions import Occasions
from glabench.verdicts.statistics import PROCESS_SPREAD, Ratio, compare_samples, excess_variance, median_of_known
from glabench.verdicts.surroundings import check_same_device, differences

_IDENTICAL = "the measured code (kernels and plugins) is identical on both sides"
# An interval this wide lets an unchanged cell be blamed, or a slow-down of just the limit be missed, once in 200 times.
CONFIDENCE = 0.99
# Pairs of rounds in a second look. If samples scatter by 3 %, five leave one in twenty slow-downs by 5 % unclear.
CONFIRMING_ROUNDS = 6
# How far from 1 a ratio may be to count as the same in `compare`.
SAME_WITHIN = 0.02
# Cells that show together how far processes differ here.
_MANY = 6
# A base with these doubts may be too slow and hide slow-downs.
_BAD_BASE = frozenset({Diagnosis.HOT, Diagnosis.SHARED})
_ERROR_PREFIX = "rel_error_"
_Pair: TypeAlias = tuple[Sequence[Record], Sequence[Record]]


@dataclass(frozen=True)
class Side:
    """One version: its rounds and their environment. A round is the records of fresh processes."""

    name: str
    rounds: Sequence[Sequence[Record]]
    environment: Mapping[str, Any] = field(default_factory=dict)

    def on(self, cells: Iterable[Cell]) -> "Side":
        """The same side with some of its cells."""
        wanted = set(cells)
        return replace(self, rounds=[[record for record in round_ if record.cell in wanted] for round_ in self.rounds])


def by_cell(rounds: Iterable[Iterable[Record]]) -> dict[Cell, list[Record]]:
    """The records of every cell, one per round, with cells in order of first appearance."""
    found: dict[Cell, list[Record]] = {}
    for records in rounds:
        for record in records:
            found.setdefault(record.cell, []).append(record)
    return found


def compare_sides(
    base: Side,
    new: Side,
    limits: Limits,
    paired: bool = False,
    *,
    expects_all: bool = False,
    any_device: bool = False,
    occasions: Occasions | None = None,
    before: Comparison | None = None,
) -> Comparison:
    """A finding for every cell of either side, and for the first calls of every backend of both sides.

    `paired`: round i of the base and of the new side ran one after the other. Otherwise the sides are from different
    occasions, whose spread is that of `occasions` (by default those that ship with glabench). `expects_all`: this is a
    check; a cell that the new side lacks has failed, and none passes only because the machine is faster as a whole.
    `before`: the first look, if this is the second one; some cells do not show the machine. Raises UsageError for sides
    from different devices (unless `any_device`) or without a common cell.
    """
    device = device_name(base.environment)
    if not any_device:
        check_same_device(base.environment, new.environment)
    cells_base, cells_new = by_cell(base.rounds), by_cell(new.rounds)
    if not expects_all and cells_base.keys().isdisjoint(cells_new):
        sizes = [f"{side.name} has {len(cells)}" for side, cells in ((base, cells_base), (new, cells_new))]
        raise UsageError(f"nothing to compare: no cell is on both sides ({', '.join(sizes)}); measure the same sweep")
    sides = {cell: (cells_base.get(cell, []), cells_new.get(cell, [])) for cell in {**cells_base, **cells_new}}
    findings = {cell: found for cell, pair in sides.items() if (found := _find_missing_time(cell, *pair, expects_all))}
    timed = {cell: ([r for r in b if _has_time(r)], n) for cell, (b, n) in sides.items() if cell not in findings}
    doubts = {cell: why for cell, pair in timed.items() if (why := _explain_doubt(*pair))}
    times = {cell: _Times.of(pair, paired) for cell, pair in timed.items() if cell not in doubts}
    known = None if paired else occasions or Occasions.of(device)
    processes, seen = _find_spread(times.values(), before)
    of_occasions = known.spread().total if known else 0.0
    ratios = {cell: each.ratio(processes, of_occasions) for cell, each in times.items()}
    machine = None
    if known and device == device_name(new.environment):
        machine = before.machine if before else _find_machine(ratios, known)
    for cell, pair in timed.items():
        finding = _judge_time(cell, ratios.get(cell), limits.time, machine if expects_all else None, doubts.get(cell))
        findings[cell] = _with_other_metrics(finding, *pair, limits)
    return Comparison(
        base.name,
        new.name,
        limits,
        (*(findings[cell] for cell in sides), *_judge_first_calls(base, new, limits)),
        tuple(differences(base.environment, new.environment)),
        (_median_clock(base), _median_clock(new)),
        (
            *((_IDENTICAL,) if _has_same_code(base, new) else ()),
            *((known.describe(),) if known else ()),
            *((str(machine),) if machine else ()),
            *_list_doubts(base),
            *_list_doubts(new),
        ),
        machine,
        seen,
    )


def _find_machine(ratios: Mapping[Cell, Ratio], occasions: Occasions) -> Machine | None:
    by_backend: dict[str, list[float]] = {}
    for cell, ratio in ratios.items():
        by_backend.setdefault(cell.backend, []).append(ratio.ratio)
    return Machine.of(by_backend, occasions.spread().largest_shift)


def _judge_time(cell: Cell, ratio: Ratio | None, limit: float, machine: Machine | None, doubt: str | None) -> Finding:
    if ratio is None:
        return Finding(str(cell), {TIME.name: Verdict.UNCLEAR}, cell, remarks=(doubt or "",))
    verdict, why = (judge_ratio(ratio, limit), None) if machine is None else machine.judge(ratio, limit)
    return Finding(str(cell), {TIME.name: verdict}, cell, ratio=ratio, limit=limit, remarks=(why,) if why else ())


def _has_same_code(base: Side, new: Side) -> bool:
    """Whether both sides are known to have run the same kernels and plugins."""
    code = measured_code(base.environment.get("code"))
    return code is not None and code == measured_code(new.environment.get("code"))


def _list_doubts(side: Side) -> list[str]:
    """One line with the number of records of each doubt, if there are any."""
    records = [record for round_ in side.rounds for record in round_]
    counts = Counter(doubt for record in records for doubt in diagnose(record))
    listed = ", ".join(f"{counts[doubt]} {doubt}" for doubt in Diagnosis if counts[doubt])
    return [f"doubts, {side.name}: of {len(records)} records {listed}"] if listed else []


def _find_missing_time(cell: Cell, base: Sequence[Record], new: Sequence[Record], expects_all: bool) -> Finding | None:
    """The finding of a cell that lacks a time in the base or in a round of the new side; None if there is no lack."""

    def found(verdict: Verdict, why: str) -> Finding:
        metric = ERROR if verdict is Verdict.INACCURATE else TIME
        values = _values(rows_of(base), rows_of(new))
        return Finding(str(cell), {metric.name: verdict}, cell, values=values, remarks=(why,))

    if not any(map(_has_time, base)):
        return found(Verdict.NOT_COMPARED, f"base: {_explain_failure(base[0])}" if base else "not in base")
    if not new:
        return found(Verdict.FAILED, "not measured") if expects_all else found(Verdict.NOT_COMPARED, "not in new")
    failed = sorted((r for r in new if not _has_time(r)), key=lambda record: record.status not in WRONG)
    if not failed:
        return None
    verdict = Verdict.INACCURATE if failed[0].status in WRONG else Verdict.FAILED
    return found(verdict, _explain_failure(failed[0]))


def _has_time(record: Record) -> bool:
    return record.status == "ok" and bool(record.samples_ms)


def _explain_failure(record: Record) -> str:
    return f"{record.status}: {record.reason}" if record.reason else record.status


@dataclass(frozen=True)
class _Times:
    """The samples of both sides of one cell, by round, and whether their rounds are pairs."""

    base: Sequence[Sequence[float]]
    new: Sequence[Sequence[float]]
    paired: bool

    @classmethod
    def of(cls, pair: _Pair, paired: bool) -> "_Times":
        base, new = ([record.samples_ms or () for record in side] for side in pair)
        return cls(base, new, paired and len(base) == len(new))

    def excess_variance(self) -> float | None:
        return excess_variance(self.base, self.new, self.paired)

    def ratio(self, processes: float, occasions: float) -> Ratio:
        return compare_samples(self.base, self.new, self.paired, CONFIDENCE, processes, occasions)


def _find_spread(times: Iterable[_Times], before: Comparison | None) -> tuple[float, float]:
    """The spread between processes that these cells count with, and the one that a second look shall count with.

    Both are at least the assumed one, and that of the first look. One cell's few rounds may differ by chance, so it
    takes many to raise what they count with themselves.
    """
    excess = [variance for each in times if (variance := each.excess_variance()) is not None]
    known = PROCESS_SPREAD if before is None else before.processes
    seen = max(known, math.sqrt(median(excess))) if excess else known
    return (seen if len(excess) >= _MANY else known), seen


def _explain_doubt(base: Sequence[Record], new: Sequence[Record]) -> str | None:
    """Why the times of two sides cannot be compared; None if they can."""
    ways = {str(record.timing) for record in (*base, *new)}
    if len(ways) > 1:
        return f"timed in different ways: {', '.join(sorted(ways))}"
    bad = sorted({doubt.name.lower() for record in base for doubt in diagnose(record) if doubt in _BAD_BASE})
    return f"the base cannot be trusted here: {', '.join(bad)}; measure it again" if bad else None


def _with_other_metrics(time: Finding, base: Sequence[Record], new: Sequence[Record], limits: Limits) -> Finding:
    """A finding of a time, with the values of all metrics and the verdicts of other metrics that became worse."""
    rows_base, rows_new = rows_of(base), rows_of(new)
    judged, remarks = dict(time.judged), list(time.remarks)
    for metric in METRICS:
        # The first call of a single cell is not judged, because what it compiles depends on earlier cells.
        if metric.name not in limits.by_metric or metric in (TIME, FIRST_CALL):
            continue
        for name in _judged_fields(metric, rows_base):
            was, now = _value(metric, name, rows_base), _value(metric, name, rows_new)
            allowed = _allowed(metric, was, limits.by_metric[metric.name])
            if was is None or now is None or allowed is None or not _is_worse(metric, now, allowed):
                continue
            judged[metric.name] = _verdict_of_worse(metric)
            of = f" ({name.removeprefix(_ERROR_PREFIX)})" if metric is ERROR else ""
            texts = f"{metric.show(was)} -> {metric.show(now)}", f"allowed {metric.show(allowed)} {metric.unit}"
            remarks.append(f"{metric.title}{of} {', '.join(texts).rstrip()}")
    return replace(time, judged=judged, values=_values(rows_base, rows_new), remarks=tuple(remarks))


def _values(base: Sequence[Row], new: Sequence[Row]) -> dict[str, tuple[float | None, float | None]]:
    """Base and new value of every metric that can become better or worse and has a value on either side."""
    pairs = {m.name: (_value(m, m.field, base), _value(m, m.field, new)) for m in METRICS if m.better}
    return {name: pair for name, pair in pairs.items() if pair != (None, None)}


def _judged_fields(metric: Metric, rows: Sequence[Row]) -> list[str]:
    """The columns that a metric is judged by."""
    if metric is PEAK:
        return ["peak_allocated_mib"]  # resident memory on a CPU is too noisy
    if metric is ERROR:
        return sorted({name for row in rows for name in row if name.startswith(_ERROR_PREFIX)})
    return [metric.field]


def _value(metric: Metric, name: str, rows: Sequence[Row]) -> float | None:
    """The value over rounds: for times the geometric mean, as in their ratio; for errors the largest; else the median.

    None if no round has a value.
    """
    found = [row[name] for row in rows if row.get(name) is not None]
    if not found:
        return None
    return geometric_mean(found) if metric is TIME else max(found) if metric is ERROR else median(found)


def _allowed(metric: Metric, was: float | None, limit: float) -> float | None:
    """The worst value that passes; None if there is no base value."""
    if was is None or (was <= 0 and not metric.slack):
        return None
    return was * (1 + limit) + metric.slack if metric.better == "lower" else was / (1 + limit) - metric.slack


def _is_worse(metric: Metric, now: float, allowed: float) -> bool:
    return now > allowed if metric.better == "lower" else now < allowed


def _verdict_of_worse(metric: Metric) -> Verdict:
    if metric is ERROR:
        return Verdict.INACCURATE
    return Verdict.LARGER if metric.better == "lower" else Verdict.SLOWER


def _judge_first_calls(base: Side, new: Side, limits: Limits) -> list[Finding]:
    """A finding per backend: the sum of its first calls in the first round, which compiles everything."""
    limit = limits.by_metric.get(FIRST_CALL.name)
    if limit is None or not base.rounds or not new.rounds:
        return []
    seconds_base, seconds_new = (
        {r.cell: r.first_call_s for r in side.rounds[0] if r.first_call_s is not None and _has_time(r)}
        for side in (base, new)
    )
    common = [cell for cell in seconds_base if cell in seconds_new]
    findings = []
    for backend in dict.fromkeys(cell.backend for cell in common):
        was, now = (
            sum(seconds[cell] for cell in common if cell.backend == backend) for seconds in (seconds_base, seconds_new)
        )
        allowed = was * (1 + limit) + FIRST_CALL.slack
        verdict = Verdict.NOT_SLOWER if now <= allowed else Verdict.SLOWER
        name, words = f"first calls of {backend}", f"{was:.1f} s -> {now:.1f} s, allowed {allowed:.1f} s"
        judged, values = {FIRST_CALL.name: verdict}, {FIRST_CALL.name: (was, now)}
        findings.append(Finding(name, judged, backend=backend, values=values, remarks=(words,)))
    return findings


def _median_clock(side: Side) -> float | None:
    return median_of_known(record.sm_clock_mhz for records in side.rounds for record in records)
