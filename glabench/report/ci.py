"""Comparisons for CI systems: JUnit XML, and GitHub's annotations."""

import re
from collections.abc import Collection
from xml.etree import ElementTree

from glabench.records.metrics import TIME
from glabench.verdicts.comparison import Comparison
from glabench.verdicts.findings import FAILING, Verdict

_UNPRINTABLE = re.compile(r"[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


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
