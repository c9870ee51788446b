"""Two sets of samples: the ratio's interval, the rank test, the verdict."""

from dataclasses import replace

import numpy as np
import pytest
from simulated import CELL, World, record

from glabench.errors import UsageError
from glabench.records import Record
from glabench.records.comparison import check_same_device, compare_runs, device_name, differences, judge
from glabench.records.statistics import Ratio, compare_samples, false_discovery, memory_length
from glabench.report.comparison import Comparison, draw_ratios, markdown, summary
from glabench.report.figures import save


def rounds(factor=1.0, count=3, seed=0, world=None):
    generator = np.random.default_rng(seed)
    return [(world or World()).round(generator, factor, at) for at in range(count)]


# The ratio


def test_the_ratio_is_that_of_the_medians_and_lies_in_its_interval():
    found = compare_samples([[1.0, 2.0, 3.0] * 5], [[2.0, 4.0, 6.0] * 5])
    assert found.ratio == pytest.approx(2.0)
    assert found.low < 2.0 < found.high


def test_equal_samples_differ_by_the_spread_of_processes_alone():
    found = compare_samples([[5.0] * 50], [[5.0] * 50])
    assert found.ratio == 1
    assert 0.985 < found.low < 0.995
    assert 1.005 < found.high < 1.015
    assert found.p_value == pytest.approx(1)


def test_the_same_samples_always_give_the_same_interval():
    assert compare_samples(rounds(), rounds(1.05, seed=1)) == compare_samples(rounds(), rounds(1.05, seed=1))


def test_more_rounds_and_a_smaller_confidence_narrow_the_interval():
    def width(count, confidence=0.95):
        found = compare_samples(rounds(count=count), rounds(count=count, seed=1), confidence=confidence)
        return found.high - found.low

    assert width(8) < width(2)
    assert width(3, 0.9) < width(3, 0.99)


WORLDS = [World(), World(memory=0.95), World(processes=0.006, samples=120), World(noise=0.05), World(processes=0.1)]


@pytest.mark.parametrize("world", WORLDS)
def test_the_interval_holds_the_truth_nearly_as_often_as_it_says(world):
    hits = 0
    for seed in range(120):
        found = compare_samples(rounds(1.0, 3, seed, world), rounds(1.1, 3, 1000 + seed, world))
        hits += found.low <= 1.1 <= found.high
    assert hits / 120 >= 0.9


def test_pairs_take_off_what_drifts_between_rounds():
    world = World(drift_a_round=0.2)
    generator = np.random.default_rng(3)
    a = [world.round(generator, 1.0, at) for at in (0, 1, 2, 3)]
    b = [world.round(generator, 1.03, at) for at in (0, 1, 2, 3)]
    paired, apart = compare_samples(a, b, paired=True), compare_samples(a, b)
    assert paired.low > 1
    assert paired.p_value < 0.001
    assert apart.low < 1


@pytest.mark.parametrize(
    ("a", "b", "paired"), [([], [[1.0]], False), ([[1.0]], [[]], False), ([[1.0]], [[1.0]] * 2, True)]
)
def test_sides_without_samples_and_pairs_that_do_not_match_are_refused(a, b, paired):
    with pytest.raises(ValueError, match=r"needs? "):
        compare_samples(a, b, paired)


def test_a_single_sample_a_side_is_compared_but_proves_nothing():
    assert compare_samples([[1.0]], [[2.0]]).p_value > 0.05


def test_samples_that_remember_are_seen():
    generator = np.random.default_rng(0)
    alone = generator.normal(size=400)
    assert memory_length(alone) <= 3
    assert 10 <= memory_length(np.convolve(alone, np.ones(20), "valid")) <= 60
    assert memory_length(np.ones(50)) == 1


def test_p_values_grow_with_the_number_of_tests():
    assert false_discovery([0.01]) == [0.01]
    assert false_discovery([0.01, 1.0, 1.0, 1.0])[0] == pytest.approx(0.04)
    assert false_discovery([]) == []


# The verdict


@pytest.mark.parametrize(
    ("low", "high", "q_value", "verdict"),
    [
        (1.03, 1.05, 0.01, "slower"),
        (0.90, 0.95, 0.01, "faster"),
        (1.03, 1.05, 0.20, "unclear"),
        (0.99, 1.05, 0.01, "unclear"),
        (0.99, 1.01, 0.90, "same"),
        (1.005, 1.015, 0.001, "same"),
        (0.90, 1.10, 0.90, "unclear"),
    ],
)
def test_both_the_test_and_the_interval_must_say_so(low, high, q_value, verdict):
    assert judge(Ratio((low * high) ** 0.5, low, high, q_value), q_value, 0.02) == verdict


