"""The measuring loop: drives workers through the cells of one or several lanes, and keeps every record.

Plain runs, rounds, revisions in turns and baselines all go through it: the lock, resuming, a full disk, Ctrl-C and
progress work for each of them.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import groupby
from typing import Any

from glabench.devices.ceilings import Ceilings
from glabench.errors import GlabenchError, InterruptedRunError, RecordNotKeptError
from glabench.measure.job import Job
from glabench.measure.outcome import failure
from glabench.plain import read_as
from glabench.records import Record, RunFolder, Status
from glabench.scheduling.observer import Observer
from glabench.scheduling.plan import Plan
from glabench.scheduling.process import ProcessWorker, Worker, WorkerDiedError, WorkerTimeoutError
from glabench.sweeps import Cell

# After these the worker's memory or device may be in a bad state, or the worker is gone.
_NEEDS_FRESH_WORKER: frozenset[Status] = frozenset({"oom", "error", "timeout", "crashed"})
StartWorker = Callable[[Job, Mapping[str, str]], Worker]


@dataclass(frozen=True)
class Version:
    """One version of the code: what its workers find in their environment, the plugins that they load, its name."""

    label: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()
    # Hashes of its kernels and plugins, as `describe_code` has them.
    code: Mapping[str, Any] = field(default_factory=dict)

    @property
    def hash(self) -> str | None:
        """One hash of the measured code; None if it is not known."""
        measured = {part: self.code.get(part) for part in ("kernels", "plugins")}
        return sha256(json.dumps(measured, sort_keys=True).encode()).hexdigest()[:12] if self.code else None


@dataclass(frozen=True)
class Lane:
    """One run folder and the version that is measured into it; `name` tells rounds apart."""

    folder: RunFolder
    version: Version
    name: str = ""


def measure_lanes(
    lanes: Sequence[Lane],
    plan: Plan,
    observer: Observer,
    go_on: str,
    retry_failed: bool = False,
    start_worker: StartWorker = ProcessWorker,
) -> None:
    """Measures what the lanes' folders lack: backend by backend, each lane in its turn in a fresh worker.

    `go_on` is the command that resumes, for messages. Raises InterruptedRunError, RecordNotKeptError (a full disk),
    UsageError (another process measures into a folder); what was measured is kept.
    """
    with ExitStack() as stack:
        for lane in lanes:
            stack.enter_context(lane.folder.locked())
        todo = [missing_cells(lane.folder, plan.cells, retry_failed) for lane in lanes]
        left, total = sum(map(len, todo)), len(lanes) * len(plan.cells)
        if left < total:
            observer.say(f"{total - left} of {total} cells are measured already")
        observer.begin(left)
        stack.callback(observer.end)
        try:
            for backend, group in groupby(plan.cells, key=lambda cell: cell.backend):
                own = list(group)
                for lane, missing in zip(lanes, todo, strict=True):
                    _measure_group(
                        backend, [cell for cell in own if cell in missing], lane, plan, observer, start_worker
                    )
        except KeyboardInterrupt:
            raise InterruptedRunError(f"interrupted; what was measured is kept, go on with: {go_on}") from None
        except RecordNotKeptError as problem:
            raise RecordNotKeptError(f"{problem}, go on with: {go_on}") from None
        except OSError as problem:  # no process, no temporary file for a worker
            why = problem.strerror or problem
            message = f"the next cell cannot be measured: {why}; what was measured is kept, go on with: {go_on}"
            raise GlabenchError(message) from None


def missing_cells(folder: RunFolder, cells: Iterable[Cell], retry_failed: bool = False) -> set[Cell]:
    """The cells that a run has no record of, or with `retry_failed` none that is ok."""
    done = {record.cell for record in folder.records() if record.status == "ok" or not retry_failed}
    return {cell for cell in cells if cell not in done}


def _measure_group(
    backend: str, cells: Sequence[Cell], lane: Lane, plan: Plan, observer: Observer, start_worker: StartWorker
) -> None:
    """Measures cells of one backend; a fresh worker follows a crash, a time-out, an out-of-memory or an error."""
    ceilings = read_as(Ceilings, lane.folder.environment().get("ceilings") or {})
    job = Job(
        backend, lane.folder.run_id, plan.place.device, plan.settings, lane.version.plugins, ceilings, lane.version.hash
    )
    worker: Worker | None = None
    try:
        for cell in cells:
            worker = worker or start_worker(job, lane.version.variables)
            observer.start(cell, lane.name)
            record = _measure(worker, cell, job)
            lane.folder.append(record)
            observer.record(record, lane.name)
            if record.status in _NEEDS_FRESH_WORKER:
                worker.close()
                worker = None
    finally:
        if worker is not None:
            worker.close()


def _measure(worker: Worker, cell: Cell, job: Job) -> Record:
    try:
        record = worker.measure(cell)
    except WorkerTimeoutError as problem:
        return failure(job, cell, "timeout", str(problem))
    except WorkerDiedError as problem:
        return failure(job, cell, "crashed", str(problem))
    except ValueError as problem:  # not a record at all
        return failure(job, cell, "crashed", f"the worker's answer makes no sense: {problem}")
    if record.cell != cell:
        return failure(job, cell, "crashed", "the worker answered for another cell")
    return record
