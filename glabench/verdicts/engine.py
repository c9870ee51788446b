"""The engine of `compare` and `check`: compares two sides, each with some rounds, and gives a finding per cell."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, TypeAlias

from glabench.errors import UsageError
from glabench.records import WRONG, Record
from glabench.records.diagnosis import Diagnosis, diagnose
from glabench.records.environment import device_name, measured_code
from glabench.records.metrics import METRICS, TIME, Metric, Row
from glabench.records.run import rows_of
from glabench.sweeps.model import Cell
from glabench.verdicts.comparison import Comparison
from glabench.verdicts.findings import Finding, Limits, Verdict
from glabench.verdicts.machine import Machine, judge_ratio
from glabench.verdicts.occasions import Occasions
from glabench.verdicts.statistics import (
    PROCESS_SPREAD,
    Ratio,
    Spread,
    compare_samples,
    excess_variance,
    median_of_known,
)
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
    """A finding for every cell of either side, and for what is judged by its sum over the cells of a backend.

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
    spread = known.spread() if known else None
    ratios = {
        cell: each.ratio(processes, spread.at(cell.backend, each.usual_ms) if spread else 0.0)
        for cell, each in times.items()
    }
    machine = None
    if spread and device == device_name(new.environment):
        machine = before.machine if before else _find_machine(ratios, spread)
    for cell, pair in timed.items():
        finding = _judge_time(cell, ratios.get(cell), limits.time, machine if expects_all else None, doubts.get(cell))
        findings[cell] = _with_other_metrics(finding, *pair, limits)
    return Comparison(
        base.name,
        new.name,
        limits,
        (*(findings[cell] for cell in sides), *_judge_totals(base, new, limits)),
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


def _find_machine(ratios: Mapping[Cell, Ratio], occasions: Spread) -> Machine | None:
    by_backend: dict[str, list[float]] = {}
    for cell, ratio in ratios.items():
        by_backend.setdefault(cell.backend, []).append(ratio.ratio)
    return Machine.of(by_backend, occasions.largest_shift)


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
        values = _values(rows_of(base), rows_of(new))
        return Finding(str(cell), {TIME.name: verdict}, cell, values=values, remarks=(why,))

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

    @property
    def usual_ms(self) -> float:
        """The base's time."""
        return median(median(samples) for samples in self.base)

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
        if metric is TIME or metric.total or metric.name not in limits.by_metric:
            continue
        for column, part in _judged_columns(metric, rows_base):
            was, now = _value(metric, column, rows_base), _value(metric, column, rows_new)
            allowed = _allowed(metric, was, limits)
            if was is None or now is None or allowed is None or not _is_worse(metric, now, allowed):
                continue
            judged[metric.name] = _verdict_of_worse(metric)
            texts = f"{metric.show(was)} -> {metric.show(now)}", f"allowed {metric.show(allowed)} {metric.unit}"
            remarks.append(f"{metric.title}{part and f' ({part})'} {', '.join(texts).rstrip()}")
    return replace(time, judged=judged, values=_values(rows_base, rows_new), remarks=tuple(remarks))


def _values(base: Sequence[Row], new: Sequence[Row]) -> dict[str, tuple[float | None, float | None]]:
    """Base and new value of every metric that can become better or worse and has a value on either side."""
    pairs = {m.name: (_value(m, m.field, base), _value(m, m.field, new)) for m in METRICS if m.better}
    return {name: pair for name, pair in pairs.items() if pair != (None, None)}


def _judged_columns(metric: Metric, rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The columns that a metric is judged by, each with the text that `*` stands for, if there is one."""
    start, star, _ = (metric.judged_by or metric.field).partition("*")
    if not star:
        return [(start, "")]
    names = sorted({name for row in rows for name in row if name.startswith(start)})
    return [(name, name.removeprefix(start)) for name in names]


def _value(metric: Metric, column: str, rows: Sequence[Row]) -> float | None:
    """The value of all rounds together; None if no round has one."""
    found = [row[column] for row in rows if row.get(column) is not None]
    return metric.combine(found) if found else None


def _allowed(metric: Metric, was: float | None, limits: Limits) -> float | None:
    """The worst value that passes; None if there is no base value."""
    if was is None or (was <= 0 and not metric.slack):
        return None
    share = 1 + limits.by_metric[metric.name]
    return was * share + metric.slack if metric.better == "lower" else was / share - metric.slack


def _is_worse(metric: Metric, now: float, allowed: float) -> bool:
    return now > allowed if metric.better == "lower" else now < allowed


def _verdict_of_worse(metric: Metric) -> Verdict:
    return Verdict(metric.worse or ("larger" if metric.better == "lower" else "slower"))


def _judge_totals(base: Side, new: Side, limits: Limits) -> list[Finding]:
    """A finding per backend for every metric whose sum is judged: that of the first round."""
    if not base.rounds or not new.rounds:
        return []
    totals = [metric for metric in METRICS if metric.total and metric.name in limits.by_metric]
    return [found for metric in totals for found in _judge_total(metric, base.rounds[0], new.rounds[0], limits)]


def _judge_total(metric: Metric, base: Sequence[Record], new: Sequence[Record], limits: Limits) -> list[Finding]:
    """A finding per backend for the sums of a metric over the cells that both sides measured."""
    values_base, values_new = (
        {r.cell: row[metric.field] for r, row in zip(side, rows_of(side), strict=True) if _has_time(r)}
        for side in (base, new)
    )
    cells: dict[str, list[Cell]] = {}
    for cell, value in values_base.items():
        if value is not None and values_new.get(cell) is not None:
            cells.setdefault(cell.backend, []).append(cell)
    findings = []
    for backend, own in cells.items():
        was, now = (sum(values[cell] for cell in own) for values in (values_base, values_new))
        if (allowed := _allowed(metric, was, limits)) is None:
            continue
        verdict = _verdict_of_worse(metric) if _is_worse(metric, now, allowed) else Verdict.NOT_SLOWER
        before, after, most = (f"{metric.scale * value:.1f} {metric.unit}" for value in (was, now, allowed))
        judged, values = {metric.name: verdict}, {metric.name: (was, now)}
        words = f"{before} -> {after}, allowed {most}"
        findings.append(
            Finding(f"{metric.total} of {backend}", judged, backend=backend, values=values, remarks=(words,))
        )
    return findings


def _median_clock(side: Side) -> float | None:
    return median_of_known(record.sm_clock_mhz for records in side.rounds for record in records)
