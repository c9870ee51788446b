"""Profiles as tables, sentences and a figure: where the time of a call goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from glabench.records import Record, Run
from glabench.records.metrics import significant
from glabench.records.profile import COUNTERS, Kernel, Profile, main_stall
from glabench.report.describe import surroundings_of, title_of
from glabench.report.grid import Grid
from glabench.report.kinds import REST, has_kinds, kinds_table, times_by_kind
from glabench.report.text import shorten
from glabench.sweeps.model import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Kernels that take less than this share of a call are one row, and those below the second one piece of a bar, as are
# all but the longest of a call.
LEAST_SHARE, _LEAST_DRAWN, MOST_DRAWN = 0.005, 0.03, 12
# A time of the suite and a span that differ by more than this share of the time are said to differ.
AGREES = 0.05
# Beyond this one shares do not count either.
_FAR = 0.5
_TOO_FAR = "they differ so much that shares do not count either; profile again, on a machine that does nothing else"
_OF_KERNELS = (
    "calls", "ms", "adds, ms", "share", "idle before, us", "grid", "threads", "registers", "shared, KiB",
    "programs per SM", "GB/s", "TFLOP/s", "of the roof",
)  # fmt: skip
_OF_OPERATORS = ("calls", "ms", "share")
# Inches: a bar, what is around all bars, the width of the figure, a row of its legend.
_BAR, _AROUND, _WIDTH, _LEGEND_ROW = 0.42, 1.5, 8.0, 0.2
_SMALL_PRINT, _LEGEND_COLUMNS = 8.5, 2
# Characters of a cell besides its backend.
_LONGEST_SIZES = 80
_IDLE, _OUTSIDE, _OTHERS = "idle", "outside of operators", "others"
_COLOURS = (
    "#4878CF", "#EE854A", "#6ACC64", "#D65F5F", "#956CB4", "#8C613C", "#DC7EC0", "#D5BB67", "#82C6E2", "#2B5C8A",
    "#B15928", "#33A02C",
)  # fmt: skip
_PLAIN_TEXT: Any = {"text.parse_math": False}


def profile_table(
    found: Profile, record: Record | None = None, all_kernels: bool = False
) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Head and rows: a row per kernel, on a CPU per operator. Those of little time are one row, unless asked for.

    `record` is the cell's own, with the ceilings of its run.
    """
    of_rows = _OF_KERNELS if found.on_device else _OF_OPERATORS
    if counted := any(kernel.counters for kernel in found.kernels):
        of_rows = (*of_rows, *COUNTERS.values(), "warps wait for")
    head = ("kernel" if found.on_device else "operator", *of_rows)
    least = 0.0 if all_kernels else LEAST_SHARE * found.span_ms
    rows = [_row(kernel, found, record, counted) for kernel in found.kernels if kernel.added_ms >= least]
    if hidden := [kernel for kernel in found.kernels if kernel.added_ms < least]:
        ms, added = (sum(getattr(kernel, name) for kernel in hidden) for name in ("ms", "added_ms"))
        times = [ms, added] if found.on_device else [ms]
        calls = sum(kernel.calls for kernel in hidden)
        rest = [f"{len(hidden)} others", str(calls), *map(significant, times), _share(added, found.span_ms)]
        rows.append([*rest, *[""] * (len(head) - len(rest))])
    return head, rows


def _row(kernel: Kernel, found: Profile, record: Record | None, counted: bool) -> Sequence[str]:
    start, share = [kernel.name, str(kernel.calls), significant(kernel.ms)], _share(kernel.added_ms, found.span_ms)
    if not found.on_device:
        return [*start, share]
    return [
        *start,
        significant(kernel.added_ms),
        share,
        significant(kernel.gap_ms * 1e3, 2),
        "x".join(map(str, kernel.grid or ())) or "-",
        _known(kernel.threads),
        _known(kernel.registers),
        "-" if kernel.shared_bytes is None else f"{kernel.shared_bytes / 1024:.3g}",
        "-" if kernel.programs is None else f"{kernel.programs} ({kernel.limit})",
        _rate(kernel.bytes, kernel.ms, 1e6),
        _rate(kernel.flops, kernel.ms, 1e9),
        _of_roof(kernel, record),
        *(_counters(kernel) if counted else ()),
    ]


