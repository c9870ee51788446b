"""Comparisons for a terminal, as Markdown, as GitHub annotations, as JUnit XML and as a figure."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from glabench.records.metrics import FIRST_CALL, TIME
from glabench.verdicts.comparison import Comparison
from glabench.verdicts.findings import FAILING, Finding, Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import RenderableType


@dataclass(frozen=True)
class _Look:
    """The look of a verdict: colour and marker in figures, style on terminals."""

    color: str
    marker: str
    style: str


_LOOKS = {
    Verdict.FASTER: _Look("#009E73", "<", "green"),
    Verdict.SAME: _Look("#666666", "o", "dim"),
    Verdict.NOT_SLOWER: _Look("#56B4E9", "s", "dim"),
    Verdict.NOT_COMPARED: _Look("#999999", "x", "dim"),
    Verdict.UNCLEAR: _Look("#E69F00", "D", "yellow"),
    Verdict.SLOWER: _Look("#D55E00", ">", "red"),
    Verdict.LARGER: _Look("#CC79A7", "^", "red"),
    Verdict.FAILED: _Look("#000000", "X", "red"),
    Verdict.INACCURATE: _Look("#000000", "*", "red"),
}
_HEADS = ("cell", "verdict", "base, ms", "new, ms", "new / base", "99 % interval")
# Characters. In a narrower column, names of cells are hard to read.
_LEAST_NAME = 28
_MOST_NAMED = 3
_MARGIN = 1.01
_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2)
_MOST_TICKS = 10
_UNPRINTABLE = re.compile(r"[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class _Texts:
    """A comparison as texts. Words that all cells have in common are in the heading only."""

    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison
        words = [finding.name.split() for finding in comparison.cells]
        # Backend and pass always stay in the name.
        self._common = [word for word in (words[0][2:] if words else []) if all(word in each[2:] for each in words)]
        self.heading = [f"base: {comparison.base}", f"new: {comparison.new}"]
        if self._common:
            self.heading.append(f"all cells: {' '.join(self._common)}")
        self.shown = [finding for finding in comparison.worst_first if finding.cell and not _is_left_out(finding)]
        # Metrics with a ratio column; time and first calls are shown in other ways.
        self._others = [name for name in comparison.limits.by_metric if name not in (TIME.name, FIRST_CALL.name)]
        heads = [*_HEADS, *(f"{name} ×" for name in self._others)]
        rows = [self._row(finding) for finding in self.shown]
        kept = [place for place in range(len(heads)) if any(row[place] for row in rows)]
        self.heads = [heads[place] for place in kept]
        self.rows = [[row[place] for place in kept] for row in rows]

    def name(self, finding: Finding) -> str:
        """A finding's name without the words that all cells have in common."""
        if finding.cell is None:
            return finding.name
        words = finding.name.split()
        return " ".join(words[:2] + [word for word in words[2:] if word not in self._common])

    def _row(self, finding: Finding) -> list[str]:
        ratio = finding.ratio
        interval = ("", "") if ratio is None else (f"{ratio.ratio:.3f}", f"{ratio.low:.3f} to {ratio.high:.3f}")
        return [self.name(finding), str(finding.verdict), *_times(finding), *interval, *self._quotients(finding)]

    def numbers(self, finding: Finding) -> str:
        """A row's numbers in one line."""
        times = " -> ".join(time for time in _times(finding) if time)
        quotients = zip(self._others, self._quotients(finding), strict=True)
        parts = [f"{times} ms" if times else "", f"×{finding.ratio}" if finding.ratio else ""]
        return ", ".join(filter(None, [*parts, *(f"{name} ×{text}" for name, text in quotients if text)]))

    def _quotients(self, finding: Finding) -> list[str]:
        return ["" if (share := finding.quotient(name)) is None else f"{share:.2f}" for name in self._others]

    def surroundings(self) -> Iterator[str]:
        """Lines that say how the two sides were measured."""
        yield from self._comparison.notes
        for name, base, new in self._comparison.differences:
            yield f"{name}: {base} -> {new}"
        base, new = self._comparison.clocks_mhz
        if base is not None and new is not None:
            yield f"median SM clock while measured: {base:.0f} -> {new:.0f} MHz"
        yield f"allowed to become worse: {self._comparison.limits}"

    def remarks(self) -> Iterator[str]:
        """One line per finding that has remarks, worst first; then one line per reason for cells that were left out."""
        left_out: dict[str, list[str]] = {}
        for finding in self._comparison.worst_first:
            if _is_left_out(finding):
                left_out.setdefault(finding.reason, []).append(self.name(finding))
            elif finding.remarks:
                yield f"{self.name(finding)}: {'cleared' if finding.cleared else finding.verdict}: {finding.reason}"
        for reason, names in left_out.items():
            more = f"; and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
            yield f"{Verdict.NOT_COMPARED}, {reason}: {'; '.join(names[:_MOST_NAMED])}{more}"


