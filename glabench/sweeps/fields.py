"""Plain data of files and workers, held against the types that a dataclass gives its fields.

What a run folder holds may come from anybody: a value that is not of its field's type is refused here, by name, so
that nothing that reads records has to doubt them.
"""

import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from glabench.errors import printable

POSITIVE = "positive"
# What is divided by, or drawn on a logarithmic axis.
Count = Annotated[int, POSITIVE]
Amount = Annotated[float, POSITIVE]

# Far beyond what is measured, and near enough that no ratio and no axis of a figure overflows.
_LEAST, _MOST = 1e-18, 2**63 - 1
_LONGEST_SHOWN = 60
_Fit = Callable[[Any], Any]


def shown(value: Any) -> str:
    """A value for a message: short, and in one line."""
    try:
        text = printable(repr(value))
    except (ValueError, RecursionError):  # a number of thousands of digits, or tables in tables without end
        return f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 1] + "…"


def read_fields(
    owner: type, data: Any, names: Mapping[str, str] | None = None, skip: Collection[str] = ()
) -> dict[str, Any]:
    """The values of a dataclass' fields in `data`; other keys are passed over, and fields with a default may be absent.

    `names` gives the keys of fields that are called otherwise in `data`. Texts come back printable, lists as tuples
    where the field is one. Raises ValueError that names the first key that is missing or of another type.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"it needs to be a table of fields, got {shown(data)}")
    hints = _hints(owner)
    values = {}
    for field in fields(owner):
        key = (names or {}).get(field.name, field.name)
        if field.name in skip:
            continue
        if key in data:
            try:
                values[field.name] = _fit_of(hints[field.name])(data[key])
            except TypeError:
                raise ValueError(f"{key} needs {_words(hints[field.name])}, got {shown(data[key])}") from None
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{key} is missing")
    return values


@cache
def _hints(owner: type) -> dict[str, Any]:
    return get_type_hints(owner, include_extras=True)


@cache
def _fit_of(hint: Any) -> _Fit:
    """What turns a value into one of the type, or raises TypeError; made once a type, as runs hold many numbers."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _positive(_fit_of(arguments[0])) if POSITIVE in arguments[1:] else _fit_of(arguments[0])
    if origin in (Union, types.UnionType):
        return _any_of([_fit_of(argument) for argument in arguments])
    if origin is Literal:
        return _only(lambda value: isinstance(value, str) and value in arguments)
    if origin is tuple:
        return _tuple_of(_fit_of(arguments[0]))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _table_of(_fit_of(arguments[1]))
    return _PLAIN[hint]


def _only(fits: Callable[[Any], bool]) -> _Fit:
    def fit(value: Any) -> Any:
        if not fits(value):
            raise TypeError
        return value

    return fit


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return printable(value)


def _is_number(value: Any) -> bool:
    # The largest first: a whole number may be too large for a float.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MOST


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and _is_number(value)


_PLAIN: Mapping[Any, _Fit] = {
    str: _text,
    float: _only(_is_number),
    int: _only(_is_whole),
    bool: _only(lambda value: isinstance(value, bool)),
    type(None): _only(lambda value: value is None),
    Any: lambda value: value,
}


def _positive(fit: _Fit) -> _Fit:
    def checked(value: Any) -> Any:
        if fit(value) < _LEAST:
            raise TypeError
        return value

    return checked


def _any_of(fits: list[_Fit]) -> _Fit:
    def fit(value: Any) -> Any:
        for one in fits:
            try:
                return one(value)
            except TypeError:
                continue
        raise TypeError

    return fit


def _tuple_of(fit: _Fit) -> _Fit:
    def checked(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise TypeError
        return tuple(fit(item) for item in value)

    return checked


def _table_of(fit: _Fit) -> _Fit:
    def checked(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise TypeError
        return {_text(key): fit(item) for key, item in value.items()}

    return checked


def _words(hint: Any) -> str:
    """What a type allows, for a message."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _words(arguments[0]) + (" above 0" if POSITIVE in arguments[1:] else "")
    if origin in (Union, types.UnionType):
        return " or ".join(_words(argument) for argument in arguments)
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin is tuple:
        return f"a list (each {_words(arguments[0])})"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"a table (each {_words(arguments[1])})"
    return {str: "a text", float: "a number", int: "a whole number", bool: "true or false"}.get(hint, "null")
