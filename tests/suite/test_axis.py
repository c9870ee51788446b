"""The axis grammar."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glabench.backends import load_registry
from glabench.errors import UsageError
from glabench.sweeps.axis import axis_text, format_number, parse_axis, parse_choices, parse_integers, parse_number
from glabench.sweeps.expand import parameters_of
from glabench.sweeps.parameters import parse_names

AXES = parameters_of(load_registry().traits().values())
numbers = st.integers(1, 2**24)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1k..16k", (1024, 2048, 4096, 8192, 16384)),
        ("1k..4k:+1k", (1024, 2048, 3072, 4096)),
        ("1k,3k", (1024, 3072)),
        ("64", (64,)),
        ("1..100:*10", (1, 10, 100)),
        ("1k..5k", (1024, 2048, 4096)),
        ("512..2k", (512, 1024, 2048)),
        ("8..8", (8,)),
        ("4k,1k..4k", (4096, 1024, 2048)),
        (" 1K , 2K ", (1024, 2048)),
        ("1m", (1048576,)),
    ],
)
def test_examples(text, values):
    assert parse_integers(text) == values


@pytest.mark.parametrize(
    "text",
    ["", "0", "x", "5x", "-1", "1.5k", "1k..", "..4k", "4k..1k", "1k..4k:", "1k..4k:-1", "1..4:*1", "1,,2", "1..1m:+1"],
)
def test_mistakes_raise(text):
    with pytest.raises(ValueError, match="'"):
        parse_integers(text)


@given(numbers)
def test_a_number_survives_being_written_and_read(value):
    assert parse_number(format_number(value)) == value


@given(numbers, numbers)
def test_a_doubling_range_doubles_within_its_bounds(a, b):
    low, high = min(a, b), max(a, b)
    values = parse_integers(f"{low}..{high}")
    assert values[0] == low
    assert all(y == 2 * x for x, y in itertools.pairwise(values))
    assert values[-1] <= high < 2 * values[-1]


@given(st.integers(1, 2**20), st.integers(1, 2**10), st.integers(0, 100))
def test_an_adding_range_is_a_range(low, step, count):
    assert parse_integers(f"{low}..{low + step * count}:+{step}") == tuple(range(low, low + step * count + 1, step))


@given(st.integers(1, 1000), st.integers(2, 10), st.integers(0, 5))
def test_a_multiplying_range_multiplies(low, factor, count):
    values = parse_integers(f"{low}..{low * factor**count}:*{factor}")
    assert values == tuple(low * factor**i for i in range(count + 1))


@given(st.lists(numbers, min_size=1, max_size=20))
def test_a_list_keeps_its_order_without_repeats(values):
    assert parse_integers(",".join(map(format_number, values))) == tuple(dict.fromkeys(values))


@given(st.text(max_size=20))
def test_any_text_gives_positive_values_or_a_value_error(text):
    try:
        values = parse_integers(text)
    except ValueError:
        return
    assert values
    assert all(value > 0 for value in values)


def test_an_unknown_name_is_refused_with_those_allowed_and_the_nearest():
    with pytest.raises(ValueError, match=r"'fast' is not allowed$"):
        parse_choices("on,fast", ("on", "off"))
    with pytest.raises(ValueError, match=r"'resetz' is not allowed; did you mean 'resets'\?$"):
        parse_choices("resetz", ("slow", "resets"))


@pytest.mark.parametrize(
    ("axis", "text", "values"),
    [
        ("materialize", "states,off,nothing", ("states", "checkpoints", "nothing")),
        ("chunk", "auto,64", (None, 64)),
        ("chunk", "16..64", (16, 32, 64)),
        ("pass", "fwd,fwd+bwd", ("fwd", "fwd+bwd")),
        ("dtype", "bf16", ("bf16",)),
        ("head_dim", "64,128", (64, 128)),
        ("inner", "2k", (2048,)),
        ("width", "1k..2k", (1024, 2048)),
        ("gate", "slow,resets", ("slow", "resets")),
    ],
)
def test_every_axis_uses_the_grammar(axis, text, values):
    assert AXES[axis].parse(text) == values


def test_names_of_backends_keep_their_order_and_are_not_empty():
    assert parse_names("b, a,b") == ("b", "a")
    with pytest.raises(ValueError, match="has an empty name"):
        parse_names("a,,b")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("1k..4k", "1k..4k"),
        (64, "64"),
        ([16, 32], "16,32"),
        ((16, None), "16,auto"),
        (None, "auto"),
        ([True, False], "on,off"),
        (["1k..4k", 5000], "1k..4k,5000"),
        ([["fwd"], "bwd"], "fwd,bwd"),
    ],
)
def test_values_of_python_and_toml_become_text_of_the_grammar(value, text):
    assert axis_text(value) == text


@pytest.mark.parametrize("value", [0, -1, 2**41, 2.5, [], (), {}, {"a": 1}, [1, [2.5]], b"64", float("nan"), object()])
def test_what_no_axis_takes_is_refused(value):
    with pytest.raises(ValueError, match="an axis takes text such as"):
        axis_text(value)


def test_a_mistake_names_the_option_the_value_and_what_is_allowed():
    axis = AXES["materialize"]
    with pytest.raises(UsageError) as problem:
        parse_axis(axis.option, "maybe", axis.parse, axis.allowed)
    assert str(problem.value).startswith("--materialize: 'maybe'")
    assert "allowed: states, checkpoints, nothing" in str(problem.value)