def _times(finding: Finding) -> list[str]:
    return ["" if time is None else TIME.format(time) for time in finding.values.get(TIME.name, (None, None))]


def _is_left_out(finding: Finding) -> bool:
    return finding.verdict is Verdict.NOT_COMPARED


def terminal_report(comparison: Comparison, width: int) -> RenderableType:
    """One row per cell, worst first, with explanations below. If a table is too wide, two lines per cell."""
    from rich.console import Group
    from rich.text import Text

    texts = _Texts(comparison)
    lines = [*texts.surroundings(), *texts.remarks()]
    return Group(
        *(Text(line, style="italic", overflow="fold") for line in texts.heading),
        *(_rich_rows(texts, width) if texts.shown else ()),
        *(Text(line, overflow="fold") for line in lines),
        Text(comparison.summary(), style="bold", overflow="fold"),
    )


def _rich_rows(texts: _Texts, width: int) -> list[RenderableType]:
    from rich.box import SIMPLE_HEAD
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    styles = [_LOOKS[finding.verdict].style for finding in texts.shown]
    widths = [max(map(len, column)) for column in zip(texts.heads, *texts.rows, strict=True)]
    # Three spaces between columns, two at either edge.
    if min(widths[0], _LEAST_NAME) + sum(widths[1:]) + 3 * len(widths) + 1 <= width:
        table = Table(box=SIMPLE_HEAD)
        for place, head in enumerate(texts.heads):
            table.add_column(head, justify="left" if place < 2 else "right", no_wrap=place > 0, overflow="fold")
        for style, (name, verdict, *numbers) in zip(styles, texts.rows, strict=True):
            table.add_row(Text(name), Text(verdict, style=style), *numbers)
        return [table]
    lines: list[RenderableType] = []
    for style, finding in zip(styles, texts.shown, strict=True):
        lines.append(Text.assemble((str(finding.verdict), style), " ", texts.name(finding), overflow="fold"))
        lines.append(Padding(Text(texts.numbers(finding), overflow="fold"), (0, 0, 0, 4), expand=False))
    return lines


def markdown(comparison: Comparison, heading: str) -> str:
    """The comparison as Markdown, for a step summary or a comment."""
    texts = _Texts(comparison)
    lines = [f"### {heading}", "", *(f"{line}  " for line in texts.heading), "", f"**{comparison.summary()}**", ""]
    if texts.shown:
        lines.append(_markdown_row(texts.heads))
        lines.append(_markdown_row(["---" if place < 2 else "---:" for place in range(len(texts.heads))]))
        lines += [_markdown_row(row) for row in texts.rows] + [""]
    lines += [f"- {line}" for line in (*texts.remarks(), *texts.surroundings())]
    return "\n".join(lines) + "\n"


def _markdown_row(texts: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in texts) + " |"


