"""The course of every cell over several runs, and where it changed level."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import fmean, median
from typing import Any

from glabench.correlation import correlation_length
from glabench.errors import UsageError, count_of
from glabench.records import Record, Run
from glabench.records.environment import device_name
from glabench.records.metrics import Metric
from glabench.records.run import name_runs, rows_of
from glabench.sweeps.model import Cell
from glabench.verdicts.occasions import Occasions
from glabench.verdicts.statistics import Spread

# A change that this share of the cells have, in the same direction between the same runs, is hardly a kernel's.
_COMMON_SHARE, _LEAST_COMMON = 0.8, 5
# Normal noise: from the median of the distances of neighbours to a standard deviation.
_TO_DEVIATION = 1 / (0.6745 * math.sqrt(2))
# How many times the noise's own gain a change has to explain (as in the Bayesian criterion, threefold to be strict).
_STRICT = 3.0
# Fewer runs count as so many, so that chance changes 1 % of the cells of two runs whose noise is known, and not 15 %.
_FEW = 10
# Normal noise: from the distance of the 20th and the 80th percentile to the standard deviation of a median.
_TO_MEDIAN = 1.2533 / (2 * 0.8416)


@dataclass(frozen=True)
class Point:
    """A cell's value in a run, measured `at`, of a commit if it is known."""

    run: str
    at: datetime
    commit: str | None
    value: float
    # Standard deviations, as shares: what the run's own samples leave open, and what is assumed to be between two runs
    # of a machine while too few of them show it. 0 if nothing is known.
    own_noise: float = 0.0
    assumed_noise: float = 0.0


@dataclass(frozen=True)
class Change:
    """A change of level between two points: the medians of the levels before and after it."""

    before: Point
    after: Point
    level_before: float
    level_after: float

    @property
    def ratio(self) -> float:
        """The level after it over that before it."""
        return self.level_after / self.level_before


@dataclass(frozen=True)
class Course:
    """A cell on one device, timed in one way, from the oldest run to the newest."""

    cell: Cell
    device: str
    # As in records; None if it is unknown, or does not matter to the metric.
    timing: str | None
    points: Sequence[Point]
    changes: Sequence[Change]


@dataclass(frozen=True)
class History:
    """The courses of cells over runs."""

    courses: Sequence[Course]
    # How many records could not be used, by the reason.
    left_out: Mapping[str, int]


def history_of(runs: Sequence[Run], metric: Metric, least: float) -> History:
    """The courses of cells that two runs or more have measured on one device, timed in one way.

    `least`: the smallest change that counts, as a share. Raises UsageError if there is no such cell.
    """
    found: dict[tuple[Cell, str, str | None], list[Point]] = {}
    left_out: Counter[str] = Counter()
    known: set[tuple[str, Cell, datetime]] = set()
    spreads = {device: Occasions.of(device).spread() for device in {device_name(run.environment) for run in runs}}
    for run, name in zip(runs, name_runs(runs), strict=True):
        device, commit = device_name(run.environment), _commit_of(run.environment)
        for record, row in zip(run.records, rows_of(run.records), strict=True):
            value, at = row.get(metric.field), _start_of(record)
            if record.status != "ok":
                left_out[record.status] += 1
            elif value is None or value <= 0:
                left_out[f"without a {metric.name}"] += 1
            elif at is None:
                left_out["without a readable started_at"] += 1
            elif (record.run_id, record.cell, at) in known:
                left_out["copied from another run"] += 1
            else:
                known.add((record.run_id, record.cell, at))
                key = record.cell, device, record.timing if metric.timed else None
                noise = _noise_of(record, spreads[device]) if metric.timed else (0.0, 0.0)
                found.setdefault(key, []).append(Point(name, at, commit, float(value), *noise))
    several = {key: sorted(points, key=lambda point: point.at) for key, points in found.items() if len(points) > 1}
    if not several:
        none = f"RUN: no cell has a value of {metric.name} in two of the runs on one device, timed in one way"
        raise UsageError("; ".join([none, *([describe_left_out(left_out)] if left_out else [])]))
    return History([Course(*key, points, changes_in(points, least)) for key, points in several.items()], left_out)


