"""The figure of a history: cells that changed, each relative to its first level, over runs in the order of time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from glabench.records.metrics import Metric
from glabench.verdicts.history import Course, differ_in_timing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Courses in a figure, those with the largest changes first.
MOST_DRAWN = 10
_WIDTH, _HEIGHT, _LEGEND_ROW, _SMALL_PRINT = 9.0, 4.2, 0.19, 8.0


def drawn_of(courses: Sequence[Course]) -> list[Course]:
    """The courses that a figure shows: those that changed most or, if none did, the first ones."""
    changed = [course for course in courses if course.changes]
    changed.sort(key=lambda course: -max(abs(change.ratio - 1) for change in course.changes))
    return (changed or list(courses))[:MOST_DRAWN]


def draw_history(courses: Sequence[Course], metric: Metric) -> Figure:
    """A line per course; a ring where it has changed."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    drawn = drawn_of(courses)
    with_timing = differ_in_timing(courses)
    first_times = {point.run: point.at for course in drawn for point in reversed(course.points)}
    runs = sorted(first_times, key=lambda run: (first_times[run], run))
    with mpl.rc_context({"text.parse_math": False}):
        height = _HEIGHT + _LEGEND_ROW * len(drawn)
        figure = Figure(figsize=(_WIDTH, height), layout="constrained", dpi=160)
        axes = figure.subplots()
        for course in drawn:
            first = course.points[0].value
            places, values = zip(*((runs.index(p.run), p.value / first) for p in course.points), strict=True)
            (line,) = axes.plot(
                places, values, marker="o", markersize=3.5, linewidth=1.2, label=_label(course, with_timing)
            )
            marked = {change.after for change in course.changes}
            rings = [(runs.index(p.run), p.value / first) for p in course.points if p in marked]
            look: dict[str, Any] = {"facecolors": "none", "edgecolors": line.get_color(), "s": 70, "linewidths": 1.4}
            axes.scatter(*zip(*rings, strict=True), **look) if rings else None
        axes.axhline(1, color="#888888", linewidth=0.8, zorder=0)
        axes.set_xticks(range(len(runs)), runs, rotation=30, ha="right", fontsize=_SMALL_PRINT)
        axes.set_ylabel(f"{metric.title}, first run = 1")
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title("Rings: the level changes here", loc="left", fontsize=_SMALL_PRINT, color="#444444")
        figure.legend(loc="outside lower left", frameon=False, fontsize=_SMALL_PRINT)
    return figure


def _label(course: Course, with_timing: bool) -> str:
    return f"{course.cell} ({course.timing or 'timing unknown'})" if with_timing else str(course.cell)
