"""Two sets of samples: the ratio's interval. Occasions: what they have in common, and the scatter of cells."""

import math

import numpy as np
import pytest
from simulated import World

from glabench.correlation import correlation_length
from glabench.verdicts.statistics import (
    ASSUMED_FIXED_MS,
    Spread,
    compare_samples,
    excess_variance,
    median_ratio,
    spread_over,
)


def rounds(factor=1.0, count=3, seed=0, world=None):
    generator = np.random.default_rng(seed)
    return [(world or World()).round(generator, factor, at) for at in range(count)]


def test_ratio_is_that_of_the_medians_and_lies_in_its_interval():
    found = compare_samples([[1.0, 2.0, 3.0] * 5], [[2.0, 4.0, 6.0] * 5])
    assert found.ratio == pytest.approx(2.0)
    assert found.low < 2.0 < found.high


def test_equal_samples_differ_by_the_spread_of_processes_alone():
    found = compare_samples([[5.0] * 50], [[5.0] * 50])
    assert found.ratio == 1
    assert 0.98 < found.low < 0.985
    assert 1.015 < found.high < 1.02


def test_same_samples_always_give_the_same_interval():
    assert compare_samples(rounds(), rounds(1.05, seed=1)) == compare_samples(rounds(), rounds(1.05, seed=1))


def test_more_rounds_and_a_smaller_confidence_narrow_the_interval():
    def width(count, confidence=0.95):
        found = compare_samples(rounds(count=count), rounds(count=count, seed=1), confidence=confidence)
        return found.high - found.low

    assert width(8) < width(2)
    assert width(3, 0.9) < width(3, 0.99)


WORLDS = [World(), World(memory=0.95), World(processes=0.006, samples=120), World(noise=0.05), World(processes=0.1)]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("trials", "least"), [(40, 0.85), pytest.param(120, 0.9, marks=pytest.mark.full)])
def test_interval_holds_the_truth_nearly_as_often_as_it_says(world, trials, least):
    hits = 0
    for seed in range(trials):
        found = compare_samples(rounds(1.0, 3, seed, world), rounds(1.1, 3, 1000 + seed, world))
        hits += found.low <= 1.1 <= found.high
    assert hits / trials >= least


def test_pairs_take_off_what_drifts_between_rounds():
    world = World(drift_a_round=0.2)
    generator = np.random.default_rng(3)
    a = [world.round(generator, 1.0, at) for at in (0, 1, 2, 3)]
    b = [world.round(generator, 1.03, at) for at in (0, 1, 2, 3)]
    paired, apart = compare_samples(a, b, paired=True), compare_samples(a, b)
    assert paired.low > 1
    assert apart.low < 1


@pytest.mark.parametrize(
    ("a", "b", "paired"), [([], [[1.0]], False), ([[1.0]], [[]], False), ([[1.0]], [[1.0]] * 2, True)]
)
def test_sides_without_samples_and_pairs_that_do_not_match_are_refused(a, b, paired):
    with pytest.raises(ValueError, match=r"needs? "):
        compare_samples(a, b, paired)


def test_more_rounds_do_not_shrink_what_two_occasions_differ_by():
    few, many = (compare_samples(rounds(count=n), rounds(count=n, seed=1), occasions=0.02) for n in (2, 20))
    assert math.log(many.high / many.low) > 2 * 1.96 * math.sqrt(2) * 0.02
    assert math.log(few.high / few.low) < 2 * 2.5 * math.sqrt(2) * 0.02
    assert compare_samples(rounds(), rounds(seed=1), processes=0.05).high > 1.08


def test_what_samples_do_not_explain_is_the_variance_between_processes():
    world = World(processes=0.05, drift_a_round=0.2)
    drift = rounds(1, 30, 0, world), rounds(1, 30, 1, world)
    assert math.sqrt(excess_variance(*drift, True)) == pytest.approx(0.05, rel=0.25)
    assert math.sqrt(excess_variance(*drift, False)) > 0.5
    assert excess_variance(rounds(count=1), rounds(count=1), False) is None
    assert excess_variance([[1.0] * 9] * 2, [[1.0] * 9] * 2, False) == 0


def test_a_few_ratios_have_no_interval_and_many_have_one_around_their_median():
    assert median_ratio([]) is None
    assert median_ratio([1.0, 1.1, 1.2, 1.3, 1.4]) is None
    found = median_ratio([1 + n / 100 for n in range(25)])
    assert (found.ratio, found.low, found.high) == (1.12, 1.07, 1.17)


def simulated_occasions(count, shift, scatter, cells=24, seed=0):
    generator = np.random.default_rng(seed)
    return [
        {str(n): t for n, t in enumerate(np.exp(s + generator.normal(0, scatter, cells)))}
        for s in generator.normal(0, shift, count)
    ]


