"""Tables of metrics, for terminals and as Markdown. On narrow terminals, tables get a vertical form; nothing is cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from glabench.records import Run
from glabench.records.metrics import TIME, Metric, known, significant
from glabench.report.describe import surroundings_of, title_of
from glabench.report.grid import DOUBTS, Grid
from glabench.report.layers import layer_grids
from glabench.report.notes import explain_doubts, list_failures, tag_series
from glabench.report.published import published_grids
from glabench.report.series import Panel, Row, View, check_metrics, find_base, make_view
from glabench.report.text import escape
from glabench.sweeps.words import show_x

if TYPE_CHECKING:
    from rich.text import Text

_SPREAD_NOTE = "±: from the median to the farther of p20 and p80"


def render_tables(runs: Sequence[Run], metrics: Sequence[Metric], width: int, against: str | None = None) -> list[Text]:
    """The texts for a terminal of `width` characters: title, tables, explained doubts, cells that were not measured.

    Tables that are too wide get a vertical form, with one line per cell. Metrics that no record has are left out. Times
    have in brackets how many times as fast as the backend `against` they are; None stands for that of the first run's
    sweep. Raises UsageError if no record has any of the metrics.
    """
    from rich.text import Text

    check_metrics(runs, metrics)
    view = make_view(runs)
    heading = Text(title_of(runs), "bold")
    heading.append("".join(f"\n{line}" for line in [view.shape, *surroundings_of(runs)] if line), "not bold dim")
    grids = _make_grids(view, metrics, _Form(against or view.against, with_spread=True), width)
    cells = [cell for grid in grids for row in grid.rows for cell in row]
    notes = [_SPREAD_NOTE] if any("±" in cell for cell in cells) else []
    notes += _list_notes(view, metrics, grids)
    return [heading.append("\n"), *(grid.to_text() for grid in grids), *([Text("\n".join(notes))] if notes else [])]


def make_markdown(view: View, metrics: Sequence[Metric], against: str | None) -> str:
    """Tables and notes as Markdown. Times have their ratio to the backend `against`; None stands for the sweep's.

    `2.31 (×6.3)` means 2.31 ms, 6.3 times as fast as that backend at the same x. A failed cell shows its status.
    """
    grids = _make_grids(view, metrics, _Form(against or view.against, with_spread=False))
    notes = "".join(f"- {escape(note)}\n" for note in _list_notes(view, metrics, grids))
    return "\n".join([*(grid.to_markdown() for grid in grids), *([notes] if notes else [])])


@dataclass(frozen=True)
class _Form:
    """How values are written: times with or without their spread, and with a ratio to the backend `against`, if any."""

    against: str | None
    with_spread: bool

    def show(self, panel: Panel, metric: Metric, row: Row | None, x: Any) -> str:
        """A row's value, or the status of a failed row."""
        if row is None:
            return ""
        value = row.get(metric.field)
        if value is None:
            return "" if row["status"] == "ok" else str(row["status"])
        if metric is not TIME:
            return metric.show(value)
        base = find_base(panel, row, x, self.against)
        ratio = f" (×{significant(base[1]['time_ms'] / value, 2)})" if base and base[1]["time_ms"] else ""
        return metric.show(value) + (_spread(row) if self.with_spread else "") + ratio

    def explain(self, panel: Panel) -> str:
        """The end of a panel's title that says which backend the ratios refer to."""
        cells = [(row, x) for series in panel.series for x in panel.x_values if (row := series.at(x))]
        bases = {base[0].label for row, x in cells if (base := find_base(panel, row, x, self.against))}
        return f"; in brackets: times as fast as {bases.pop() if len(bases) == 1 else self.against}" if bases else ""


def _spread(row: Row) -> str:
    time, low, high = row["time_ms"], row["time_ms_p20"], row["time_ms_p80"]
    if low is None or high is None or low == high:  # one sample has no spread
        return ""
    spread = max(high - time, time - low) / time
    return " ±>100%" if spread > 1 else f" ±{100 * spread:.0f}%"


def _make_grids(view: View, metrics: Sequence[Metric], form: _Form, width: float = math.inf) -> list[Grid]:
    """The tables of all panels; in the vertical form if one is wider than `width`."""
    again = [metric for metric in metrics if metric.of_pass] or metrics
    shown = [(panel, _known(metrics if panel.pass_ == view.panels[0].pass_ else again, panel)) for panel in view.panels]
    wide = [grid for panel, own in shown for grid in [*_make_wide(view, panel, own, form), *published_grids(panel)]]
    if not all(grid.width <= width for grid in wide):
        wide = [grid for panel, own in shown for grid in _make_narrow(view, panel, own, form, width)]
    return [*wide, *layer_grids(view, metrics)]


