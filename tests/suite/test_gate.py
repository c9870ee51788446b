"""The gate: catches what became worse, blames nothing that did not, and passes nothing that it cannot tell."""

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from simulated import CELL, World, record

from glabench.errors import ExitCode, UsageError
from glabench.records import Record, RunFolder
from glabench.records.baseline import Baseline
from glabench.records.comparison import by_cell
from glabench.records.gate import (
    CONFIRMING_ROUNDS,
    Finding,
    Limits,
    Outcome,
    check_cells,
    check_first_calls,
    confirmed,
    exit_code,
    judge_time,
    suspects,
    worst,
    yardstick_of,
)
from glabench.records.statistics import Ratio
from glabench.report.gate import github_annotations, junit, markdown, rich_table
from glabench.sweeps import load_sweep

RESULTS = Path(__file__).parent.parent.parent / "results"
YARD = replace(CELL, backend="sdpa-flash", op="softmax", materialize=None, gate=None)
LIMITS = Limits()


def side(world, generator, factor=1.0, rounds=2, start=0, cell=CELL, **fields):
    return [[record(world.round(generator, factor, start + i), cell, **fields)] for i in range(rounds)]


def verdict(before, now, before_again, now_again):
    """The way of `check`: a first look, and if that is doubtful one in turns with the old code."""
    (finding,) = check_cells(before, now, LIMITS)
    if not suspects([finding], LIMITS):
        return finding.outcome
    (again,) = check_cells(before_again, now_again, LIMITS, paired=True)
    return confirmed(finding, again, "again").outcome


# Trials

TRIALS = 120
WORLDS = {
    "quiet": World(),
    "drifting": World(drift_a_round=0.006, drift_within=0.02),
    "remembering": World(memory=0.95),
    "full of outliers": World(outliers=0.15),
    "noisy": World(noise=0.03, processes=0.005),
}


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS.keys())
@pytest.mark.parametrize(
    ("factor", "least", "most"), [(1.05, 0.95, 1.0), (1.0, 0.0, 0.01)], ids=["slowed", "unchanged"]
)
def test_a_slow_down_of_the_limit_is_caught_and_an_unchanged_build_is_not_blamed(world, factor, least, most):
    assert least <= outcomes(world, factor).count(Outcome.REGRESSION) / TRIALS <= most


def outcomes(world, factor):
    found = []
    for seed in range(TRIALS):
        generator = np.random.default_rng(seed)
        before = side(world, generator, rounds=3)
        now = side(world, generator, factor, start=4)
        again = [side(world, generator, f, CONFIRMING_ROUNDS, start=6) for f in (1.0, factor)]
        found.append(verdict(before, now, *again))
    return found


def test_where_processes_differ_by_a_tenth_nothing_can_be_told_and_little_is_blamed():
    found = outcomes(World(processes=0.1, noise=0.05, samples=15), 1.0)
    assert found.count(Outcome.UNCLEAR) / TRIALS >= 0.85
    assert found.count(Outcome.REGRESSION) / TRIALS <= 0.04


def recorded():
    """Samples of the same cells from ten processes of a GPU."""
    folders = [RunFolder.open(RESULTS / f"h200-validation/process-{n}") for n in range(1, 11)]
    return by_cell(folder.records() for folder in folders)


@pytest.mark.parametrize(
    ("factor", "least", "most"), [(1.05, 0.95, 1.0), (1.0, 0.0, 0.01)], ids=["slowed", "unchanged"]
)
def test_the_same_holds_for_samples_that_a_gpu_gave(factor, least, most):
    outcomes = []
    for number, records in enumerate(recorded().values()):
        assert len(records) == 10
        for seed in range(20):
            generator = np.random.default_rng(100 * number + seed)
            picked = [records[i] for i in generator.permutation(10)]
            slowed = [replace(r, samples_ms=tuple(factor * ms for ms in r.samples_ms)) for r in picked]
            before, now = ([[r] for r in picked[:2]], [[r] for r in slowed[2:4]])
            again = ([[r] for r in picked[4:7]], [[r] for r in slowed[7:10]])
            outcomes.append(verdict(before, now, *again) is Outcome.REGRESSION)
    assert len(outcomes) >= 100
    assert least <= np.mean(outcomes) <= most


# One cell


