"""A baseline: rounds stored in one JSON file, as the base of later checks on the same kind of device."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glabench.errors import UsageError, printable
from glabench.plain import read_as, read_file, read_json, read_text, shown
from glabench.records import Record
from glabench.records.environment import check_environment
from glabench.sweeps.load import dump_sweep, parse_sweep
from glabench.sweeps.model import Sweep
from glabench.verdicts.engine import Side

# 1: records without `schema`, and sweeps with the key `baseline` instead of `against`. Both formats are read.
_FORMAT = 2
_KNOWN_FORMATS = (1, 2)
_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_SHORT_COMMIT = 10
_MOST_BYTES = 256 * 2**20


@dataclass(frozen=True)
class _StoredSweep:
    name: str
    toml: str


@dataclass(frozen=True)
class _File:
    """The keys of a baseline file."""

    format: int
    environment: dict[str, Any]
    sweep: _StoredSweep
    rounds: list[list[dict[str, Any]]]
    revision: Any = None


@dataclass(frozen=True)
class Baseline:
    """The stored records of some rounds, and their sweep."""

    sweep: Sweep
    # Includes the settings that the cells were measured with.
    environment: Mapping[str, Any]
    # The commit of the measured code; None if there was none, or uncommitted changes.
    revision: str | None
    rounds: Sequence[Sequence[Record]]

    @property
    def side(self) -> Side:
        """The rounds as a side of a comparison."""
        name = f"baseline ({self.revision[:_SHORT_COMMIT]})" if self.revision else "baseline"
        return Side(name, self.rounds, self.environment)

    def save(self, path: Path) -> None:
        """Writes the file, one record per line, so that diffs are readable. Raises UsageError if it cannot write."""
        head = {
            "format": _FORMAT,
            "environment": dict(self.environment),
            "revision": self.revision,
            "sweep": {"name": self.sweep.name, "toml": dump_sweep(self.sweep)},
        }
        rounds = ",\n".join(
            "[\n" + ",\n".join(record.to_line() for record in records) + "\n]" for records in self.rounds
        )
        text = json.dumps(head, indent=1)[:-2] + ',\n "rounds": [\n' + rounds + "\n]}\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as problem:
            raise UsageError(f"--out: cannot write '{path}': {problem.strerror}") from None

    @classmethod
    def load(cls, path: Path) -> "Baseline":
        """Reads the file. Raises UsageError if it is missing or not a baseline."""
        if not path.is_file():  # a pipe or a device could be read for ever
            raise UsageError(f"--baseline: there is no file '{path}'; make one with: glabench baseline save")
        try:
            return cls._from_json(read_json(read_file(path, _MOST_BYTES)), f"--baseline: '{path}'")
        except OSError as problem:
            raise UsageError(f"--baseline: cannot read '{path}': {problem.strerror}") from None
        except ValueError as problem:
            raise UsageError(
                f"--baseline: '{path}' is not a baseline ({problem}); make one with: glabench baseline save"
            ) from None

    @classmethod
    def _from_json(cls, data: Any, where: str) -> "Baseline":
        file = read_as(_File, data)
        if file.format not in _KNOWN_FORMATS:
            raise ValueError(f"its format is {shown(file.format)}; known are {', '.join(map(str, _KNOWN_FORMATS))}")
        # Must be a hash, because its code may be measured again, and a name could refer to another commit here.
        if file.revision is not None and not (isinstance(file.revision, str) and _COMMIT.fullmatch(file.revision)):
            raise ValueError(f"revision must be the hash of a commit, got {shown(file.revision)}")
        sweep = parse_sweep(printable(file.sweep.name), file.sweep.toml, where, stored=True)
        rounds = [[Record.from_json(read_text(record)) for record in records] for records in file.rounds]
        if not rounds or not all(rounds):
            raise ValueError("it holds no records")
        return cls(sweep, check_environment(file.environment), file.revision, rounds)
