"""The run folder: `environment.json`, `sweep.toml`, `records.jsonl`, `profiles.jsonl`, and the reports made of them."""

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from glabench.errors import RecordNotKeptError, UsageError, printable
from glabench.plain import read_as, read_file, read_json, read_text, shown
from glabench.records.environment import check_environment
from glabench.records.profile import Profile, profile_line, read_profile
from glabench.records.record import Record
from glabench.records.run import Run
from glabench.sweeps.load import dump_sweep, read_sweep
from glabench.sweeps.model import Cell, Sweep

# Bytes. A record with many thousand samples is shorter; a longer line is not a record.
_LONGEST_LINE = 16 * 2**20
_LARGEST_ENVIRONMENT = _LARGEST_PLUGINS = 2**20
_RECORDS, _SWEEP, _PLUGINS, _PROFILES = "records.jsonl", "sweep.toml", "plugins.json", "profiles.jsonl"
_Read = TypeVar("_Read")


class RunFolder:
    """A run on disk. Every record is flushed to the disk when it is added, so that a killed run can be resumed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def run_id(self) -> str:
        """The folder's name."""
        return self.path.resolve().name

    @staticmethod
    def is_run(path: Path) -> bool:
        """Whether a folder holds a run."""
        return (path / _RECORDS).is_file()

    @staticmethod
    def found_in(folder: Path, pattern: str = "*") -> list[Path]:
        """The run folders in a folder whose names match a pattern, in no order."""
        return [file.parent for file in folder.glob(f"{pattern}/{_RECORDS}")]

    @classmethod
    def check_free(cls, path: Path) -> None:
        """Raises UsageError if a path holds a run already."""
        if cls(path).records_file.exists():
            what = "holds a run that is starting, or was killed then; delete it"
            if (path / _SWEEP).exists():
                what = "already holds a run; resume it (--resume)"
            raise UsageError(f"--out: '{path}' {what} or name another folder")

    @classmethod
    def create(
        cls, path: Path, sweep: Sweep, environment: Mapping[str, Any], plugins: Sequence[str] = ()
    ) -> "RunFolder":
        """Makes a new run folder. Raises UsageError if it holds a run already or cannot be made.

        The paths of plugins are kept beside the environment, which has their names alone: only resuming needs them.
        """
        folder = cls(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            folder.records_file.open(
                "xb"
            ).close()  # first, so that of two runs started at once only one gets the folder
        except FileExistsError:
            if not path.is_dir():
                raise UsageError(f"--out: cannot write to '{path}': it is not a folder") from None
            cls.check_free(path)
            raise
        except OSError as problem:
            raise _cannot_write(path, problem) from None
        try:
            if plugins:
                (path / _PLUGINS).write_text(json.dumps(read_text(list(plugins))) + "\n", encoding="utf-8")
            (path / _SWEEP).write_text(dump_sweep(sweep), encoding="utf-8")
            (path / "environment.json").write_text(
                json.dumps(read_text(environment), indent=2) + "\n", encoding="utf-8"
            )
        except OSError as problem:
            folder.records_file.unlink()  # so that the same command works once the disk has room
            raise _cannot_write(path, problem) from None
        return folder

    @classmethod
    def open(cls, path: Path, argument: str = "RUN") -> "RunFolder":
        """Opens a run folder. Raises UsageError, which names the command line's argument, if there is none."""
        folder = cls(path)
        if not folder.records_file.is_file():
            why = "its records.jsonl is no regular file" if folder.records_file.exists() else "it has no records.jsonl"
            why = why if path.exists() else "it does not exist"
            raise UsageError(f"{argument}: '{path}' is not a run folder ({why})")
        return folder

    @property
    def records_file(self) -> Path:
        """The file of its records."""
        return self.path / _RECORDS

    def sweep(self) -> Sweep:
        """The run's sweep, named after the folder. Raises UsageError if it is missing or wrong."""
        file = self.path / _SWEEP
        if not file.is_file():
            raise UsageError(f"RUN: '{self.path}' has no sweep.toml")
        return read_sweep(self.run_id, file, str(file), stored=True)

    def environment(self) -> dict[str, Any]:
        """The run's environment; empty if the file is missing. Raises UsageError if it is wrong."""
        path = self.path / "environment.json"
        if not path.is_file():
            return {}
        try:
            return check_environment(read_json(read_file(path, _LARGEST_ENVIRONMENT)))
        except ValueError as problem:
            raise UsageError(f"{path}: not an environment: {problem}") from None

    def plugins(self) -> list[str]:
        """The paths of the plugins that the run was begun with, as they were given."""
        file = self.path / _PLUGINS
        if not file.is_file():
            return []
        try:
            paths = read_as(list[str], read_json(read_file(file, _LARGEST_PLUGINS)))
            if odd := [path for path in paths if not path or path != printable(path)]:
                raise ValueError(f"{shown(odd[0])} is empty or has unprintable characters")
        except ValueError as problem:
            raise UsageError(f"{file}: not a list of paths: {problem}") from None
        inside = [path for path in paths if Path(path).resolve().is_relative_to(self.path.resolve())]
        if inside:  # a run folder may come from anybody, and its code with it
            raise UsageError(
                f"{file}: '{inside[0]}' is in the run folder itself; if you trust it, give it with --plugin"
            )
        return paths

    def load(self) -> Run:
        """The run as it is now. Raises UsageError for a missing or wrong file."""
        profiles, cut_off = self.profiles(), self.profiles_cut_off()
        return Run(self.path, self.sweep(), self.environment(), self.records(), profiles, cut_off)

    def append(self, record: Record) -> None:
        """Adds a record and waits until it is on the disk. A last line that a kill cut off is removed first.

        Raises RecordNotKeptError if it cannot be written; the file is then as it was before.
        """
        try:
            _append(self.records_file, record.to_line())
        except OSError as problem:
            why = problem.strerror or problem
            message = f"the record of {record.cell} cannot be written: {why}; what was measured is kept"
            raise RecordNotKeptError(message) from None

    def add_profile(self, cell: Cell, profile: Profile) -> None:
        """Adds the profile of a cell, as `append` adds a record. Raises UsageError if it cannot be written."""
        file = self.path / _PROFILES
        try:
            file.touch()
            _append(file, profile_line(cell, profile))
        except OSError as problem:
            raise _cannot_write(self.path, problem) from None

    def profiles(self) -> dict[Cell, Profile]:
        """The profile of every cell that has one; of several of the same cell the last, which was made anew.

        A last line that a kill cut off is ignored; any other bad line raises UsageError, as those of records do. So
        does what is no file.
        """
        file = self._profiles_file()
        return {} if file is None else dict(_read_lines(file, read_profile, "a profile"))

    def profiles_cut_off(self) -> bool:
        """Whether the last line of `profiles.jsonl` has no end, which `profiles` leaves out."""
        if (file := self._profiles_file()) is None:
            return False
        with file.open("rb") as opened:
            return _is_cut_off(opened)

    def _profiles_file(self) -> Path | None:
        file = self.path / _PROFILES
        if not file.exists():
            return None
        if not file.is_file():
            raise UsageError(f"{file}: is no regular file; remove it, or put the run's profiles there")
        return file

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the run for this process. Raises UsageError if another process is measuring into it."""
        try:
            # For writing, so that a read-only folder is noticed before a cell is measured.
            opened = self.records_file.open("rb+")
        except OSError as problem:
            raise _cannot_write(self.path, problem) from None
        with opened as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"--out: another glabench is measuring into '{self.path}'; wait for it or name another folder"
                ) from None
            yield

    def records(self) -> list[Record]:
        """The latest record of every cell, in the order in which cells first appeared.

        A last line that a kill cut off is ignored; any other bad line raises UsageError.
        """
        return list(
            {record.cell: record for record in _read_lines(self.records_file, Record.from_line, "a record")}.values()
        )


def _append(path: Path, text: str) -> None:
    """Adds a line to a file and waits until it is on the disk. A last line that a kill cut off is removed first.

    Raises OSError if it cannot be written; the file is then as it was before.
    """
    left = memoryview(text.encode() + b"\n")
    # Without a buffer, which would try again when the file is closed to write what did not fit.
    with path.open("rb+", buffering=0) as file:
        # Usually the last byte is a newline, and the file need not be read.
        size = file.seek(0, os.SEEK_END)
        if _is_cut_off(file):
            file.seek(0)
            size = file.readall().rfind(b"\n") + 1
            file.truncate(size)
        file.seek(size)
        try:
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                file.truncate(size)
            raise


def _is_cut_off(file: BinaryIO) -> bool:
    """Whether the last line of a file has no end."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 1))
    return size > 0 and file.read(1) != b"\n"


def _read_lines(file: Path, read: Callable[[bytes], _Read], what: str) -> Iterator[_Read]:
    """What the lines of a file are. Raises UsageError for a bad one, but not for a last one that a kill cut off."""
    with file.open("rb") as opened:
        for number, line in enumerate(iter(partial(opened.readline, _LONGEST_LINE), b""), start=1):
            if len(line) < _LONGEST_LINE and not line.endswith(b"\n"):
                break
            try:
                yield read(line)
            except ValueError as problem:
                raise UsageError(f"{file}: line {number} is not {what}: {problem}") from None


def _cannot_write(path: Path, problem: OSError) -> UsageError:
    return UsageError(f"--out: cannot write to '{path}': {problem.strerror or problem}")