@pytest.mark.parametrize(
    ("low", "high", "p_value", "outcome"),
    [
        (0.99, 1.04, 0.5, Outcome.FINE),
        (1.02, 1.04, 0.001, Outcome.FINE),  # shown to be slower, and to be within the limit
        (1.04, 1.06, 0.001, Outcome.REGRESSION),
        (1.20, 1.30, 0.001, Outcome.REGRESSION),
        (0.99, 1.06, 0.001, Outcome.UNCLEAR),
        (1.04, 1.06, 0.2, Outcome.UNCLEAR),
        (0.50, 0.60, 0.001, Outcome.FINE),
    ],
)
def test_time_is_fine_only_if_shown_to_be_within_the_limit(low, high, p_value, outcome):
    assert judge_time(Ratio((low + high) / 2, low, high, p_value), p_value, 0.05) is outcome


def looked_at(now, limits=LIMITS):
    steady = World(noise=0.001, outliers=0, drift_within=0, drift_a_round=0)
    before = side(steady, np.random.default_rng(0), rounds=3)
    after = side(steady, np.random.default_rng(1)) if isinstance(now, dict) else now
    if isinstance(now, dict):
        after = [[replace(r, **now) for r in records] for records in after]
    (found,) = check_cells(before, after, limits)
    return found


@pytest.mark.parametrize(
    ("fields", "outcome", "words"),
    [
        ({}, Outcome.FINE, "time x"),
        ({"peak_allocated_mib": 101.9}, Outcome.FINE, "time x"),
        ({"peak_allocated_mib": 103.0}, Outcome.REGRESSION, "peak memory x 1.030, allowed 1.02"),
        ({"rel_error": {"o": 0.0044}}, Outcome.FINE, "time x"),
        ({"rel_error": {"o": 0.0046}}, Outcome.ACCURACY, "error of o 3.0e-03 -> 4.6e-03, allowed 4.5e-03"),
        ({"rel_error": {"o": 0.003, "dq": 1e-5}}, Outcome.ACCURACY, "error of dq 0.0e+00 -> 1.0e-05"),
        ({"peak_allocated_mib": None, "rel_error": None}, Outcome.FINE, "time x"),
    ],
)
def test_memory_and_accuracy_count_like_time(fields, outcome, words):
    found = looked_at(fields)
    assert (found.outcome, words in found.reason) == (outcome, True)


@pytest.mark.parametrize(
    ("status", "outcome"), [("inaccurate", Outcome.ACCURACY), ("oom", Outcome.FAILED), ("crashed", Outcome.FAILED)]
)
def test_a_cell_that_fails_now_does_not_pass(status, outcome):
    found = looked_at([[Record("run", CELL, status, "why it failed")]])
    assert (found.outcome, found.reason) == (outcome, f"{status}: why it failed")


def test_a_cell_that_was_not_measured_does_not_pass():
    assert looked_at([]).outcome is Outcome.FAILED


def test_what_failed_in_the_baseline_already_is_not_held_against_anyone():
    assert check_cells([[Record("run", CELL, "oom")]], [[Record("run", CELL, "oom")]], LIMITS) == []


def test_only_doubts_about_time_are_looked_at_again():
    slow = looked_at(side(World(), np.random.default_rng(1), 1.2))
    large = looked_at({"peak_allocated_mib": 200.0})
    assert suspects([slow, large, looked_at({})], LIMITS) == [CELL]


def test_a_suspicion_that_the_second_look_does_not_share_is_dropped_with_both_reasons():
    slow, fine = looked_at(side(World(), np.random.default_rng(1), 1.2)), looked_at({})
    found = confirmed(slow, fine, "in turns")
    assert found.outcome is Outcome.FINE
    assert found.reason == f"{fine.reason}, in turns; before that: {slow.reason}"
    assert found.cleared
    assert (found.first_ratio, found.ratio) == (slow.ratio, fine.ratio)
    assert "cleared" in markdown([found], "check")
    assert f"to the baseline {slow.ratio.ratio:.3f}" in markdown([found], "check")


def test_a_suspicion_stays_where_the_old_code_gives_no_time():
    slow = looked_at(side(World(), np.random.default_rng(1), 1.2))
    found = confirmed(slow, None, "in turns")
    assert (found.outcome, found.cleared) == (Outcome.REGRESSION, False)
    assert "in turns, which gave nothing to compare" in found.reason


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ({"other_processes": 3}, {}, "the baseline cannot be trusted here: shared"),
        ({"throttle": "temperature"}, {}, "the baseline cannot be trusted here: hot"),
        ({}, {"timing": "hot"}, "timed in different ways: cold, hot"),
    ],
)
def test_times_that_cannot_be_held_against_each_other_are_unclear_and_memory_counts_all_the_same(before, now, words):
    generator = np.random.default_rng(0)
    old = side(World(), generator, rounds=3, **before)
    (found,) = check_cells(old, side(World(), generator, **now), LIMITS)
    assert found.outcome is Outcome.UNCLEAR
    assert words in found.reason
    (found,) = check_cells(old, side(World(), generator, peak_allocated_mib=200.0, **now), LIMITS)
    assert found.outcome is Outcome.REGRESSION


