"""Line figures: one line per series against the swept axis, with failures in a strip at the top edge."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from glabench.records.metrics import TIME
from glabench.report.canvas import FAILURE_MARKS, PANEL_WIDTH, Plan, Plot, Quantity, frame, has_failed, lay_out, mark_of
from glabench.report.series import Row, is_number
from glabench.report.styles import Style
from glabench.sweeps.words import axis_title, show_x

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BAND = "band: p20 to p80 of the samples"
_MOST_TICKS = 8
# Failure marks: number per line at one x, points of width per mark, share of the panel's height per line.
_MARKS_PER_LINE, _MARK_WIDTH, _STRIP_LINE = 6, 10, 0.09
# A logarithmic axis reaches at least from its middle divided by this factor to its middle times this factor.
_LEAST_RANGE = 1.25
# Inches: the height of a panel and of a row of the legend.
_HEIGHT, _LEGEND_ROW = 3.5, 0.22


@dataclass(frozen=True)
class _Break:
    """The place where a line breaks off: the failure's x, its kind and the line's colour."""

    place: float
    status: str
    color: str


def draw_lines(plan: Plan) -> Figure:
    """Draws one panel per pass and quantity, with one legend below all panels."""
    columns = max(1, int(PANEL_WIDTH * plan.columns / (0.7 + 0.075 * max(map(len, [*plan.styles, _BAND])))))
    handles = [_legend_line(label, style) for label, style in plan.styles.items()]
    failed = {mark_of(row) for own in plan.series.values() for s in own for row in s.rows.values() if has_failed(row)}
    handles += [_legend_mark(status) for status in FAILURE_MARKS if status in failed]
    if any(quantity.metric is TIME for quantity in plan.quantities):
        handles.append(_legend_band())
    below = _LEGEND_ROW * -(-len(handles) // columns)
    figure, plots = lay_out(plan, [_HEIGHT] * len(plan.view.panels), below)
    for plot in plots:
        _draw_panel(plan, plot)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=8.5)
    return figure


def _legend_line(label: str, style: Style) -> Artist:
    from matplotlib.lines import Line2D

    # A legend ignores labels that begin with an underscore.
    return Line2D([], [], label=f" {label}" if label.startswith("_") else label, **style.line)


def _legend_mark(status: str) -> Artist:
    from matplotlib.lines import Line2D

    mark, words = FAILURE_MARKS[status]
    plain: dict[str, Any] = {"color": "black", "linestyle": "none", "markersize": 8, "markeredgewidth": 2}
    return Line2D([], [], label=words, marker=mark, **plain)


def _legend_band() -> Artist:
    from matplotlib.patches import Patch

    return Patch(color="black", alpha=0.2, linewidth=0, label=_BAND)


def _draw_panel(plan: Plan, plot: Plot) -> None:
    axes, quantity, x_values = plot.axes, plot.quantity, plot.panel.x_values
    is_scale = all(is_number(x) and x > 0 for x in x_values)
    places: dict[Any, float] = {x: x if is_scale else i for i, x in enumerate(x_values)}
    if not quantity.is_linear:
        axes.set_yscale("log")
    breaks: list[_Break] = []
    shown = plan.series[plot.panel.pass_]
    for number, series in enumerate(shown):
        style = plan.styles[series.label]
        if x_values != [None] and None in series.rows:
            breaks += _draw_constant(axes, series.rows[None], quantity, style, max(places.values()))
            continue
        found = [(places[x], series.rows[x]) for x in x_values if x in series.rows]
        size = 5.0 + 4.0 * (1 - number / len(shown))  # later markers are smaller, so that equal values stay visible
        _draw_series(axes, found, quantity, style.line | {"markersize": size, "linewidth": size / 3.5}, is_scale)
        breaks += _find_breaks(found, style)
    _dress(plot, places, is_scale)
    _mark_failures(axes, breaks, quantity)


def _draw_series(
    axes: Axes, found: Sequence[tuple[float, Row]], quantity: Quantity, line: Mapping[str, Any], is_scale: bool
) -> None:
    """Draws the points of a series; if x is a scale, joins them and adds a band from p20 to p80 for times."""
    across = [place for place, _ in found]
    # NaN for a missing value, so that the line breaks there.
    values = [math.nan if (value := quantity.of(row)) is None else value for _, row in found]
    if all(map(math.isnan, values)):
        return
    axes.plot(across, values, **{**line, **({} if is_scale else {"linestyle": "none"})})
    if quantity.metric is TIME and is_scale:
        low, high = ([row[name] or math.nan for _, row in found] for name in ("time_ms_p20", "time_ms_p80"))
        axes.fill_between(across, low, high, color=line["color"], alpha=0.2, linewidth=0)


def _draw_constant(axes: Axes, row: Row, quantity: Quantity, style: Style, last: float) -> list[_Break]:
    """Draws a row that does not depend on x as a horizontal line. A failure is returned as a break at the last x."""
    if (value := quantity.of(row)) is not None:
        axes.axhline(value, color=style.color, linestyle=style.line["linestyle"], linewidth=1.2)
    return [_Break(last, mark_of(row), style.color)] if has_failed(row) else []


def _find_breaks(found: Sequence[tuple[float, Row]], style: Style) -> list[_Break]:
    """The first of each group of neighbouring failures."""
    before = [None, *(row for _, row in found)]
    return [
        _Break(place, mark_of(row), style.color)
        for previous, (place, row) in zip(before, found, strict=False)
        if has_failed(row) and not (previous and has_failed(previous))
    ]


def _mark_failures(axes: Axes, breaks: Sequence[_Break], quantity: Quantity) -> None:
    """Marks failures in a strip at the top edge, outside of the y scale; those at the same x stand side by side."""
    from matplotlib.patches import Rectangle

    if not breaks:
        return
    at_place: dict[float, list[_Break]] = {}
    for point in breaks:
        at_place.setdefault(point.place, []).append(point)
    lines = -(-max(map(len, at_place.values())) // _MARKS_PER_LINE)
    strip = min(_STRIP_LINE * lines, 0.5)  # share of the panel
    low, high = axes.get_ylim()
    ticks = [tick for tick in axes.get_yticks() if low <= tick <= high]
    top = 1 / (1 - strip)
    axes.set_ylim(low, low + (high - low) * top if quantity.is_linear else low * (high / low) ** top)
    axes.set_yticks(ticks)
    background: dict[str, Any] = {"color": "#eeeeee", "linewidth": 0, "zorder": 1}
    axes.add_patch(Rectangle((0, 1 - strip), 1, strip, transform=axes.transAxes, **background))
    for points in at_place.values():
        for number, point in enumerate(points):
            line, place = divmod(number, _MARKS_PER_LINE)
            middle = (min(len(points) - line * _MARKS_PER_LINE, _MARKS_PER_LINE) - 1) / 2
            _mark_failure(axes, point, (place - middle) * _MARK_WIDTH, 1 - strip * (line + 0.5) / lines)


def _mark_failure(axes: Axes, point: _Break, shift: float, height: float) -> None:
    """Draws one mark, `shift` points beside its x; `height` is a share of the panel's height."""
    from matplotlib.transforms import ScaledTranslation

    beside = ScaledTranslation(shift / 72, 0, axes.figure.dpi_scale_trans)
    style: dict[str, Any] = {"color": point.color, "markersize": 7, "markeredgewidth": 2, "clip_on": False}
    mark, _ = FAILURE_MARKS[point.status]
    axes.plot(point.place, height, mark, transform=axes.get_xaxis_transform() + beside, linestyle="none", **style)


