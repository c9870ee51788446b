"""Claims of papers: verdicts from records, the page, mistakes in the file."""

from dataclasses import replace
from pathlib import Path

import pytest
from simulated import record

from glabench.errors import UsageError
from glabench.records.profile import Host, Part, Profile
from glabench.records.published import Entry, Published
from glabench.records.run import Run
from glabench.report.claims import make_claims
from glabench.sweeps import Parameters, load_sweep
from glabench.verdicts.claims import (
    CLAIMS,
    Claim,
    Claims,
    Point,
    Test,
    Verdict,
    judged,
    load_claims,
    points_of,
    verdict_of,
)

Test.__test__ = False  # not a class of tests


def run_of(times):
    """A run of cells with these median times, by backend and sequence length; a text is a status."""
    records = []
    for (backend, seqlen), time in times.items():
        one = record([1.0])
        ok = not isinstance(time, str)
        values = (
            {"time_ms": time, "samples_ms": (time,) * 9}
            if ok
            else {"status": time, "reason": "why", "time_ms": None, "samples_ms": None}
        )
        records.append(replace(one, cell=replace(one.cell, backend=backend, seqlen=seqlen), **values))
    return Run(Path("a-run"), load_sweep("cpu-smoke"), {}, records)


TIMES = {("a", 64): 1.0, ("a", 128): 2.0, ("a", 256): 6.0, ("b", 64): 2.0, ("b", 128): 1.0, ("b", 512): 1.0}
A, B = {"backend": "a"}, {"backend": "b"}


def test_cells_are_compared_at_every_x_that_both_have():
    assert points_of(Test("a-run", A, B), run_of(TIMES)) == [Point(64, 2.0, True), Point(128, 0.5, False)]
    assert [point.holds for point in points_of(Test("a-run", A, B, factor=2.5), run_of(TIMES))] == [True, True]


def test_sizes_that_a_claim_is_not_about_are_left_out():
    assert points_of(Test("a-run", A, B, least=128), run_of(TIMES)) == [Point(128, 0.5, False)]


@pytest.mark.parametrize(
    ("ratio", "factor", "holds"),
    [
        (1.05, 1, True), (1.005, 1, None), (1.0, 1, None), (0.995, 1, None), (0.95, 1, False),
        (0.55, 2, True), (0.501, 2, None), (0.45, 2, False),
    ],
)  # fmt: skip
def test_times_that_differ_too_little_do_not_tell(ratio, factor, holds):
    """Processes differ, so the interval of a ratio without any scatter is 1.6 % wide on either side."""
    run = run_of({("a", 64): 1.0, ("b", 64): ratio})
    assert points_of(Test("a-run", A, B, factor=factor), run) == [Point(64, ratio, holds)]
    run = run_of({("a", 64): 1.0, ("a", 128): 1 / ratio})
    assert [point.holds for point in points_of(Test("a-run", A, factor=factor), run)] == [holds]


def test_the_wider_times_scatter_the_less_they_tell():
    steady = run_of({("a", 64): 1.0, ("b", 64): 1.1})
    scattered = tuple(1.1 + step for step in (-0.4, 0.4, -0.3, 0.3, -0.2, 0.2, -0.1, 0.1, 0.0))
    wide = [replace(each, samples_ms=scattered) for each in steady.records if each.cell.backend == "b"]
    assert points_of(Test("a-run", A, B), steady)[0].holds
    run = replace(steady, records=[steady.records[0], *wide])
    assert points_of(Test("a-run", A, B), run) == [Point(64, 1.1, None)]


def test_what_is_no_time_has_no_scatter():
    run = run_of({("a", 64): 1.0, ("b", 64): 2.0})
    records = [replace(each, peak_allocated_mib=100) for each in run.records]
    same = points_of(Test("a-run", A, B, metric="peak"), replace(run, records=records))
    assert same == [Point(64, 1.0, True)]


def test_operations_are_those_executed_in_a_call():
    run = run_of({("a", 64): 1.0, ("a", 128): 1.0, ("b", 64): 4.0, ("b", 128): 4.0})
    rates = {"a": 3.0, "b": 2.0}  # TFLOP/s
    counted = [each for each in run.records if each.cell != run.records[-1].cell]
    records = [replace(each, executed_tflops=rates[each.cell.backend]) for each in counted] + run.records[-1:]
    found = points_of(Test("a-run", A, B, metric="operations"), replace(run, records=records))
    assert found == [Point(64, 8 / 3, True)]  # without a count there is nothing to compare