def describe_left_out(left_out: Mapping[str, int]) -> str:
    """`left out 5 records: 3 inaccurate, 2 without a readable started_at`."""
    reasons = ", ".join(f"{number} {reason}" for reason, number in left_out.items())
    return f"left out {count_of(sum(left_out.values()), 'record')}: {reasons}"


def differ_in_timing(courses: Sequence[Course]) -> bool:
    """Whether only the way of timing tells some courses apart."""
    return len({(course.cell, course.device) for course in courses}) < len(courses)


def _start_of(record: Record) -> datetime | None:
    """When a record's measurement began, without a time zone in UTC; None if that cannot be read."""
    try:
        at = datetime.fromisoformat(record.started_at or "")
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def _noise_of(record: Record, spread: Spread) -> tuple[float, float]:
    """The own and the assumed noise of a record's time, and of what is computed from it."""
    import numpy as np

    time, low, high, samples = record.time_ms, record.time_ms_p20, record.time_ms_p80, record.samples_ms
    if not time:
        return 0.0, 0.0
    assumed = spread.at(record.cell.backend, time)
    if low is None or high is None or not samples:
        return 0.0, assumed
    # Samples count as one for as long as they remember each other.
    independent = len(samples) / correlation_length(np.array(samples))
    return _TO_MEDIAN * (high - low) / time / math.sqrt(independent), assumed


def _commit_of(environment: Mapping[str, Any]) -> str | None:
    code = environment.get("code")
    commit = code.get("commit") if isinstance(code, Mapping) else None
    return commit if isinstance(commit, str) else None


def changes_in(points: Sequence[Point], least: float) -> list[Change]:
    """Where the level changes by at least the share `least`: of the logarithms, by PELT with squared distances.

    A change has to explain more than one of half the least size would, and more than the noise does.
    """
    import numpy as np
    import ruptures

    logs = np.log([point.value for point in points])
    steps = np.abs(np.diff(logs))
    # Neighbours show all of the noise, unless by chance they are closer than their own samples allow. Two or three runs
    # do not show it, so what is assumed between runs is added to what is known within each.
    own = _mean_square(point.own_noise for point in points)
    if len(steps) > 2:
        variance = max(own, (float(np.median(steps)) * _TO_DEVIATION) ** 2)
    else:
        variance = own + _mean_square(point.assumed_noise for point in points)
    penalty = max(0.25 * math.log1p(least) ** 2, _STRICT * variance * math.log(max(len(points), _FEW)))
    ends = ruptures.Pelt(model="l2", min_size=1, jump=1).fit(logs.reshape(-1, 1)).predict(pen=penalty)
    levels = [points[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    changes: list[Change] = []
    held: Sequence[Point] = levels[0]
    for level in levels[1:]:
        change = Change(held[-1], level[0], _level(held), _level(level))
        if abs(math.log(change.ratio)) >= math.log1p(least):
            changes.append(change)
            held = level
        else:
            held = [*held, *level]
    return changes


def _mean_square(values: Iterable[float]) -> float:
    return fmean(value**2 for value in values)


def _level(points: Iterable[Point]) -> float:
    return median(point.value for point in points)


def common_changes(courses: Sequence[Course]) -> list[tuple[str, str, float]]:
    """Changes of nearly all cells at once, in one direction: the runs before and after, and the median ratio.

    These are rather of the machine, its driver or the suite than of a kernel.
    """
    found: dict[tuple[str, str, bool], list[float]] = {}
    passing: dict[tuple[str, str], int] = {}
    for course in courses:
        for before, after in zip(course.points, course.points[1:], strict=False):
            passing[before.run, after.run] = passing.get((before.run, after.run), 0) + 1
        for change in course.changes:
            found.setdefault((change.before.run, change.after.run, change.ratio > 1), []).append(change.ratio)
    return [
        (before, after, median(ratios))
        for (before, after, _), ratios in found.items()
        if len(ratios) >= max(_LEAST_COMMON, _COMMON_SHARE * passing.get((before, after), 0))
    ]