def _counters(kernel: Kernel) -> Sequence[str]:
    counters = kernel.counters or {}
    values = (counters.get(name) for name in COUNTERS)
    return [*("-" if value is None else significant(value) for value in values), main_stall(counters) or "-"]


def _share(ms: float, of_ms: float) -> str:
    return f"{ms / of_ms:.1%}" if of_ms else "-"


def _rate(amount: int | None, ms: float, unit: float) -> str:
    return "-" if amount is None or ms <= 0 else significant(amount / ms / unit)


def _of_roof(kernel: Kernel, record: Record | None) -> str:
    """The least time that the kernel's bytes and operations take at the run's ceilings, of its time."""
    if record is None or not record.copy_gbps or not record.product_tflops or not kernel.bytes or kernel.ms <= 0:
        return "-"
    least = max(kernel.bytes / record.copy_gbps / 1e6, (kernel.flops or 0) / record.product_tflops / 1e9)
    return f"{least / kernel.ms:.0%}"


def _known(value: int | None) -> str:
    return "-" if value is None else str(value)


def describe_profile(found: Profile, record: Record | None) -> list[str]:
    """What the table does not say: the span, how it agrees with the suite's time, the rate, the host's side."""
    lines = [_describe_span(found)]
    if record is not None and record.time_ms:
        off = found.span_ms / record.time_ms - 1
        way = "longer" if off >= 0 else "shorter"
        lines.append(
            f"The suite measures {significant(record.time_ms)} ms; the profile is {abs(off):.1%} {way}: "
            f"{_agreement(off)}."
        )
        if record.gbps and record.tflops:
            lines.append(
                f"At the suite's time, a perfect pass's bytes move at {significant(record.gbps)} GB/s, and its "
                f"operations run at {significant(record.tflops)} TFLOP/s."
            )
    host = found.host
    launches = f", {significant(host.launch_ms, 2)} of it in CUDA's driver and runtime ({host.launches} launches)"
    autograd = f", {significant(host.autograd_ms, 2)} in autograd" if host.autograd_ms else ""
    lines.append(
        f"The host, slowed down by the profiler: {significant(host.call_ms, 2)} ms per call"
        + (launches if found.on_device else "")
        + f", {significant(host.operators_ms, 2)} in torch's operators{autograd}"
        + f", {significant(host.rest_ms, 2)} in Python."
    )
    return lines


def _agreement(off: float) -> str:
    """What a difference from the suite's time, a share of it, leaves of a profile's worth."""
    if abs(off) <= AGREES:
        return "they agree"
    return "they differ, so take shares, not times, from the table" if abs(off) <= _FAR else _TOO_FAR


def _describe_span(found: Profile) -> str:
    if not found.on_device:
        return (
            f"A call takes {significant(found.span_ms)} ms under the profiler, of which torch's operators take "
            f"{significant(found.busy_ms)}."
        )
    idle = found.span_ms - found.busy_ms
    return (
        f"From the first kernel's start to the last one's end: {significant(found.span_ms)} ms, of which kernels "
        f"run for {significant(found.busy_ms)} and the device is idle for {significant(idle, 2)} ms."
    )


def profiles_markdown(run: Run) -> str:
    """A section with a table per profiled cell; empty if the run has none."""
    if not run.profiles:
        return ""
    records = {record.cell: record for record in run.records}
    parts = ["## Where the time goes", "![where the time goes](profile.png)"]
    for cell, found in run.profiles.items():
        head, rows = profile_table(found, records.get(cell))
        grid = Grid(f"{cell}", "", head, rows, words=("grid", "programs per SM", "warps wait for"))
        if has_kinds(found):
            kinds = Grid(f"{cell}, by kinds of kernels", "", *kinds_table(found))
            parts.append(kinds.to_markdown().rstrip("\n"))
        parts += [grid.to_markdown().rstrip("\n"), " ".join(describe_profile(found, records.get(cell)))]
    return "\n\n".join(parts)


