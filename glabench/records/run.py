"""A run, as `glabench.load` returns it: the records of one sweep on one machine, with its environment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glabench.errors import printable
from glabench.records.metrics import derived
from glabench.records.profile import Profile
from glabench.records.record import Record
from glabench.sweeps.model import Cell, Sweep

if TYPE_CHECKING:
    import pandas as pd


def rows_of(records: Iterable[Record]) -> list[dict[str, Any]]:
    """One flat dict per record: its fields, one key per tensor's error (`rel_error_o`, ...), and the derived columns.

    `samples` is the number of samples, `cell` the cell as text. Every report is made from these rows.
    """
    rows, known = [], list(records)
    alone_ms = {record.cell: record.time_ms for record in known if record.cell.gpus == 1}
    for record in known:
        row = record.to_json()
        gpus = record.cell.gpus
        row |= derived(row, gpus, alone_ms.get(record.cell.alone) if gpus > 1 else None)
        row["samples"] = len(row.pop("samples_ms") or ()) or None
        row["parameters"] = ",".join(row["parameters"])
        row |= {f"rel_error_{name}": error for name, error in (row.pop("rel_error") or {}).items()}
        rows.append({"cell": str(record.cell), **row})
    return rows


@dataclass(frozen=True)
class Run:
    """The records of one sweep on one machine, as they were when the folder was read."""

    path: Path
    sweep: Sweep
    environment: Mapping[str, Any]
    records: Sequence[Record]
    profiles: Mapping[Cell, Profile] = field(default_factory=dict)
    # Whether the last line of `profiles.jsonl` has no end; it is left out.
    profiles_cut_off: bool = False

    def __repr__(self) -> str:
        return f"<Run {self.name}: {self.sweep.title}, {len(self.records)} of {self.cells} cells>"

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.resolve().name

    @property
    def cells(self) -> int:
        """The number of cells in the sweep; if the run did not store it, the number of records."""
        found = self.environment.get("cells")
        return found if isinstance(found, int) else len(self.records)

    @property
    def complete(self) -> bool:
        """Whether every cell of the sweep has a record, failed ones included."""
        return len(self.records) >= self.cells

    def table(self) -> pd.DataFrame:
        """One row per record, in measuring order, with the columns of `rows_of`.

        Whole-number parameters have the type Int64, because a parameter is missing for ops that do not have it.
        """
        import pandas as pd

        rows = rows_of(self.records)
        frame = pd.DataFrame(rows)
        for name in frame:
            if pd.api.types.is_float_dtype(frame[name]) and _all_ints(self.records, name):
                frame[name] = pd.array([row.get(str(name)) for row in rows], dtype="Int64")
        return frame


def name_runs(runs: Sequence[Run]) -> list[str]:
    """A name for each run: the shortest end of its path that no other run's path has, mostly its folder's name."""
    paths = [run.path.resolve() for run in runs]
    count = Counter(end for path in set(paths) for end in _ends_of(path))
    return [printable(str(next(end for end in _ends_of(path) if count[end] == 1))) for path in paths]


def _ends_of(path: Path) -> list[Path]:
    """For `/a/b`: `b`, `a/b`, `/a/b`."""
    return [Path(*path.parts[-length:]) for length in range(1, len(path.parts) + 1)]


def _all_ints(records: Sequence[Record], name: Any) -> bool:
    found = [value for record in records if (value := record.cell.get(str(name))) is not None]
    return bool(found) and all(isinstance(value, int) for value in found)
