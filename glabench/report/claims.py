"""The page of claims: what papers say, the run that tests it, and what it found."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from glabench.errors import UsageError
from glabench.records.metrics import choose_metrics, significant
from glabench.records.published import Published
from glabench.report.series import rows_of_runs
from glabench.report.text import escape_bars
from glabench.sweeps.words import show_x
from glabench.verdicts.claims import (
    CLAIMS,
    Claim,
    Claims,
    Point,
    Test,
    Verdict,
    judged,
    points_of,
    verdict_of,
)

# How near a ratio is to the one asked for, as a share of it.
_NEAR = 0.05
_HEAD = "<!-- Made by `glabench results` from results/claims.toml and the runs that it names: edit these instead. -->"


def make_claims(claims: Claims, published: Mapping[str, Published], out: Path) -> str:
    """The page as Markdown: a table of verdicts, then what was found for each claim.

    `out` is its path, which links are relative to. Raises UsageError for a wrong test.
    """
    rows, sections = [["", "claim", "where", "verdict"], ["---"] * 4], []
    for number, claim in enumerate(claims.claims, 1):
        verdict, section = _check(claim, published, out.resolve().parent)
        text, source = (" ".join(words.split()) for words in (claim.text, claim.source))
        rows.append([f"{number}", escape_bars(text), escape_bars(source), f"**{verdict}**"])
        sections.append(f"## {number}. {text}\n\n{section}")
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    intro = [f"{claims.intro.strip()}\n"] if claims.intro.strip() else []
    return "\n".join([f"{_HEAD}\n\n# Claims of the papers\n", *intro, table, *sections])


def _check(claim: Claim, published: Mapping[str, Published], folder: Path) -> tuple[Verdict, str]:
    """A claim's verdict, and its section: the verdict, a line per test, and what a person says of them."""
    if unknown := [test.run for test in claim.tests if test.run not in published]:
        raise UsageError(f"{CLAIMS}: '{unknown[0]}' is not a published run; add it to the index, or correct the test")
    found = [(test, points_of(test, published[test.run].first)) for test in claim.tests]
    verdict = verdict_of([judged(test, points) for test, points in found])
    lines = []
    for test, own in found:
        alone = f"**{verdict_of([judged(test, own)])}**: " if len(found) > 1 else ""
        lines.append(f"- {alone}{_describe(test, own, published[test.run], folder)}\n")
    whole = f"{claim.source[:1].upper()}{claim.source[1:]}: **{verdict}**."
    said = f"\n{claim.why.strip()}\n" if claim.why else ""
    return verdict, f"{whole}\n" + (f"\n{''.join(lines)}" if lines else "") + said


def _describe(test: Test, points: list[Point], one: Published, folder: Path) -> str:
    """`time of flash-attn over linear-triton at 1k, 2k: 4.7, 7.8, at least 2 asked ([h200-paper-fig2](...))`."""
    link = f"[{test.run}]({Path(os.path.relpath((one.page or one.path).resolve(), folder)).as_posix()})"
    along = "" if test.x == "seqlen" else f"{test.x} "
    places = along + ", ".join(show_x(point.x) for point in points)
    least = 1 / test.factor
    numbers = [p.found for p in points if not isinstance(p.found, str)]
    # Two digits, unless these would not tell on which side of what is asked a number is.
    digits = 3 if any(abs(number / least - 1) < _NEAR for number in numbers) else 2
    values = ", ".join(p.found if isinstance(p.found, str) else significant(p.found, digits) for p in points)
    if open_at := [show_x(point.x) for point in points if point.holds is None]:
        values += f" (open at {', '.join(open_at)})"
    if test.of:
        what, other = ("bytes", "operations") if test.bound == "memory" else ("operations", "bytes")
        part = f"'{test.part}' of {_name(test.of)}"
        return f"{part} is bound by {test.bound}: {what} take {values} times as long as {other} at {places} ({link})"
    title = _title(test, one)
    if test.fails:
        return f"{_name(test.fails)} at {places}: {values} ({link})"
    if not test.than:
        return f"{title} of {_name(test.less)} grows by {values} from half of that to {places} ({link})"
    asked = "" if test.factor == 1 else f", at least {significant(least, digits)} asked"
    return f"{title} of {_name(test.than)} over {_name(test.less)} at {places}: {values}{asked} ({link})"


def _title(test: Test, one: Published) -> str:
    return choose_metrics(test.metric, rows_of_runs([one.first]))[0].title


def _name(cells: Mapping[str, object]) -> str:
    hidden = ("backend", "pass", "status")
    words = [f"{name} {_word(value)}" for name, value in cells.items() if name not in hidden]
    words += [str(cells["pass"])] if "pass" in cells else []
    return f"{cells.get('backend', 'all')}" + (f" ({', '.join(words)})" if words else "")


def _word(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
