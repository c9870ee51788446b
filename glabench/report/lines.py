"""Line figures: one line per series against the swept axis, with failures in a strip at the top edge."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from glabench.records.metrics import TIME
from glabench.report.canvas import (
    FAILURE_MARKS,
    PANEL_WIDTH,
    Layout,
    Plot,
    Quantity,
    frame,
    label_log_axis,
    lay_out,
    missing_in,
)
from glabench.report.choice import has_other_kernels
from glabench.report.published import published_lines
from glabench.report.series import Panel, Row, Series
from glabench.sweeps.words import axis_title, show_x

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BAND = "band: p20 to p80 of the samples"
# Most labels along x, level and slanted; names longer than so many letters, all in a row with gaps, are slanted.
_MOST_TICKS, _MOST_SLANTED, _LETTERS = 8, 24, 48
# Marks: most per line at one x and at all x, points of width per mark, share of the panel's height per line.
_MOST_MARKS, _ROOM, _MARK_WIDTH, _STRIP_LINE = 6, 30, 10, 0.09
# A logarithmic axis reaches at least from its middle divided by this factor to its middle times this factor.
_LEAST_RANGE = 1.25
# How far a linear axis reaches beyond the largest value, so that its mark is whole.
_OVER_LINEAR = 1.06
# Inches: the height of a panel and of a row of the legend. Letters: the width of a line in the legend.
_HEIGHT, _SLANTED_HEIGHT, _LEGEND_ROW, _LEGEND_LINE = 3.5, 4.4, 0.22, 4.0
# The share of a time that a band must span to be seen.
_SEEN = 0.01
# Matplotlib's arguments for the line of a series.
_Look = Mapping[str, Any]
_PUBLISHED: _Look = {"color": "black", "linestyle": (0, (1, 1.5)), "linewidth": 1.6}
_PUBLISHED_MARKERS: Sequence[_Look] = (
    {"marker": "+", "markersize": 8},
    {"marker": "D", "markersize": 6, "markerfacecolor": "none"},
)


@dataclass(frozen=True)
class _Break:
    """A missing point of a line: its x, the reason and the line's colour."""

    place: float
    status: str
    color: str