def test_a_cell_that_failed_in_one_round_of_the_baseline_is_held_on_the_others():
    before = side(World(), np.random.default_rng(0), rounds=3)
    before[1] = [Record("run", CELL, "timeout", "too slow")]
    (found,) = check_cells(before, [[Record("run", CELL, "inaccurate", "wrong")]], LIMITS)
    assert found.outcome is Outcome.ACCURACY


# First calls


@pytest.mark.parametrize(("later", "outcome"), [(10.0, Outcome.FINE), (15.9, Outcome.FINE), (16.2, Outcome.REGRESSION)])
def test_first_calls_of_a_backend_are_judged_together(later, outcome):
    cells = [CELL, replace(CELL, seqlen=2048)]
    before = [[record([1.0], cell, first_call_s=5.0) for cell in cells]]
    now = [[record([1.0], cell, first_call_s=seconds) for cell, seconds in zip(cells, (later, 0.0), strict=True)]]
    before[0].append(record([1.0], replace(CELL, seqlen=4096), first_call_s=60.0))  # not measured now
    (found,) = check_first_calls(before, now, LIMITS).values()
    assert (found.outcome, found.name) == (outcome, "first calls of gla-triton")


# The yardstick


def with_yard(generator, factor=1.0, machine=1.0, rounds=2, **fields):
    """A cell and its yardstick on a machine that is slower as a whole."""
    steady = World(noise=0.002, outliers=0, drift_within=0, drift_a_round=0)
    return [
        [
            record(steady.round(generator, machine * factor), CELL),
            record(steady.round(generator, 3 * machine), YARD, **fields),
        ]
        for _ in range(rounds)
    ]


@pytest.mark.parametrize(("factor", "outcome"), [(1.0, Outcome.FINE), (1.08, Outcome.REGRESSION)])
def test_a_yardstick_takes_a_slower_machine_off_and_leaves_a_slower_kernel(factor, outcome):
    generator = np.random.default_rng(0)
    before, now = with_yard(generator, rounds=3), with_yard(generator, factor, machine=1.3)
    (without, _) = check_cells(before, now, LIMITS)
    (found,) = check_cells(before, now, LIMITS, "sdpa-flash")
    assert without.outcome is Outcome.REGRESSION
    assert (found.outcome, found.cell) == (outcome, CELL)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stop_reason": "time limit"}, "cannot be trusted now: unsettled"),
        ({"other_processes": 2}, "cannot be trusted now: shared"),
        ({"time_ms": None}, "has no time now"),
    ],
)
def test_without_a_yardstick_that_can_be_trusted_a_cell_is_unclear(fields, words):
    generator = np.random.default_rng(0)
    before, now = with_yard(generator, rounds=3), with_yard(generator, 2.0)
    now = [[cell, replace(yard, **fields)] for cell, yard in now]
    (found,) = check_cells(before, now, LIMITS, "sdpa-flash")
    assert found.outcome is Outcome.UNCLEAR
    assert words in found.reason
    wrong = [[replace(cell, rel_error={"o": 0.9}), yard] for cell, yard in now]
    assert check_cells(before, wrong, LIMITS, "sdpa-flash")[0].outcome is Outcome.ACCURACY


def test_a_yardstick_that_varies_between_rounds_is_not_trusted():
    generator = np.random.default_rng(0)
    before, now = with_yard(generator), with_yard(generator)
    now[1][1] = replace(now[1][1], time_ms=1.05 * now[0][1].time_ms)
    (found,) = check_cells(before, now, LIMITS, "sdpa-flash")
    assert "varies by more than 3%" in found.reason


def test_the_yardstick_has_the_same_heads_or_is_the_only_one_of_its_length():
    other = replace(YARD, heads=16)
    assert yardstick_of(CELL, "sdpa-flash", [YARD, other, CELL]) == YARD
    assert yardstick_of(CELL, "sdpa-flash", [other, CELL, replace(YARD, seqlen=64)]) == other
    for cells, words in ((([CELL]), "no cells"), ([other, replace(YARD, heads=8)], "2 cells")):
        with pytest.raises(Exception, match=words):
            yardstick_of(CELL, "sdpa-flash", cells)