def _dress(plot: Plot, places: Mapping[Any, float], is_scale: bool) -> None:
    """Sets scales, ticks and titles of the axes."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes = plot.axes
    if is_scale:
        axes.set_xscale("log", base=2)
    # An x at which everything failed also needs a place, for its mark.
    axes.update_datalim([(place, 1.0) for place in places.values()], updatey=False)
    axes.autoscale_view(scaley=False)
    shown = list(places)[:: -(-len(places) // _MOST_TICKS)]
    axes.set_xticks([places[x] for x in shown], [show_x(x) for x in shown])
    axes.xaxis.set_minor_formatter(NullFormatter())
    if not is_scale or len(places) == 1:
        axes.margins(x=0.2)
    if plot.quantity.is_linear:
        axes.set_ylim(bottom=0)
    else:
        low, high = axes.get_ylim()
        middle = (low * high) ** 0.5
        axes.set_ylim(min(low, middle / _LEAST_RANGE), max(high, middle * _LEAST_RANGE))
        axes.yaxis.set_major_locator(_log_ticks(*axes.get_ylim()))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.10g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(axis_title(plot.panel.x_name))
    axes.set_ylabel(plot.quantity.title)
    frame(plot)


def _log_ticks(low: float, high: float) -> Any:
    """Tick positions: decades over wide ranges, even steps within a factor of 8, else 1, 2 and 5 per decade."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    if high / low < 8:
        return MaxNLocator(5, steps=[1, 2, 2.5, 5, 10])
    return LogLocator(subs=(1.0,) if high / low > 1000 else (1.0, 2.0, 5.0))
