"""Occasions: a machine at a time. Two sides that were not measured in turns differ by the spread between them.

A file per device model holds the times of the same cells on several occasions. The files ship with glabench;
`glabench baseline occasion` adds to them.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from importlib import resources
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from glabench.errors import UsageError
from glabench.plain import Amount, Count, Name, read_as, read_file, read_json, read_text
from glabench.records import Record
from glabench.records.environment import device_name
from glabench.verdicts.statistics import ASSUMED_FIXED_MS, Spread, spread_over

# What is assumed with fewer than LEAST occasions: twice what two of one GPU model had (docs/method.md).
ASSUMED = Spread(shift=0.007, scatter=0.007)
LEAST = 3
_APART = timedelta(hours=1)
# Of a file: far more than years of occasions need.
_MOST_BYTES = 2**24
_MOST_OCCASIONS = 500


@dataclass(frozen=True)
class Occasion:
    """The times of some cells, measured on one GPU within minutes."""

    # UTC, ISO 8601: the first cell's start.
    started_at: Name
    # The anonymous identity of the GPU.
    gpu: Name
    driver: Name | None
    # Of each backend whose code is known: the hash of its own code, if any, and the versions of what it is built on.
    codes: dict[str, Name]
    rounds: Count
    # Milliseconds: geometric means of the rounds' medians.
    cells: dict[str, Amount]

    @classmethod
    def of(
        cls,
        rounds: Sequence[Sequence[Record]],
        environments: Sequence[Mapping[str, Any]],
    ) -> "Occasion":
        """The occasion of some rounds, each with its environment.

        Raises UsageError if they do not name one GPU, are not cold, or have no two times of known code.
        """
        gpus = {(_gpu(each).get("id"), _gpu(each).get("driver")) for each in environments}
        ((gpu, driver),) = gpus if len(gpus) == 1 else ((None, None),)
        if gpu is None:
            raise UsageError("RUN: an occasion is of one GPU, whose identity is recorded (`gpu id`); measure it again")
        if any((each.get("settings") or {}).get("timing") != "cold" for each in environments):
            raise UsageError("RUN: the times of an occasion are cold ones; measure without --timing")
        timed = [r for records in rounds for r in records if r.status == "ok" and r.time_ms and r.started_at]
        if not timed:
            raise UsageError("RUN: no cell has a time; name runs, or folders of rounds, of one sweep")
        times: dict[str, list[float]] = {}
        for record in timed:
            times.setdefault(str(record.cell), []).append(record.time_ms or 0)
        codes: dict[str, set[str | None]] = {}
        for records, environment in zip(rounds, environments, strict=True):
            for record in records:
                if record.time_ms:
                    code = _code(record.cell.backend, record.code, environment)
                    codes.setdefault(record.cell.backend, set()).add(code)
        occasion = cls(
            started_at=min(record.started_at or "" for record in timed),
            gpu=str(gpu),
            driver=driver,
            codes={backend: one for backend, found in codes.items() for one in found if one and len(found) == 1},
            rounds=len(rounds),
            cells={cell: round(geometric_mean(found), 6) for cell, found in times.items()},
        )
        if len(occasion.comparable) < 2:
            unknown = ", ".join(sorted(codes.keys() - occasion.codes.keys())) or "none"
            raise UsageError(
                "RUN: fewer than two cells have a time and code whose version is known and the same in all rounds "
                f"(not known of: {unknown}); measure with this version of glabench"
            )
        return occasion

    @property
    def comparable(self) -> dict[tuple[str, str, str], float]:
        """The times of the cells whose code is known, by backend, cell and code: with other code, a cell is another."""
        found = {}
        for cell, ms in self.cells.items():
            backend = max((name for name in self.codes if cell.startswith(f"{name} ")), key=len, default=None)
            if backend is not None:
                found[backend, cell, self.codes[backend]] = ms
        return found


def _code(backend: str, own: str | None, environment: Mapping[str, Any]) -> str | None:
    """What a backend's times in a run are of; None if it is not known. `own`: the hash of kernels and plugins."""
    recorded = (environment.get("implementations") or {}).get(backend)
    if not recorded:
        return None
    versions = {**recorded["packages"], "CUDA": _gpu(environment).get("cuda")}
    parts = [own] if recorded["own_code"] else []
    parts += [version and f"{name} {version}" for name, version in versions.items()]
    return ", ".join(map(str, parts)) if all(parts) else None


def _gpu(environment: Mapping[str, Any]) -> Mapping[str, Any]:
    return environment.get("gpu") or {}


