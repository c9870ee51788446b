"""Comparisons as texts: for a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from glabench.records.metrics import METRICS, TIME, Metric
from glabench.report.grid import Grid
from glabench.verdicts.comparison import Comparison
from glabench.verdicts.findings import Finding, Verdict

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class _Look:
    """The look of a verdict: colour and marker in figures, style on terminals."""

    color: str
    marker: str
    style: str


LOOKS = {
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
_TIME_HEADS = ("base, ms", "new, ms", "new / base", "99 % interval")
_STYLES = {str(verdict): look.style for verdict, look in LOOKS.items()}
_MOST_NAMED = 3


class ComparisonTexts:
    """A comparison as texts. Words that all cells have in common are in the heading only.

    The table shows `metrics`, by default the time and what else is judged cell by cell.
    """

    def __init__(self, comparison: Comparison, metrics: Sequence[Metric] | None = None) -> None:
        self._comparison = comparison
        words = [finding.name.split() for finding in comparison.cells]
        # Backend and pass always stay in the name.
        self._common = [word for word in (words[0][2:] if words else []) if all(word in each[2:] for each in words)]
        self.heading = [f"base: {comparison.base}", f"new: {comparison.new}"]
        if self._common:
            self.heading.append(f"all cells: {' '.join(self._common)}")
        self.shown = [finding for finding in comparison.worst_first if finding.cell and not _is_left_out(finding)]
        limits = comparison.limits.by_metric
        self._is_chosen = metrics is not None
        self._metrics = metrics or [each for each in METRICS if each.name in limits and not each.total]
        # Metrics with a ratio column; the time has several columns.
        self._others = [metric for metric in self._metrics if metric is not TIME]
        heads = ["cell", "verdict"]
        heads += [*_TIME_HEADS] if TIME in self._metrics else []
        heads += [f"{metric.name.replace('_', ' ')} ×" for metric in self._others]
        rows = [self._row(finding) for finding in self.shown]
        kept = [place for place in range(len(heads)) if any(row[place] for row in rows)]
        picked = [[row[place] for place in kept] for row in [heads, *rows]]
        self.grid = Grid("", "", picked[0], picked[1:], words=("verdict",), styles=_STYLES)

    def name(self, finding: Finding) -> str:
        """A finding's name without the words that all cells have in common."""
        if finding.cell is None:
            return finding.name
        words = finding.name.split()
        return " ".join(words[:2] + [word for word in words[2:] if word not in self._common])

    def _row(self, finding: Finding) -> list[str]:
        times: list[str] = []
        if TIME in self._metrics:
            ratio = finding.ratio
            interval = ("", "") if ratio is None else (f"{ratio.ratio:.3f}", ratio.interval)
            times = [*_times(finding), *interval]
        return [self.name(finding), str(finding.verdict), *times, *self._quotients(finding)]

    def numbers(self, finding: Finding) -> str:
        """A row's numbers in one line."""
        parts = []
        if TIME in self._metrics:
            times = " -> ".join(time for time in _times(finding) if time)
            parts += [f"{times} ms" if times else "", f"×{finding.ratio}" if finding.ratio else ""]
        quotients = zip(self._others, self._quotients(finding), strict=True)
        parts += [f"{metric.name.replace('_', ' ')} ×{text}" for metric, text in quotients if text]
        return ", ".join(filter(None, parts))

    def _quotients(self, finding: Finding) -> list[str]:
        quotients = [finding.quotient(metric.name) for metric in self._others]
        return ["" if quotient is None else f"{quotient:.2f}" for quotient in quotients]

    def surroundings(self) -> Iterator[str]:
        """Lines that say how the two sides were measured."""
        yield from self._comparison.notes
        for name, base, new in self._comparison.differences:
            yield f"{name}: {base} -> {new}"
        base, new = self._comparison.clocks_mhz
        if base is not None and new is not None:
            yield f"median SM clock while measured: {base:.0f} -> {new:.0f} MHz"
        yield f"allowed to become worse: {self._comparison.limits}"
        there = {name for finding in self._comparison.cells for name in finding.values}
        if self._is_chosen and (missing := [each.name for each in self._metrics if each.name not in there]):
            yield f"no cell has these metrics: {', '.join(missing)}"

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


def terminal_report(comparison: Comparison, width: int, metrics: Sequence[Metric] | None = None) -> RenderableType:
    """One row per cell, worst first, with explanations below. If the table is too wide, two lines per cell."""
    from rich.console import Group
    from rich.text import Text

    texts = ComparisonTexts(comparison, metrics)
    lines = [*texts.surroundings(), *texts.remarks()]
    rows = [texts.grid.to_text()] if texts.grid.width <= width else [_two_lines(texts, each) for each in texts.shown]
    return Group(
        *(Text(line, style="italic", overflow="fold") for line in texts.heading),
        *(["", *rows] if texts.shown else []),
        *(Text(line, overflow="fold") for line in lines),
        Text(comparison.summary(), style="bold", overflow="fold"),
    )


def _two_lines(texts: ComparisonTexts, finding: Finding) -> RenderableType:
    from rich.text import Text

    verdict = str(finding.verdict)
    parts = (verdict, _STYLES[verdict]), f" {texts.name(finding)}\n    {texts.numbers(finding)}"
    return Text.assemble(*parts, overflow="fold")


def markdown(comparison: Comparison, heading: str, metrics: Sequence[Metric] | None = None) -> str:
    """The comparison as Markdown, for a step summary or a comment."""
    texts = ComparisonTexts(comparison, metrics)
    lines = [f"### {heading}", "", *(f"{line}  " for line in texts.heading), "", f"**{comparison.summary()}**", ""]
    if texts.shown:
        lines.append(texts.grid.to_markdown())
    lines += [f"- {line}" for line in (*texts.remarks(), *texts.surroundings())]
    return "\n".join(lines) + "\n"
