"""Two sets of samples: the ratio's interval, the rank test, p values of many tests."""

import numpy as np
import pytest
from simulated import World

from glabench.correlation import correlation_length
from glabench.verdicts.statistics import compare_samples, false_discovery


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
    assert 0.985 < found.low < 0.995
    assert 1.005 < found.high < 1.015
    assert found.p_value == pytest.approx(1)


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
    assert paired.p_value < 0.001
    assert apart.low < 1


@pytest.mark.parametrize(
    ("a", "b", "paired"), [([], [[1.0]], False), ([[1.0]], [[]], False), ([[1.0]], [[1.0]] * 2, True)]
)
def test_sides_without_samples_and_pairs_that_do_not_match_are_refused(a, b, paired):
    with pytest.raises(ValueError, match=r"needs? "):
        compare_samples(a, b, paired)


def test_single_sample_per_side_is_compared_but_proves_nothing():
    assert compare_samples([[1.0]], [[2.0]]).p_value > 0.05


def test_samples_that_remember_are_seen():
    generator = np.random.default_rng(0)
    alone = generator.normal(size=400)
    assert correlation_length(alone) <= 3
    assert 10 <= correlation_length(np.convolve(alone, np.ones(20), "valid")) <= 60
    assert correlation_length(np.ones(50)) == 1


def test_p_values_grow_with_the_number_of_tests():
    assert false_discovery([0.01]) == [0.01]
    assert false_discovery([0.01, 1.0, 1.0, 1.0])[0] == pytest.approx(0.04)
    assert false_discovery([]) == []
