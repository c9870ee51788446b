"""The roofline of a run's profiles: a dot per kernel whose bytes and operations are known, and one per call."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from glabench.records import Run
from glabench.records.metrics import significant
from glabench.report.describe import surroundings_of, title_of
from glabench.report.profiles import MOST_DRAWN
from glabench.report.roofline import Dot, Roof, dot_of, draw_roof, roof_of
from glabench.report.series import PASS_TITLES, describe_shape, name_values, rows_of_runs
from glabench.report.text import escape, shorten
from glabench.sweeps.model import Cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT, _LEGEND_ROW, _SMALL_PRINT, _COLUMNS = 7.0, 4.2, 0.2, 8.5, 2
# Characters of a backend, or cell, and its kernel; of a line above the figure.
_LONGEST_LABEL, _WRAP, _TITLE_WRAP = 52, 88, 60
_CALL = "whole call"
_MARKERS = "osD^v<>PX*hp"
_PLAIN_TEXT: Any = {"text.parse_math": False}


def _owners(run: Run) -> dict[Cell, str]:
    """How the cells that have profiles are called: by their backend and, if that has several, by what differs."""
    return {cell: " ".join([cell.backend, *_apart(cell, run.profiles)]) for cell in run.profiles}


def _apart(cell: Cell, cells: Iterable[Cell]) -> list[str]:
    """What tells a cell from the others of its backend, such as `C=16`; nothing if there are none."""
    fields, others = cell.to_json(), [each.to_json() for each in cells if each.backend == cell.backend]
    names = [name for name in fields if name != "parameters" and any(each.get(name) != fields[name] for each in others)]
    values = {name: fields[name] for name in names if name != "pass"}
    return [*([cell.pass_] if "pass" in names else []), *name_values(values)]


def call_dots(run: Run) -> dict[str, Dot]:
    """Where whole calls are, by the op's own bytes and operations, those of a perfect pass, and the suite's time."""
    owners = _owners(run)
    rows = {row["cell"]: row for row in rows_of_runs([run])}
    found = {owner: dot_of(rows[str(cell)]) for cell, owner in owners.items() if str(cell) in rows}
    return {f"{owner}: {_CALL}": dot for owner, dot in found.items() if dot is not None}


def kernel_dots(run: Run, most: int | None = None) -> dict[str, Dot]:
    """Where each kernel is, by its backend, name and, if a backend has several cells, cell.

    Those of a profile that add the most come first; with `most`, no more than so many.
    """
    owners = _owners(run)
    dots: dict[str, Dot] = {}
    for cell, found in run.profiles.items():
        owner = owners[cell]
        own = [
            (kernel, Dot(kernel.flops / kernel.bytes, kernel.flops / kernel.ms / 1e9))
            for kernel in found.kernels
            if kernel.bytes and kernel.flops and kernel.ms > 0
        ]
        own.sort(key=lambda pair: -pair[0].added_ms)
        dots |= {f"{owner}: {kernel.name}": dot for kernel, dot in own[:most]}
    return dots


def kernel_roof(run: Run) -> Roof | None:
    """The roof of a run that has such kernels, or calls; None if it has none, or no ceilings."""
    return roof_of([run]) if kernel_dots(run) or call_dots(run) else None


def draw_kernel_roof(run: Run) -> Figure:
    """A panel with a dot per kernel. The run has some, and ceilings; see `kernel_roof`."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    roof, calls, kernels = kernel_roof(run), call_dots(run), kernel_dots(run, MOST_DRAWN)
    dots = kernels | calls
    assert roof is not None
    with mpl.rc_context(_PLAIN_TEXT):
        height = _HEIGHT + _LEGEND_ROW * -(-len(dots) // _COLUMNS)
        figure = Figure(figsize=(_WIDTH, height), layout="constrained", dpi=160)
        title = "\n".join(textwrap.wrap(f"{title_of([run])}: kernels and calls", _TITLE_WRAP))
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        axes = figure.subplots()
        draw_roof(axes, roof, list(dots.values()), _SMALL_PRINT)
        handles: list[Any] = []
        for number, (label, dot) in enumerate(dots.items()):
            look: dict[str, Any] = {"marker": _MARKERS[number % len(_MARKERS)], "linestyle": "none", "markersize": 7}
            # The strong colours first, then the pale ones.
            colour = mpl.colormaps["tab20"](number % 10 * 2 + number // 10 % 2)
            look |= {"color": colour, "label": shorten(label, _LONGEST_LABEL)}
            look |= {"markerfacecolor": "none"} if label in calls else {}
            handles += axes.plot([dot.intensity], [dot.tflops], **look)
        cells = {str(cell) for cell in run.profiles}
        shape = describe_shape([row for row in rows_of_runs([run]) if row["cell"] in cells], run.sweep.x)
        passes = ", ".join(dict.fromkeys(PASS_TITLES.get(cell.pass_, cell.pass_) for cell in run.profiles))
        about = "\n".join([*textwrap.wrap(f"{passes}; {shape}", _WRAP), *surroundings_of([run])])
        axes.set_title(about, loc="left", fontsize=_SMALL_PRINT, color="#444444")
        axes.spines[["top", "right"]].set_visible(False)
        where: dict[str, Any] = {"loc": "outside lower center", "ncols": _COLUMNS}
        figure.legend(handles=handles, **where, frameon=False, fontsize=_SMALL_PRINT)
    return figure


def kernel_roof_markdown(run: Run) -> str:
    """A section with the figure and a line per dot: which roof is nearer, and how close it comes; may be empty."""
    roof = kernel_roof(run)
    if roof is None:
        return ""
    dots = kernel_dots(run) | call_dots(run)
    lines = [f"- {escape(label)}: {_bound(dot, roof)}" for label, dot in dots.items()]
    figure = "![roofline of the kernels](roof.png)"
    return "\n\n".join(["## Kernels against what the device can do", figure, "\n".join(lines)])


def _bound(dot: Dot, roof: Roof) -> str:
    nearer = "memory" if dot.intensity < roof.ridge else "products"
    share = dot.tflops / roof.at(dot.intensity)
    return f"{significant(dot.intensity)} operations per byte, so the roof of {nearer} is nearer; {share:.0%} of it"
