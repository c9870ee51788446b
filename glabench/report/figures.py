"""Figures: time and memory against the swept axis, log-log, one line a series; a cross where memory ran out.

Where the axis has one value there is nothing to draw against it: bars.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from glabench.errors import printable
from glabench.records import FAILED, Record
from glabench.report.series import Panel, Series, make_panels, show_x
from glabench.report.tables import PASS_TITLES, significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

# Okabe and Ito's colours, which the colour-blind tell apart, and two more; markers and dashes repeat the distinction
# for print.
_COLORS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#8C6D1F", "#8F8F8F", "#5D3A9B",
)  # fmt: skip
_MARKERS = ("o", "s", "^", "D", "v", "P", "<", ">", "p", "h")
_DASHES = ("-", "--", "-.", ":")
_FAILURE_MARKS = {
    "oom": ("x", "out of memory"),
    "timeout": ("1", "timed out"),
    "inaccurate": ("*", "inaccurate"),
    "error": ("2", "failed"),
}
_MOST_TICKS = 8
# Titles and names are text: a dollar sign in them starts no formula.
_PLAIN_TEXT: Any = {"text.parse_math": False}
_AXIS_TITLES = {
    "seqlen": "sequence length T",
    "chunk": "chunk size C",
    "head_dim": "head dim (K = V)",
    "key_dim": "key head dim K",
    "value_dim": "value head dim V",
    "batch": "batch B",
    "heads": "heads H",
}
_VALUE_TITLES = {"time_ms": "median time, ms", "peak_allocated_mib": "peak memory above inputs, MiB"}


@dataclass(frozen=True)
class _Break:
    """Where a line breaks off: the failure's x, the last point before it, its kind and the line's colour."""

    place: Any
    last: tuple[Any, float] | None
    status: str
    color: str


def draw(records: Sequence[Record], x_axis: str, title: str, subtitle: str) -> Figure:
    """One row of panels a pass: time with its p20 to p80, and memory where it is known. Nothing goes to a screen."""
    import matplotlib as mpl

    panels = make_panels(records, x_axis)
    fields = ["time_ms", "peak_allocated_mib"] if any(p.knows_memory for p in panels) else ["time_ms"]
    bars = panels and all(len(panel.x_values) == 1 for panel in panels)
    with mpl.rc_context(_PLAIN_TEXT):
        return (_draw_bars if bars else _draw_lines)(panels, fields, printable(title), printable(subtitle))


def _titled(figure: Figure, height: float, title: str, subtitle: str) -> None:
    """Makes room at the top and writes the title and what the whole figure has in common."""
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - 0.62 / height))  # type: ignore[union-attr, call-arg]
    figure.text(0.01, 1 - 0.1 / height, title, fontsize=12, fontweight="bold", va="top")
    figure.text(0.01, 1 - 0.36 / height, subtitle, fontsize=8.5, color="#444444", va="top")


def _draw_bars(panels: Sequence[Panel], fields: Sequence[str], title: str, subtitle: str) -> Figure:
    from matplotlib.figure import Figure

    shown = [[series for series in panel.series if _shown(series)] for panel in panels]
    heights = [0.9 + 0.28 * len(series) for series in shown]
    height = 0.9 + sum(heights)
    figure = Figure(figsize=(5.2 * len(fields) + 0.4, height), layout="constrained")
    grid = figure.subplots(len(panels), len(fields), squeeze=False, height_ratios=heights)
    for row, panel, each in zip(grid, panels, shown, strict=True):
        for axes, field in zip(row, fields, strict=True):
            _draw_bar_panel(axes, panel, field, each)
        row[0].set_yticks(range(len(each)), [series.label for series in each])
    x_title = _AXIS_TITLES.get(panels[0].x_name, panels[0].x_name)
    _titled(figure, height, title, f"{x_title} = {show_x(panels[0].x_values[0])}, {subtitle}")
    return figure


def _draw_bar_panel(axes: Axes, panel: Panel, field: str, shown: Sequence[Series]) -> None:
    records = [next(iter(series.records.values())) for series in shown]
    places = range(len(records))
    lengths = [getattr(record, field) or 0.0 for record in records]
    bars = axes.barh(places, lengths, height=0.62, color=[_COLORS[i % len(_COLORS)] for i in places])
    axes.bar_label(bars, [_bar_text(record, field) for record in records], padding=3, fontsize=8)
    axes.margins(x=0.14)
    axes.invert_yaxis()
    axes.set_yticks([])
    axes.set_xlabel(_VALUE_TITLES[field])
    _frame(axes, panel, field)
    axes.grid(axis="y", visible=False)


def _bar_text(record: Record, field: str) -> str:
    value = getattr(record, field)
    if value is not None:
        return significant(value)
    return _FAILURE_MARKS[_mark_of(record)][1] if _failed(record) else ""


def _draw_lines(panels: Sequence[Panel], fields: Sequence[str], title: str, subtitle: str) -> Figure:
    from matplotlib.figure import Figure

    labels = list(dict.fromkeys(s.label for p in panels for s in p.series if _shown(s)))
    legend_columns = max(1, min(2 * len(fields), 150 * len(fields) // (2 * max(map(len, labels), default=1) + 16)))
    legend_rows = -(-(len(labels) + 1) // legend_columns)
    height = 3.4 * len(panels) + 1.0 + 0.22 * legend_rows
    figure = Figure(figsize=(5.2 * len(fields) + 0.4, height), layout="constrained")
    grid = figure.subplots(len(panels), len(fields), squeeze=False)
    failures: set[str] = set()
    for row, panel in zip(grid, panels, strict=True):
        for axes, field in zip(row, fields, strict=True):
            failures |= _draw_panel(axes, panel, field, labels)
    _titled(figure, height, title, subtitle)
    handles = [_legend_line(i, label) for i, label in enumerate(labels)] + [_legend_mark(s) for s in sorted(failures)]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=legend_columns, frameon=False, fontsize=8.5)
    return figure


def _shown(series: Series) -> bool:
    return any(r.status != "unsupported" for r in series.records.values())


def _style(index: int) -> dict[str, Any]:
    """Colour, dashes and marker of the series at `index`; no two of the first 32 are alike."""
    return {
        "color": _COLORS[index % len(_COLORS)],
        "linestyle": _DASHES[index // 2 % len(_DASHES)],
        "marker": _MARKERS[(index + index // len(_COLORS)) % len(_MARKERS)],
        "markersize": 5,
    }


def _legend_line(index: int, label: str) -> Line2D:
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **_style(index))


def _legend_mark(status: str) -> Line2D:
    from matplotlib.lines import Line2D

    mark, words = _FAILURE_MARKS[status]
    plain: dict[str, Any] = {"color": "black", "linestyle": "none", "markersize": 8, "markeredgewidth": 2}
    return Line2D([], [], label=words, marker=mark, **plain)


def _draw_panel(axes: Axes, panel: Panel, field: str, labels: list[str]) -> set[str]:
    """Draws one panel; returns the statuses of the failures that it marks."""
    numeric = all(isinstance(x, int) and not isinstance(x, bool) for x in panel.x_values)
    places = {x: x if numeric else i for i, x in enumerate(panel.x_values)}
    axes.set_yscale("log")
    broken: list[_Break] = []
    for series in panel.series:
        if not _shown(series):
            continue
        style = _style(labels.index(series.label))
        constant = series.records.get(None) if panel.x_values != [None] else None
        if constant is not None:
            value = getattr(constant, field)
            if value is not None:
                axes.axhline(value, color=style["color"], linestyle=style["linestyle"], linewidth=1.2)
            continue
        found = [(places[x], series.records[x]) for x in panel.x_values if x in series.records]
        # NaN where there is no value, so that a line breaks there.
        values = [math.nan if (v := getattr(r, field)) is None else v for _, r in found]
        if not all(map(math.isnan, values)):
            axes.plot([place for place, _ in found], values, **style if numeric else style | {"linestyle": "none"})
        if field == "time_ms" and numeric:
            low, high = ([math.nan if v is None else v for v in side] for side in _spread(found))
            axes.fill_between([place for place, _ in found], low, high, color=style["color"], alpha=0.15, linewidth=0)
        last = None
        for (_, previous), (place, record) in pairwise([(None, None), *found]):
            # The first of several failures in a row ends the line.
            if _failed(record) and not _failed(previous):
                broken.append(_Break(place, last, _mark_of(record), style["color"]))
            last = (place, value) if (value := getattr(record, field)) is not None else last
    _dress(axes, panel, field, places, numeric)
    _mark_failures(axes, broken)
    return {point.status for point in broken}


def _spread(found: Sequence[tuple[Any, Record]]) -> tuple[list[float | None], list[float | None]]:
    return [r.time_ms_p20 for _, r in found], [r.time_ms_p80 for _, r in found]


def _mark_failures(axes: Axes, broken: Sequence[_Break]) -> None:
    """A failure has no value: its mark stands at the height where its line broke off, or at the panel's upper edge."""
    limits = axes.get_ylim()
    for point in broken:
        mark, _ = _FAILURE_MARKS[point.status]
        style: dict[str, Any] = {"color": point.color, "markersize": 9, "markeredgewidth": 2, "linestyle": "none"}
        if point.last is None:
            axes.plot([point.place], [0.95], mark, transform=axes.get_xaxis_transform(), **style)
        else:
            place, height = point.last
            axes.plot([place, point.place], [height, height], ":", color=point.color, linewidth=1, alpha=0.6)
            axes.plot([point.place], [height], mark, **style)
    axes.set_ylim(limits)