@dataclass(frozen=True)
class Occasions:
    """The known occasions of a device model."""

    device: Name
    occasions: list[Occasion] = field(default_factory=list)

    @classmethod
    def of(cls, device: str, path: Path | None = None) -> "Occasions":
        """Those in a file, by default the one that ships with glabench; none if there is no file.

        Raises UsageError for a file that is not one of occasions on this device.
        """
        path = path or file_of(device)
        return cls.load(path, device, "--out") if path.exists() else cls(device)

    @classmethod
    def load(cls, path: Path, device: str, option: str = "--occasions") -> "Occasions":
        """Those in a file, which must exist. Raises UsageError if it is not one of occasions on this device."""
        if not path.is_file():  # a pipe or a device could be read for ever
            raise UsageError(
                f"{option}: there is no file '{path}'; make one with: glabench baseline occasion RUN... --out FILE"
            )
        try:
            found = read_as(cls, read_text(read_json(read_file(path, _MOST_BYTES))))
            if len(found.occasions) > _MOST_OCCASIONS:
                raise ValueError(f"too many; allowed are {_MOST_OCCASIONS}")
            for each in found.occasions:
                datetime.fromisoformat(each.started_at)
        except (OSError, ValueError) as problem:
            raise UsageError(f"{option}: '{path}' is not a file of occasions ({problem})") from None
        if found.device != device:
            raise UsageError(f"{option}: '{path}' holds occasions of {found.device}, not {device}; name another file")
        return found

    def save(self, path: Path | None = None) -> Path:
        """Writes the file and returns its path. Raises UsageError if it cannot be written."""
        path = path or file_of(self.device)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        except OSError as problem:
            raise UsageError(f"--out: cannot write '{path}': {problem.strerror}") from None
        return path

    def adding(self, new: Occasion) -> "Occasions":
        """With one more.

        Raises UsageError if it is less than an hour from a known one, or if no known one has two of its cells, of the
        same code.
        """
        begun = datetime.fromisoformat(new.started_at)
        for known in self.occasions:
            if abs(begun - datetime.fromisoformat(known.started_at)) < _APART:
                raise UsageError(
                    f"RUN: it was measured at {new.started_at}, less than an hour from the known occasion of "
                    f"{known.started_at}; measure again later"
                )
        found = replace(self, occasions=sorted([*self.occasions, new], key=lambda each: each.started_at))
        if self.occasions and not any(
            len(each.comparable.keys() & new.comparable.keys()) > 1 for each in self.occasions
        ):
            raise UsageError(
                "RUN: no known occasion has two of its cells with the same code; measure the same sweep with the same "
                "versions, or begin a new file with --out"
            )
        return found

    def measured(self) -> Spread | None:
        """The spread over all known occasions, by the cells that two or more have; None if there are fewer than two."""
        return spread_over([each.comparable for each in self.occasions], lambda cell: str(cell[0]))

    def spread(self) -> Spread:
        """The spread to count with: assumed if too few occasions are known."""
        return (self.measured() if len(self.occasions) >= LEAST else None) or ASSUMED

    def describe(self) -> str:
        """One line with the spread and where it comes from."""
        spread = self.spread()
        if spread.occasions:
            parts = f"{spread.shift:.2%} in common, {spread.scatter:.2%} per cell"
            counts = Counter(cell for each in self.occasions for cell in each.comparable)
            backends = sorted({backend for (backend, *_), count in counts.items() if count > 1})
            cells = f"{spread.cells} cells of {', '.join(backends)}"
            counted = f"{spread.occasions} occasions of {cells}, so {spread.total:.2%} counts"
            fixed = [f"{1e3 * ms:.1f} us of {name}" for name, ms in sorted(spread.fixed_ms.items())]
            counted += f"; per call {', '.join([*fixed, f'{1e3 * ASSUMED_FIXED_MS:.1f} us of others, assumed'])}"
            return f"spread between occasions: {spread.measured:.2%} ({parts}; {counted})"
        few = f"{len(self.occasions)} of at least {LEAST} occasions known on {self.device}"
        per_call = f"{1e3 * ASSUMED_FIXED_MS:.1f} us per call"
        return f"spread between occasions assumed: {spread.measured:.1%} ({few}), and {per_call}"


def file_of(device: str) -> Path:
    """The file of a device model, which may not exist yet."""
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return Path(str(resources.files("glabench.verdicts"))) / "known" / f"{name or 'unknown'}.json"


def add_occasion(
    rounds: Sequence[Sequence[Record]], environments: Sequence[Mapping[str, Any]], path: Path | None
) -> tuple[Occasions, Path]:
    """Adds the occasion of some rounds to its device's file. Returns all occasions, and the file. Raises UsageError."""
    new = Occasion.of(rounds, environments)
    found = Occasions.of(device_name(environments[0]), path).adding(new)
    return found, found.save(path)