def test_none_asks_for_cells_without_a_value():
    """`state` is a value of some ops; records without states do not have it."""
    points = points_of(Test("a-run", A | {"state": "none"}, B), run_of(TIMES))
    assert points == points_of(Test("a-run", A, B), run_of(TIMES))


def test_growth_is_from_half_as_many():
    assert points_of(Test("a-run", A, factor=2.5), run_of(TIMES)) == [Point(128, 2.0, True), Point(256, 3.0, False)]
    assert points_of(Test("a-run", B, factor=2.5), run_of(TIMES)) == [Point(128, 0.5, True)]


def run_with_parts(*parts, ceilings=None):
    """A run whose profiles at chunks of 16 and 32 have these parts."""
    run = run_of({("a", 64): 1.0})
    cell = run.records[0].cell
    cells = [replace(cell, parameters=Parameters({**cell.parameters, "chunk": chunk})) for chunk in (32, 16)]
    profile = Profile(1, 1.0, 1.0, (), Host(1.0, 1, 0.0, 0.0), on_device=True, parts=parts)
    environment = {"ceilings": ceilings or {"copy_gbps": 1000.0, "product_tflops": 100.0}}
    return replace(run, environment=environment, profiles=dict.fromkeys(cells, profile))


@pytest.mark.parametrize(("bound", "found", "holds"), [("memory", 4.0, True), ("operations", 0.25, False)])
def test_what_bounds_a_part_is_what_takes_longer(bound, found, holds):
    """4 GB at 1 TB/s take 4 ms, 0.1 TFLOP at 100 TFLOP/s 1 ms."""
    run = run_with_parts(Part("across", 9.0, 4 * 10**9, 10**11), Part("within", 9.0, 1, 10**11))
    test = Test("a-run", of=A, part="across", bound=bound, x="chunk")
    points = points_of(test, run)
    assert [(point.x, point.holds) for point in points] == [(16, holds), (32, holds)]
    assert [point.found for point in points] == pytest.approx([found, found])


@pytest.mark.parametrize(
    "run",
    [
        run_with_parts(Part("across", 9.0)),
        run_with_parts(Part("other", 9.0, 1, 1)),
        run_with_parts(Part("across", 9.0, 1, 1), ceilings={"copy_gbps": 1000.0}),
        run_of(TIMES),
    ],
)
def test_a_part_without_counts_is_a_mistake(run):
    with pytest.raises(UsageError, match=r"a-run has no profile with the part 'across' for .*; correct the test"):
        points_of(Test("a-run", of=A, part="across", bound="memory", x="chunk"), run)


def test_several_cells_with_a_part_at_one_x_are_a_mistake():
    run = run_with_parts(Part("across", 9.0, 1, 1))
    with pytest.raises(UsageError, match="a-run has several cells at one seqlen with the part 'across'"):
        points_of(Test("a-run", of=A, part="across", bound="memory"), run)


def test_the_page_says_what_bounds_a_part(tmp_path):
    run = run_with_parts(Part("across", 9.0, 4 * 10**9, 10**11))
    claim = Claim("a paper", "A part.", tests=[Test("a-run", of=A, part="across", bound="memory", x="chunk")])
    one = Published(Entry("a-run", "it"), tmp_path / "results/a-run", (run,), None, unchanged=False)
    page = make_claims(Claims([claim]), {"a-run": one}, tmp_path / "page.md")
    assert "'across' of a is bound by memory: bytes take 4, 4 times as long as operations at chunk 16, 32" in page


def test_cells_that_have_to_fail_do_so_from_some_x_on():
    times = {("a", 64): 1.0, ("a", 128): "inaccurate"}
    points = points_of(Test("a-run", fails={**A, "status": "inaccurate"}), run_of(times))
    assert points == [Point(64, "ok", False), Point(128, "inaccurate", True)]
    test = Test("a-run", fails={**A, "status": "inaccurate"})
    assert verdict_of([judged(test, points)]) is Verdict.HOLDS
    assert verdict_of([judged(test, points[:1])]) is Verdict.NOT
    other = Test("a-run", A, B)
    assert verdict_of([judged(test, points), judged(other, points_of(other, run_of(TIMES)))]) is Verdict.PARTLY


