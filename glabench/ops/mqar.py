"""Multi-query associative recall: rows that name pairs of a key and a value, then ask for values by their keys.

As Arora et al. define it ("Zoology", 2023, section 4 and appendix): a row begins with its pairs, key before value; then
each key comes once more, at a slot of two tokens whose distance behind the pairs follows a power law, and the token to
predict there is its value. All other tokens are 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Generator, Tensor

# The power law of the slots, of which early ones are likelier: p(i) ~ i^(0.01 - 1) for slots i = 1, 2, ...
_POWER = 0.01


class Rows(NamedTuple):
    """tokens [N, T]; places [N, n] of the n queries of a row, and the values [N, n] to predict there."""

    tokens: Tensor
    places: Tensor
    values: Tensor


def check_sizes(seqlen: int, pairs: int, vocabulary: int) -> None:
    """Raises ValueError, with what is allowed, if rows of these sizes cannot be made."""
    if seqlen % 2 or 4 * pairs > seqlen:
        raise ValueError(f"rows of {seqlen} tokens take up to {seqlen // 4} pairs, and have an even number of tokens")
    if vocabulary // 2 - 1 < pairs:
        raise ValueError(f"{pairs} pairs need a vocabulary of at least {2 * pairs + 2} tokens")


def make_rows(count: int, seqlen: int, pairs: int, vocabulary: int, generator: Generator) -> Rows:
    """Rows drawn at random, on the generator's device.

    Keys are from 1 to vocabulary / 2 - 1, values from there on, neither twice in a row. Raises ValueError for sizes
    that do not fit.
    """
    check_sizes(seqlen, pairs, vocabulary)
    half, slots = vocabulary // 2, (seqlen - 2 * pairs) // 2
    keys = 1 + _distinct(count, pairs, half - 1, generator)
    values = half + _distinct(count, pairs, vocabulary - half, generator)
    chosen = _slots(count, pairs, slots, generator)
    tokens = torch.zeros(count, seqlen, dtype=torch.int64, device=generator.device)
    tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = keys, values
    places = 2 * pairs + 2 * chosen
    return Rows(tokens.scatter_(1, places, keys), places, values)


def _distinct(count: int, number: int, below: int, generator: Generator) -> Tensor:
    """Rows of numbers from 0 to `below` - 1 without repeats: rows that have some are drawn again."""
    drawn = torch.empty(count, number, dtype=torch.int64, device=generator.device)
    missing = torch.arange(count, device=generator.device)
    while len(missing):
        if number * number > 4 * below:  # too few rows would be free of repeats
            noise = torch.rand(len(missing), below, generator=generator, device=generator.device)
            drawn[missing] = noise.topk(number).indices
            return drawn
        new = torch.randint(below, (len(missing), number), generator=generator, device=generator.device)
        drawn[missing] = new
        ordered = new.sort().values
        missing = missing[(ordered[:, 1:] == ordered[:, :-1]).any(1)]
    return drawn


def _slots(count: int, number: int, slots: int, generator: Generator) -> Tensor:
    """Slots from 0 on by the power law, one after another without repeats: the largest of Gumbel-distributed scores."""
    weights = torch.arange(1, slots + 1, device=generator.device, dtype=torch.float64) ** (_POWER - 1)
    noise = torch.rand(count, slots, generator=generator, device=generator.device)
    scores = weights.log().float() - (-noise.clamp_min(torch.finfo(torch.float32).tiny).log()).log()
    return scores.topk(number).indices