def draw_lines(layout: Layout) -> Figure:
    """Draws one panel per pass and quantity, with one legend below all panels."""
    entry = layout.enlarged * (0.9 + 0.075 * max(map(len, [*layout.styles, _BAND])))
    columns = max(1, int(layout.panel_width * layout.columns / entry))
    looks = _choose_looks(layout)
    handles = [_legend_line(label, look) for label, look in looks.items()]
    missing = {kind for own in layout.series.values() for series in own for kind in missing_in(series).values()}
    handles += [_legend_mark(kind) for kind in FAILURE_MARKS if kind in missing]
    if any(quantity.metric is TIME for quantity in layout.quantities):
        handles += [_legend_band()] if has_bands(layout.view.panels) else []
    published = _published_in(layout)
    handles += [_legend_line(label, look) for label, look in published.items()]
    below = _LEGEND_ROW * layout.enlarged * -(-len(handles) // columns)
    heights = [_SLANTED_HEIGHT if _is_slanted(layout, panel) else _HEIGHT for panel in layout.view.panels]
    figure, plots = lay_out(layout, heights, below)
    for plot in plots:
        _draw_panel(layout, plot, looks, published)
    where: dict[str, Any] = {"loc": "outside lower center", "ncols": columns, "handlelength": _LEGEND_LINE}
    figure.legend(handles=handles, **where, frameon=False, fontsize=layout.small_print)
    return figure


def has_bands(panels: Sequence[Panel]) -> bool:
    """Whether the band of some time is wide enough to be seen."""
    lines = [series for panel in panels if panel.is_scale for series in panel.series if not series.is_constant]
    times = [row for series in lines for row in series.rows.values() if row["time_ms"]]
    return any((row["time_ms_p80"] or 0) - (row["time_ms_p20"] or math.inf) > _SEEN * row["time_ms"] for row in times)


def breaks_between_kernels(series: Series) -> bool:
    """Whether a line of the series would join chunk sizes whose kernels are of different families."""
    return any(itertools.starmap(has_other_kernels, itertools.pairwise(series.rows.values())))


def _choose_looks(layout: Layout) -> Mapping[str, _Look]:
    """The look of each label, in all panels and in the legend. Later markers are smaller, so that equal values show."""
    constant = {series.label for own in layout.series.values() for series in own if series.is_constant}
    joins = any(panel.is_scale for panel in layout.view.panels)
    looks: dict[str, dict[str, Any]] = {}
    for number, (label, style) in enumerate(layout.styles.items()):
        size = 5.5 + 3.5 * (1 - number / len(layout.styles))
        looks[label] = style.line | {"markersize": size, "linewidth": size / 3.5}
        if label in constant:
            looks[label] |= {"marker": "none", "linewidth": 1.6}
        elif not joins:
            looks[label] |= {"linestyle": "none"}
    return looks


def _legend_line(label: str, look: _Look) -> Artist:
    from matplotlib.lines import Line2D

    # A legend ignores labels that begin with an underscore.
    return Line2D([], [], label=f" {label}" if label.startswith("_") else label, **look)


def _legend_mark(status: str) -> Artist:
    from matplotlib.lines import Line2D

    mark, words = FAILURE_MARKS[status]
    plain: dict[str, Any] = {"color": "black", "linestyle": "none", "markersize": 8, "markeredgewidth": 2}
    return Line2D([], [], label=words, marker=mark, **plain)


def _legend_band() -> Artist:
    from matplotlib.patches import Patch

    return Patch(color="black", alpha=0.2, linewidth=0, label=_BAND)


def _draw_panel(layout: Layout, plot: Plot, looks: Mapping[str, _Look], published: Mapping[str, _Look]) -> None:
    axes, quantity, x_values, is_scale = plot.axes, plot.quantity, plot.panel.x_values, plot.panel.is_scale
    places: dict[Any, float] = {x: x if is_scale else i for i, x in enumerate(x_values)}
    if not quantity.is_linear:
        axes.set_yscale("log")
    breaks: list[_Break] = []
    for series in layout.series[plot.panel.key]:
        look = looks[series.label]
        if series.is_constant:
            breaks += _draw_constant(axes, series, quantity, look, max(places.values()))
            continue
        found = [(places[x], series.rows[x]) for x in x_values if x in series.rows]
        _draw_series(axes, found, quantity, look, is_scale)
        breaks += _find_breaks(series, places, look["color"])
    for label, values in published_lines(plot.panel, quantity.metric).items():
        at = sorted(values)
        axes.plot(at, [values[x] * quantity.metric.scale for x in at], **published[label])
    _dress(plot, places, is_scale, _is_slanted(layout, plot.panel))
    room = int(_ROOM * layout.panel_width / PANEL_WIDTH)
    _mark_missing(axes, breaks, quantity, places.values(), min(_MOST_MARKS, max(1, room // len(places))))


def _published_in(layout: Layout) -> dict[str, _Look]:
    """The looks of what was published and is in the figure, by label."""
    metrics = [quantity.metric for quantity in layout.quantities]
    labels = dict.fromkeys(
        label for panel in layout.view.panels for metric in metrics for label in published_lines(panel, metric)
    )
    return {
        label: {**_PUBLISHED, **marker}
        for label, marker in zip(labels, itertools.cycle(_PUBLISHED_MARKERS), strict=False)
    }


def _draw_series(
    axes: Axes, found: Sequence[tuple[float, Row]], quantity: Quantity, look: _Look, is_scale: bool
) -> None:
    """Draws the points of a series; if x is a scale, joins them and adds a band from p20 to p80 for times."""
    across = [place for place, _ in found]
    # NaN for a missing value, so that the line breaks there.
    values = [math.nan if (value := quantity.of(row)) is None else value for _, row in found]
    if all(map(math.isnan, values)):
        return
    starts = [i for i in range(1, len(found)) if has_other_kernels(found[i - 1][1], found[i][1])]
    style = {**look, **({} if is_scale else {"linestyle": "none"})}
    for start, end in itertools.pairwise([0, *starts, len(found)]):
        own = slice(start, end)
        axes.plot(across[own], values[own], **style)
        if quantity.metric is TIME and is_scale:
            rows = [row for _, row in found[own]]
            low, high = ([row[name] or math.nan for row in rows] for name in ("time_ms_p20", "time_ms_p80"))
            axes.fill_between(across[own], low, high, color=look["color"], alpha=0.2, linewidth=0)


def _draw_constant(axes: Axes, series: Series, quantity: Quantity, look: _Look, last: float) -> list[_Break]:
    """Draws a row that does not depend on x as a horizontal line. A failure is returned as a break at the last x."""
    if (value := quantity.of(series.rows[None])) is not None:
        axes.axhline(value, **look)
    return [_Break(last, kind, look["color"]) for kind in missing_in(series).values()]


def _find_breaks(series: Series, places: Mapping[Any, float], color: str) -> list[_Break]:
    """The missing points of a series; of those at its end that have the same reason only the first."""
    missing = missing_in(series)
    found = [(place, missing.get(x)) for x, place in places.items() if x in series.rows]
    kinds = [kind for _, kind in found]
    return [
        _Break(place, kind, color)
        for i, (place, kind) in enumerate(found)
        if kind and not (i and {*kinds[i - 1 :]} == {kind})
    ]


def _mark_missing(
    axes: Axes, breaks: Sequence[_Break], quantity: Quantity, places: Collection[float], per_line: int
) -> None:
    """Marks missing points in a strip at the top edge, outside of the y scale, with up to `per_line` side by side."""
    from matplotlib.patches import Rectangle

    if not breaks:
        return
    at_place: dict[float, list[_Break]] = {}
    for point in breaks:
        at_place.setdefault(point.place, []).append(point)
    lines = -(-max(map(len, at_place.values())) // per_line)
    strip = min(_STRIP_LINE * lines, 0.5)  # share of the panel
    low, high = axes.get_ylim()
    ticks = [tick for tick in axes.get_yticks() if low <= tick <= high]
    top = 1 / (1 - strip)
    axes.set_ylim(low, low + (high - low) * top if quantity.is_linear else low * (high / low) ** top)
    axes.set_yticks(ticks)
    background: dict[str, Any] = {"color": "#eeeeee", "linewidth": 0, "zorder": 1}
    axes.add_patch(Rectangle((0, 1 - strip), 1, strip, transform=axes.transAxes, **background))
    first, last = min(places), max(places)
    for at, points in at_place.items():
        for number, point in enumerate(points):
            line, place = divmod(number, per_line)
            middle = (min(len(points) - line * per_line, per_line) - 1) / 2
            # Beyond the first and the last x there is room for half a mark.
            beyond = max(0.0, middle - 0.5) * ((at == last) - (at == first))
            _draw_mark(axes, point, (place - middle - beyond) * _MARK_WIDTH, 1 - strip * (line + 0.5) / lines)


def _draw_mark(axes: Axes, point: _Break, shift: float, height: float) -> None:
    """Draws one mark, `shift` points beside its x; `height` is a share of the panel's height."""
    from matplotlib.transforms import ScaledTranslation

    beside = ScaledTranslation(shift / 72, 0, axes.figure.dpi_scale_trans)
    style: dict[str, Any] = {"color": point.color, "markersize": 7, "markeredgewidth": 2, "clip_on": False}
    mark, _ = FAILURE_MARKS[point.status]
    axes.plot(point.place, height, mark, transform=axes.get_xaxis_transform() + beside, linestyle="none", **style)


def _dress(plot: Plot, places: Mapping[Any, float], is_scale: bool, slanted: bool) -> None:
    """Sets scales, ticks and titles of the axes."""
    from matplotlib.ticker import NullFormatter

    axes = plot.axes
    if is_scale:
        axes.set_xscale("log", base=2)
    # An x at which everything failed also needs a place, for its mark.
    axes.update_datalim([(place, 1.0) for place in places.values()], updatey=False)
    axes.autoscale_view(scaley=False)
    shown = list(places)[:: -(-len(places) // (_MOST_SLANTED if slanted else _MOST_TICKS))]
    look: dict[str, Any] = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if slanted else {}
    axes.set_xticks([places[x] for x in shown], [show_x(x) for x in shown], **look)
    axes.xaxis.set_minor_formatter(NullFormatter())
    if not is_scale or len(places) == 1:
        axes.margins(x=0.2 if len(places) <= _MOST_TICKS else 0.05)
    if plot.quantity.is_linear:
        top = max(axes.get_ylim()[1], _OVER_LINEAR * axes.dataLim.y1, plot.quantity.least_top)
        axes.set_ylim(0, top)
    else:
        low, high = axes.get_ylim()
        middle = (low * high) ** 0.5
        axes.set_ylim(min(low, middle / _LEAST_RANGE), max(high, middle * _LEAST_RANGE))
        label_log_axis(axes.yaxis, *axes.get_ylim())
    if not axes.lines:  # there is no value to scale the axis by
        axes.set_yticks([])
        axes.set_yticks([], minor=True)
    axes.set_xlabel(axis_title(plot.panel.x_name))
    axes.set_ylabel(plot.quantity.title)
    frame(plot)


def _is_slanted(layout: Layout, panel: Panel) -> bool:
    """Whether x values are names that have no room side by side."""
    letters = sum(len(show_x(x)) + 2 for x in panel.x_values)
    return not panel.is_scale and letters > _LETTERS * layout.panel_width / PANEL_WIDTH
