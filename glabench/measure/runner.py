"""The runner: drives workers through the cells. What a cell does to its worker costs that cell only."""

from collections.abc import Callable, Iterable
from itertools import groupby

from glabench.measure.outcome import failure
from glabench.measure.process import Worker, WorkerDiedError, WorkerTimeoutError
from glabench.records import Record, Status
from glabench.sweeps.model import Cell

# After these the worker's memory or device may be in a bad state, or the worker is gone.
_NEEDS_FRESH_WORKER: frozenset[Status] = frozenset({"oom", "error", "timeout", "crashed"})


def run_cells(
    cells: Iterable[Cell],
    start_worker: Callable[[str], Worker],
    run_id: str,
    on_record: Callable[[Record], None],
    on_start: Callable[[Cell], None] | None = None,
) -> None:
    """Measures the cells in their order; tells of each when it starts, and hands on its record when it is there.

    `start_worker` makes a worker for a backend's name: one for each run of cells of the same backend, and a fresh one
    after a crash, a time-out, an out-of-memory or an error. Tests hand in workers that only pretend.
    """
    for backend, group in groupby(cells, key=lambda cell: cell.backend):
        worker: Worker | None = None
        try:
            for cell in group:
                worker = worker or start_worker(backend)
                if on_start is not None:
                    on_start(cell)
                record = _measure(worker, cell, run_id)
                on_record(record)
                if record.status in _NEEDS_FRESH_WORKER:
                    worker.close()
                    worker = None
        finally:
            if worker is not None:
                worker.close()


def _measure(worker: Worker, cell: Cell, run_id: str) -> Record:
    try:
        record = worker.measure(cell)
    except WorkerTimeoutError as problem:
        return failure(run_id, cell, "timeout", str(problem))
    except WorkerDiedError as problem:
        return failure(run_id, cell, "crashed", str(problem))
    except ValueError as problem:  # not a record at all
        return failure(run_id, cell, "crashed", f"the worker's answer makes no sense: {problem}")
    if record.cell != cell:
        return failure(run_id, cell, "crashed", "the worker answered for another cell")
    return record
