"""The measuring loop: drives workers through the cells of one or several lanes and stores every record.

Plain runs, rounds, revisions in turns and baselines all use it, so locks, resuming, full disks, Ctrl-C and progress are
handled in one place.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import groupby
from typing import Any

from glabench.backends.sites import variables_with
from glabench.devices.provenance import describe_code
from glabench.errors import GlabenchError, InterruptedRunError, RecordNotKeptError
from glabench.measure.job import Job
from glabench.measure.outcome import failure
from glabench.plain import read_as
from glabench.records import Record, RunFolder, Status
from glabench.records.environment import Ceilings, measured_code
from glabench.scheduling.observer import Observer
from glabench.scheduling.plan import Plan
from glabench.scheduling.process import ProcessWorker, Worker, WorkerDiedError, WorkerTimeoutError
from glabench.scheduling.starting import Order, StartWorker, Workers
from glabench.sweeps import Cell

# After these statuses the worker's memory or device may be in a bad state, or the worker has ended.
_NEEDS_FRESH_WORKER: frozenset[Status] = frozenset({"oom", "error", "timeout", "crashed"})


@dataclass(frozen=True)
class Version:
    """One version of the code, as its workers load it."""

    label: str | None = None
    # Environment variables of its workers.
    variables: Mapping[str, str] = field(default_factory=dict)
    # Paths of plugin files that its workers load.
    plugins: tuple[str, ...] = ()
    # Hashes of its kernels and plugins, from `describe_code`.
    code: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def installed(cls, plugins: Sequence[str]) -> "Version":
        """The installed code."""
        return cls(plugins=tuple(plugins), code=describe_code(plugins))

    @property
    def hash(self) -> str | None:
        """One hash of the measured code; None if unknown."""
        measured = measured_code(self.code)
        return sha256(json.dumps(measured, sort_keys=True).encode()).hexdigest()[:12] if measured else None


@dataclass(frozen=True)
class Lane:
    """A run folder and the version that is measured into it. `name` distinguishes rounds in messages."""

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
    """Measures the cells that the lanes' folders lack: backend by backend, lane after lane, each in a fresh worker.

    `go_on` is what to do after an interruption, such as `continue with: COMMAND`, for messages. Raises
    InterruptedRunError after Ctrl-C, RecordNotKeptError if a record cannot be written, GlabenchError if no worker can
    start, UsageError if another process measures into a folder. Measured records are kept.
    """
    with ExitStack() as stack:
        for lane in lanes:
            stack.enter_context(lane.folder.locked())
        todo = [missing_cells(lane.folder, plan.cells, retry_failed) for lane in lanes]
        total = len(lanes) * len(plan.cells)
        if done := total - sum(map(len, todo)):
            observer.say(f"{done} of {total} cells are already measured")
        observer.begin(total, done)
        stack.callback(observer.end)
        groups = list(_groups(lanes, todo, plan))
        workers = Workers(start_worker, [group.order for group in groups])
        stack.callback(workers.close)
        try:
            for number, group in enumerate(groups):
                _measure_group(group, number, workers, plan, observer)
        except KeyboardInterrupt:
            raise InterruptedRunError(f"interrupted; what was measured is kept, {go_on}") from None
        except RecordNotKeptError as problem:
            raise RecordNotKeptError(f"{problem}, {go_on}") from None
        except OSError as problem:  # no process or no temporary file for a worker
            why = problem.strerror or problem
            message = f"the next cell cannot be measured: {why}; what was measured is kept, {go_on}"
            raise GlabenchError(message) from None


def missing_cells(folder: RunFolder, cells: Iterable[Cell], retry_failed: bool = False) -> set[Cell]:
    """The cells without a record in a run; with `retry_failed`, also those whose record is not ok."""
    done = {record.cell for record in folder.records() if record.status == "ok" or not retry_failed}
    return {cell for cell in cells if cell not in done}


@dataclass(frozen=True)
class _Group:
    """Cells of one backend, to be measured into one lane."""

    lane: Lane
    order: Order
    cells: Sequence[Cell]


def _groups(lanes: Sequence[Lane], todo: Sequence[set[Cell]], plan: Plan) -> Iterator[_Group]:
    """All groups in the order in which they are measured.

    Lanes are compared with each other, so all their workers are started in the same way: each in its turn.
    """
    ceilings = [read_as(Ceilings, lane.folder.environment().get("ceilings") or {}) for lane in lanes]
    place = plan.place
    for backend, group in groupby(plan.cells, key=lambda cell: cell.backend):
        own = list(group)
        for lane, missing, known in zip(lanes, todo, ceilings, strict=True):
            if not (cells := [cell for cell in own if cell in missing]):
                continue
            version = lane.version
            job = Job(backend, lane.folder.run_id, place.device, plan.settings, version.plugins, known, version.hash)
            variables = variables_with(place.sites.get(backend), version.variables)
            early = len(lanes) == 1 and cells[0].gpus == 1
            yield _Group(lane, Order(job, variables, early), cells)


def _measure_group(group: _Group, number: int, workers: Workers, plan: Plan, observer: Observer) -> None:
    """Measures cells of one backend. After a crash, time-out, out-of-memory or error, a fresh worker continues.

    A cell that GPUs share has a worker of its own, and no other has the device meanwhile.
    """
    lane, job = group.lane, group.order.job
    worker: Worker | None = None
    try:
        for cell in group.cells:
            if worker is not None and cell.gpus > 1:
                worker.close()
                worker = None
            lacking = plan.place.lacks_gpus(cell)
            if worker is None and lacking is None:
                worker = workers.take(number, cell.gpus)
            observer.start(cell, lane.name)
            record = _measure(worker, cell, job) if worker else failure(job, cell, "unsupported", lacking or "")
            lane.folder.append(record)
            observer.record(record, lane.name)
            if worker is not None and (record.status in _NEEDS_FRESH_WORKER or cell.gpus > 1):
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
    except ValueError as problem:
        return failure(job, cell, "crashed", f"the worker's answer is not a record: {problem}")
    if record.cell != cell:
        return failure(job, cell, "crashed", "the worker's answer is the record of another cell")
    return record
