"""The part of an environment that reports describe, held against its types when a run folder is read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from glabench.sweeps.fields import read_fields


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
    environment = _checked(_Described, data)
    if environment.get("gpu") is not None:
        environment["gpu"] = _checked(_Gpu, environment["gpu"])
    return environment


def _checked(owner: type, data: Any) -> dict[str, Any]:
    values = read_fields(owner, data)
    return {**data, **values}