def _failed(record: Record | None) -> TypeGuard[Record]:
    return record is not None and record.status in FAILED


def _mark_of(record: Record) -> str:
    return record.status if record.status in _FAILURE_MARKS else "error"


def _dress(axes: Axes, panel: Panel, field: str, places: dict[Any, Any], numeric: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if numeric:
        axes.set_xscale("log", base=2)
    shown = list(places)[:: -(-len(places) // _MOST_TICKS)]
    axes.set_xticks([places[x] for x in shown], [show_x(x) for x in shown])
    axes.xaxis.set_minor_formatter(NullFormatter())
    if not numeric or len(places) == 1:
        axes.margins(x=0.2)
    low, high = axes.get_ylim()
    # Plain numbers: decades alone where there are enough of them, 1-2-5 steps where there are not.
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 1000 else (1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.10g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(_AXIS_TITLES.get(panel.x_name, panel.x_name))
    axes.set_ylabel(_VALUE_TITLES[field])
    _frame(axes, panel, field)


def _frame(axes: Axes, panel: Panel, field: str) -> None:
    """Title and grid of a panel."""
    axes.set_title(f"{PASS_TITLES[panel.pass_]}: {'time' if field == 'time_ms' else 'memory'}", fontsize=10)
    axes.grid(which="major", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, folder: Path, stem: str, suffixes: Sequence[str] = (".png", ".svg")) -> list[Path]:
    """Writes the figure as PNG, SVG or both; the same figure gives the same bytes."""
    import matplotlib as mpl

    metadata = {".png": {"Software": None}, ".svg": {"Date": None}}
    paths = [folder / f"{stem}{suffix}" for suffix in suffixes]
    with mpl.rc_context({"svg.hashsalt": "glabench", **_PLAIN_TEXT}):
        for path in paths:
            figure.savefig(path, dpi=160, metadata=metadata[path.suffix])
    return paths
