"""Roofline figures: operations per second against operations per byte, below what the device reached in the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from glabench.errors import UsageError
from glabench.records import Run
from glabench.records.metrics import BY_NAME, significant
from glabench.report.canvas import Layout, Plot, frame, lay_out, make_layout
from glabench.report.series import Panel, Row, Series, View, rows_of_runs
from glabench.sweeps.words import show_x

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches: the height of a panel and of a row of the legend. How far the roof reaches beyond the cells, as a factor.
_HEIGHT, _LEGEND_ROW, _BEYOND = 4.4, 0.22, 3.0
# Labels at 1, 2 and 5 fit on an axis whose ends are no further apart than this factor.
_WIDE = 1e3
# Ceilings that only the environment of a run has.
_MORE = ("l2_copy_gbps", "fp32_product_tflops")
_OTHER: Any = {"color": "#999999", "linewidth": 1}
_PLAIN_TEXT: Any = {"text.parse_math": False}


@dataclass(frozen=True)
class Roof:
    """What the device reached: a copy in GB/s, a large bf16 product in TFLOP/s.

    And, if known, a copy within the L2 cache, and a product in fp32 without tensor cores.
    """

    copy_gbps: float
    product_tflops: float
    l2_copy_gbps: float | None = None
    fp32_product_tflops: float | None = None

    @property
    def ridge(self) -> float:
        """Operations per byte from which products bound a call, and not memory."""
        return self.product_tflops * 1e3 / self.copy_gbps

    def at(self, intensity: float) -> float:
        """The most TFLOP/s at so many operations per byte."""
        return min(self.product_tflops, self.copy_gbps * intensity / 1e3)


@dataclass(frozen=True)
class Dot:
    """A cell: operations per byte of the op's equation, and TFLOP/s."""

    intensity: float
    tflops: float


def roof_of(runs: Sequence[Run]) -> Roof | None:
    """The ceilings that runs have measured, the highest of each; None if they have none."""
    rows = rows_of_runs(runs)
    copies, products = ([row[name] for row in rows if row.get(name)] for name in ("copy_gbps", "product_tflops"))
    if not copies or not products:
        return None
    whole = [run.environment.get("ceilings") or {} for run in runs]
    more = {name: max((each[name] for each in whole if each.get(name)), default=None) for name in _MORE}
    return Roof(max(copies), max(products), **more)


def dot_of(row: Row) -> Dot | None:
    """Where a cell is; None if it has no rates."""
    tflops, gbps = row.get("tflops"), row.get("gbps")
    return Dot(tflops * 1e3 / gbps, tflops) if tflops and gbps else None


def draw_roofline(view: View) -> Figure:
    """A panel per pass with a dot per cell. Raises UsageError if the runs lack rates or ceilings."""
    import matplotlib as mpl

    roof = roof_of(view.runs)
    if roof is None or not any(dot_of(row) for row in view.rows):
        raise UsageError("--roofline: the run has no rates or no ceilings of its device; measure it anew")
    with mpl.rc_context(_PLAIN_TEXT):
        layout = make_layout(view, [BY_NAME["tflops"]])
        columns = 2
        below = _LEGEND_ROW * layout.enlarged * -(-len(layout.styles) // columns) + 0.1
        figure, plots = lay_out(layout, [_HEIGHT] * len(view.panels), below)
        for plot in plots:
            _draw_panel(layout, plot, roof)
        handles = [_handle(label, layout) for label in layout.styles]
        where: dict[str, Any] = {"loc": "outside lower center", "ncols": columns}
        figure.legend(handles=handles, **where, frameon=False, fontsize=layout.small_print)
    return figure


def _draw_panel(layout: Layout, plot: Plot, roof: Roof) -> None:
    axes = plot.axes
    frame(plot)
    dots = {series.label: list(_dots(series)) for series in layout.series[plot.panel.key]}
    draw_roof(axes, roof, [dot for own in dots.values() for dot in own], layout.small_print)
    for label, own in dots.items():
        style = layout.styles[label].line | {"linestyle": "none"}
        axes.plot([dot.intensity for dot in own], [dot.tflops for dot in own], **style)


def draw_roof(axes: Axes, roof: Roof, dots: Sequence[Dot], small_print: float) -> None:
    """The roof over a range with room for the dots, what it is made of, and the axes' scales and labels."""
    from matplotlib.ticker import LogLocator, NullFormatter

    lowest = min([*(dot.intensity for dot in dots), roof.ridge]) / _BEYOND
    highest = max([*(dot.intensity for dot in dots), roof.ridge]) * _BEYOND
    axes.set_xscale("log")
    axes.set_yscale("log")
    for look in _roofs(roof):
        ends = [lowest, look.roof.ridge, highest]
        axes.plot(ends, [look.roof.at(x) for x in ends], label=look.label, **look.line)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=1, frameon=False, fontsize=small_print)
    for axis, (least, most) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if most / least < _WIDE else (1.0,)))
        axis.set_major_formatter(lambda value, _: significant(value))
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("operations per byte")
    axes.set_ylabel("TFLOP/s")


class _Look(NamedTuple):
    """A roof as a line, and what the legend says of it."""

    roof: Roof
    label: str
    line: dict[str, Any]


def _roofs(roof: Roof) -> Iterator[_Look]:
    """The roof itself, then, if known, what data in the L2 cache and products without tensor cores would allow."""
    copy, products = f"{significant(roof.copy_gbps)} GB/s", f"{significant(roof.product_tflops)} TFLOP/s"
    yield _Look(roof, f"a copy, {copy}; products, {products}", {"color": "#444444"})
    if roof.l2_copy_gbps is not None:
        label = f"a copy within the L2 cache, {significant(roof.l2_copy_gbps)} GB/s"
        yield _Look(replace(roof, copy_gbps=roof.l2_copy_gbps), label, {**_OTHER, "linestyle": "--"})
    if roof.fp32_product_tflops is not None:
        label = f"products in fp32, off tensor cores, {significant(roof.fp32_product_tflops)} TFLOP/s"
        yield _Look(replace(roof, product_tflops=roof.fp32_product_tflops), label, {**_OTHER, "linestyle": ":"})


def _dots(series: Series) -> Iterator[Dot]:
    for row in series.rows.values():
        if (dot := dot_of(row)) is not None:
            yield dot


def _handle(label: str, layout: Layout) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **(layout.styles[label].line | {"linestyle": "none"}))


def describe_roofline(view: View) -> list[str]:
    """A line per pass and series: which roof is the nearer one, and how close its cells come."""
    roof = roof_of(view.runs)
    if roof is None:
        return []
    return [line for panel in view.panels for line in _of_panel(panel, roof)]


def _of_panel(panel: Panel, roof: Roof) -> Iterator[str]:
    for series in panel.series:
        found: Mapping[Any, Dot] = {x: dot for x, row in series.rows.items() if (dot := dot_of(row)) is not None}
        if not found:
            continue
        shares = {x: dot.tflops / roof.at(dot.intensity) for x, dot in found.items()}
        bounds = {"memory's" if dot.intensity < roof.ridge else "the products'" for dot in found.values()}
        which = " and ".join(sorted(bounds))
        best, worst = max(shares, key=lambda x: shares[x]), min(shares, key=lambda x: shares[x])
        share = f"{shares[best]:.0%}" + (f" at {show_x(best)}" if best is not None else "")
        if shares[best] - shares[worst] >= 0.005:
            share = f"{shares[worst]:.0%} at {show_x(worst)} to {share}"
        yield f"{panel.title}, {series.label}: the nearer roof is {which}; {share} of it."