def draw_profiles(run: Run) -> Figure:
    """A bar per profiled cell, in pieces: its kernels in the order of their starts, and when the device is idle."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_PLAIN_TEXT):
        of_kinds = any(has_kinds(found) for found in run.profiles.values())
        bars = {cell: _pieces(found, of_kinds and found.on_device) for cell, found in run.profiles.items()}
        colours = _choose_colours(bars)
        legend = -(-len(colours) // _LEGEND_COLUMNS) * _LEGEND_ROW
        figure = Figure(figsize=(_WIDTH, _BAR * len(bars) + _AROUND + legend), layout="constrained", dpi=160)
        figure.suptitle(title_of([run]), x=0.01, ha="left", fontsize=12, fontweight="bold")
        axes = figure.subplots()
        _draw_bars(axes, bars, {cell: found.span_ms for cell, found in run.profiles.items()}, colours)
        axes.set_title("\n".join(surroundings_of([run])), loc="left", fontsize=_SMALL_PRINT, color="#444444")
        looks = {name: {"edgecolor": "white", "linewidth": 0.5, **look} for name, look in colours.items()}
        handles = [mpl.patches.Patch(label=shorten(name), **look) for name, look in looks.items()]
        where: dict[str, Any] = {"loc": "outside lower center", "ncols": _LEGEND_COLUMNS}
        figure.legend(handles=handles, **where, frameon=False, fontsize=_SMALL_PRINT)
    return figure


def _pieces(found: Profile, of_kinds: bool) -> dict[str, float]:
    """Milliseconds that kernels or kinds of them add, in the order of their starts, then of the rest, then idle."""
    times = times_by_kind(found) if of_kinds else found.by_name()
    longest = set(sorted(times, key=lambda name: -times[name])[:MOST_DRAWN])
    drawn = {name: ms for name, ms in times.items() if name in longest and ms >= _LEAST_DRAWN * found.span_ms}
    rest = {
        _OTHERS: sum(times.values()) - sum(drawn.values()),
        _IDLE if found.on_device else _OUTSIDE: found.span_ms - found.busy_ms,
    }
    return drawn | {name: ms for name, ms in rest.items() if ms > 0}


def _choose_colours(bars: Mapping[Cell, Mapping[str, float]]) -> dict[str, dict[str, Any]]:
    idle = {"facecolor": "white", "edgecolor": "#888888"}
    last = {REST: {"facecolor": "#4A4A4A"}, _OTHERS: {"facecolor": "#BBBBBB"}, _IDLE: idle, _OUTSIDE: idle}
    names = dict.fromkeys(name for pieces in bars.values() for name in pieces if name not in last)
    colours: dict[str, dict[str, Any]] = {
        name: {"facecolor": _COLOURS[i % len(_COLOURS)], "hatch": _hatch(i)} for i, name in enumerate(names)
    }
    return colours | {name: look for name, look in last.items() if any(name in pieces for pieces in bars.values())}


def _hatch(number: int) -> str | None:
    """So that more kernels than colours stay apart."""
    return None if number < len(_COLOURS) else "//" if number < 2 * len(_COLOURS) else ".."


def _draw_bars(
    axes: Axes, bars: Mapping[Cell, Mapping[str, float]], span: Mapping[Cell, float],
    colours: Mapping[str, Mapping[str, Any]],
) -> None:  # fmt: skip
    longest = max(sum(pieces.values()) for pieces in bars.values())
    for place, (cell, pieces) in enumerate(bars.items()):
        left = 0.0
        for name, ms in pieces.items():
            axes.barh(place, ms, left=left, height=0.7, linewidth=0.5, **{"edgecolor": "white", **colours[name]})
            left += ms
        axes.text(left + 0.01 * longest, place, significant(span[cell]), va="center", fontsize=_SMALL_PRINT)
    axes.set_yticks(range(len(bars)), [_label(cell) for cell in bars], fontsize=_SMALL_PRINT)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * longest)
    axes.set_xlabel("ms per call")
    axes.spines[["top", "right"]].set_visible(False)


def _label(cell: Cell) -> str:
    backend, _, rest = str(cell).partition(" ")
    return f"{shorten(backend)}\n{shorten(rest, _LONGEST_SIZES)}"
