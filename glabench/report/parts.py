"""The parts of forwards by chunk size, as stacked bars: within chunks, across them, and the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from glabench.records import Run
from glabench.records.literature import Stack, published_stacks
from glabench.records.metrics import significant
from glabench.records.profile import Part
from glabench.report.choice import CHUNK
from glabench.report.describe import surroundings_of
from glabench.report.grid import Grid
from glabench.report.series import describe_shape, name_values, rows_of_runs
from glabench.report.text import shorten
from glabench.sweeps.model import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches: a bar, what is beside all bars, the narrowest figure, the height, a line of the title.
_BAR, _AROUND, _NARROWEST, _HEIGHT, _TITLE = 0.44, 1.2, 6.4, 4.3, 0.24
# A panel has room for so many bars at least; bars are as wide in all panels.
_LEAST_BARS = 2
_SMALL_PRINT = 8.5
_COLOURS = {"within chunks": "#4878CF", "across chunks": "#EE854A"}
_OTHER_COLOURS = ("#6ACC64", "#956CB4", "#D5BB67", "#82C6E2")
_PLAIN_TEXT: Any = {"text.parse_math": False}
# The chunk where the backend chooses it.
_AUTO = "auto"
_LEFT_OUT = "Parts are timed alone: variants of the forward, or calls that it makes; numbers are sums in ms."
_EXPLAINED = (
    "Parts are variants of the forward that leave the others out; those of fla-gla are calls that it makes, of which "
    "the outputs belong to both. Each reads and writes its tensors anew, so together they may take longer than the "
    "whole call, which is the black line. Numbers above bars are milliseconds. A bar is as high as its sum over that "
    "of the best chunk."
)


@dataclass(frozen=True)
class Bars:
    """Stacked bars of one panel: by x the parts' milliseconds and, if known, those of the whole call."""

    title: str
    parts: Mapping[Any, Mapping[str, float]]
    whole: Mapping[Any, float]
    note: str = ""

    @property
    def best_ms(self) -> float:
        """The least sum of parts."""
        return min(sum(own.values()) for own in self.parts.values())


def bars_of(run: Run) -> list[Bars]:
    """A panel per backend whose profiles have parts, and those published of the same op, whatever their sizes."""
    cells: dict[str, list[Cell]] = {}
    for cell, found in run.profiles.items():
        if found.parts:
            cells.setdefault(cell.backend, []).append(cell)
    panels = []
    for backend, own in cells.items():
        parts = {_chunk_of(cell): {each.name: each.ms for each in run.profiles[cell].parts} for cell in own}
        if len(parts) == len(own) > (0 if _AUTO in parts else 1):
            panels.append(Bars(backend, parts, {_chunk_of(cell): run.profiles[cell].span_ms for cell in own}))
    all_cells = [cell for own in cells.values() for cell in own]
    published = [one for one in published_stacks() if any(one.cell["op"] == cell.op for cell in all_cells)]
    return [*panels, *(_of_stack(one, all_cells) for one in published if one.x == CHUNK)] if panels else []


def _chunk_of(cell: Cell) -> Any:
    return _AUTO if cell.get(CHUNK) is None else cell.get(CHUNK)


def _of_stack(one: Stack, cells: Sequence[Cell]) -> Bars:
    """Its title names the sizes if no cell has them."""
    parts = {x: {name: times[i] for name, times in one.parts.items()} for i, x in enumerate(one.at)}
    is_same = any(all(cell.to_json().get(name) == value for name, value in one.cell.items()) for cell in cells)
    sizes = " ".join(name_values({name: value for name, value in one.cell.items() if name != "op"}))
    about = one.device if is_same else f"{sizes}; {one.device}"
    return Bars(f"published: {one.source} ({about})", parts, {}, one.note)


def parts_markdown(run: Run) -> str:
    """A section with a table per backend; empty if no profile has parts."""
    panels = bars_of(run)
    if not panels:
        return ""
    grids = [grid for each in panels for grid in (_table(each), _work_table(run, each)) if grid is not None]
    tables = [grid.to_markdown().strip("\n") for grid in grids]
    notes = [each.note for each in panels if each.note]
    figure = "![parts of a forward](parts.png)"
    head = ["## Within chunks and across them", figure, " ".join([_EXPLAINED, *notes]), *_missing(run, panels)]
    return "\n\n".join([*head, *tables])


def _missing(run: Run, panels: Sequence[Bars]) -> list[str]:
    """A sentence per backend with chunks whose times the run has, and whose parts it lacks."""
    found = []
    for bars in panels:
        chunks = (
            _chunk_of(record.cell)
            for record in run.records
            if record.cell.backend == bars.title and not record.cell.has_backward and record.time_ms is not None
        )
        if missing := [str(x) for x in dict.fromkeys(chunks) if x not in bars.parts]:
            found.append(f"No parts of {bars.title} were measured at chunks of {', '.join(missing)}.")
    return found


