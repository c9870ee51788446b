"""A sweep of 10,000 cells: what the suite itself takes for a cell, and that its memory does not grow.

A made-up worker answers at once, over the JSON that a real one speaks. Counted is everything that the suite does
between two cells: choosing the worker, reading its answer, keeping the record, telling of it. It is counted as time of
the processor: how long the disk takes to confirm a record is the disk's affair, and on a busy machine others' too.
"""

import gc
import os
import resource
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from glabench.measure.runner import run_cells
from rich.console import Console
from test_records import CELL, record

from glabench.cli.output import Messages
from glabench.records import Record, RunFolder
from glabench.sweeps import load_sweep

CELLS = [replace(CELL, batch=batch, seqlen=seqlen) for batch in range(1, 101) for seqlen in range(1, 101)]
SAMPLES = tuple(1.0 + i / 1000 for i in range(100))
MOST_MS = 5.0


class InstantWorker:
    """Answers with the same measurement for every cell; notes the processor time that its own part takes."""

    def __init__(self, _backend):
        self.own_s = 0.0

    def measure(self, cell):
        start = time.process_time()
        line = replace(record(samples_ms=SAMPLES), cell=cell).to_line()
        self.own_s += time.process_time() - start
        return Record.from_line(line)

    def close(self):
        pass


@pytest.fixture
def sweep(tmp_path):
    """Runs the cells as a measuring command does, and calls `after` with the number of each that is done."""
    folder = RunFolder.create(tmp_path / "run", load_sweep("cpu-smoke"), {})
    worker = InstantWorker("")

    def run(terminal, after=lambda done: None):
        with ExitStack() as stack:
            nowhere = stack.enter_context(open(os.devnull, "w"))  # noqa: PTH123
            messages = Messages()
            messages.console = Console(file=nowhere, force_terminal=terminal, width=120)
            stack.enter_context(folder.locked())
            progress = stack.enter_context(messages.progress(len(CELLS)))
            done = 0

            def on_record(found):
                nonlocal done
                folder.append(found)
                progress.add(found)
                done += 1
                after(done)

            run_cells(CELLS, lambda _: worker, "run", on_record, progress.start)
        return folder, worker

    return run


def held():
    """What the process holds: small objects, and resident memory in bytes."""
    gc.collect()
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return sys.getallocatedblocks(), resident_pages * resource.getpagesize()


@pytest.mark.parametrize("terminal", [True, False], ids=["bar", "lines"])
def test_the_suite_takes_less_than_5_ms_a_cell_besides_the_worker_and_its_memory_is_flat(sweep, terminal):
    seen = {}

    def watch(done):
        if done in (2000, len(CELLS)):
            seen[done] = held()

    start = time.process_time()
    folder, worker = sweep(terminal, watch)
    per_cell_ms = 1000 * (time.process_time() - start - worker.own_s) / len(CELLS)
    assert per_cell_ms < MOST_MS
    (blocks_before, resident_before), (blocks, resident) = seen[2000], seen[len(CELLS)]
    assert blocks - blocks_before < (len(CELLS) - 2000) / 2, "cells leave objects behind"
    assert resident - resident_before < 8 * 2**20, "cells leave memory behind"
    start = time.process_time()
    assert [found.cell for found in folder.records()] == CELLS
    assert 1000 * (time.process_time() - start) / len(CELLS) < MOST_MS
