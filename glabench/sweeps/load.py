"""Sweeps as .toml files: the presets that come along, and users' own, in the same format.

title = "..."                 # shown above tables and figures
description = "..."
x = "seqlen"                  # the axis that figures are drawn against
baseline = "sdpa-flash"       # ratios in reports refer to this backend

[axes]                        # text of the axis grammar, or a plain number
seqlen = "1k..16k"
batch = 32

[cpu]                         # axes that replace those above where there is no GPU (may be left out)
batch = 1

[[backends]]                  # one table a backend; axes in it hold for this backend alone
name = "gla-triton"
materialize = "on,off"
"""

import json
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from glabench.errors import UsageError, printable
from glabench.sweeps.axis import parse_axis
from glabench.sweeps.fields import shown
from glabench.sweeps.model import AXES, Sweep, Variant

_TEXTS = ("title", "description", "x", "baseline")
_TABLES = ("axes", "cpu", "backends")
_SWEPT = tuple(name for name in AXES if name != "backend")
# Reading TOML takes time with the square of a key's parts, so that a small file could keep it busy for hours.
_MOST_BYTES = 256 * 1024
_MOST_DOTS = 100


def preset_names() -> list[str]:
    """Names of the presets that come with glabench, sorted."""
    folder = resources.files("glabench.sweeps") / "presets"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_sweep(name: str) -> Sweep:
    """Reads a preset by name, or a sweep file by its path (which ends in .toml). Raises UsageError."""
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise UsageError(f"SWEEP: there is no file '{name}'")
        return read_sweep(printable(path.stem), path, name)
    if name not in preset_names():
        allowed = ", ".join(preset_names())
        raise UsageError(f"SWEEP: '{name}' is neither a preset ({allowed}) nor the path of a .toml file")
    text = (resources.files("glabench.sweeps") / "presets" / f"{name}.toml").read_text(encoding="utf-8")
    return parse_sweep(name, text, f"preset {name}")


def read_sweep(name: str, path: Path, where: str) -> Sweep:
    """Reads a sweep file, whatever it holds; `where` stands in messages. Raises UsageError."""
    with path.open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise UsageError(f"{where}: too large for a sweep file (allowed: {_MOST_BYTES // 1024} KiB)")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise UsageError(f"{where}: not a text file in UTF-8") from None
    return parse_sweep(name, text, where)


def _parse_toml(text: str, where: str) -> dict[str, Any]:
    for number, line in enumerate(text.split("\n"), start=1):
        keys = line if line.lstrip().startswith("[") else line.rpartition("=")[0]
        if keys.count(".") > _MOST_DOTS:
            raise UsageError(f"{where}: line {number} has a key of more than {_MOST_DOTS} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise UsageError(f"{where}: not a sweep: tables or lists in one another without end") from None
    except ValueError as problem:
        raise UsageError(f"{where}: not a TOML file: {problem}") from None


def parse_sweep(name: str, text: str, where: str) -> Sweep:
    """Parses a sweep file's text; `where` stands in messages. Raises UsageError that names a wrong key."""
    data = _parse_toml(text, where)
    _check_keys(data, (*_TEXTS, *_TABLES), where)
    for key in _TEXTS:
        if key in data and not isinstance(data[key], str):
            raise UsageError(f"{where}: {key} needs a text, got {shown(data[key])}")
    backends = data.get("backends")
    tables = isinstance(backends, list) and all(
        isinstance(b, dict) and isinstance(b.get("name"), str) and b["name"] for b in backends
    )
    if not backends or not tables:
        raise UsageError(f"{where}: needs one [[backends]] table a backend, each with a name")
    x = data.get("x", "seqlen")
    if x not in _SWEPT:
        raise UsageError(f"{where}: x is '{x}', which is not an axis (allowed: {', '.join(_SWEPT)})")
    if x == "pass":
        raise UsageError(f"{where}: x cannot be 'pass': every pass has a panel of its own")
    baseline = data.get("baseline")
    names = [b["name"] for b in backends]
    if baseline is not None and baseline not in names:
        raise UsageError(f"{where}: baseline '{baseline}' is not one of its backends (allowed: {', '.join(names)})")
    return Sweep(
        name=name,
        axes=_axes(data.get("axes", {}), f"{where}: [axes]"),
        variants=tuple(
            Variant(b["name"], _axes({k: v for k, v in b.items() if k != "name"}, f"{where}: backend {b['name']}"))
            for b in backends
        ),
        title=data.get("title") or name,
        description=data.get("description", ""),
        x=x,
        baseline=baseline,
        on_cpu=_axes(data.get("cpu", {}), f"{where}: [cpu]"),
    )


def _check_keys(data: Mapping[str, Any], allowed: tuple[str, ...], where: str) -> None:
    for key in data:
        if key not in allowed:
            raise UsageError(f"{where}: the key '{key}' is not known (allowed: {', '.join(allowed)})")


def _axes(table: Any, where: str) -> dict[str, str]:
    """An axis table as text, every value parsed once so that a mistake shows when the file is read."""
    if not isinstance(table, dict):
        raise UsageError(f"{where} needs a table of axes, got {shown(table)}")
    _check_keys(table, _SWEPT, where)
    axes = {}
    for name, value in table.items():
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise UsageError(f'{where}: {name} needs a number or a text like "1k..16k", got {shown(value)}')
        # A whole number may have more digits than Python writes.
        axes[name] = value if isinstance(value, str) else shown(value)
        parse_axis(f"{where} {name}", axes[name], AXES[name].parse, AXES[name].allowed)
    return axes


def dump_sweep(sweep: Sweep) -> str:
    """A sweep as the text of a .toml file that `parse_sweep` reads back."""

    def quoted(value: str) -> str:
        # A JSON string is a TOML string, but for DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

    def table(axes: Mapping[str, str]) -> list[str]:
        return [f"{name} = {quoted(text)}" for name, text in axes.items()]

    lines = [f"{key} = {quoted(getattr(sweep, key))}" for key in _TEXTS if getattr(sweep, key)]
    lines += ["", "[axes]", *table(sweep.axes)]
    if sweep.on_cpu:
        lines += ["", "[cpu]", *table(sweep.on_cpu)]
    for variant in sweep.variants:
        lines += ["", "[[backends]]", f"name = {quoted(variant.backend)}", *table(variant.axes)]
    return "\n".join(lines) + "\n"
