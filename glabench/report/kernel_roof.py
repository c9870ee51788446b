"""The roofline of a run's profiles: a dot per kernel whose bytes and operations are known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from glabench.records import Run
from glabench.records.metrics import significant
from glabench.report.describe import surroundings_of, title_of
from glabench.report.profiles import MOST_DRAWN
from glabench.report.roofline import Dot, Roof, draw_roof, roof_of
from glabench.report.text import escape, shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT, _LEGEND_ROW, _SMALL_PRINT, _COLUMNS = 7.0, 4.2, 0.2, 8.5, 2
# Characters of a backend, or cell, and its kernel.
_LONGEST_LABEL = 80
_MARKERS = "osD^v<>PX*hp"
_PLAIN_TEXT: Any = {"text.parse_math": False}


def kernel_dots(run: Run, most: int | None = None) -> dict[str, Dot]:
    """Where each kernel is, by its backend, name and, if a backend has several cells, cell.

    Those of a profile that add the most come first; with `most`, no more than so many.
    """
    cells_of: dict[str, int] = {}
    for cell in run.profiles:
        cells_of[cell.backend] = cells_of.get(cell.backend, 0) + 1
    dots: dict[str, Dot] = {}
    for cell, found in run.profiles.items():
        owner = cell.backend if cells_of[cell.backend] == 1 else str(cell)
        own = [
            (kernel, Dot(kernel.flops / kernel.bytes, kernel.flops / kernel.ms / 1e9))
            for kernel in found.kernels
            if kernel.bytes and kernel.flops and kernel.ms > 0
        ]
        own.sort(key=lambda pair: -pair[0].added_ms)
        dots |= {f"{owner}: {kernel.name}": dot for kernel, dot in own[:most]}
    return dots


def kernel_roof(run: Run) -> Roof | None:
    """The roof of a run that has such kernels; None if it has none, or no ceilings."""
    return roof_of([run]) if kernel_dots(run) else None


def draw_kernel_roof(run: Run) -> Figure:
    """A panel with a dot per kernel. The run has some, and ceilings; see `kernel_roof`."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    roof, dots = kernel_roof(run), kernel_dots(run, MOST_DRAWN)
    assert roof is not None
    with mpl.rc_context(_PLAIN_TEXT):
        height = _HEIGHT + _LEGEND_ROW * -(-len(dots) // _COLUMNS)
        figure = Figure(figsize=(_WIDTH, height), layout="constrained", dpi=160)
        figure.suptitle(f"{title_of([run])}: kernels", x=0.01, ha="left", fontsize=12, fontweight="bold")
        axes = figure.subplots()
        draw_roof(axes, roof, list(dots.values()), _SMALL_PRINT)
        handles: list[Any] = []
        for number, (label, dot) in enumerate(dots.items()):
            look: dict[str, Any] = {"marker": _MARKERS[number % len(_MARKERS)], "linestyle": "none", "markersize": 7}
            look |= {"color": f"C{number % 10}", "label": shorten(label, _LONGEST_LABEL)}
            handles += axes.plot([dot.intensity], [dot.tflops], **look)
        axes.set_title("\n".join(surroundings_of([run])), loc="left", fontsize=_SMALL_PRINT, color="#444444")
        axes.spines[["top", "right"]].set_visible(False)
        where: dict[str, Any] = {"loc": "outside lower center", "ncols": _COLUMNS}
        figure.legend(handles=handles, **where, frameon=False, fontsize=_SMALL_PRINT)
    return figure


def kernel_roof_markdown(run: Run) -> str:
    """A section with the figure and a line per kernel: which roof is nearer, and how close it comes; may be empty."""
    roof = kernel_roof(run)
    if roof is None:
        return ""
    lines = [f"- {escape(label)}: {_bound(dot, roof)}" for label, dot in kernel_dots(run).items()]
    figure = "![roofline of the kernels](roof.png)"
    return "\n\n".join(["## Kernels against what the device can do", figure, "\n".join(lines)])


def _bound(dot: Dot, roof: Roof) -> str:
    nearer = "memory" if dot.intensity < roof.ridge else "products"
    share = dot.tflops / roof.at(dot.intensity)
    return f"{significant(dot.intensity)} operations per byte, so {nearer} bound it; {share:.0%} of that roof"
