"""Claims of papers, and how records test them: `claims.toml` in a folder of published runs.

intro = "..."                        # Markdown, above the table

[[claims]]
source = "final paper, abstract"     # where it is made
text = "..."                         # what it says
why = "..."                          # why no run tests it, or what to know about the test (optional)

[[claims.tests]]                     # none: cannot be told
run = "h200-paper-fig2"              # a run folder
less = { backend = "linear-triton", pass = "fwd+bwd" }    # cells, by keys of their records; "none": without the key
than = { backend = "flash-attn", pass = "fwd+bwd" }       # what they are compared with at the same x
x = "seqlen"                         # over which both are compared
metric = "time"                      # whose values are compared: a metric
factor = 1.0                         # it holds where less <= factor * than
least = 128                          # the smallest x that the claim is about; all of them, if it is left out

Without `than` the test is of growth: where x doubles, the value may grow by at most `factor`. With `fails` in place of
`less`, cells have to end with a status from some x on: fails = { backend = "...", status = "inaccurate" }.

A part of a forward (as profiles have it) can be asked what bounds it, with three keys in place of `less`:

part = "across chunks"               # its name
of = { backend = "gla-two-level" }   # cells whose profiles have it
bound = "memory"                     # or "operations": what takes longer, each at the rate that the device reached

A ratio of times has an interval, as in `check` (`compare_samples`). If it leaves open on which side of the limit the
ratio is, nothing can be told.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from glabench.errors import UsageError, printable
from glabench.plain import Name, read_as
from glabench.records.metrics import BY_NAME, TIME
from glabench.records.record import Record
from glabench.records.run import Run, rows_of
from glabench.verdicts.statistics import compare_samples

CLAIMS = "claims.toml"
Cells = dict[str, str | int | float | bool]
# A row of `rows_of`, and the record that it is of.
_Known = tuple[Mapping[str, Any], Record]


class Verdict(StrEnum):
    """What the records say about a claim."""

    HOLDS = "holds"
    PARTLY = "in part"
    NOT = "does not hold"
    UNKNOWN = "cannot be told"


@dataclass(frozen=True)
class Test:
    """One comparison in one run."""

    run: Name
    less: Cells = field(default_factory=dict)
    than: Cells = field(default_factory=dict)
    fails: Cells = field(default_factory=dict)
    of: Cells = field(default_factory=dict)
    part: str = ""
    bound: Literal["", "memory", "operations"] = ""
    x: Name = "seqlen"
    metric: Name = "time"
    factor: float = 1.0
    least: float | None = None


@dataclass(frozen=True)
class Claim:
    """One claim, with the tests that all have to be passed."""

    source: str
    text: str
    why: str = ""
    tests: list[Test] = field(default_factory=list)


@dataclass(frozen=True)
class Claims:
    """The contents of the file."""

    claims: list[Claim]
    intro: str = ""


@dataclass(frozen=True)
class Point:
    """A test at one x: what was found (a ratio, or a status), whether the claim holds there, if that can be told."""

    x: Any
    found: float | str
    holds: bool | None


@dataclass(frozen=True)
class _Value:
    """The value of a metric and, of times, their samples in ms."""

    value: float
    samples: tuple[float, ...] | None

    def within(self, factor: float, other: "_Value") -> bool | None:
        """Whether it is at most `factor` times the other one; None if the interval of their ratio leaves that open."""
        if not self.samples or not other.samples:
            return self.value <= factor * other.value
        ratio = compare_samples([self.samples], [other.samples])
        if factor * ratio.low >= 1:
            return True
        return False if factor * ratio.high < 1 else None


def load_claims(folder: Path) -> Claims | None:
    """The claims beside published runs; None if there are none. Raises UsageError for a file that is wrong."""
    path = folder / CLAIMS
    if not path.is_file():
        return None
    try:
        found = read_as(Claims, tomllib.loads(path.read_text(encoding="utf-8")))
        for test in (test for claim in found.claims for test in claim.tests):
            _check(test)
    except ValueError as problem:
        raise UsageError(f"{path}: {printable(str(problem))}") from None
    return found


def _check(test: Test) -> None:
    if len({bool(x) for x in (test.of, test.part, test.bound)}) > 1:
        raise ValueError(f"a test of a part in {test.run} needs `part`, `of` and `bound`")
    if sum(bool(x) for x in (test.less, test.fails, test.of)) != 1 or (test.than and not test.less):
        raise ValueError(f"a test in {test.run} needs either `less`, or `fails` or `of` and no `than`")
    if test.fails and "status" not in test.fails:
        raise ValueError(f"a test in {test.run} needs a status in `fails`")
    if test.metric not in BY_NAME:
        raise ValueError(f"'{test.metric}' is not a metric (allowed: {', '.join(BY_NAME)})")


def points_of(test: Test, run: Run) -> list[Point]:
    """What the records of a run say, by x. Raises UsageError if cells that a test names do not have one value per x."""
    if test.of:
        return _bounds(test, run)
    known = list(zip(rows_of(run.records), run.records, strict=True))
    if test.fails:
        status = test.fails["status"]
        cells = {name: value for name, value in test.fails.items() if name != "status"}
        return [Point(x, row["status"], row["status"] == status) for x, (row, _) in _select(test, known, cells).items()]
    values = _values(test, known, test.less)
    if not test.than:
        return [
            Point(x, values[x].value / values[before].value, values[x].within(test.factor, values[before]))
            for before, x in pairwise(sorted(values))
            if x == 2 * before
        ]
    others = _values(test, known, test.than)
    both = [x for x in values if x in others]
    return [Point(x, others[x].value / values[x].value, values[x].within(test.factor, others[x])) for x in sorted(both)]


def judged(test: Test, points: Sequence[Point]) -> Sequence[Point]:
    """The points that a test's verdict follows from: all of them, or if cells have to fail, the last one."""
    return points[-1:] if test.fails else points


