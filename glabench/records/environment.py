"""Environments: what a run stores about its machine, settings and code. They are checked when they are read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from glabench.plain import Amount, Name, Whole, read_as, read_text

# Keys that differ from moment to moment, or that were not asked for: no difference between machines.
MOMENTARY = frozenset({"busy", "ceilings", "cells", "command", "gpus", "implementations", "plugins", "version"})


@dataclass(frozen=True)
class _Gpu:
    name: Name


@dataclass(frozen=True)
class Ceilings:
    """The highest rates that the device reached; None if unknown."""

    # GB/s (10^9), bytes read plus bytes written.
    copy_gbps: Amount | None = None
    # TFLOP/s (10^12), in bf16.
    product_tflops: Amount | None = None
    # The same within the L2 cache, and in fp32 without tensor cores.
    l2_copy_gbps: Amount | None = None
    fp32_product_tflops: Amount | None = None
    # GB/s of a kernel that only reads.
    read_gbps: Amount | None = None


@dataclass(frozen=True)
class _Implementation:
    own_code: bool
    packages: dict[str, Name | None]


@dataclass(frozen=True)
class _Environment:
    """The keys that are used after reading; others are kept as they are."""

    device: str | None = None
    cpu: Name | None = None
    gpu: _Gpu | None = None
    ceilings: Ceilings | None = None
    packages: Mapping[str, str | None] = field(default_factory=dict)
    implementations: dict[str, _Implementation] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    plugins: list[str] = field(default_factory=list)
    cells: Whole | None = None
    version: Name | None = None


def check_environment(data: Any) -> dict[str, Any]:
    """An environment read from a file, checked and printable. Raises ValueError that names the wrong key."""
    environment = read_text(data)
    read_as(_Environment, environment)
    return {"packages": {}, **environment}


def device_name(environment: Mapping[str, Any]) -> str:
    """The name of the GPU, or of the CPU if the run was made on a CPU."""
    gpu = environment.get("gpu")
    if environment.get("device") != "cpu" and isinstance(gpu, Mapping):
        return str(gpu.get("name"))
    return str(environment.get("cpu") or "an unknown machine")


def versions_of_sites(environment: Mapping[str, Any], package: str) -> dict[str, list[str]]:
    """Backends that ran with another version of a package than the run's own, by `--site`, by that version."""
    found: dict[str, list[str]] = {}
    for (backend, name), version in packages_of_backends(environment).items():
        if name == package and version and version != environment.get("packages", {}).get(package):
            found.setdefault(version, []).append(backend)
    return found


def packages_of_backends(environment: Mapping[str, Any]) -> dict[tuple[str, str], str | None]:
    """The version of each package that decides a backend's times, by backend and package; None if it is missing."""
    implementations = environment.get("implementations") or {}
    return {
        (backend, package): version for backend, its in implementations.items()
        for package, version in its["packages"].items()
    }  # fmt: skip


def device_number(environment: Mapping[str, Any]) -> str:
    """The device as text for workers and `--device`: `cuda:1`, `cpu`, or `auto` if it is unknown."""
    if environment.get("device") != "cuda":
        return str(environment.get("device") or "auto")
    return f"cuda:{(environment.get('gpu') or {}).get('index') or 0}"


def measured_code(code: Any) -> dict[str, Any] | None:
    """The hashes of kernels and plugins in an environment's `code`; None if there are none.

    Equal ones are the same code. Others need not differ: runs before the hashes of syntax trees (`tree:...`) have
    hashes of bytes, of which nothing follows for a tree.
    """
    found = {part: code.get(part) for part in ("kernels", "plugins")} if isinstance(code, Mapping) else {}
    return found if any(found.values()) else None
