"""The verdict engine: it catches what became worse, does not blame unchanged cells, and calls doubtful ones unclear."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from product import product
from simulated import CELL, LIMITS, STEADY, World, compare, failed, measured, record

from glabench.errors import ExitCode, UsageError
from glabench.records import RunFolder
from glabench.verdicts import FAILING, Comparison, Finding, Limits, Verdict
from glabench.verdicts.engine import CONFIRMING_ROUNDS, SAME_WITHIN, by_cell
from glabench.verdicts.machine import judge_ratio
from glabench.verdicts.statistics import Ratio

RESULTS = Path(__file__).parent.parent.parent / "results"


def only_cell(base, new, limits=LIMITS, **options):
    (found,) = compare(base, new, limits, **options).cells
    return found


def verdict_with_second_look(base, new, base_again, new_again, paired=False):
    """The steps of a check: a first look, in turns or against a baseline, and if it is doubtful one in turns."""
    found = compare(base, new, paired=paired)
    if found.suspects():
        found = found.confirmed(compare(base_again, new_again, paired=True, before=found), "again")
    return found.cells[0].verdict


# Trials

WORLDS = {
    "quiet": World(),
    "drifting": World(drift_a_round=0.006, drift_within=0.02),
    "remembering": World(memory=0.95),
    "full of outliers": World(outliers=0.15),
    "noisy": World(noise=0.03, processes=0.005),
}
CHANGES = pytest.mark.parametrize(
    ("factor", "least", "most"), [(1.05, 0.95, 1.0), (1.0, 0.0, 0.01)], ids=["slowed", "unchanged"]
)


WAYS = {"2 in turns": (2, True), "2 apart": (2, False), "3 in turns": (3, True), "4 apart": (4, False)}


def with_one_way(world, way, trials):
    """Each world with one way, and each way with one world at least."""
    return trials == 20 and list(WORLDS).index(world) % len(WAYS) == list(WAYS).index(way)


@CHANGES
@product(with_one_way, world=WORLDS, way=WAYS, trials=[20, 120])
def test_slow_down_of_the_limit_is_caught_and_unchanged_code_is_not_blamed(world, way, factor, least, most, trials):
    rounds, paired = way
    found = trial_verdicts(world, factor, trials, rounds, paired)
    assert least <= found.count(Verdict.SLOWER) / trials <= most


@product(lambda way, trials: trials == 40, way=WAYS, trials=[40, 400])
def test_if_processes_differ_by_a_tenth_little_can_be_told_and_hardly_anything_is_blamed(way, trials):
    rounds, paired = way
    found = trial_verdicts(World(processes=0.1, noise=0.05, samples=15), 1.0, trials, rounds, paired)
    assert found.count(Verdict.UNCLEAR) / trials >= 0.7
    assert found.count(Verdict.SLOWER) / trials <= 0.01


def trial_verdicts(world, factor, trials, rounds, paired):
    found = []
    for seed in range(trials):
        generator = np.random.default_rng(seed)
        base = measured(world, generator, rounds=rounds if paired else 3)
        new = measured(world, generator, factor, rounds, start=0 if paired else 4)
        again = [measured(world, generator, f, CONFIRMING_ROUNDS, start=6) for f in (1.0, factor)]
        found.append(verdict_with_second_look(base, new, *again, paired=paired))
    return found


@CHANGES
@pytest.mark.parametrize("trials", [4, pytest.param(20, marks=pytest.mark.full)])
def test_the_same_holds_for_samples_that_a_gpu_gave(factor, least, most, trials):
    folders = [RunFolder.open(RESULTS / f"h200-validation/process-{n}") for n in range(1, 11)]
    found = []
    for number, records in enumerate(by_cell(folder.records() for folder in folders).values()):
        assert len(records) == 10
        for seed in range(trials):
            picked = [records[i] for i in np.random.default_rng(100 * number + seed).permutation(10)]
            slowed = [replace(r, samples_ms=tuple(factor * ms for ms in r.samples_ms)) for r in picked]
            sides = [[[r] for r in side] for side in (picked[:2], slowed[2:4], picked[4:7], slowed[7:10])]
            found.append(verdict_with_second_look(*sides, paired=True) is Verdict.SLOWER)
    assert len(found) >= 5 * trials
    assert least <= np.mean(found) <= most


def test_many_cells_show_that_processes_differ_more_than_assumed():
    cells = [replace(CELL, seqlen=64 * n) for n in range(1, 21)]
    wild = World(processes=0.1, noise=0.05, samples=15)

    def side(seed):
        generator = np.random.default_rng(seed)
        return [[record(wild.round(generator), cell) for cell in cells] for _ in range(2)]

    verdicts = [f.verdict for seed in range(4) for f in compare(side(seed), side(9 + seed), paired=True).cells]
    assert verdicts.count(Verdict.SLOWER) <= 1


# The verdict of a time


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.99, 1.01, "same"),
        (1.005, 1.015, "same"),  # shown to be slower, but also to be within the limit
        (1.01, 1.03, "slower"),  # a slow-down as large as the limit
        (1.20, 1.30, "slower"),
        (0.99, 1.05, "unclear"),
        (0.90, 1.10, "unclear"),
        (0.90, 0.95, "faster"),
        (0.90, 1.01, "not slower"),
    ],
)
def test_a_time_passes_only_if_shown_to_be_within_the_limit(low, high, verdict):
    assert judge_ratio(Ratio((low * high) ** 0.5, low, high), 0.02) == verdict


@pytest.mark.parametrize(("factor", "verdict"), [(1.08, "slower"), (0.92, "faster"), (1.0, "same")])
def test_cells_are_compared_one_by_one_with_all_their_metrics(factor, verdict):
    new = measured(STEADY, 1, factor, 4, peak_allocated_mib=50.0, rel_error={"o": 0.0015})
    found = compare(measured(STEADY, 0, rounds=4), new, Limits.of(time=SAME_WITHIN), paired=True)
    assert found.cells[0].verdict == verdict
    assert (found.cells[0].quotient("peak"), found.cells[0].quotient("error")) == (0.5, 0.5)
    (row,) = found.table().to_dict("records")
    assert row["ratio"] == pytest.approx(factor, abs=0.01)
    assert (row["peak_mib_base"], row["peak_mib_new"], row["key_dim"]) == (100.0, 50.0, 64)
    assert row["time_ms_new"] / row["time_ms_base"] == pytest.approx(row["ratio"], rel=1e-4)


def test_doubts_about_either_side_are_counted():
    found = compare(measured(STEADY, 0, stop_reason="time limit"), measured(STEADY, 1), paired=True)
    assert found.notes == ("doubts, base: of 2 records 2 unsettled",)


def test_many_unchanged_cells_raise_no_alarm():
    cells = [replace(CELL, seqlen=64 * n) for n in range(1, 41)]

    def side(seed):
        generator = np.random.default_rng(seed)
        return [[record(World().round(generator), cell) for cell in cells] for _ in range(3)]

    found = compare(side(1), side(2), Limits.of(time=SAME_WITHIN))
    assert not {Verdict.SLOWER, Verdict.FASTER} & {finding.verdict for finding in found.cells}


@pytest.mark.parametrize(
    ("base", "new", "words"),
    [
        ({"other_processes": 3}, {}, "the base cannot be trusted here: shared"),
        ({"throttle": "temperature"}, {}, "the base cannot be trusted here: hot"),
        ({}, {"timing": "hot"}, "timed in different ways: cold, hot"),
    ],
)
def test_times_that_cannot_be_held_against_each_other_are_unclear_and_memory_counts_all_the_same(base, new, words):
    before = measured(World(), 0, rounds=3, **base)
    found = only_cell(before, measured(World(), 1, **new))
    assert (found.verdict, found.ratio) == (Verdict.UNCLEAR, None)
    assert words in found.reason
    large = only_cell(before, measured(World(), 1, peak_allocated_mib=200.0, **new))
    assert large.verdict is Verdict.LARGER


# The other metrics


@pytest.mark.parametrize(
    ("base", "new", "verdict", "words"),
    [
        ({}, {}, "same", "time ×"),
        ({}, {"peak_allocated_mib": 101.9}, "same", "time ×"),
        ({}, {"peak_allocated_mib": 103.0}, "larger", "peak memory above the inputs 100 -> 103, allowed 102 MiB"),
        ({}, {"rel_error": {"o": 0.0044}}, "same", "time ×"),
        ({}, {"rel_error": {"o": 0.0046}}, "inaccurate", "largest relative error (o) 3.0e-03 -> 4.6e-03, allowed 4.5"),
        ({"rel_error": {"dq": 0.0}}, {"rel_error": {"dq": 1e-5}}, "inaccurate", "(dq) 0.0e+00 -> 1.0e-05"),
        ({}, {"rel_error": {"o": 0.003, "dq": 0.009}}, "same", "time ×"),  # never measured in the base
        ({}, {"peak_allocated_mib": None, "rel_error": None}, "same", "time ×"),
        ({"peak_resident_mib": 100.0, "peak_allocated_mib": None},
         {"peak_resident_mib": 300.0, "peak_allocated_mib": None}, "same", "time ×"),
    ],
)  # fmt: skip
def test_memory_and_accuracy_count_like_time(base, new, verdict, words):
    found = only_cell(measured(STEADY, 0, rounds=3, **base), measured(STEADY, 1, **new))
    assert (found.verdict, words in found.reason) == (verdict, True)


@pytest.mark.parametrize(("tflops", "verdict"), [(96.0, "same"), (90.0, "slower")])
def test_any_metric_of_the_table_can_have_a_limit(tflops, verdict):
    base, new = measured(STEADY, 0, tflops=100.0), measured(STEADY, 1, tflops=tflops)
    assert only_cell(base, new, Limits.of(tflops=0.05)).verdict == verdict
    assert only_cell(base, new).verdict == "same"


@pytest.mark.parametrize("limits", [{"nonsense": 0.1}, {"clock": 0.1}, {"time": None}])
def test_limits_of_what_cannot_be_judged_are_refused(limits):
    with pytest.raises(
        UsageError, match=r"is not a limit \(allowed: a share from 0 up, such as 0.05, for time, host, peak"
    ):
        Limits.of(**limits)


@pytest.mark.parametrize(("later", "verdict"), [(10.0, "not slower"), (15.9, "not slower"), (16.2, "slower")])
def test_first_calls_of_a_backend_are_judged_together(later, verdict):
    cells = [CELL, replace(CELL, seqlen=2048)]
    base = [[record([1.0], cell, first_call_s=5.0) for cell in cells]]
    new = [[record([1.0], cell, first_call_s=seconds) for cell, seconds in zip(cells, (later, 0.0), strict=True)]]
    base[0].append(record([1.0], replace(CELL, seqlen=4096), first_call_s=60.0))  # not measured now
    found = compare(base, new)
    assert (found.findings[-1].verdict, found.findings[-1].name) == (verdict, "first calls of gla-triton")
    assert [each.backend for each in found.worse_sums()] == (["gla-triton"] if verdict == "slower" else [])
    assert len(compare(base, new, Limits.of(first_call=None)).findings) == 3


# Cells without a time


@pytest.mark.parametrize(
    ("status", "verdict"), [("inaccurate", Verdict.INACCURATE), ("oom", Verdict.FAILED), ("crashed", Verdict.FAILED)]
)
def test_a_cell_that_fails_now_does_not_pass(status, verdict):
    found = only_cell(measured(STEADY, 0), [*measured(STEADY, 1), [failed(status, "why it failed")]])
    assert (found.verdict, found.reason) == (verdict, f"{status}: why it failed")
    assert found.values["time"][0] == pytest.approx(1, abs=0.02)


def test_a_time_of_a_wrong_result_is_no_time():
    new = [[replace(records[0], status="inaccurate")] for records in measured(STEADY, 1)]
    assert only_cell(measured(STEADY, 0), new).verdict is Verdict.INACCURATE
    assert only_cell(new, measured(STEADY, 0)).verdict is Verdict.NOT_COMPARED


def test_a_cell_that_was_not_measured_fails_a_check_and_is_listed_by_a_comparison():
    other = measured(STEADY, 1, cell=replace(CELL, seqlen=64))
    base = [a + b for a, b in zip(measured(STEADY, 0), other, strict=True)]
    assert [f.verdict for f in compare(base, other, expects_all=True).cells] == [Verdict.FAILED, Verdict.SAME]
    found = compare(base, other).cells[0]
    assert (found.verdict, found.reason) == (Verdict.NOT_COMPARED, "not in new")
    assert compare(other, base).cells[1].reason == "not in base"
    assert compare(base, [], expects_all=True).cells[1].verdict is Verdict.FAILED


def test_what_has_no_time_in_the_base_is_not_held_against_anyone():
    found = compare([[failed("oom", "out of memory")]], [[failed("oom")]])
    assert (found.cells[0].verdict, found.cells[0].reason) == (Verdict.NOT_COMPARED, "base: oom: out of memory")
    assert found.exit_code({*FAILING, Verdict.UNCLEAR}) == ExitCode.OK


def test_a_cell_that_failed_in_one_round_of_the_base_is_held_on_the_others():
    base = measured(World(), 0, rounds=3)
    base[1] = [failed("timeout", "too slow")]
    assert only_cell(base, [[failed("inaccurate", "wrong")]]).verdict is Verdict.INACCURATE
    assert only_cell(base, measured(World(), 1, rounds=3), paired=True).ratio is not None


def test_sides_without_a_common_cell_are_refused():
    with pytest.raises(UsageError, match=r"no cell is on both sides \(base has 1, new has 1\)"):
        compare(measured(STEADY, 0), measured(STEADY, 1, cell=replace(CELL, seqlen=64)))


# The second look


def test_only_doubts_about_time_are_looked_at_again():
    base = measured(STEADY, 0, rounds=3)
    assert compare(base, measured(STEADY, 1, 1.2)).suspects() == [CELL]
    assert compare(base, measured(STEADY, 1, 1.2, peak_allocated_mib=200.0)).suspects() == [CELL]
    assert compare(base, measured(World(noise=0.3), 1)).suspects() == [CELL]
    for fields in ({}, {"peak_allocated_mib": 200.0}, {"rel_error": {"o": 0.9}}):
        assert compare(base, measured(STEADY, 1, **fields)).suspects() == []
    assert compare(base, [[failed("oom")]]).suspects() == []


@pytest.fixture
def slow():
    return compare(measured(STEADY, 0, rounds=3), measured(STEADY, 1, 1.2))


def test_a_suspicion_that_the_second_look_does_not_share_is_dropped_with_both_reasons(slow):
    again = compare(measured(STEADY, 2), measured(STEADY, 3))
    (found,) = slow.confirmed(again, "measured in turns").cells
    assert (found.verdict, found.cleared) == (Verdict.SAME, True)
    assert (found.first_ratio, found.ratio) == (slow.cells[0].ratio, again.cells[0].ratio)
    assert found.reason == f"{again.cells[0].reason}; measured in turns; before that: {slow.cells[0].reason}"
    words = f"median ratio of all cells before the second look {slow.cells[0].ratio.ratio:.3f}"
    assert words in slow.confirmed(again, "").summary()


@pytest.mark.parametrize("base", [[[failed("oom")]], measured(STEADY, 0, cell=replace(CELL, seqlen=64))])
def test_a_suspicion_stays_if_the_old_code_gives_no_time(slow, base):
    again = compare(base, [*measured(STEADY, 1), *measured(STEADY, 0, cell=replace(CELL, seqlen=64))])
    (found,) = slow.confirmed(again, "measured in turns").cells
    assert (found.verdict, found.cleared) == (Verdict.SLOWER, False)
    assert "measured in turns, which gave nothing to compare" in found.reason


def test_a_second_look_in_which_the_cell_fails_counts(slow):
    (found,) = slow.confirmed(compare(measured(STEADY, 0), [[failed("crashed")]]), "again").cells
    assert (found.verdict, found.cleared) == (Verdict.FAILED, False)


def first_calls(base, new, *more):
    return compare(measured(STEADY, 0, first_call_s=base), [measured(STEADY, 1, first_call_s=new)[0], *more], LIMITS)


def test_slow_first_calls_are_cleared_by_a_second_look_unless_a_cell_failed_in_it():
    slow = first_calls(5.0, 60.0)
    found = slow.confirmed_sums(first_calls(5.0, 5.1), "compiled again")
    assert (found.worse_sums(), found.findings[-1].cleared) == ([], True)
    assert "5.0 s -> 5.1 s, allowed 8.5 s; compiled again; before that: 5.0 s -> 60.0 s" in found.findings[-1].reason
    found = slow.confirmed_sums(first_calls(5.0, 5.1, [failed("timeout")]), "compiled again")
    assert [each.backend for each in found.worse_sums()] == ["gla-triton"]
    assert found.findings[:-1] == slow.findings[:-1]


# What follows from all findings


@pytest.mark.parametrize(
    ("verdicts", "code", "strict_code"),
    [
        ((), 0, 0),
        (("same", "faster", "not slower", "not compared"), 0, 0),
        (("same", "unclear"), 0, 6),
        (("unclear", "slower"), 1, 1),
        (("larger",), 1, 1),
        (("slower", "failed"), 4, 4),
        (("failed", "inaccurate", "same"), 5, 5),
    ],
)
def test_the_worst_finding_decides_the_exit_code(verdicts, code, strict_code):
    found = comparison_of(*({"time": Verdict(verdict)} for verdict in verdicts))
    assert (found.exit_code(FAILING), found.exit_code({*FAILING, Verdict.UNCLEAR})) == (code, strict_code)
    assert found.exit_code(()) is ExitCode.OK


def test_a_slower_time_is_seen_behind_what_is_worse():
    found = comparison_of({"time": Verdict.SLOWER, "error": Verdict.INACCURATE})
    assert found.cells[0].verdict is Verdict.INACCURATE
    assert found.exit_code({Verdict.SLOWER}) is ExitCode.REGRESSION


def test_verdicts_are_counted_the_worst_first():
    found = comparison_of({"time": Verdict.SAME}, {"time": Verdict.SLOWER}, {"time": Verdict.SAME})
    assert found.summary() == "1 slower, 2 same"
    assert [finding.verdict for finding in found.worst_first] == ["slower", "same", "same"]
    assert found.to_json()["verdicts"] == {"same": 2, "slower": 1}


def comparison_of(*judged):
    return Comparison("main", "HEAD", LIMITS, tuple(Finding("a cell", each, CELL) for each in judged))