# The end of it


def finding(outcome, name="a cell", reason="a reason"):
    return Finding(name, outcome, reason)


@pytest.mark.parametrize(
    ("outcomes", "code", "strict_code"),
    [
        ((), 0, 0),
        ((Outcome.FINE,), 0, 0),
        ((Outcome.FINE, Outcome.UNCLEAR), 0, 6),
        ((Outcome.UNCLEAR, Outcome.REGRESSION), 1, 1),
        ((Outcome.REGRESSION, Outcome.FAILED), 4, 4),
        ((Outcome.FAILED, Outcome.ACCURACY, Outcome.FINE), 5, 5),
    ],
)
def test_the_worst_finding_decides_the_exit_code(outcomes, code, strict_code):
    findings = [finding(outcome) for outcome in outcomes]
    assert (exit_code(findings, strict=False), exit_code(findings, strict=True)) == (code, strict_code)
    assert exit_code(findings, True) in set(ExitCode)
    assert worst(findings) is (max(outcomes, key=list(Outcome).index) if outcomes else Outcome.FINE)


NASTY = "a & b <c> | d\n\x00 100% ::error::"


def test_junit_has_a_case_for_each_finding_and_unclear_ones_fail_only_if_strict():
    findings = [finding(outcome, NASTY, NASTY) for outcome in Outcome]
    for strict, failures, skipped in ((False, 3, 1), (True, 4, 0)):
        suite = ElementTree.fromstring(junit(findings, strict))
        assert len(suite.findall("testcase")) == int(suite.get("tests")) == 5
        assert len(suite.findall("testcase/failure")) == int(suite.get("failures")) == failures
        assert len(suite.findall("testcase/skipped")) == skipped


def test_annotations_are_one_line_each_and_escape_what_would_be_a_command():
    lines = github_annotations([finding(outcome, NASTY, NASTY) for outcome in Outcome])
    assert [line.split()[0] for line in lines] == ["::error"] * 3 + ["::warning"]
    assert all("\n" not in line and "100%25" in line for line in lines)


def test_the_page_counts_outcomes_and_puts_the_worst_first():
    findings = [looked_at({}), finding(Outcome.UNCLEAR, "doubt | ful"), finding(Outcome.ACCURACY, "wrong")]
    page = markdown(findings, "glabench check")
    assert "**1 accuracy, 1 unclear, 1 fine; median ratio of all cells to the baseline" in page
    assert page.index("wrong") < page.index("doubt \\| ful") < page.index("gla-triton")
    assert rich_table(findings).row_count == 3


# The file


@pytest.fixture
def baseline():
    generator = np.random.default_rng(0)
    environment = {"device": "cuda", "gpu": {"name": "NVIDIA H200"}, "settings": {"timing": "cold"}}
    return Baseline(load_sweep("gate"), environment, "abc1234", side(World(samples=5), generator, rounds=2))


def test_a_baseline_is_read_back_as_it_was_written(baseline, tmp_path):
    file = tmp_path / "new" / "b.json"
    baseline.save(file)
    again = Baseline.load(file)
    assert again == replace(baseline, sweep=again.sweep)
    assert again.sweep.variants == baseline.sweep.variants
    assert len(file.read_text().splitlines()) < 60


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-20],
        lambda text: "",
        lambda text: "[" * 100_000,
        lambda text: json.dumps({"format": 1}),
        lambda text: json.dumps(json.loads(text) | {"format": 2}),
        lambda text: json.dumps(json.loads(text) | {"rounds": []}),
        lambda text: json.dumps(json.loads(text) | {"rounds": [[{"run_id": 3}]]}),
        lambda text: json.dumps(json.loads(text) | {"rounds": 7}),
        lambda text: json.dumps(json.loads(text) | {"environment": "H200"}),
        lambda text: json.dumps(json.loads(text) | {"sweep": {"name": "x", "toml": "= ="}}),
    ],
)
def test_garbage_is_no_baseline(baseline, tmp_path, change):
    file = tmp_path / "b.json"
    baseline.save(file)
    file.write_text(change(file.read_text()))
    with pytest.raises(UsageError):
        Baseline.load(file)


def test_a_baseline_that_is_not_there_is_named():
    with pytest.raises(UsageError, match=r"nowhere\.json"):
        Baseline.load(Path("nowhere.json"))
