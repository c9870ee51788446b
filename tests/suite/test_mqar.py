"""Rows of multi-query associative recall are as defined, and are made fast."""

import time

import pytest
import torch

from glabench.ops.mqar import make_rows

SIZES = [(64, 4, 8192), (128, 8, 8192), (512, 64, 8192), (64, 16, 34)]


def rows_of(count, T, pairs, vocabulary, seed=0):
    return make_rows(count, T, pairs, vocabulary, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("T", "pairs", "vocabulary"), SIZES)
def test_a_row_names_its_pairs_and_then_asks_for_each_once(T, pairs, vocabulary):
    half = vocabulary // 2
    for tokens, places, values in zip(*rows_of(50, T, pairs, vocabulary), strict=True):
        row = tokens.tolist()
        known = dict(zip(row[0 : 2 * pairs : 2], row[1 : 2 * pairs : 2], strict=True))
        assert len(known) == len(set(known.values())) == pairs
        assert all(1 <= key < half <= value < vocabulary for key, value in known.items())
        asked = {place: row[place] for place in places.tolist()}
        assert sorted(asked.values()) == sorted(known)
        assert [known[row[place]] for place in places.tolist()] == values.tolist()
        assert all(place >= 2 * pairs and place % 2 == 0 for place in asked)
        assert all(token == 0 for place, token in enumerate(row[2 * pairs :], 2 * pairs) if place not in asked)


def test_slots_follow_the_power_law():
    """The first key's slot is drawn with p(i) ~ i^-0.99, whatever the others' are."""
    T, pairs, count = 64, 4, 40_000
    first = (rows_of(count, T, pairs, 8192).places[:, 0] - 2 * pairs) // 2
    weights = torch.arange(1, 29, dtype=torch.float64) ** -0.99
    expected = count * weights / weights.sum()
    found = torch.bincount(first, minlength=28).double()
    assert len(found) == 28
    # Chi squared with 27 degrees of freedom: 55.5 is exceeded once in a thousand times.
    assert ((found - expected) ** 2 / expected).sum() < 55.5


def test_keys_and_values_are_drawn_evenly():
    rows = rows_of(20_000, 64, 16, 66)
    counts = torch.bincount(rows.tokens[:, :32:2].flatten(), minlength=33)[1:]
    assert counts.min() > 0.95 * counts.float().mean()
    assert counts.max() < 1.05 * counts.float().mean()


def test_rows_depend_on_the_seed_alone():
    first, again, other = (rows_of(10, 64, 4, 8192, seed) for seed in (0, 0, 1))
    assert torch.equal(first.tokens, again.tokens)
    assert not torch.equal(first.tokens, other.tokens)


def test_a_hundred_thousand_rows_are_made_in_seconds_at_most():
    start = time.perf_counter()
    rows_of(100_000, 128, 8, 8192)
    assert time.perf_counter() - start < 5  # about 0.3 on an idle core


@pytest.mark.parametrize(
    ("T", "pairs", "vocabulary", "said"),
    [
        (64, 17, 8192, "rows of 64 tokens take up to 16 pairs"),
        (63, 4, 8192, "have an even number of tokens"),
        (64, 4, 8, "4 pairs need a vocabulary of at least 10 tokens"),
    ],
)
def test_sizes_that_do_not_fit_are_named(T, pairs, vocabulary, said):
    with pytest.raises(ValueError, match=said):
        rows_of(1, T, pairs, vocabulary)