def verdict_of(points: Sequence[Sequence[Point]]) -> Verdict:
    """A claim's verdict from the points that its tests are judged by: it holds if it does at all of them."""
    every = [point.holds for own in points for point in own]
    if not all(points) or not {True, False} & set(every):
        return Verdict.UNKNOWN
    return Verdict.HOLDS if all(every) else Verdict.PARTLY if any(every) else Verdict.NOT


def _bounds(test: Test, run: Run) -> list[Point]:
    """How many times as long what is said to bound a part takes as the other, at the rates that the device reached."""
    ceilings = run.environment.get("ceilings") or {}
    copy, product = ceilings.get("copy_gbps"), ceilings.get("product_tflops")
    points = []
    for cell, profile in run.profiles.items():
        values = cell.to_json()
        if not all(_is(values.get(name), value) for name, value in test.of.items()):
            continue
        for part in profile.parts:
            if part.name == test.part and part.bytes and part.flops and copy and product:
                ratio = (part.bytes / copy) / (part.flops / product / 1e3)
                found = ratio if test.bound == "memory" else 1 / ratio
                points.append(Point(values[test.x], found, found >= 1))
    if not points or len({point.x for point in points}) < len(points):
        what = f"several cells at one {test.x}" if points else "no profile"
        raise UsageError(f"{CLAIMS}: {test.run} has {what} with the part '{test.part}' for {test.of}; correct the test")
    return sorted(points, key=lambda point: point.x)


def _values(test: Test, known: Sequence[_Known], cells: Cells) -> dict[Any, _Value]:
    metric = BY_NAME[test.metric]
    return {
        x: _Value(value, record.samples_ms if metric is TIME else None)
        for x, (row, record) in _select(test, known, cells).items()
        if (value := row.get(metric.field)) is not None
    }


def _is(found: Any, asked: str | int | float | bool) -> bool:
    return bool(found == asked) or (found is None and asked == "none")


def _select(test: Test, known: Sequence[_Known], cells: Cells) -> dict[Any, _Known]:
    """The rows that have these values, and their records, by x."""
    own = [each for each in known if all(_is(each[0].get(name), value) for name, value in cells.items())]
    found = {row[test.x]: (row, record) for row, record in own}
    if not own or len(found) < len(own):
        what = "no cell" if not own else "several cells at one " + test.x
        raise UsageError(f"{CLAIMS}: {test.run} has {what} for {cells}; correct the test")
    return {x: each for x, each in found.items() if test.least is None or x >= test.least}
