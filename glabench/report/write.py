"""Everything that a report of a run folder consists of, written beside its records."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from glabench.errors import printable
from glabench.records import Record, RunFolder
from glabench.report.figures import draw, save
from glabench.report.series import LABELS, choose_x, x_field
from glabench.report.tables import markdown, to_frame
from glabench.sweeps import Sweep

_WRITTEN = ("records.csv", "report.md", "figure.png", "figure.svg")
_SHAPE = ("batch", "heads", "key_dim", "value_dim", "seqlen", "dtype")


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
    fixed = {f: rows[0][f] for f in _SHAPE if f != x_field(x_axis) and len({row[f] for row in rows}) == 1}
    words = {f: LABELS[f](value) for f, value in fixed.items()}
    if "key_dim" in fixed and fixed["key_dim"] == fixed.get("value_dim"):
        words["key_dim"] = f"K={words.pop('value_dim')}"
    return ", ".join(words.values())


def write_report(folder: RunFolder, sweep: Sweep, records: Sequence[Record], baseline: str | None) -> list[Path]:
    """Writes `records.csv`, `report.md`, `figure.png` and `figure.svg` into the run folder; returns their paths.

    `sweep` and `records` are the folder's own; `baseline` None stands for the sweep's.
    """
    surroundings = describe_environment(folder.environment())
    for name in _WRITTEN:
        if (folder.path / name).is_symlink():
            (folder.path / name).unlink()  # it may have come with the run, and lead to any file of the user's
    csv = folder.path / "records.csv"
    to_frame(records).to_csv(csv, index=False)
    page = folder.path / "report.md"
    x = choose_x(records, sweep.x)
    description = "\n".join(map(printable, sweep.description.splitlines()))
    text = f"# {printable(sweep.title)}\n\n{description}\n\n{surroundings}\n\n![time and memory](figure.png)\n\n"
    page.write_text(text + markdown(records, x, baseline or sweep.baseline), encoding="utf-8")
    figure = draw(records, x, sweep.title, "; ".join(filter(None, [describe_shape(records, x), surroundings])))
    return [csv, page, *save(figure, folder.path, "figure")]
