"""The part of an environment that reports describe, and its type check when a run folder is read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from glabench.plain import Amount, Whole, read_as, read_text


@dataclass(frozen=True)
class _Gpu:
    name: str


@dataclass(frozen=True)
class _Ceilings:
    copy_gbps: Amount | None = None
    product_tflops: Amount | None = None


@dataclass(frozen=True)
class _Described:
    device: str | None = None
    cpu: str | None = None
    gpu: _Gpu | None = None
    ceilings: _Ceilings | None = None
    packages: Mapping[str, str | None] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    plugins: list[str] = field(default_factory=list)
    cells: Whole | None = None
    version: str | None = None


def check_environment(data: Any) -> dict[str, Any]:
    """An environment read from a file, checked and printable. Raises ValueError that names the wrong key."""
    environment = read_text(data)
    read_as(_Described, environment)
    return {"packages": {}, **environment}


def device_name(environment: Mapping[str, Any]) -> str:
    """The name of the GPU, or of the CPU if the run was made on a CPU."""
    gpu = environment.get("gpu")
    if environment.get("device") != "cpu" and isinstance(gpu, Mapping):
        return str(gpu.get("name"))
    return str(environment.get("cpu") or "an unknown machine")
