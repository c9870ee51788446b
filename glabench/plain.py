"""Plain data from files and workers, checked against the types of dataclasses.

Run folders may come from unknown sources. A value that does not fit its field's type is refused here, by name, so that
readers of records can rely on them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from glabench.errors import printable

# Far beyond any measured value, but small enough that no ratio and no axis of a figure overflows.
_LEAST, _MOST = 1e-18, 2**63 - 1
_DEEPEST = 8
_LONGEST_TEXT = 10_000
_LONGEST_SHOWN = 60
_Read = TypeVar("_Read")

# Names and titles, which go into tables and figures: drawing very long ones takes minutes.
Name = Annotated[str, msgspec.Meta(max_length=300)]
Whole = Annotated[int, msgspec.Meta(ge=-_MOST, le=_MOST)]
Natural = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]
Number = Annotated[float, msgspec.Meta(ge=-_MOST, le=_MOST)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=_MOST)]
# Positive numbers: for division and logarithmic axes.
Count = Annotated[int, msgspec.Meta(ge=1, le=_MOST)]
Amount = Annotated[float, msgspec.Meta(ge=_LEAST, le=_MOST)]


def shown(value: Any) -> str:
    """A value as short text in one line, for messages."""
    try:
        text = printable(repr(value))
    except Exception:  # a number of thousands of digits, endlessly nested tables, or an object of a plugin's
        return f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 1] + "…"


def read_file(path: Path, most_bytes: int) -> bytes:
    """A whole file, which may be a stranger's. Raises ValueError, without reading it all, if it is too large."""
    with path.open("rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        size = f"{most_bytes // 2**20} MiB" if most_bytes >= 2**20 else f"{most_bytes // 2**10} KiB"
        raise ValueError(f"it is too large (allowed: {size})")
    return data


def read_json(data: bytes | str) -> Any:
    """JSON as plain data. Raises ValueError for anything else, including NaN and Infinity, which JSON lacks."""
    return _explained(lambda: msgspec.json.decode(data))


def read_as(kind: type[_Read], data: Any) -> _Read:
    """Plain data as a dataclass; unknown keys are ignored. Raises ValueError that names the wrong key."""
    return _explained(lambda: msgspec.convert(data, kind))


def read_text(value: Any, depth: int = 0) -> Any:
    """Plain data with all text in it made printable. Raises ValueError for text that is too long, and deep nesting."""
    if depth > _DEEPEST:
        raise ValueError(f"tables or lists are nested more than {_DEEPEST} deep")
    if isinstance(value, str):
        if len(value) > _LONGEST_TEXT:
            raise ValueError(f"it holds text of more than {_LONGEST_TEXT} characters")
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
        raise ValueError("tables or lists are nested too deeply") from None
    except msgspec.MsgspecError as problem:
        what, _, where = printable(str(problem)).replace("`", "").partition(" - at $")
        key = where.lstrip(".")
        words = what[:1].lower() + what[1:] if what[1:2].islower() else what
        words = words.replace("object missing required field", "it has no")
        raise ValueError(f"{key}: {words}" if key else words) from None
