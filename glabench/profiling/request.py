"""What a profile is asked for, and the process that makes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from glabench.errors import GlabenchError
from glabench.measure.outcome import one_line
from glabench.records.profile import Profile
from glabench.sweeps.model import Cell

_CALLS = 10


@dataclass(frozen=True)
class Request:
    """Which cell to profile, on which device (`cuda:1`, `cpu`), over how many calls.

    `trace_to`, `memory_to`: files for the trace and for torch's snapshot of allocations. `counted`: run one call for
    Nsight Compute in place of all that.
    """

    cell: Cell
    device: str
    plugins: tuple[str, ...] = ()
    calls: int = _CALLS
    trace_to: str | None = None
    memory_to: str | None = None
    counted: bool = False

    def to_json(self) -> dict[str, Any]:
        """The fields as plain data."""
        names = ("device", "plugins", "calls", "trace_to", "memory_to", "counted")
        return {"cell": self.cell.to_json(), **{name: getattr(self, name) for name in names}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Request:
        """The inverse of `to_json`."""
        return cls(**{**data, "cell": Cell.from_json(data["cell"]), "plugins": tuple(data["plugins"])})


@dataclass(frozen=True)
class Answer:
    """A cell's profile. If its parts failed, it has none, and `failure` says why."""

    profile: Profile
    failure: str | None = None


def profile_cell(request: Request, variables: Mapping[str, str], timeout_s: float) -> Answer:
    """The profile, made in a process of its own. Raises GlabenchError that names the cell if that fails."""
    command = [sys.executable, "-P", "-m", "glabench.profiling.worker", json.dumps(request.to_json())]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **variables}, timeout=timeout_s, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise GlabenchError(f"{request.cell}: no profile within {timeout_s:g} s (--cell-timeout)") from None
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        said = done.stderr.strip().splitlines()
        why = f": {one_line(said[-1])}" if said else ""
        raise GlabenchError(f"{request.cell}: the profiling process ended with code {done.returncode}{why}") from None
    if "error" in answer:
        raise GlabenchError(f"{request.cell}: {answer['error']}")
    failed = answer["failure"]
    try:
        return Answer(Profile.from_json(answer["profile"]), failed and f"{request.cell}: its parts failed: {failed}")
    except ValueError as problem:  # of what a plugin says of its kernels
        raise GlabenchError(f"{request.cell}: its profile cannot be kept: {problem}") from None
