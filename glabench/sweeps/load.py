"""Sweeps as .toml files. Presets and users' own files have the same format.

title = "..."                 # shown above tables and figures
description = "..."
x = "seqlen"                  # the axis that figures are drawn against
against = "sdpa-flash"        # ratios in reports refer to this backend
metrics = "error"             # what reports show, by default time and memory (optional)
memory_limit = "40GiB"        # that torch may hold on a GPU, if --memory-limit does not say (optional)
time_limit = 0.4              # seconds for which a cell is sampled on a GPU, if --time-limit does not say (optional)
energy = false                # no joules on a GPU, unless --energy asks for them (optional)

[panels]                      # backends that reports show apart, by a title (optional); one may be in several
"GLA" = ["gla-triton", "gla-torch"]

[axes]                        # text in the axis grammar, a number, true or false, or a list of these
seqlen = "1k..16k"
batch = 32

[cpu]                         # axes that replace those above, and backends' own, on a CPU (optional)
batch = 1
backend = "gla-torch"         # backends that take the place of those below, on a CPU

[[backends]]                  # one table per backend, with axes for this backend only
name = "gla-triton"
materialize = ["states", "checkpoints"]
"""

import tomllib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import tomli_w

from glabench.errors import RenamedWarning, UsageError, allowed_names, did_you_mean, printable
from glabench.plain import Amount, Name, read_as, read_file, shown
from glabench.sweeps.axis import axis_text
from glabench.sweeps.model import Sweep, Variant
from glabench.sweeps.parameters import read_mib

# Reading TOML takes time quadratic in the number of a key's parts: without limits, a small file could take hours.
_MOST_BYTES = 256 * 1024
_MOST_DOTS = 100
# Preset names of the previous version, which still work.
RENAMED_PRESETS = {"gate": "guard"}


@dataclass(frozen=True)
class _SweepFile:
    """The keys of a sweep file."""

    backends: list[dict[str, Any]]
    axes: dict[str, Any] = field(default_factory=dict)
    cpu: dict[str, Any] = field(default_factory=dict)
    title: Name = ""
    description: str = ""
    x: str = "seqlen"
    against: str | None = None
    metrics: str | None = None
    memory_limit: str | None = None
    time_limit: Amount | None = None
    energy: bool | None = None
    panels: dict[Name, list[Name]] = field(default_factory=dict)


_KEYS = tuple(_SweepFile.__dataclass_fields__)


def preset_names() -> list[str]:
    """The names of glabench's presets, sorted."""
    folder = resources.files("glabench.sweeps") / "presets"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def preset_text(name: str) -> str:
    """The text of a preset's .toml file."""
    return (resources.files("glabench.sweeps") / "presets" / f"{name}.toml").read_text(encoding="utf-8")


def as_sweep(sweep: str | Path | Sweep) -> Sweep:
    """A sweep as it is, or the one that `load_sweep` finds."""
    return sweep if isinstance(sweep, Sweep) else load_sweep(str(sweep))


def load_sweep(name: str) -> Sweep:
    """Reads a preset by name, or a sweep file by its path, which ends in .toml. Raises UsageError."""
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise UsageError(f"SWEEP: there is no file '{name}'")
        return read_sweep(printable(path.stem), path, name)
    if name in RENAMED_PRESETS:
        warnings.warn(f"the preset '{name}' is now called '{RENAMED_PRESETS[name]}'", RenamedWarning, stacklevel=2)
        name = RENAMED_PRESETS[name]
    if name not in preset_names():
        allowed = ", ".join(preset_names())
        raise UsageError(
            f"SWEEP: '{name}' is neither a preset ({allowed}) nor the path of a .toml file"
            + did_you_mean(name, preset_names())
        )
    return parse_sweep(name, preset_text(name), f"preset {name}")


def read_sweep(name: str, path: Path, where: str, stored: bool = False) -> Sweep:
    """Reads a sweep file, which may hold anything. Arguments and errors are as in `parse_sweep`."""
    try:
        text = read_file(path, _MOST_BYTES).decode()
    except UnicodeDecodeError:
        raise UsageError(f"{where}: not a text file in UTF-8") from None
    except ValueError as problem:
        raise UsageError(f"{where}: not a sweep file: {problem}") from None
    return parse_sweep(name, text, where, stored)


