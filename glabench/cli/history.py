"""The command `glabench history RUN...`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from glabench.cli.options import JsonOption, QuietOption, share
from glabench.cli.output import Messages, check_targets, print_table, write_json
from glabench.errors import UsageError, allowed_names, count_of
from glabench.records import Run, RunFolder
from glabench.records.metrics import BY_NAME, Metric
from glabench.report.figures import check_figure, save_figure
from glabench.report.history import draw_history
from glabench.verdicts.history import Course, Point, common_changes, describe_left_out, differ_in_timing, history_of

_LEAST = 0.03
_COMMIT = 10


def history(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders of these; at least two runs.")
    ],
    metric: Annotated[str, typer.Option(help=f"One of: {', '.join(BY_NAME)}.", metavar="NAME")] = "time",
    least: Annotated[float, share("--least", "The smallest change that counts.", 1e-3, 10)] = _LEAST,
    all_cells: Annotated[bool, typer.Option("--all", help="Show the course of every cell, changed or not.")] = False,
    figure: Annotated[Path | None, typer.Option(help="Draw the cells that changed most into this file.")] = None,
    json_to: JsonOption = None,
    quiet: QuietOption = False,
) -> None:
    """Show how cells changed over runs: between which runs, and commits, a level ended, by change points.

    Cells are the same if all their parameters are, and compared on the same kind of device and, in what depends on it,
    with the same timing alone. A change of nearly all cells at once is said apart: it is the machine's, its driver's or
    the suite's rather than a kernel's.

    Example: glabench history results --metric time --figure history.png
    """
    if find_spec("ruptures") is None:
        raise UsageError("history: ruptures is not installed; install with: pip install 'glabench[history]'")
    check_targets({"--json": json_to})
    if figure is not None:
        check_figure(figure)
    if metric not in BY_NAME:
        raise UsageError(f"--metric: '{metric}' is unknown ({allowed_names(tuple(BY_NAME), metric)})")
    chosen, messages = BY_NAME[metric], Messages(quiet)
    loaded = _load(runs)
    found = history_of(loaded, chosen, least)
    courses = found.courses
    changed = [course for course in courses if course.changes]
    if json_to is not None:
        write_json([_as_json(course) for course in courses], json_to)
    if json_to != "-" and not quiet:
        _print(courses if all_cells else changed, chosen, all_cells, differ_in_timing(courses))
    for before, after, ratio in common_changes(courses):
        messages.say(
            f"nearly all cells change from {before} to {after}, by x{ratio:.3g}: the machine, or its software?"
        )
    if found.left_out:
        messages.say(describe_left_out(found.left_out))
    messages.say(
        f"{len(changed)} of {count_of(len(courses), 'cell')} in {len(loaded)} runs changed by {least:.3g} or more"
    )
    if figure is not None:
        save_figure(draw_history(courses, chosen), figure)
        messages.say(f"wrote {figure}")


def _load(paths: Sequence[Path]) -> list[Run]:
    """All runs that are named, or in a folder that is. Raises UsageError if they are not two at least."""
    found: dict[Path, Path] = {}
    for path in paths:
        inside = [path] if RunFolder.is_run(path) else RunFolder.found_in(path)
        found |= {each.resolve(): each for each in sorted(inside) or [path]}
    if len(found) < 2:
        for path in found.values():
            RunFolder.open(path)  # what is no run is the first mistake
        raise UsageError("RUN...: name at least two runs, or a folder of runs")
    return [RunFolder.open(path).load() for path in found.values()]


def _print(courses: Sequence[Course], metric: Metric, with_points: bool, with_timing: bool) -> None:
    unit = f", {metric.unit}" if metric.unit else ""
    timing = ("timing",) if with_timing else ()
    if with_points:
        rows = [
            (
                *_names(course, with_timing),
                course.device,
                *(_value(metric, point) for point in ends),
                _path(course, metric),
            )
            for course in courses
            if (ends := (course.points[0], course.points[-1]))
        ]
        print_table(("cell", *timing, "device", f"first{unit}", f"last{unit}", "course"), rows)
        return
    changes = [
        (
            *_names(course, with_timing),
            f"{_name(change.before)} to {_name(change.after)}",
            f"{metric.show(change.level_before)} to {metric.show(change.level_after)}",
            f"x{change.ratio:.3g}",
        )
        for course in courses
        for change in course.changes
    ]
    if changes:
        print_table(("cell", *timing, "between", f"{metric.title}{unit}", "ratio"), changes)


def _names(course: Course, with_timing: bool) -> tuple[str, ...]:
    return (str(course.cell), course.timing or "unknown") if with_timing else (str(course.cell),)


def _value(metric: Metric, point: Point) -> str:
    return metric.show(point.value)


def _path(course: Course, metric: Metric) -> str:
    """All values, with a bar where the level changes."""
    marks = {change.after for change in course.changes}
    return " ".join(("| " if point in marks else "") + metric.show(point.value) for point in course.points)


def _name(point: Point) -> str:
    return point.run + (f" ({point.commit[:_COMMIT]})" if point.commit else "")


def _as_json(course: Course) -> Mapping[str, Any]:
    return {"cell": course.cell.to_json(), "device": course.device, "timing": course.timing,
            "points": [_plain(point) for point in course.points],
            "changes": [{**asdict(change), "before": _plain(change.before), "after": _plain(change.after)}
                        for change in course.changes]}  # fmt: skip


def _plain(point: Point) -> Mapping[str, Any]:
    return asdict(point) | {"at": point.at.isoformat()}
