"""A comparison as a rich table, as Markdown, as JSON, and as a figure of ratios with their intervals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from glabench.records.comparison import VERDICTS, CellComparison
from glabench.report.tables import significant

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

_COLORS = {"slower": "#D55E00", "faster": "#009E73", "same": "#666666", "unclear": "#E69F00"}
_STYLES = {"slower": "red", "faster": "green", "same": "dim", "unclear": "yellow"}
_MARGIN = 1.01
_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2)
_MOST_TICKS = 10
_HEADS = ("cell", "A, ms", "B, ms", "B / A", "95 % interval", "verdict", "memory B / A", "error B / A")


@dataclass(frozen=True)
class Comparison:
    """Two sides by name, their cells, and what differs between their environments."""

    name_a: str
    name_b: str
    cells: Sequence[CellComparison]
    differences: Sequence[tuple[str, Any, Any]] = ()
    clocks_mhz: tuple[float | None, float | None] = (None, None)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "a": self.name_a,
            "b": self.name_b,
            "verdicts": dict(Counter(cell.verdict for cell in self.cells)),
            "sm_clock_mhz": {"a": self.clocks_mhz[0], "b": self.clocks_mhz[1]},
            "environment": [{"name": name, "a": a, "b": b} for name, a, b in self.differences],
            "cells": [cell.to_json() for cell in self.cells],
        }


def summary(comparison: Comparison) -> str:
    """One line: how many cells have which verdict."""
    count = Counter(cell.verdict for cell in comparison.cells)
    return ", ".join(f"{count[verdict]} {verdict}" for verdict in VERDICTS if count[verdict])


def surroundings(comparison: Comparison) -> list[str]:
    """A line for each difference of the environments, and for the clocks where they are known."""
    lines = [f"{name}: {a} -> {b}" for name, a, b in comparison.differences]
    a, b = comparison.clocks_mhz
    if a is not None and b is not None:
        lines.append(f"median SM clock while measured: {a:.0f} -> {b:.0f} MHz")
    return lines


def rich_table(comparison: Comparison) -> Table:
    """One row a cell."""
    from rich.markup import escape
    from rich.table import Table

    title = f"A: {comparison.name_a}   B: {comparison.name_b}"
    table = Table(title=escape(title), title_justify="left")
    for head in _HEADS:
        table.add_column(head, justify="left" if head in ("cell", "verdict") else "right")
    for cell in comparison.cells:
        style = _STYLES[cell.verdict]
        row = [escape(text) for text in _row(cell)]
        row[5] = f"[{style}]{row[5]}[/]"
        table.add_row(*row)
    return table


def markdown(comparison: Comparison) -> str:
    """A table with one row a cell, what differs in the environments above it."""
    lines = [f"A: {comparison.name_a}  ", f"B: {comparison.name_b}", "", f"**{summary(comparison)}**", ""]
    lines += [f"- {line}" for line in surroundings(comparison)] + [""]
    lines.append("| " + " | ".join(_HEADS) + " |")
    lines.append("| --- | ---: | ---: | ---: | ---: | --- | ---: | ---: |")
    lines += ["| " + " | ".join(text.replace("|", "\\|") for text in _row(cell)) + " |" for cell in comparison.cells]
    return "\n".join(lines) + "\n"


def _row(cell: CellComparison) -> tuple[str, ...]:
    verdict = cell.verdict + (f" ({cell.reason})" if cell.reason else "")
    if cell.ratio is None:
        return (str(cell.cell), "", "", "", "", verdict, "", "")
    return (
        str(cell.cell),
        _number(cell.time_a_ms),
        _number(cell.time_b_ms),
        f"{cell.ratio.ratio:.3f}",
        f"{cell.ratio.low:.3f} to {cell.ratio.high:.3f}",
        verdict,
        _quotient(cell.memory_ratio),
        _quotient(cell.error_ratio),
    )


def _number(value: float | None) -> str:
    return "" if value is None else significant(value)


def _quotient(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def draw_ratios(comparison: Comparison) -> Figure:
    """The ratios with their intervals, sorted, on a log axis; colour and marker by verdict."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    known = [(cell, cell.ratio) for cell in comparison.cells if cell.ratio is not None]
    known.sort(key=lambda pair: pair[1].ratio)
    height = 1.9 + 0.26 * max(1, len(known))
    figure = Figure(figsize=(9.5, height), layout="constrained")
    axes = figure.subplots()
    for place, (cell, ratio) in enumerate(known):
        color = _COLORS[cell.verdict]
        axes.plot([ratio.low, ratio.high], [place, place], color=color, linewidth=2, solid_capstyle="butt")
        axes.plot([ratio.ratio], [place], marker=_MARKERS[cell.verdict], color=color, markersize=5)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    low = min((ratio.low for _, ratio in known), default=0.99)
    high = max((ratio.high for _, ratio in known), default=1.01)
    low, high = min(low, 0.99) / _MARGIN, max(high, 1.01) * _MARGIN
    axes.set_xlim(low, high)
    axes.set_xticks(_ticks(low, high))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.10g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(range(len(known)), [str(cell.cell) for cell, _ in known], fontsize=7.5)
    axes.set_ylim(-0.8, len(known) - 0.2)
    axes.set_xlabel("time of B over time of A, with its 95 % interval (left of 1: B is faster)")
    figure.suptitle(
        f"A: {comparison.name_a}\nB: {comparison.name_b}\n{summary(comparison)}", x=0.01, ha="left", fontsize=9
    )
    axes.grid(axis="x", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    _legend(figure, [cell.verdict for cell, _ in known])
    return figure


_MARKERS: Mapping[str, str] = {"slower": ">", "faster": "<", "same": "o", "unclear": "D"}


def _ticks(low: float, high: float) -> list[float]:
    """Round ratios in a range: even steps where few of them fill it, else 1, 2, 5 a decade."""
    for step in _STEPS:
        first, last = math.ceil(low / step), math.floor(high / step)
        if last - first < _MOST_TICKS:
            return [round(step * n, 10) for n in range(first, last + 1)]
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [digit * 10.0**power for power in decades for digit in (1, 2, 5) if low <= digit * 10.0**power <= high]


def _legend(figure: Figure, verdicts: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    shown = [verdict for verdict in VERDICTS if verdict in verdicts]
    handles = [Line2D([], [], color=_COLORS[v], marker=_MARKERS[v], linewidth=2, label=v) for v in shown]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8.5)