def github_annotations(comparison: Comparison) -> list[str]:
    """GitHub workflow commands: an error for each finding that fails a check, a warning for each unclear one."""
    lines = []
    for finding in comparison.worst_first:
        if finding.verdict in FAILING or finding.verdict is Verdict.UNCLEAR:
            kind = "error" if finding.verdict in FAILING else "warning"
            title = _escaped(f"glabench: {finding.verdict}").replace(":", "%3A").replace(",", "%2C")
            lines.append(f"::{kind} title={title}::{_escaped(f'{finding.name}: {finding.reason}')}")
    return lines


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def junit(comparison: Comparison, fail_on: Collection[Verdict]) -> str:
    """JUnit XML, one test case per finding.

    A finding with a verdict in `fail_on` is a failure; otherwise unclear and not compared findings are skipped.
    """
    suite = ElementTree.Element("testsuite", {"name": "glabench"})
    counts = {"failure": 0, "skipped": 0}
    for finding in comparison.findings:
        new = finding.values.get(TIME.name, (None, None))[1]
        case = {"classname": "glabench", "name": _printable(finding.name), "time": f"{(new or 0) / 1e3:.6f}"}
        element = ElementTree.SubElement(suite, "testcase", case)
        bad = [verdict for verdict in finding.judged.values() if verdict in fail_on]
        if bad:
            kind = {"type": str(finding.verdict), "message": _printable(finding.reason)}
            ElementTree.SubElement(element, "failure", kind)
        elif finding.verdict in (Verdict.UNCLEAR, Verdict.NOT_COMPARED):
            ElementTree.SubElement(element, "skipped", {"message": _printable(finding.reason)})
        for child in element:
            counts[child.tag] += 1
    sizes = {"tests": len(comparison.findings), "failures": counts["failure"], "skipped": counts["skipped"]}
    suite.attrib.update({name: str(size) for name, size in (sizes | {"errors": 0}).items()})
    ElementTree.indent(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def _printable(text: str) -> str:
    return _UNPRINTABLE.sub("?", text)


def draw_ratios(comparison: Comparison) -> Figure:
    """Draws the ratios of times with their intervals, sorted, on a log axis. The range within the limit is shaded."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    texts = _Texts(comparison)
    known = [(finding, finding.ratio) for finding in comparison.cells if finding.ratio is not None]
    known.sort(key=lambda pair: pair[1].ratio)
    # So that a dollar sign in a name does not start a formula.
    with mpl.rc_context({"text.parse_math": False}):
        figure = Figure(figsize=(9.5, 2.1 + 0.26 * max(1, len(known))), layout="constrained")
        axes = figure.subplots()
        for place, (finding, ratio) in enumerate(known):
            look = _LOOKS[finding.verdict]
            axes.plot([ratio.low, ratio.high], [place, place], color=look.color, linewidth=2, solid_capstyle="butt")
            axes.plot([ratio.ratio], [place], marker=look.marker, color=look.color, markersize=5)
        ends = [end for _, ratio in known for end in (ratio.low, ratio.high)]
        _dress_ratio_axis(axes, ends, comparison.limits.time)
        axes.set_yticks(range(len(known)), [texts.name(finding) for finding, _ in known], fontsize=7.5)
        axes.set_ylim(-0.8, len(known) - 0.2)
        figure.suptitle("\n".join([*texts.heading, comparison.summary()]), x=0.01, ha="left", fontsize=9)
        _add_legend(figure, {finding.verdict for finding, _ in known}, comparison.limits.time)
    return figure


def _dress_ratio_axis(axes: Axes, ends: Sequence[float], limit: float) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    low, high = min([*ends, 1 / (1 + limit)]) / _MARGIN, max([*ends, 1 + limit]) * _MARGIN
    axes.axvspan(1 / (1 + limit), 1 + limit, color="#f0f0f0", zorder=0)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_xticks(_ticks(low, high))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.10g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("new time over base time, with its 99 % interval (left of 1: new is faster)")
    axes.grid(axis="x", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _ticks(low: float, high: float) -> list[float]:
    """Round ratios from `low` to `high`: even steps if a few cover the range, else 1, 2, 5 per decade."""
    for step in _STEPS:
        first, last = math.ceil(low / step), math.floor(high / step)
        if last - first < _MOST_TICKS:
            return [round(step * n, 10) for n in range(first, last + 1)]
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [digit * 10.0**power for power in decades for digit in (1, 2, 5) if low <= digit * 10.0**power <= high]


def _add_legend(figure: Figure, verdicts: Collection[Verdict], limit: float) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shown = [(verdict, _LOOKS[verdict]) for verdict in reversed(Verdict) if verdict in verdicts]
    lines = [Line2D([], [], color=k.color, marker=k.marker, linewidth=2, label=str(v)) for v, k in shown]
    handles = [*lines, Patch(color="#f0f0f0", label=f"within {100 * limit:.3g} %")]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8.5)
