"""Everything that a report of a run folder consists of, written beside its records."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glabench.records import RunFolder
from glabench.report.figures import draw, save
from glabench.report.tables import markdown, to_frame


def describe_environment(environment: Mapping[str, Any]) -> str:
    """One line: the GPU or CPU, and the versions that matter."""
    packages = environment.get("packages", {})
    gpu = environment.get("gpu")
    device = gpu["name"] if gpu else environment.get("cpu") or "unknown machine"
    versions = [f"{name} {packages[name]}" for name in ("torch", "triton") if packages.get(name)]
    return ", ".join([device, *versions])


def write_report(folder: RunFolder, baseline: str | None) -> list[Path]:
    """Writes `records.csv`, `report.md`, `figure.png` and `figure.svg` into the run folder; returns their paths."""
    sweep, records = folder.sweep(), folder.records()
    surroundings = describe_environment(folder.environment())
    csv = folder.path / "records.csv"
    to_frame(records).to_csv(csv, index=False)
    page = folder.path / "report.md"
    text = f"# {sweep.title}\n\n{sweep.description}\n\n{surroundings}\n\n![time and memory](figure.png)\n\n"
    page.write_text(text + markdown(records, sweep.x, baseline or sweep.baseline), encoding="utf-8")
    figure = draw(records, sweep.x, sweep.title, surroundings)
    return [csv, page, *save(figure, folder.path, "figure")]
