"""The axis grammar: `1k..16k`, `1k..4k:+1k`, `1k,3k`, `on,off`, `fwd,fwd+bwd`.

An axis is a comma-separated list. An item of a numeric axis is a number (`64`, `4k`, `1m`; k = 1024, m = 1024 * 1024)
or a range `LOW..HIGH`, which doubles from LOW up to HIGH, or `LOW..HIGH:+STEP`, or `LOW..HIGH:*FACTOR`. HIGH is part of
the range if the steps reach it. The order is kept; repeats are dropped.
"""

import math
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from glabench.errors import UsageError, did_you_mean

_NUMBER = re.compile(r"([0-9]+)([km]?)", re.IGNORECASE)
_UNIT = {"": 1, "k": 1024, "m": 1024**2}
# What a sweep file may have instead of these words.
_SWITCHES = {"on": " (true)", "off": " (false)"}
_MOST_VALUES = 1000
_LARGEST = 2**40
_LONGEST_SHOWN = 200
Value = TypeVar("Value")

INTEGER_FORM = "a number (64, 4k), a list (1k,3k) or a range (1k..16k doubles, 1k..4k:+1k adds, 1k..1m:*4 multiplies)"


def parse_number(text: str) -> int:
    """`64` -> 64, `4k` -> 4096, `1m` -> 1048576. Raises ValueError for other text, 0, and numbers above 2**40."""
    found = _NUMBER.fullmatch(text.strip())
    if not found or not found[1].strip("0"):
        raise ValueError(f"'{text.strip()}'{_SWITCHES.get(text.strip(), '')} is not a positive whole number")
    # A very long number would make `int` raise an error with a less helpful message.
    value = int(found[1]) * _UNIT[found[2].lower()] if len(found[1]) < 30 else _LARGEST + 1
    if value > _LARGEST:
        raise ValueError(f"'{text.strip()}' is too large; the largest number is {format_number(_LARGEST)}")
    return value


def parse_amounts(text: str) -> tuple[float, ...]:
    """`1e-3,0.01` -> 0.001, 0.01. Raises ValueError for what is no number above 0."""
    values = []
    for item in text.split(","):
        try:
            value = float(item)
        except ValueError:
            raise ValueError(f"'{item.strip()}' is not a number") from None
        if not 0 < value < math.inf:
            raise ValueError(f"'{item.strip()}' is not a number above 0")
        values.append(value)
    return tuple(dict.fromkeys(values))


def format_number(value: int) -> str:
    """The inverse of `parse_number`, as short as possible without rounding: 4096 -> `4k`, 1000 -> `1000`."""
    for unit in ("m", "k"):
        if value >= _UNIT[unit] and value % _UNIT[unit] == 0:
            return f"{value // _UNIT[unit]}{unit}"
    return str(value)


def _parse_range(item: str) -> list[int]:
    bounds, colon, step_text = item.partition(":")
    low_text, _, high_text = bounds.partition("..")
    low, high = parse_number(low_text), parse_number(high_text)
    if low > high:
        raise ValueError(f"'{item}' runs downwards; give the smaller end first")
    step_text = step_text.strip() if colon else "*2"
    sign, amount = step_text[:1], step_text[1:]
    if sign not in ("+", "*"):
        raise ValueError(f"'{step_text}' is not a step; a step is +512 or *4")
    step = parse_number(amount)
    if sign == "*" and step < 2:
        raise ValueError(f"'{step_text}' never advances; a factor is at least 2")
    values, value = [], low
    while value <= high:
        values.append(value)
        if len(values) > _MOST_VALUES:
            raise ValueError(f"'{item}' has more than {_MOST_VALUES} values")
        value = value + step if sign == "+" else value * step
    return values


def parse_integers(text: str) -> tuple[int, ...]:
    """The values of a numeric axis. Raises ValueError that says which part is wrong."""
    values: list[int] = []
    for item in text.split(","):
        values += _parse_range(item) if ".." in item else [parse_number(item)]
        if len(values) > _MOST_VALUES:
            raise ValueError(f"it has more than {_MOST_VALUES} values")
    return tuple(dict.fromkeys(values))


def parse_choices(text: str, allowed: Iterable[str]) -> tuple[str, ...]:
    """The values of an axis of names. Raises ValueError for a name that is not allowed."""
    known = tuple(allowed)
    names = tuple(dict.fromkeys(item.strip() for item in text.split(",")))
    for name in names:
        if name not in known:
            raise ValueError(f"'{name}' is not allowed{did_you_mean(name, known)}")
    return names


def axis_text(value: Any) -> str:
    """Values from Python or TOML as text in the grammar: [16, None] -> `16,auto`, True -> `on`. Text is unchanged.

    Raises ValueError for a value that no axis takes.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and value:
        return ",".join(map(axis_text, value))
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and 0 < value <= _LARGEST:
        return str(value)
    raise ValueError('an axis takes text such as "1k..16k", a positive whole number, true or false, or a list of these')


def parse_axis(option: str, text: str, parse: Callable[[str], Value], allowed: str) -> Value:
    """Parses one axis. Raises UsageError that names the option or key, the value and what is allowed."""
    try:
        values = parse(text)
        if not isinstance(values, tuple | list):
            raise TypeError("it returns no tuple")
    except ValueError as problem:
        got = "" if f"'{text}'" in str(problem) else f"got '{_cut(text)}'; "
        raise UsageError(f"{option}: {_cut(str(problem))} ({got}allowed: {allowed})") from None
    except Exception as problem:  # a plugin's parser
        why = _cut(f"{type(problem).__name__}: {problem}")
        raise UsageError(f"{option}: its parser fails for '{_cut(text)}' (allowed: {allowed}): {why}") from problem
    return values


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "…"