def _table(bars: Bars) -> Grid:
    """Milliseconds by chunk."""
    names = _names([bars])
    head = [CHUNK, *(f"{name}, ms" for name in names), "sum, ms", *(["whole, ms"] if bars.whole else [])]
    rows = []
    for x, own in bars.parts.items():
        row = [str(x), *(significant(own[name]) if name in own else "-" for name in names)]
        rows.append([*row, significant(sum(own.values())), *([significant(bars.whole[x])] if bars.whole else [])])
    return Grid(bars.title, "", head, rows)


def _work_table(run: Run, bars: Bars) -> Grid | None:
    """For our own measurements: what each part moves and executes, and how fast."""
    here = {_chunk_of(cell): found for cell, found in run.profiles.items() if cell.backend == bars.title}
    head = [CHUNK, "part", "MB", "GFLOP", "GB/s", "TFLOP/s"]
    rows = [
        [str(x), part.name, *_work(part)] for x in bars.parts if x in here
        for part in sorted(here[x].parts, key=lambda part: _names([bars]).index(part.name))
    ]  # fmt: skip
    return Grid("", "", head, rows, words=("part",)) if rows else None


def _work(part: Part) -> Iterator[str]:
    for over in (1.0, part.ms):  # 10^6 bytes are MB, and in a millisecond GB/s; so it is with operations
        for amount, unit in ((part.bytes, 1e6), (part.flops, 1e9)):
            yield "-" if not amount else significant(amount / over / unit)


def _names(panels: Sequence[Bars]) -> list[str]:
    found = dict.fromkeys(name for each in panels for own in each.parts.values() for name in own)
    return sorted(found, key=lambda name: list(_COLOURS).index(name) if name in _COLOURS else len(_COLOURS))


def draw_parts(run: Run) -> Figure:
    """A panel per backend and published series. The run has some, see `bars_of`."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    panels = bars_of(run)
    names = _names(panels)
    others = [name for name in names if name not in _COLOURS]
    colours = _COLOURS | dict(zip(others, _OTHER_COLOURS * (1 + len(others)), strict=False))
    with mpl.rc_context(_PLAIN_TEXT):
        widths = [max(len(bars.parts), _LEAST_BARS) for bars in panels]
        size = (max(_NARROWEST, sum(widths) * _BAR + _AROUND), _HEIGHT)
        figure = Figure(figsize=size, layout="constrained", dpi=160)
        title = "The parts of a forward, by chunk size\n"
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False, width_ratios=widths)[0]
        for axes, bars in zip(all_axes, panels, strict=True):
            _draw_panel(axes, bars, colours)
        all_axes[0].set_ylabel("time over the best sum")
        cells = {str(cell) for cell, found in run.profiles.items() if found.parts}
        rows = [row for row in rows_of_runs([run]) if row["cell"] in cells]
        about = "\n".join([describe_shape(rows, CHUNK), *surroundings_of([run]), _LEFT_OUT])
        figure.supxlabel(about, x=0.01, ha="left", fontsize=_SMALL_PRINT - 1, color="#444444")
        handles: list[Any] = [mpl.patches.Patch(label=shorten(name), facecolor=colours[name]) for name in names]
        handles.append(mpl.lines.Line2D([], [], color="black", label="whole call"))
        # In the title's second line, which is empty: a legend outside of the panels would take no notice of the title.
        place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0.0, 1 - _TITLE / _HEIGHT)}
        figure.legend(handles=handles, ncols=len(handles), **place, frameon=False, fontsize=_SMALL_PRINT)
    return figure


def _draw_panel(axes: Axes, bars: Bars, colours: Mapping[str, str]) -> None:
    best = bars.best_ms
    for place, (x, own) in enumerate(bars.parts.items()):
        bottom = 0.0
        for name in _names([bars]):
            height = own.get(name, 0.0) / best
            axes.bar(place, height, bottom=bottom, width=0.75, color=colours[name])
            bottom += height
        whole = bars.whole.get(x, 0.0) / best
        if whole:
            axes.plot([place - 0.45, place + 0.45], [whole, whole], color="black", linewidth=1.5)
        top, text = max(bottom, whole), significant(sum(own.values()))
        axes.annotate(text, (place, top), (0, 3), textcoords="offset points", ha="center", fontsize=_SMALL_PRINT)
    axes.set_xticks(range(len(bars.parts)), [str(x) for x in bars.parts])
    beside = (max(len(bars.parts), _LEAST_BARS) - len(bars.parts) + 1) / 2
    axes.set_xlim(-beside, len(bars.parts) - 1 + beside)
    axes.set_xlabel("chunk")
    axes.set_title("\n".join(_wrapped(bars.title)), fontsize=_SMALL_PRINT + 0.5)
    axes.spines[["top", "right"]].set_visible(False)


def _wrapped(title: str) -> list[str]:
    import textwrap

    return textwrap.wrap(title, 30)
