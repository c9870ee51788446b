"""The common parts of all figures: quantities on axes, and a grid of panels under a title."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from glabench.records import FAILED
from glabench.records.metrics import Metric, known
from glabench.report.describe import surroundings_of, title_of
from glabench.report.series import Panel, Row, Series, View
from glabench.report.styles import Style, choose_styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Marker and legend text of each reason for a missing point.
FAILURE_MARKS: Mapping[str, tuple[str, str]] = {
    "oom": ("x", "out of memory"),
    "timeout": ("1", "timed out"),
    "inaccurate": ("*", "inaccurate"),
    "suspicious": ("3", "too fast to be true"),
    "error": ("2", "failed"),
    "unsupported": ("+", "unsupported"),
}
# Inches: the usual width of a panel, the height of a line in the title and in the subtitle, the margin.
PANEL_WIDTH = 5.2
_TITLE_LINE, _SUBTITLE_LINE, _MARGIN = 0.24, 0.16, 0.1
_CHARACTERS_PER_INCH, _IN_TITLE = 15, 9
# Points: subtitle, legend and other small print.
_SMALL_PRINT = 8.5
# With the most columns, panels are narrower and small print is larger: on 7 inches of paper no text is below 6 points.
_NARROW_PANEL, _LARGER_PRINT = 3.7, 10.0
# Of a .png: pixels per inch, and how wide and high it is at most. A file's size counts: a run's folder is kept small.
_DPI, _MOST_WIDE, _MOST_HIGH = 160, 1728, 3700
_MOST_COLUMNS = 3
_LINEAR_UNITS = ("%", "W", "MHz")
_LEAST_PERCENT = 5.0


@dataclass(frozen=True)
class Quantity:
    """A metric on an axis, in a unit that fits its values."""

    metric: Metric

    @property
    def title(self) -> str:
        """The axis title, with the unit."""
        return ", ".join(filter(None, [self.metric.title, self.metric.unit]))

    @property
    def is_linear(self) -> bool:
        """Whether the axis is linear and not logarithmic."""
        return self.metric.unit in _LINEAR_UNITS

    @property
    def least_top(self) -> float:
        """A linear axis ends here or beyond: that a GPU idles for 0.2 % or 0.8 % is no difference to look at."""
        return _LEAST_PERCENT if self.metric.unit == "%" else 0.0

    def of(self, row: Row) -> float | None:
        """A row's value; None if the axis cannot show one."""
        value = row.get(self.metric.field)
        return None if value is None or (value <= 0 and not self.is_linear) else float(value) * self.metric.scale

    def text(self, row: Row) -> str:
        """A row's value as text, or its failure."""
        value = row.get(self.metric.field)
        if value is None:
            return FAILURE_MARKS[mark_of(row)][1] if has_failed(row) else ""
        return self.metric.show(value)


@dataclass(frozen=True)
class Layout:
    """What a figure shows: for each panel the series with a cell that could run, and their styles."""

    view: View
    quantities: Sequence[Quantity]
    series: Mapping[tuple[str, str], Sequence[Series]]
    styles: Mapping[str, Style]

    @property
    def columns(self) -> int:
        """The number of panels side by side."""
        return len(self.quantities) if len(self.quantities) <= _MOST_COLUMNS else 2

    @property
    def panel_width(self) -> float:
        """In inches."""
        return _NARROW_PANEL if self.columns == _MOST_COLUMNS else PANEL_WIDTH

    @property
    def small_print(self) -> float:
        """The size of small print in points."""
        return _LARGER_PRINT if self.columns == _MOST_COLUMNS else _SMALL_PRINT

    @property
    def enlarged(self) -> float:
        """How many times as large as usual small print is."""
        return self.small_print / _SMALL_PRINT


@dataclass(frozen=True)
class Plot:
    """One panel of a figure; `is_first` if it is the leftmost of its row."""

    axes: Axes
    panel: Panel
    quantity: Quantity
    is_first: bool


def make_layout(view: View, metrics: Sequence[Metric]) -> Layout:
    """Chooses units and styles. Leaves out metrics that no row has."""
    rows = [row for panel in view.panels for row in panel.rows]
    quantities = [_measure(metric, rows) for metric in known(metrics, rows) or metrics[:1]]
    shown = {panel.key: [series for series in panel.series if _can_run(series)] for panel in view.panels}
    # Horizontal lines come last, so that the others have the same looks as in figures without them.
    listed = sorted((each for panel in view.panels for each in shown[panel.key]), key=lambda each: each.is_constant)
    backends = {series.label: series.backend for series in listed}
    return Layout(view, quantities, shown, choose_styles(backends))