@pytest.mark.parametrize(("factor", "verdict"), [(1.08, "slower"), (0.92, "faster"), (1.0, "same")])
def test_runs_are_compared_cell_by_cell(factor, verdict):
    world = World(noise=0.002, drift_a_round=0, drift_within=0)
    a = [[record(s)] for s in rounds(1.0, 4, 0, world)]
    b = [[record(s, peak_allocated_mib=150.0, rel_error={"o": 0.006})] for s in rounds(factor, 4, 1, world)]
    (found,) = compare_runs(a, b)
    assert found.verdict == verdict
    assert (found.memory_ratio, found.error_ratio) == (1.5, 2.0)
    assert found.to_json()["ratio"] == pytest.approx(factor, abs=0.01)


@pytest.mark.parametrize(
    ("b", "reason"),
    [
        ([], "not in B"),
        ([Record("run", CELL, "oom", "CUDA out of memory")], "B: oom, CUDA out of memory"),
        ([record([1.0] * 20, timing="hot")], "timed in different ways: cold, hot"),
    ],
)
def test_what_cannot_be_compared_is_unclear_and_says_why(b, reason):
    (found,) = compare_runs([[record([1.0] * 20)]], [b])
    assert (found.verdict, found.reason, found.ratio) == ("unclear", reason, None)


def test_many_unchanged_cells_raise_no_alarm():
    cells = [replace(CELL, seqlen=64 * n) for n in range(1, 41)]

    def side(seed):
        generator = np.random.default_rng(seed)
        return [[record(World().round(generator), cell) for cell in cells] for _ in range(3)]

    verdicts = [found.verdict for found in compare_runs(side(1), side(2))]
    assert not {"slower", "faster"} & set(verdicts)


# Environments


def test_other_devices_are_refused_unless_asked_for():
    h100, h200 = ({"device": "cuda", "cpu": "x", "gpu": {"name": name}} for name in ("NVIDIA H100", "NVIDIA H200"))
    with pytest.raises(UsageError, match=r"NVIDIA H100.*NVIDIA H200.*--any-device"):
        check_same_device(h100, h200, allow=False)
    check_same_device(h100, h200, allow=True)
    check_same_device(h100, h100 | {"cpu": "y"}, allow=False)
    assert device_name({"device": "cpu", "cpu": "x", "gpu": {"name": "unused"}}) == "x"
    assert device_name({}) == "an unknown machine"


def test_what_differs_between_environments_is_listed_and_what_passes_is_not():
    a = {"gpu": {"name": "H200", "driver": "1"}, "busy": {"utilization_pct": 0}, "packages": {"torch": "2.11"}}
    b = {"gpu": {"name": "H200", "driver": "2"}, "busy": {"utilization_pct": 9}, "packages": {"torch": "2.13"}}
    assert differences(a, b) == [("gpu driver", "1", "2"), ("packages torch", "2.11", "2.13")]


# Showing it


@pytest.fixture
def comparison():
    cells = [replace(CELL, seqlen=2**n) for n in range(6, 12)]
    generator = np.random.default_rng(0)
    a = [[record(World().round(generator), cell) for cell in cells]]
    b = [
        [
            record(World().round(generator, factor), c)
            for c, factor in zip(cells, (0.5, 0.9, 1, 1.02, 1.2, 3), strict=True)
        ]
    ]
    b[0][3] = Record("run", cells[3], "error", "RuntimeError: a | b")
    return Comparison("main", "HEAD", compare_runs(a, b), [("gpu driver", "1", "2")], (1980.0, 1700.0))


def test_markdown_shows_every_cell_what_differs_and_the_clocks(comparison):
    page = markdown(comparison)
    assert page.count("| gla-triton fwd") == 6
    assert "- gpu driver: 1 -> 2" in page
    assert "1980 -> 1700 MHz" in page
    assert "a \\| b" in page
    assert summary(comparison) in page


def test_the_figure_is_sorted_on_a_log_axis_and_always_the_same(comparison, tmp_path):
    axes = draw_ratios(comparison).axes[0]
    assert axes.get_xscale() == "log"
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert [label.split("T=")[1].split()[0] for label in labels] == ["64", "128", "256", "1024", "2048"]
    first, second = (save(draw_ratios(comparison), tmp_path, name, (".svg",))[0].read_bytes() for name in ("a", "b"))
    assert first == second


def test_a_figure_of_nothing_is_drawn_all_the_same(comparison, tmp_path):
    nothing = replace(comparison, cells=[c for c in comparison.cells if c.ratio is None])
    assert save(draw_ratios(nothing), tmp_path, "none", (".png",))[0].stat().st_size > 0
