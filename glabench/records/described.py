"""The part of an environment that reports describe, held against its types when a run folder is read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from glabench.errors import printable
from glabench.records.rates import Ceilings
from glabench.sweeps.fields import read_fields

_DEEPEST = 8


@dataclass(frozen=True)
class _Gpu:
    name: str


@dataclass(frozen=True)
class _Described:
    device: str | None = None
    cpu: str | None = None
    packages: Mapping[str, str | None] = field(default_factory=dict)


def check_environment(data: Any) -> dict[str, Any]:
    """An environment that was read from a file, good to be described. Raises ValueError that names a wrong key."""
    environment = _checked(_Described, _printable(data))
    for key, owner in (("gpu", _Gpu), ("ceilings", Ceilings)):
        if environment.get(key) is not None:
            environment[key] = _checked(owner, environment[key])
    return environment


def _checked(owner: type, data: Any) -> dict[str, Any]:
    values = read_fields(owner, data)
    return {**data, **values}


def _printable(value: Any, depth: int = 0) -> Any:
    if depth > _DEEPEST:
        raise ValueError(f"tables or lists in one another, more than {_DEEPEST} deep")
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_printable(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {printable(key): _printable(item, depth + 1) for key, item in value.items()}
    return value
