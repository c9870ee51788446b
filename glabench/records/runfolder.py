"""The run folder: `environment.json`, `sweep.toml`, `records.jsonl`, and what reports make from them."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from glabench.errors import UsageError
from glabench.records.record import Record
from glabench.sweeps.load import dump_sweep, parse_sweep
from glabench.sweeps.model import Cell, Sweep


class RunFolder:
    """A run on disk. Every record is flushed to the disk when it is added, so that a killed run can go on."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def run_id(self) -> str:
        """The folder's name."""
        return self.path.resolve().name

    @classmethod
    def create(cls, path: Path, sweep: Sweep, environment: Mapping[str, Any]) -> "RunFolder":
        """Makes a new run folder. Raises UsageError if it holds a run already or cannot be made."""
        folder = cls(path)
        if folder._records_file.exists():
            raise UsageError(f"--out: '{path}' holds a run already; go on with it (--resume) or name another folder")
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / "sweep.toml").write_text(dump_sweep(sweep), encoding="utf-8")
            (path / "environment.json").write_text(json.dumps(environment, indent=2) + "\n", encoding="utf-8")
            folder._records_file.touch()
        except OSError as problem:
            raise UsageError(f"--out: cannot write to '{path}': {problem.strerror}") from None
        return folder

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Opens a run folder. Raises UsageError if there is none."""
        folder = cls(path)
        if not folder._records_file.is_file():
            raise UsageError(f"RUN: '{path}' is not a run folder (it has no records.jsonl)")
        return folder

    @property
    def _records_file(self) -> Path:
        return self.path / "records.jsonl"

    def sweep(self) -> Sweep:
        """The sweep that the run measures, under its own name or the folder's. Raises UsageError."""
        file = self.path / "sweep.toml"
        if not file.is_file():
            raise UsageError(f"RUN: '{self.path}' has no sweep.toml")
        return parse_sweep(self.run_id, file.read_text(encoding="utf-8"), str(file))

    def environment(self) -> dict[str, Any]:
        """Hardware and versions of the run; empty if the file is missing."""
        file = self.path / "environment.json"
        try:
            data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        except ValueError as problem:
            raise UsageError(f"{file}: not JSON: {problem}") from None
        return data

    def append(self, record: Record) -> None:
        """Adds a record and waits until it is on the disk. A line cut off by a kill is replaced, not glued to."""
        with self._records_file.open("rb+") as file:
            # Most often the file ends with a line's end, and one byte tells so.
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            if size and file.read() != b"\n":
                file.seek(0)
                whole = file.read().rfind(b"\n") + 1
                file.seek(whole)
                file.truncate()
            file.write(record.to_line().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the run for this process. Raises UsageError if another one is measuring into it."""
        with self._records_file.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"--out: another glabench is measuring into '{self.path}'") from None
            yield

    def records(self) -> list[Record]:
        """The latest record of every cell, in the order in which cells first appeared.

        The last line is passed over if a kill cut it off; another bad line raises UsageError.
        """
        latest: dict[Cell, Record] = {}
        whole, _, _cut = self._records_file.read_bytes().rpartition(b"\n")
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                record = Record.from_json(json.loads(line))
            except (ValueError, KeyError, TypeError) as problem:
                raise UsageError(f"{self._records_file}: line {number} is not a record: {problem!r}") from None
            latest[record.cell] = record
        return list(latest.values())
