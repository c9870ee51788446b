"""Figures of metrics: lines against the swept axis, or bars if nearly all series have one x value."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glabench.errors import UsageError
from glabench.records.metrics import TIME, Metric
from glabench.report.canvas import PANEL_WIDTH, Layout, frame, lay_out, make_layout, missing_in
from glabench.report.lines import breaks_between_kernels, draw_lines, has_bands
from glabench.report.series import Panel, Series, View
from glabench.sweeps.words import label_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Metadata to leave out, so that the same figure gives the same bytes, by file suffix.
FORMATS: dict[str, dict[str, Any]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}
# So that a dollar sign in a title or name does not start a formula.
_PLAIN_TEXT: Any = {"text.parse_math": False}
_MARKS = (
    "What failed or is unsupported is marked at the top edge; "
    "if all further x of a line failed in the same way, only at the first."
)
_BROKEN = "A line is broken between chunk sizes for which the backend has kernels of different families."
# Coordinates in an .svg, of which a hundredth of a point is enough.
_COORDINATES = re.compile(r'\s(?:d|x|y)="[^"]*"')
_LONG_NUMBER = re.compile(r"(\b\d+\.\d\d)\d+\b")
# Of a .png: lines of twenty backends, each with its shades towards the background.
_COLOURS = 256
# Inches: the height per bar, and the space around the bars of a panel.
_BAR, _AROUND_BARS = 0.28, 0.9
# Letters: of a bar's name that leaves little room for its panel, and of the lines of titles below such a panel.
_LONG_NAME, _NARROW_TITLE = 36, 20


def draw(view: View, metrics: Sequence[Metric]) -> Figure:
    """Draws a row of panels per pass, with a panel per metric that has values. Opens no window."""
    import matplotlib as mpl

    with mpl.rc_context(_PLAIN_TEXT):
        layout = make_layout(view, metrics)
        return draw_lines(layout) if view.has_lines else _draw_bars(layout)


def explain_figure(view: View, metrics: Sequence[Metric]) -> str:
    """A caption that explains bands, variants and failures."""
    words = ["Bars of one colour are variants of one backend."]
    if view.has_lines:
        band = "Bands reach from p20 to p80 of the samples. " if TIME in metrics and has_bands(view.panels) else ""
        words = [f"{band}Lines of one colour are variants of one backend."]
        every = [series for panel in view.panels for series in panel.series]
        if any(breaks_between_kernels(series) for series in every):
            words.append(_BROKEN)
        if any(missing_in(series) for series in every):
            words.append(_MARKS)
    return " ".join(words)


def check_figure(path: Path, option: str = "--figure") -> None:
    """Raises UsageError for a path that no figure can be written to; `option` names it."""
    if path.suffix not in FORMATS:
        raise UsageError(f"{option}: '{path}' must end in one of {', '.join(FORMATS)}")
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"{option}: cannot write '{path}'; give a file in an existing folder")


def save_figure(figure: Figure, path: Path) -> None:
    """Writes the figure as the path's suffix says. The same figure gives the same bytes. Raises UsageError."""
    check_figure(path)
    import matplotlib as mpl

    # Text of an .svg stays text: it can be searched, and takes a third of the space of its outlines.
    with mpl.rc_context({"svg.hashsalt": "glabench", "svg.fonttype": "none", **_PLAIN_TEXT}):
        whole = BytesIO()
        figure.savefig(whole, format=path.suffix[1:], metadata=FORMATS[path.suffix])
    if path.suffix == ".pdf":
        path.write_bytes(whole.getvalue())
        return
    if path.suffix == ".svg":
        text = whole.getvalue().decode()
        path.write_text(_COORDINATES.sub(lambda found: _LONG_NUMBER.sub(r"\1", found[0]), text), encoding="utf-8")
        return
    from PIL import Image

    # Few colours make a file of a third of the size, and a run's folder is often kept in a repository.
    few = Image.open(whole).convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
    few.save(path, optimize=True, dpi=(figure.dpi, figure.dpi))


def _draw_bars(layout: Layout) -> Figure:
    bars = {panel.key: _sort_by_x(layout.series[panel.key], panel) for panel in layout.view.panels}
    heights = [_AROUND_BARS + _BAR * len(bars[panel.key]) for panel in layout.view.panels]
    figure, plots = lay_out(layout, heights, 0.0)
    for plot in plots:
        axes, series = plot.axes, bars[plot.panel.key]
        names = [_name_bar(each, plot.panel, layout.view.has_x) for each in series]
        for place, each in enumerate(series):
            (row,) = each.rows.values()
            length = plot.quantity.of(row) or 0.0
            axes.barh(place, length, height=0.66, linewidth=0, **layout.styles[each.label].bar)
            beside: Any = {"xytext": (3, 0), "textcoords": "offset points", "va": "center"}
            axes.annotate(plot.quantity.text(row), (length, place), fontsize=layout.small_print, **beside)
        axes.margins(x=0.16 * PANEL_WIDTH / layout.panel_width)
        axes.set_xlim(0, max(axes.get_xlim()[1], plot.quantity.least_top))
        axes.set_ylim(len(series) - 0.4, -0.6)
        axes.set_yticks(range(len(series)), names if plot.is_first else [""] * len(series))
        axes.tick_params(axis="y", length=0)
        # Three panels beside long names are narrow.
        is_narrow = layout.columns > 2 and max(map(len, names)) > _LONG_NAME
        axes.set_xlabel(textwrap.fill(plot.quantity.title, _NARROW_TITLE) if is_narrow else plot.quantity.title)
        frame(plot)
        axes.grid(axis="y", visible=False)
    return figure


def _sort_by_x(series: Sequence[Series], panel: Panel) -> list[Series]:
    """Series of one x value each in order of it, after those that do not depend on x; others are taken apart."""
    order = [None, *panel.x_values]
    apart = [replace(each, rows={x: row}) for each in series for x, row in each.rows.items()]
    return sorted(apart, key=lambda each: order.index(next(iter(each.rows))))


def _name_bar(series: Series, panel: Panel, with_x: bool) -> str:
    (x,) = series.rows
    return f"{series.label}, {label_of(panel.x_name, x)}" if with_x and x is not None else series.label
