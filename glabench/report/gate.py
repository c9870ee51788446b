"""What the gate found, for a terminal, for a pull request (Markdown), for GitHub's log, and as JUnit XML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from glabench.records.gate import Finding, Outcome, middle_ratio, summary
from glabench.report.tables import significant

if TYPE_CHECKING:
    from rich.table import Table

_STYLES = {
    Outcome.FINE: "green",
    Outcome.UNCLEAR: "yellow",
    Outcome.REGRESSION: "red",
    Outcome.FAILED: "red",
    Outcome.ACCURACY: "red",
}
_HEADS = ("cell", "before, ms", "now, ms", "ratio", "99 % interval", "outcome")
_MOST_FINE_ROWS = 30
_UNPRINTABLE = re.compile(r"[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _row(finding: Finding) -> tuple[str, ...]:
    ratio = finding.ratio
    return (
        finding.name,
        "" if finding.before_ms is None else significant(finding.before_ms),
        "" if finding.now_ms is None else significant(finding.now_ms),
        "" if ratio is None else f"{ratio.ratio:.3f}",
        "" if ratio is None else f"{ratio.low:.3f} to {ratio.high:.3f}",
        str(finding.outcome),
    )


def _worst_first(findings: Sequence[Finding]) -> list[Finding]:
    order = list(Outcome)
    return sorted(findings, key=lambda finding: -order.index(finding.outcome))


def rich_table(findings: Sequence[Finding]) -> Table:
    """One row a finding, the worst first; fine ones beyond a screen are left to the summary."""
    from rich.markup import escape
    from rich.table import Table

    table = Table()
    for head in _HEADS:
        table.add_column(head, justify="left" if head in ("cell", "outcome") else "right")
    fine = 0
    for finding in _worst_first(findings):
        fine += finding.outcome is Outcome.FINE
        if fine > _MOST_FINE_ROWS:
            break
        row = [escape(text) for text in _row(finding)]
        row[-1] = f"[{_STYLES[finding.outcome]}]{row[-1]}[/]"
        table.add_row(*row)
    return table


def reasons(findings: Sequence[Finding]) -> list[str]:
    """A line for every finding that is not fine, or only was found to be so at the second look."""
    doubted = [f for f in _worst_first(findings) if f.outcome is not Outcome.FINE or f.cleared]
    return [f"{f.name}: {'cleared' if f.cleared else f.outcome}: {f.reason}" for f in doubted]


def verdict_line(findings: Sequence[Finding]) -> str:
    """One line: the outcomes counted, and the median ratio of all cells."""
    middle = middle_ratio(findings)
    return summary(findings) + ("" if middle is None else f"; median ratio of all cells to the baseline {middle:.3f}")


def markdown(findings: Sequence[Finding], heading: str) -> str:
    """A table with the reasons below it, for a step summary or a comment."""
    lines = [f"### {heading}", "", f"**{verdict_line(findings)}**", "", "| " + " | ".join(_HEADS) + " |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | --- |")
    lines += ["| " + " | ".join(_cell(text) for text in _row(f)) + " |" for f in _worst_first(findings)]
    lines += ["", *(f"- {line}" for line in reasons(findings))]
    return "\n".join(lines).rstrip() + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def github_annotations(findings: Sequence[Finding]) -> list[str]:
    """Workflow commands that mark a run: errors for what fails the gate, warnings for what is unclear."""
    lines = []
    for finding in _worst_first(findings):
        if finding.outcome is not Outcome.FINE:
            kind = "warning" if finding.outcome is Outcome.UNCLEAR else "error"
            title = _escaped(f"glabench: {finding.outcome}").replace(":", "%3A").replace(",", "%2C")
            lines.append(f"::{kind} title={title}::{_escaped(f'{finding.name}: {finding.reason}')}")
    return lines


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def junit(findings: Sequence[Finding], strict: bool) -> str:
    """JUnit XML: one test case a finding. What is unclear fails if `strict`, and is skipped otherwise."""
    failing = [f for f in findings if _fails(f, strict)]
    skipped = [f for f in findings if f.outcome is Outcome.UNCLEAR and not strict]
    counts = {"tests": len(findings), "failures": len(failing), "errors": 0, "skipped": len(skipped)}
    suite = ElementTree.Element("testsuite", {"name": "glabench check"} | {k: str(v) for k, v in counts.items()})
    for finding in findings:
        time = f"{finding.now_ms / 1e3:.6f}" if finding.now_ms is not None else "0"
        case = ElementTree.SubElement(
            suite, "testcase", {"classname": "glabench.check", "name": _printable(finding.name), "time": time}
        )
        if _fails(finding, strict):
            kind = {"type": str(finding.outcome), "message": _printable(finding.reason)}
            ElementTree.SubElement(case, "failure", kind)
        elif finding.outcome is Outcome.UNCLEAR:
            ElementTree.SubElement(case, "skipped", {"message": _printable(finding.reason)})
    ElementTree.indent(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def _fails(finding: Finding, strict: bool) -> bool:
    return finding.outcome is not Outcome.FINE and (strict or finding.outcome is not Outcome.UNCLEAR)


def _printable(text: str) -> str:
    return _UNPRINTABLE.sub("?", text)
