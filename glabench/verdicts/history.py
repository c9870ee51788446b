"""The course of every cell over several runs, and where it changed level."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from glabench.errors import UsageError
from glabench.records import Run
from glabench.records.environment import device_name
from glabench.records.metrics import Metric
from glabench.records.run import name_runs, rows_of
from glabench.sweeps.model import Cell

# A change that this share of the cells have, in the same direction between the same runs, is hardly a kernel's.
_COMMON_SHARE, _LEAST_COMMON = 0.8, 5
# Normal noise: from the median of the distances of neighbours to a standard deviation.
_TO_DEVIATION = 1 / (0.6745 * math.sqrt(2))
# How many times the noise's own gain a change has to explain (as in the Bayesian criterion, threefold to be strict).
_STRICT = 3.0


@dataclass(frozen=True)
class Point:
    """A cell's value in a run, which began `at`; the commit that was measured, if known."""

    run: str
    at: str
    commit: str | None
    value: float


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
    """A cell on one device, from the oldest run to the newest."""

    cell: Cell
    device: str
    points: Sequence[Point]
    changes: Sequence[Change]


def courses_of(runs: Sequence[Run], metric: Metric, least: float) -> list[Course]:
    """The courses of cells that two runs or more have measured on one device.

    `least`: the smallest change that counts, as a share. Raises UsageError if there is no such cell.
    """
    found: dict[tuple[str, Cell], list[Point]] = {}
    for run, name in zip(runs, name_runs(runs), strict=True):
        device = device_name(run.environment)
        commit = _commit_of(run.environment)
        for record, row in zip(run.records, rows_of(run.records), strict=True):
            value = row.get(metric.field)
            if record.status == "ok" and value is not None and value > 0:
                point = Point(name, record.started_at or "", commit, float(value))
                found.setdefault((device, record.cell), []).append(point)
    several = {key: sorted(points, key=lambda point: point.at) for key, points in found.items() if len(points) > 1}
    if not several:
        raise UsageError(f"RUN: no cell has a value of {metric.name} in two of the runs on one device")
    return [Course(cell, device, points, changes_in(points, least)) for (device, cell), points in several.items()]


def _commit_of(environment: Mapping[str, Any]) -> str | None:
    code = environment.get("code")
    commit = code.get("commit") if isinstance(code, Mapping) else None
    return commit if isinstance(commit, str) else None


def changes_in(points: Sequence[Point], least: float) -> list[Change]:
    """Where the level changes by at least the share `least`: of the logarithms, by PELT with squared distances.

    A change has to explain more than one of half the least size would, and more than the noise of neighbours does.
    """
    import numpy as np
    import ruptures

    logs = np.log([point.value for point in points])
    steps = np.abs(np.diff(logs))
    noise = float(np.median(steps)) * _TO_DEVIATION if len(steps) > 2 else 0.0
    penalty = max(0.25 * math.log1p(least) ** 2, _STRICT * noise**2 * math.log(len(points)))
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
