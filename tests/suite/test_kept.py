"""Samples that are kept by chance: each as likely as any other, and few if they are large."""

from collections import Counter
from random import Random

import pytest
import torch

from glabench.measure.kept import Kept, Reservoir


def offered(count, numbers=4, seed=0):
    reservoir = Reservoir(Random(seed))
    for number in range(count):
        reservoir.offer(Kept(number, [], [{"o": torch.empty(numbers, device="meta")}], {}))
    return [one.seed for one in reservoir.kept]


def test_every_sample_is_as_likely_to_stay():
    found = Counter(number for seed in range(2000) for number in offered(20, seed=seed))
    assert set(found) == set(range(20))
    assert all(0.2 < times / 2000 < 0.3 for times in found.values())


@pytest.mark.parametrize(("numbers", "stay"), [(4, 5), (2**26, 4), (2**28, 1), (2**30, 1)])
def test_large_samples_leave_room_for_others(numbers, stay):
    assert len(offered(20, numbers)) == stay


def test_a_few_samples_all_stay():
    assert offered(3) == [0, 1, 2]
