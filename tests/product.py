"""A test's cases as a product of axes. Some run by default, all with --full."""

import itertools
from collections.abc import Callable, Iterable

import pytest


def product(default: Callable[..., bool], **axes: Iterable[object]) -> pytest.MarkDecorator:
    """Parametrizes a test with all combinations, the last axis being the fastest.

    An axis is a list of values, or a dict of values by name. `default` gets the names, or the values without names; the
    combinations for which it is false are marked `full`.
    """
    named = [axis.items() if isinstance(axis, dict) else [(value, value) for value in axis] for axis in axes.values()]
    cases = []
    for combination in itertools.product(*named):
        names, values = zip(*combination, strict=True)
        marks = () if default(*names) else pytest.mark.full
        cases.append(pytest.param(*values, marks=marks, id="-".join(map(str, names))))
    return pytest.mark.parametrize(list(axes), cases)