def test_the_spread_of_occasions_is_split_into_what_cells_share_and_what_they_do_not():
    found = spread_over(simulated_occasions(200, 0.02, 0.005))
    assert (found.shift, found.scatter) == (pytest.approx(0.02, rel=0.1), pytest.approx(0.005, rel=0.05))
    assert (found.occasions, found.cells) == (200, 24)
    assert found.measured == pytest.approx(math.hypot(found.shift, found.scatter))
    assert found.total == pytest.approx(found.measured, rel=0.02)


def test_few_occasions_count_for_more_than_they_show():
    few = spread_over(simulated_occasions(3, 0.02, 0.001))
    assert few.total > 1.5 * few.measured
    scattered = spread_over(simulated_occasions(3, 0, 0.01))
    assert scattered.measured <= scattered.total < 1.1 * scattered.measured
    assert Spread(0.01, 0.01).total == Spread(0.01, 0.01).measured
    assert Spread(0.01, 0.0, 3, 24, 46).largest_shift > Spread(0.01, 0.0, 30, 24, 667).largest_shift > 1.03
    assert Spread(0, 0, 3, 24, 46).total == 0


def test_cells_of_some_occasions_tell_their_spread_too():
    """One backend's code changes half-way, and its new cells are others: no cell of one occasion alone counts."""
    before, after = simulated_occasions(90, 0.02, 0.005), simulated_occasions(90, 0.02, 0.005, seed=1)
    changed = [{n if int(n) < 4 else f"new {n}": t for n, t in each.items()} for each in after]
    found = spread_over([*before, *changed, {"0": 1.0, "1": 1.0, "alone": 9.0}])
    assert (found.shift, found.scatter) == (pytest.approx(0.02, rel=0.15), pytest.approx(0.005, rel=0.05))
    assert (found.occasions, found.cells, found.freedom) == (181, 44, 180 * 24 + 2 - 44 - 181 + 1)


def with_fixed_times(count, seed=0):
    """Long and short cells of two backends: one has a fixed time per call that differs by 2 us between occasions."""
    generator = np.random.default_rng(seed)
    sizes = {("steady", 0.02), ("steady", 3.0), ("jumping", 0.05), ("jumping", 3.0)}
    cells = [(name, ms * (1 + n / 10)) for name, ms in sorted(sizes) for n in range(8)]
    return [
        {(name, ms): ms * np.exp(generator.normal(0, 0.003)) + (jump if name == "jumping" else 0) for name, ms in cells}
        for jump in generator.normal(0, 0.002, count)
    ]


def test_short_cells_show_what_differs_per_call_however_long_it_takes():
    found = spread_over(with_fixed_times(60), lambda cell: cell[0])
    assert found.cells == 16  # the long ones
    assert found.scatter == pytest.approx(0.003, rel=0.1)
    assert found.fixed_ms["jumping"] == pytest.approx(0.002, rel=0.2)
    assert found.fixed_ms["steady"] < 1e-4
    assert found.at("jumping", 0.05) == pytest.approx(found.fixed_ms["jumping"] / 0.05, rel=0.1)
    assert found.at("jumping", 3.0) == pytest.approx(found.total, rel=0.1)
    assert found.at("another", 0.01) == pytest.approx(ASSUMED_FIXED_MS / 0.01, rel=0.01)


def test_few_occasions_count_for_more_than_their_short_cells_show():
    few, many = (spread_over(with_fixed_times(count), lambda cell: cell[0]) for count in (3, 60))
    assert few.at("jumping", 0.05) > 3 * few.fixed_ms["jumping"] / 0.05
    assert many.at("jumping", 0.05) < 1.1 * many.fixed_ms["jumping"] / 0.05


def test_too_few_short_cells_show_nothing_and_without_long_ones_all_cells_show_the_spread():
    long = [{cell: ms for cell, ms in each.items() if ms > 1 or cell[1] < 0.055} for each in with_fixed_times(9)]
    assert "jumping" not in spread_over(long, lambda cell: cell[0]).fixed_ms
    short = [{cell: ms for cell, ms in each.items() if ms < 1} for each in with_fixed_times(9)]
    assert spread_over(short, lambda cell: cell[0]).cells == 16


def test_occasions_that_share_too_few_cells_have_no_spread():
    assert spread_over([]) is None
    assert spread_over([{"a": 1.0, "b": 2.0}]) is None
    assert spread_over([{"a": 1.0, "b": 2.0}, {"a": 1.0, "c": 2.0}]) is None
    apart = [{"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 2.0}, {"c": 1.0, "d": 2.0}, {"c": 1.0, "d": 2.0}]
    assert spread_over(apart) is None
    alike = spread_over([{"a": 1.0, "b": 2.0, "c": 9.0}, {"a": 1.0, "b": 2.0}])
    assert (alike.measured, alike.occasions, alike.cells, alike.freedom) == (pytest.approx(0, abs=1e-12), 2, 2, 1)


def test_samples_that_remember_are_seen():
    generator = np.random.default_rng(0)
    alone = generator.normal(size=400)
    assert correlation_length(alone) <= 3
    assert 10 <= correlation_length(np.convolve(alone, np.ones(20), "valid")) <= 60
    assert correlation_length(np.ones(50)) == 1
