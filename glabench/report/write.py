"""Everything that a report of a run folder consists of, written beside its records."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from glabench.records import Record, RunFolder
from glabench.report.figures import draw, save
from glabench.report.series import choose_x, show_x
from glabench.report.tables import markdown, to_frame

_SHAPE = {"batch": "B=", "heads": "H=", "dims": "K=V=", "key_dim": "K=", "value_dim": "V=", "seqlen": "T=", "dtype": ""}


def describe_environment(environment: Mapping[str, Any]) -> str:
    """One line: the GPU or CPU, and the versions that matter."""
    packages = environment.get("packages", {})
    gpu = environment.get("gpu") if environment.get("device") != "cpu" else None
    device = gpu["name"] if gpu else environment.get("cpu") or "unknown machine"
    versions = [f"{name} {packages[name]}" for name in ("torch", "triton") if packages.get(name)]
    return ", ".join([device, *versions])


def describe_shape(records: Sequence[Record], x_axis: str) -> str:
    """The axes that have one value in the whole run, but for x: `B=32, H=16, K=V=64, bf16`."""
    rows = [record.to_json() for record in records]
    x = "key_dim" if x_axis == "head_dim" else x_axis
    fixed = {n: rows[0][n] for n in _SHAPE if n in rows[0] and n != x and len({row[n] for row in rows}) == 1}
    if fixed.get("key_dim") is not None and fixed.get("key_dim") == fixed.get("value_dim"):
        fixed = {"batch": fixed.get("batch"), "heads": fixed.get("heads"), "dims": fixed.pop("key_dim")} | fixed
        del fixed["value_dim"]
    words = {n: value for n, value in fixed.items() if value is not None}
    return ", ".join(f"{_SHAPE[n]}{show_x(value)}" for n, value in words.items())


def write_report(folder: RunFolder, baseline: str | None) -> list[Path]:
    """Writes `records.csv`, `report.md`, `figure.png` and `figure.svg` into the run folder; returns their paths."""
    sweep, records = folder.sweep(), folder.records()
    surroundings = describe_environment(folder.environment())
    csv = folder.path / "records.csv"
    to_frame(records).to_csv(csv, index=False)
    page = folder.path / "report.md"
    x = choose_x(records, sweep.x)
    text = f"# {sweep.title}\n\n{sweep.description}\n\n{surroundings}\n\n![time and memory](figure.png)\n\n"
    page.write_text(text + markdown(records, x, baseline or sweep.baseline), encoding="utf-8")
    figure = draw(records, x, sweep.title, "; ".join(filter(None, [describe_shape(records, x), surroundings])))
    return [csv, page, *save(figure, folder.path, "figure")]