def lay_out(layout: Layout, heights: Sequence[float], below: float) -> tuple[Figure, list[Plot]]:
    """A figure with its titles and empty panels. `heights` of the passes and space `below` for a legend in inches."""
    from matplotlib.figure import Figure

    width = layout.panel_width * layout.columns + 0.4
    title = textwrap.wrap(title_of(layout.view.runs), int(_IN_TITLE * width))
    about = filter(None, [layout.view.shape, *surroundings_of(layout.view.runs)])
    characters = int(_CHARACTERS_PER_INCH * width / layout.enlarged)
    subtitle = [line for text in about for line in textwrap.wrap(text, characters)]
    below_title = _MARGIN + _TITLE_LINE * len(title)
    above = below_title + _SUBTITLE_LINE * layout.enlarged * len(subtitle) + _MARGIN
    rows = [row for pair in zip(layout.view.panels, heights, strict=True) for row in _rows_of(layout, *pair)]
    row_heights = [row_height for _, row_height, _ in rows]
    height = above + sum(row_heights) + below
    dpi = min(_DPI, _MOST_WIDE / width, _MOST_HIGH / height)
    figure = Figure(figsize=(width, height), layout="constrained", dpi=dpi)
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - above / height), w_pad=0.12, h_pad=0.1)  # type: ignore[union-attr, call-arg]
    figure.text(0.01, 1 - _MARGIN / height, "\n".join(title), fontsize=12, fontweight="bold", va="top")
    look: dict[str, Any] = {"fontsize": layout.small_print, "color": "#444444", "va": "top"}
    figure.text(0.01, 1 - below_title / height, "\n".join(subtitle), **look)
    grid = figure.subplots(len(row_heights), layout.columns, squeeze=False, height_ratios=row_heights)
    plots: list[Plot] = []
    for (panel, _, own), all_axes in zip(rows, grid, strict=True):
        plots += [Plot(all_axes[i], panel, quantity, is_first=i == 0) for i, quantity in enumerate(own)]
        for axes in all_axes[len(own) :]:
            axes.set_axis_off()
    return figure, plots


def _rows_of(layout: Layout, panel: Panel, height: float) -> list[tuple[Panel, float, Sequence[Quantity]]]:
    """The rows of panels of a pass: their height and the quantities side by side, of those that the pass has."""
    own = _known_in(layout, panel)
    return [(panel, height, own[first : first + layout.columns]) for first in range(0, len(own), layout.columns)]


def frame(plot: Plot) -> None:
    """Adds title and grid to a panel."""
    axes = plot.axes
    axes.set_title(plot.panel.title, fontsize=10)
    axes.grid(which="major", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def label_log_axis(axis: Axis, low: float, high: float) -> None:
    """Ticks of a logarithmic axis with plain numbers.

    Decades over wide ranges, even steps within a factor of 8, else 1, 2 and 5 per decade.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    is_narrow, subs = high / low < 8, (1.0,) if high / low > 1000 else (1.0, 2.0, 5.0)
    axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]) if is_narrow else LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.10g}"))
    axis.set_minor_formatter(NullFormatter())


def has_failed(row: Row) -> bool:
    """Whether a cell should have run but has no time."""
    return row["status"] in FAILED


def mark_of(row: Row) -> str:
    """The key of a failed row in `FAILURE_MARKS`."""
    return row["status"] if row["status"] in FAILURE_MARKS else "error"


def missing_in(series: Series) -> dict[Any, str]:
    """The x values to mark, with their keys in `FAILURE_MARKS`: failures and, beside a measured point, unsupported."""
    rows = series.rows.values()
    marked = FAILED | {"unsupported"} if any(row["status"] == "ok" for row in rows) else FAILED
    return {x: mark_of(row) for x, row in series.rows.items() if row["status"] in marked}


def _measure(metric: Metric, rows: Sequence[Row]) -> Quantity:
    return Quantity(metric.fitted(rows))


def _known_in(layout: Layout, panel: Panel) -> Sequence[Quantity]:
    """The quantities that have values in a panel; the first one if it has only failures.

    Those that do not depend on the pass are in the panels of the first pass alone.
    """
    again = [each for each in layout.quantities if each.metric.of_pass] or layout.quantities
    quantities = layout.quantities if panel.pass_ == layout.view.panels[0].pass_ else again
    rows = [row for series in layout.series[panel.key] for row in series.rows.values()]
    found = [each for each in quantities if any(each.of(row) is not None for row in rows)]
    return found or quantities[:1]


def _can_run(series: Series) -> bool:
    return any(row["status"] != "unsupported" for row in series.rows.values())
