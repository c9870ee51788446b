"""Writes a report of runs: tables, page and figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from glabench.errors import UsageError, printable
from glabench.records import Run
from glabench.records.metrics import USUAL, Metric
from glabench.records.run import name_runs
from glabench.report.choice import CHUNK, recommend
from glabench.report.describe import settings_of, surroundings_of, title_of
from glabench.report.figures import check_figure, draw, explain_figure, save_figure
from glabench.report.kernel_roof import draw_kernel_roof, kernel_roof, kernel_roof_markdown
from glabench.report.parts import bars_of, draw_parts, parts_markdown
from glabench.report.profiled import profiled_markdown
from glabench.report.profiles import draw_profiles, profiles_markdown
from glabench.report.quality import draw_quality, has_quality, quality_markdown
from glabench.report.rates import draw_rates, has_rates, rates_markdown
from glabench.report.series import View, check_metrics, make_view
from glabench.report.tables import make_markdown
from glabench.report.text import escape

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_WRITTEN = ("records.csv", "report.md", "figure.png", "figure.svg")
# If the run has profiles, if these have parts, and if the work of kernels is known.
_PROFILE, _PARTS, _ROOF = "profile.png", "parts.png", "roof.png"
# If models were trained with several learning rates or seeds, and if perplexities of models are published.
_RATES, _QUALITY = "rates.png", "quality.png"
# The metrics that a figure shows by default.
_DRAWN = ("time", "host", "peak")
# What a formula begins with in spreadsheets. Text of records holds no tabs or line ends, which may come before.
_FORMULA = ("=", "+", "-", "@")


def write_report(
    runs: Sequence[Run], folder: Path, metrics: Sequence[Metric], against: str | None, figure: Path | None = None
) -> list[Path]:
    """Writes `records.csv`, `report.md`, `figure.png` and `figure.svg` into a folder. Returns the paths of all files.

    If there is one run and it has profiles, these are in the page too, and in figures of their own; so are learning
    rates, of any number of runs.

    `against` is the backend that ratios refer to; None stands for that of the first run's sweep. `figure` is one more
    file for the figure. Raises UsageError, before anything is written, if no record has any of the metrics, or if a
    file cannot be written.
    """
    check_metrics(runs, metrics)
    if figure is not None:
        check_figure(figure)
    folder.mkdir(parents=True, exist_ok=True)
    csv, page, *figures = paths = [folder / name for name in _WRITTEN]
    view = make_view(runs)
    extra = _drawn_besides(view)
    _make_way([*paths, *(folder / name for name in extra)])
    drawn = choose_drawn(metrics)
    csv.write_text(to_csv(to_frame(runs)), encoding="utf-8")
    page.write_text(make_page(view, metrics, drawn, against), encoding="utf-8")
    made, more = draw(view, drawn), [figure] if figure is not None else []
    for path in (*figures, *more):
        save_figure(made, path)
    for name, drawing in extra.items():
        save_figure(drawing(), folder / name)
    return [*paths, *(folder / name for name in extra), *more]


def _drawn_besides(view: View) -> dict[str, Callable[[], Figure]]:
    """The figures of learning rates, of perplexities, and of a single run's profiles, by their files' names."""
    runs = view.runs
    found: dict[str, Callable[[], Figure]] = {}
    if has_rates(runs):
        found[_RATES] = partial(draw_rates, runs)
    if has_quality(view):
        found[_QUALITY] = partial(draw_quality, view)
    if len(runs) == 1 and runs[0].profiles:
        found[_PROFILE] = partial(draw_profiles, runs[0])
        if bars_of(runs[0]):
            found[_PARTS] = partial(draw_parts, runs[0])
        if kernel_roof(runs[0]) is not None:
            found[_ROOF] = partial(draw_kernel_roof, runs[0])
    return found


def _make_way(paths: Sequence[Path]) -> None:
    """Removes what is no regular file. In a run of unknown source, a link may point to any of the user's files.

    Raises UsageError for a folder.
    """
    odd = [path for path in paths if path.is_symlink() or (path.exists() and not path.is_file())]
    for path in odd:
        if path.is_dir() and not path.is_symlink():
            raise UsageError(f"--out: '{path}' is a folder, and the report has a file of this name; remove it")
    for path in odd:
        path.unlink()


def choose_drawn(metrics: Sequence[Metric]) -> list[Metric]:
    """The metrics of the figure: all requested ones, but of the usual ones only time, the host's time and memory."""
    is_usual = tuple(metric.name for metric in metrics if metric.name != "host") == USUAL
    return [metric for metric in metrics if not is_usual or metric.name in _DRAWN]


def to_frame(runs: Sequence[Run]) -> pd.DataFrame:
    """The tables of all runs as one. If there are several runs, the first column is `run`."""
    import pandas as pd

    if len(runs) == 1:
        return runs[0].table()
    frames = [run.table() for run in runs]
    for frame, name in zip(frames, name_runs(runs), strict=True):
        frame.insert(0, "run", name)
    return pd.concat(frames, ignore_index=True)


def to_csv(frame: pd.DataFrame) -> str:
    """A table as CSV in which no text is a formula to a spreadsheet, because names and titles may be a stranger's."""

    def plain(value: object) -> object:
        return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) and not _is_number(value) else value

    # As objects, because before pandas 3.1 `map` makes floats of whole numbers beside missing ones.
    return frame.astype(object).map(plain).to_csv(index=False)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def make_page(view: View, metrics: Sequence[Metric], drawn: Sequence[Metric], against: str | None) -> str:
    """The report as Markdown; it refers to figure.png in the same folder."""
    descriptions = dict.fromkeys(run.sweep.description for run in view.runs if run.sweep.description)
    described = ["\n".join(map(printable, description.splitlines())) for description in descriptions]
    made_with = [*surroundings_of(view.runs), view.shape, *settings_of(view.runs)]
    lines = "".join(f"- {escape(line)}\n" for line in made_with if line)
    figure = f"![{', '.join(metric.title for metric in drawn)}](figure.png)"
    caption = f"*{printable(title_of(view.runs))}. {explain_figure(view, drawn)}*"
    tables = make_markdown(view, metrics, against)
    of_profiles = [parts_markdown, profiles_markdown, profiled_markdown, kernel_roof_markdown]
    profiles = [section(view.runs[0]) for section in of_profiles] if len(view.runs) == 1 else [_left_out(view.runs)]
    choice = [escape(line) for run in view.runs if run.sweep.x == CHUNK for line in recommend(run)]
    choice = ["## What to take", *choice] if choice else []
    besides = [quality_markdown(view), rates_markdown(view.runs)]
    head = [f"# {title_of(view.runs)}", *described, lines + "\n" + figure, caption]
    parts = [*head, *besides, tables, *profiles, *choice]
    return "\n\n".join(filter(None, parts))


def _left_out(runs: Sequence[Run]) -> str:
    """What a page of several runs lacks; empty if that is nothing."""
    named = [escape(name) for run, name in zip(runs, name_runs(runs), strict=True) if run.profiles]
    return f"Profiles, and parts of calls, are shown in reports of one run alone: {', '.join(named)}." if named else ""