def _parse_toml(text: str, where: str) -> dict[str, Any]:
    for number, line in enumerate(text.split("\n"), start=1):
        keys = line if line.lstrip().startswith("[") else line.rpartition("=")[0]
        if keys.count(".") > _MOST_DOTS:
            raise UsageError(f"{where}: line {number} has a key of more than {_MOST_DOTS} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise UsageError(f"{where}: not a sweep: tables or lists are nested too deeply") from None
    except ValueError as problem:
        raise UsageError(f"{where}: not a TOML file: {problem}") from None


def parse_sweep(name: str, text: str, where: str, stored: bool = False) -> Sweep:
    """Parses the text of a sweep file. Raises UsageError that names the wrong key; `where` starts its message.

    If `stored`, the sweep belongs to a run, and old names give no notice. Axes and backends are checked later, when
    the sweep is resolved, because plugins can add both.
    """
    data = _parse_toml(text, where)
    if "baseline" in data and "against" not in data:
        if not stored:
            warnings.warn(f"{where}: the key 'baseline' is now called 'against'", RenamedWarning, stacklevel=2)
        data["against"] = data.pop("baseline")
    for key in data:
        if key not in _KEYS:
            raise UsageError(f"{where}: unknown key {shown(key)} ({allowed_names(_KEYS, key)})")
    names = _names_in(data.get("backends"))
    if not names or not all(isinstance(each, str) and each for each in names):
        got = f"; got backends = {shown(data['backends'])}" if "backends" in data else ""
        raise UsageError(f"{where}: needs one [[backends]] table per backend, each with a name{got}")
    try:
        file = read_as(_SweepFile, data)
    except ValueError as problem:
        raise UsageError(f"{where}: {problem}") from None
    if file.x == "pass":
        raise UsageError(f"{where}: x cannot be 'pass': every pass has a panel of its own")
    if file.against is not None and file.against not in names:
        allowed = allowed_names(map(str, names), file.against)
        raise UsageError(f"{where}: against {shown(file.against)} is not one of its backends ({allowed})")
    _check_panels(file.panels, names, where)
    try:
        limit_mib = None if file.memory_limit is None else read_mib(file.memory_limit)
    except ValueError as problem:
        raise UsageError(f"{where}: memory_limit {problem}") from None
    return Sweep(
        name=name,
        axes=_axes(file.axes, f"{where}: [axes]"),
        variants=tuple(
            Variant(
                table["name"],
                _axes({k: v for k, v in table.items() if k != "name"}, f"{where}: {shown(table['name'])}"),
            )
            for table in file.backends
        ),
        title=file.title or name,
        description=file.description,
        x=file.x,
        against=file.against,
        metrics=file.metrics,
        memory_limit_mib=limit_mib,
        time_limit_s=file.time_limit,
        energy=file.energy,
        on_cpu=_axes(file.cpu, f"{where}: [cpu]"),
        panels={title: tuple(own) for title, own in file.panels.items()},
    )


def _check_panels(panels: Mapping[str, Sequence[str]], backends: Sequence[str], where: str) -> None:
    """Raises UsageError if a panel has an unknown backend, or a backend no panel."""
    listed = [name for own in panels.values() for name in own]
    for name in listed:
        if name not in backends:
            raise UsageError(
                f"{where}: [panels] {shown(name)} is not one of its backends ({allowed_names(backends, name)})"
            )
    if panels and (missing := [name for name in backends if name not in listed]):
        raise UsageError(f"{where}: [panels] {shown(missing[0])} is in none of them")


def _names_in(backends: Any) -> list[Any]:
    """The name of every table of backends; None for what has none."""
    tables = backends if isinstance(backends, list) else []
    return [table.get("name") if isinstance(table, dict) else None for table in tables]


def _axes(table: Mapping[str, Any], where: str) -> dict[str, str]:
    """A table of axes as text."""
    found = {}
    for name, value in table.items():
        try:
            found[printable(name)] = axis_text(value)
        except (ValueError, RecursionError) as problem:
            raise UsageError(f"{where}: {shown(name)}: {problem}, got {shown(value)}") from None
    return found


def dump_sweep(sweep: Sweep) -> str:
    """A sweep as the text of a .toml file, which `parse_sweep` reads back."""
    keys = ("title", "description", "x", "against", "metrics")
    own: dict[str, Any] = {key: getattr(sweep, key) for key in keys if getattr(sweep, key)}
    if sweep.memory_limit_mib is not None:
        own["memory_limit"] = f"{sweep.memory_limit_mib}MiB"
    for key, value in (("time_limit", sweep.time_limit_s), ("energy", sweep.energy)):
        if value is not None:
            own[key] = value
    cpu = {"cpu": dict(sweep.on_cpu)} if sweep.on_cpu else {}
    panels = {"panels": {title: list(own) for title, own in sweep.panels.items()}} if sweep.panels else {}
    backends = [{"name": variant.backend, **variant.axes} for variant in sweep.variants]
    return tomli_w.dumps({**own, **panels, "axes": dict(sweep.axes), **cpu, "backends": backends})
