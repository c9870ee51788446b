"""Plain data from files and workers, held against the types of dataclasses.

What a run folder holds may come from anybody: a value that is not of its field's type is refused here, by name, so
that nothing that reads records has to doubt them.
"""

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec

from glabench.errors import printable

# Far beyond what is measured, and near enough that no ratio and no axis of a figure overflows.
_LEAST, _MOST = 1e-18, 2**63 - 1
_DEEPEST = 8
_LONGEST_SHOWN = 60
_Read = TypeVar("_Read")

Whole = Annotated[int, msgspec.Meta(ge=-_MOST, le=_MOST)]
Number = Annotated[float, msgspec.Meta(ge=-_MOST, le=_MOST)]
# What is divided by, or drawn on a logarithmic axis.
Count = Annotated[int, msgspec.Meta(ge=1, le=_MOST)]
Amount = Annotated[float, msgspec.Meta(ge=_LEAST, le=_MOST)]


def shown(value: Any) -> str:
    """A value for a message: short, and in one line."""
    try:
        text = printable(repr(value))
    except (ValueError, RecursionError):  # a number of thousands of digits, or tables in tables without end
        return f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 1] + "…"


def read_json(data: bytes | str) -> Any:
    """JSON as plain data. Raises ValueError for anything else, numbers that JSON lacks (NaN, Infinity) among them."""
    return _explained(lambda: msgspec.json.decode(data))


def read_as(kind: type[_Read], data: Any) -> _Read:
    """Plain data as a dataclass; keys that it does not have are passed over. Raises ValueError naming a wrong key."""
    return _explained(lambda: msgspec.convert(data, kind))


def read_text(value: Any, depth: int = 0) -> Any:
    """Plain data with every text in it printable. Raises ValueError for tables and lists nested too deeply."""
    if depth > _DEEPEST:
        raise ValueError(f"tables or lists in one another, more than {_DEEPEST} deep")
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [read_text(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {printable(str(key)): read_text(item, depth + 1) for key, item in value.items()}
    return value


def _explained(read: Callable[[], _Read]) -> _Read:
    try:
        return read()
    except RecursionError:
        raise ValueError("tables or lists in one another without end") from None
    except msgspec.MsgspecError as problem:
        what, _, where = printable(str(problem)).replace("`", "").partition(" - at $")
        key = where.lstrip(".")
        words = what[:1].lower() + what[1:] if what[1:2].islower() else what
        raise ValueError(f"{key}: {words}" if key else words) from None
