"""The arguments of a worker: the backend, and everything else that is the same for all its cells."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from glabench.measure.settings import Settings
from glabench.plain import read_as
from glabench.records import Record
from glabench.records.environment import Ceilings
from glabench.sweeps.model import Cell

# The line that a worker that is started early writes before all others.
LOADED = "loaded"


@dataclass(frozen=True)
class Job:
    """The arguments of one worker. `device` is text such as `cuda:1`; `plugins` are paths of plugin files.

    Of several GPUs, `device` is the first.
    """

    backend: str
    run_id: str
    device: str
    settings: Settings = field(default_factory=Settings)
    plugins: tuple[str, ...] = ()
    ceilings: Ceilings = field(default_factory=Ceilings)
    # Hash of the measured code, for the records.
    code: str | None = None
    # Whether the worker loads torch and its like at once, and says so, because others do meanwhile; otherwise with the
    # first cell.
    early: bool = False
    # How many GPUs share a cell; for more than one, torchrun starts as many workers, for one cell alone.
    gpus: int = 1

    def begin(self, cell: Cell) -> Record:
        """The record of a cell whose measurement starts now, to which measurements are added."""
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        return Record(run_id=self.run_id, cell=cell, status="ok", code=self.code, started_at=started_at)

    def to_json(self) -> dict[str, Any]:
        """The fields as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Job":
        """The inverse of `to_json`. Raises ValueError that names a wrong key."""
        return read_as(cls, data)