def _known(metrics: Sequence[Metric], panel: Panel) -> list[Metric]:
    """The metrics that have values in a panel; the first one if none has, so that statuses can be shown."""
    return [metric.fitted(panel.rows, only_finer=True) for metric in known(metrics, panel.rows) or metrics[:1]]


def _make_wide(view: View, panel: Panel, metrics: Sequence[Metric], form: _Form) -> list[Grid]:
    """One table per metric with x values as columns; if there is only one x, one table with metrics as columns."""
    if view.has_x:
        return [_put_x_across(panel, metric, form, with_tags=metric is metrics[0]) for metric in metrics]
    (x,) = panel.x_values
    rows = [[series.label, *_values(panel, metrics, series.at(x), x, form)] for series in panel.series]
    tags = [_tag(series.at(x)) for series in panel.series]
    return [_grid(panel, _about(panel, metrics, form), ["backend", *map(_head, metrics)], rows, tags)]


def _put_x_across(panel: Panel, metric: Metric, form: _Form, with_tags: bool) -> Grid:
    rows = [
        [series.label, *(form.show(panel, metric, series.at(x), x) for x in panel.x_values)] for series in panel.series
    ]
    tags = [tag_series(series.rows) if with_tags else "" for series in panel.series]
    title = f", {metric.title}{metric.unit and ', '}{metric.unit}{_about(panel, [metric], form)}"
    return _grid(panel, title, [panel.x_name, *map(show_x, panel.x_values)], rows, tags)


def _make_narrow(view: View, panel: Panel, metrics: Sequence[Metric], form: _Form, width: float) -> list[Grid]:
    """The vertical form: metrics as columns and one line per cell, below the series' label.

    If this is too wide, too, the metrics are split over several tables.
    """
    rows: list[list[str]] = []
    tags: list[str] = []
    for series in panel.series:
        rows.append([series.label])
        tags.append("")
        for x, row in series.rows.items():
            rows.append([f"  {show_x(x)}" if view.has_x else "", *_values(panel, metrics, row, x, form)])
            tags.append(_tag(row))
    head = [panel.x_name if view.has_x else "", *map(_head, metrics)]
    grid = _grid(panel, _about(panel, metrics, form), head, rows, tags)
    if grid.width <= width or len(metrics) == 1:
        return [grid]
    half = (len(metrics) + 1) // 2
    return [each for part in (metrics[:half], metrics[half:]) for each in _make_narrow(view, panel, part, form, width)]


def _grid(panel: Panel, title: str, head: Sequence[str], rows: Sequence[Sequence[str]], tags: Sequence[str]) -> Grid:
    """A table of a panel, with a column for doubts if there are any."""
    if any(tags):
        head = [*head, DOUBTS]
        rows = [row if len(row) == 1 else [*row, tag] for row, tag in zip(rows, tags, strict=True)]
    return Grid(panel.title, title, head, rows)


def _values(panel: Panel, metrics: Sequence[Metric], row: Row | None, x: Any, form: _Form) -> list[str]:
    return [form.show(panel, metric, row, x) for metric in metrics]


def _about(panel: Panel, metrics: Sequence[Metric], form: _Form) -> str:
    return form.explain(panel) if TIME in metrics else ""


def _tag(row: Row | None) -> str:
    return ", ".join(row["doubts"]) if row else ""


def _head(metric: Metric) -> str:
    """A short column head for a metric: `peak, MiB`."""
    return ", ".join(filter(None, [metric.name.replace("_", " "), metric.unit]))


def _list_notes(view: View, metrics: Sequence[Metric], grids: Sequence[Grid]) -> list[str]:
    """The lines below the tables: the meaning of short column heads, doubts, cells that were not measured."""
    heads = {head.partition(",")[0] for grid in grids for head in grid.head}  # units may be others
    names = {_head(metric).partition(",")[0]: metric.title for metric in metrics}
    short = {name: title for name, title in names.items() if name in heads}
    named = "; ".join(f"{name}: {title}" for name, title in short.items() if name != title)
    return [*([named] if named else []), *explain_doubts(view), *list_failures(view)]
