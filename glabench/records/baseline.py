"""A baseline: what a gate holds later measurements against. One JSON file, tied to the device that it was made on."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glabench.errors import UsageError
from glabench.records.described import check_environment
from glabench.records.record import Record
from glabench.sweeps.fields import shown
from glabench.sweeps.load import dump_sweep, parse_sweep
from glabench.sweeps.model import Sweep

_FORMAT = 1
_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_KEYS = ("format", "environment", "sweep", "rounds")


@dataclass(frozen=True)
class Baseline:
    """The records of some rounds, the sweep and the environment they came from, the commit of the code if it had one.

    The environment holds the settings that the cells were measured with.
    """

    sweep: Sweep
    environment: Mapping[str, Any]
    revision: str | None
    rounds: Sequence[Sequence[Record]]

    def save(self, path: Path) -> None:
        """Writes the file; one record a line, so that changes can be read. Raises UsageError if it cannot."""
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
        """Reads the file. Raises UsageError if it is not there, or is no baseline."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as problem:
            raise UsageError(f"--baseline: cannot read '{path}': {problem.strerror}") from None
        except (ValueError, RecursionError) as problem:
            raise UsageError(f"--baseline: '{path}' is not JSON: {problem}") from None
        try:
            return cls._from_json(data, str(path))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as problem:
            reason = f"{type(problem).__name__}: {problem}"
            raise UsageError(
                f"--baseline: '{path}' is not a baseline of this glabench ({reason}); make one with: "
                "glabench baseline save"
            ) from None

    @classmethod
    def _from_json(cls, data: Any, where: str) -> "Baseline":
        if not isinstance(data, dict) or any(key not in data for key in _KEYS):
            raise ValueError(f"it needs the keys {', '.join(_KEYS)}")
        if data["format"] != _FORMAT:
            raise ValueError(f"its format is {shown(data['format'])}, known is {_FORMAT}")
        environment, revision = data["environment"], data.get("revision")
        # Its code is measured anew: a commit by its hash, and not by a name that stands for another one here.
        if revision is not None and not (isinstance(revision, str) and _COMMIT.fullmatch(revision)):
            raise ValueError(f"revision needs the hash of a commit, got {shown(revision)}")
        sweep = parse_sweep(str(data["sweep"]["name"]), str(data["sweep"]["toml"]), where)
        rounds = [[Record.from_json(line) for line in records] for records in data["rounds"]]
        if not rounds or not all(rounds):
            raise ValueError("it holds no records")
        return cls(sweep, check_environment(environment), revision, rounds)