@pytest.mark.parametrize(
    ("holds", "verdict"),
    [
        ([[True, True], [True]], Verdict.HOLDS),
        ([[True, False]], Verdict.PARTLY),
        ([[True, None]], Verdict.PARTLY),
        ([[False, None]], Verdict.NOT),
        ([[None], [None]], Verdict.UNKNOWN),
        ([[True], [False]], Verdict.PARTLY),
        ([[False, False]], Verdict.NOT),
        ([], Verdict.UNKNOWN),
        ([[True], []], Verdict.UNKNOWN),
    ],
)
def test_a_claim_holds_if_all_of_its_tests_do_at_every_x(holds, verdict):
    assert verdict_of([[Point(1, 1.0, each) for each in own] for own in holds]) is verdict


@pytest.mark.parametrize(
    ("cells", "words"), [({"backend": "c"}, "no cell for"), ({"status": "ok"}, "several cells at one seqlen for")]
)
def test_a_test_that_names_no_cell_or_several_is_a_mistake(cells, words):
    with pytest.raises(UsageError, match=rf"{CLAIMS}: a-run has {words} .*; correct the test"):
        points_of(Test("a-run", cells, A), run_of(TIMES))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("claims = 3", "claims"),
        ('[[claims]]\nsource = "s"', "text"),
        ('[[claims]]\nsource = "s"\ntext = "t"\n[[claims.tests]]\nrun = "r"', "needs either `less`, or `fails`"),
        (
            '[[claims]]\nsource = "s"\ntext = "t"\n[[claims.tests]]\nrun = "r"\npart = "p"\nof = {a = 1}',
            "a test of a part in r needs `part`, `of` and `bound`",
        ),
        (
            '[[claims]]\nsource = "s"\ntext = "t"\n[[claims.tests]]\nrun = "r"\nfails = {a = 1}',
            "needs a status in `fails`",
        ),
        (
            '[[claims]]\nsource = "s"\ntext = "t"\n[[claims.tests]]\nrun = "r"\nless = {a = 1}\nmetric = "tmie"',
            "'tmie' is not a metric",
        ),
    ],
)
def test_a_wrong_file_is_a_mistake_that_is_named(tmp_path, text, words):
    (tmp_path / CLAIMS).write_text(text)
    with pytest.raises(UsageError, match=words):
        load_claims(tmp_path)


def test_without_a_file_there_are_no_claims(tmp_path):
    assert load_claims(tmp_path) is None
    (tmp_path / CLAIMS).write_text('[[claims]]\nsource = "s"\ntext = "t"\nwhy = "w"')
    assert load_claims(tmp_path) == Claims([Claim("s", "t", "w")])


def test_the_page_says_where_times_do_not_tell(tmp_path):
    run = run_of({("a", 64): 1.0, ("a", 128): 1.0, ("b", 64): 2.0, ("b", 128): 1.001})
    one = Published(Entry("a-run", "it"), tmp_path / "results/a-run", (run,), None, unchanged=False)
    page = make_claims(Claims([Claim("s", "t", "", [Test("a-run", A, B)])]), {"a-run": one}, tmp_path / "page.md")
    assert "S: **in part**." in page
    assert "at 64, 128: 2, 1 (open at 128) ([a-run](" in page


def test_the_page_has_a_table_of_verdicts_and_says_what_each_test_found(tmp_path):
    tests = [Test("a-run", A, B, factor=2.5), Test("a-run", A, B, least=128)]
    claims = Claims([Claim("where | it is", "A is faster.", "Why.", tests), Claim("there", "Nobody knows.")], "Intro")
    one = Published(Entry("a-run", "it"), tmp_path / "results/a-run", (run_of(TIMES),), None, unchanged=False)
    page = make_claims(claims, {"a-run": one}, tmp_path / "page.md")
    assert (
        "| 1 | A is faster. | where \\| it is | **in part** |\n| 2 | Nobody knows. | there | **cannot be told** |\n"
        in page
    )
    section = page[page.index("## 1. A is faster.") : page.index("## 2. ")]
    assert section.count("\n- **") == 2
    assert "- **holds**: median time of b over a at 64, 128: 2, 0.5, at least 0.4 asked ([a-run](" in section
    assert "- **does not hold**: median time of b over a at 128: 0.5 ([a-run](" in section
    assert section.endswith("\nWhy.\n\n")
