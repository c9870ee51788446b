"""Figures: time and memory against the swept axis, log-log, one line a series; a cross where memory ran out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from glabench.records import Record
from glabench.report.series import Panel, Series, make_panels, show_x
from glabench.report.tables import PASS_TITLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which the colour-blind tell apart, darkest first so that they also differ in grey; markers
# and dashes repeat the distinction for print.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#8C6D1F")
_MARKERS = ("o", "s", "^", "D", "v", "P", "<", ">")
_DASHES = ("-", "--", "-.", ":")
_FAILURE_MARKS = {"oom": ("x", "out of memory"), "timeout": ("1", "timed out"), "inaccurate": ("*", "inaccurate")}
_OTHER_FAILURE = ("2", "failed")
_AXIS_TITLES = {
    "seqlen": "sequence length T",
    "chunk": "chunk size C",
    "head_dim": "head dim (K = V)",
    "key_dim": "key head dim K",
    "value_dim": "value head dim V",
    "batch": "batch B",
    "heads": "heads H",
}


def draw(records: Sequence[Record], x_axis: str, title: str, subtitle: str) -> Figure:
    """One row of panels a pass: time, and memory where it is known. Nothing is shown on a screen."""
    from matplotlib.figure import Figure

    panels = [p for p in make_panels(records, x_axis) if p.x_values]
    labels = list(dict.fromkeys(s.label for p in panels for s in p.series if _shown(s)))
    with_memory = any(r.peak_allocated_mib is not None for r in records)
    columns = ["time_ms", "peak_allocated_mib"] if with_memory else ["time_ms"]
    rows = max(1, len(panels))
    figure = Figure(figsize=(5.2 * len(columns) + 0.4, 3.5 * rows + 1.5), layout="constrained")
    grid = figure.subplots(rows, len(columns), squeeze=False)
    failures: dict[str, Any] = {}
    lines: dict[str, Any] = {}
    for row, panel in zip(grid, panels, strict=False):
        for axes, field in zip(row, columns, strict=True):
            drawn, failed = _draw_panel(axes, panel, field, labels)
            lines |= drawn
            failures |= failed
    figure.suptitle(f"{title}\n", fontsize=12, x=0.01, ha="left", fontweight="bold")
    figure.text(0.01, 0.985 - 0.28 / figure.get_figheight(), subtitle, fontsize=8.5, color="#444444", va="top")
    legend = {label: lines[label] for label in labels if label in lines} | failures
    if legend:
        figure.legend(
            legend.values(),
            legend.keys(),
            loc="outside lower center",
            ncols=min(4, len(legend)),
            frameon=False,
            fontsize=8.5,
        )
    return figure


def _shown(series: Series) -> bool:
    return any(r.status != "unsupported" for r in series.records.values())


def _draw_panel(axes: Axes, panel: Panel, field: str, labels: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draws one panel; returns the legend's lines and failure marks."""
    lines: dict[str, Any] = {}
    failures: dict[str, Any] = {}
    numeric = all(isinstance(x, int) and not isinstance(x, bool) for x in panel.x_values)
    places = {x: x if numeric else i for i, x in enumerate(panel.x_values)}
    for series in panel.series:
        if not _shown(series):
            continue
        index = labels.index(series.label)
        style: dict[str, Any] = {
            "color": _COLORS[index % len(_COLORS)],
            "linestyle": _DASHES[index // 2 % len(_DASHES)],
        }
        known = [(places[x], getattr(r, field)) for x, r in _by_x(series, panel) if getattr(r, field) is not None]
        if known:
            if None in series.records:
                lines[series.label] = axes.axhline(known[0][1], linewidth=1.2, **style)
            else:
                marker = _MARKERS[index % len(_MARKERS)]
                (lines[series.label],) = axes.plot(*zip(*known, strict=True), marker=marker, markersize=5, **style)
        for (_, previous), (x, record) in pairwise([(None, None), *_by_x(series, panel)]):
            # The first of several failures in a row ends the line.
            if not _failed(record) or _failed(previous):
                continue
            mark, words = _FAILURE_MARKS.get(record.status, _OTHER_FAILURE)
            # A failure has no value: it is marked at the height where the line broke off.
            before = [point for point in known if point[0] < places[x]] or [(places[x], axes.get_ylim()[0])]
            axes.plot([before[-1][0], places[x]], [before[-1][1]] * 2, linewidth=0.8, alpha=0.5, **style)
            (failures[words],) = axes.plot(
                [places[x]], [before[-1][1]], mark, color=style["color"], markersize=9, markeredgewidth=2
            )
    _dress(axes, panel, field, places, numeric)
    black = {words: _in_black(handle) for words, handle in failures.items()}
    return lines, black


def _failed(record: Record | None) -> TypeGuard[Record]:
    return record is not None and record.status not in ("ok", "unsupported")


def _in_black(handle: Any) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color="black", linestyle="none", marker=handle.get_marker(), markersize=8, markeredgewidth=2)


def _by_x(series: Series, panel: Panel) -> list[tuple[Any, Record]]:
    if None in series.records:
        return [(panel.x_values[0], series.records[None])]
    return [(x, series.records[x]) for x in panel.x_values if x in series.records]


def _dress(axes: Axes, panel: Panel, field: str, places: dict[Any, Any], numeric: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if numeric:
        axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(places.values()), [show_x(x) for x in places])
    axes.xaxis.set_minor_formatter(NullFormatter())
    low, high = axes.get_ylim()
    # Plain numbers: decades alone where there are enough of them, 1-2-5 steps where there are not.
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 1000 else (1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.10g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(_AXIS_TITLES.get(panel.x_name, panel.x_name))
    time = field == "time_ms"
    axes.set_ylabel("median time, ms" if time else "peak memory above inputs, MiB")
    axes.set_title(f"{PASS_TITLES[panel.pass_]}: {'time' if time else 'memory'}", fontsize=10)
    axes.grid(which="major", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, folder: Path, stem: str) -> list[Path]:
    """Writes the figure as PNG and SVG; the same figure gives the same bytes."""
    import matplotlib as mpl

    paths = []
    with mpl.rc_context({"svg.hashsalt": "glabench"}):
        for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None})):
            path = folder / f"{stem}{suffix}"
            figure.savefig(path, dpi=160, metadata=metadata)
            paths.append(path)
    return paths
