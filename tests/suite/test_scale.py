"""A sweep of thousands of cells: the suite's own time per cell is short, and its memory does not grow.

A made-up worker answers at once, through the same JSON as a real one. The test measures everything that the suite does
between two cells: choosing the worker, reading its answer, storing the record, showing it. It measures processor time,
because the time to flush a record depends on the disk and on other work of the machine.
"""

import gc
import os
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from simulated import CELL, record

from glabench.backends import load_registry
from glabench.cli.output import Messages
from glabench.measure.settings import Settings
from glabench.records import Record, RunFolder
from glabench.scheduling.loop import Lane, Version, measure_lanes
from glabench.scheduling.plan import Place, Plan
from glabench.sweeps import load_sweep

SAMPLES = tuple(1.0 + i / 1000 for i in range(100))
MOST_MS = 5.0
GROWN = 1200  # cells; until then memory grows, because the progress bar remembers a thousand
CASES = [
    pytest.param(2000, True, id="bar"),
    pytest.param(2000, False, id="lines"),
    pytest.param(10_000, True, id="bar, many", marks=pytest.mark.full),
    pytest.param(10_000, False, id="lines, many", marks=pytest.mark.full),
]


class InstantWorker:
    """Answers with the same measurement for every cell, and records the processor time that this takes."""

    def __init__(self):
        self.own_s = 0.0
        self._record = record(SAMPLES)

    def is_loaded(self):
        return True

    def pause(self):
        pass

    def measure(self, cell):
        start = time.process_time()
        line = replace(self._record, cell=cell).to_line()
        self.own_s += time.process_time() - start
        return Record.from_line(line)

    def close(self):
        pass


class Watching(Messages):
    """Discards the messages of a measuring command, and records the process's memory after some cells."""

    def __init__(self, nowhere, terminal):
        super().__init__()
        self.console = Console(file=nowhere, force_terminal=terminal, width=120)
        self.seen = {}

    def record(self, record, lane):
        super().record(record, lane)
        if self._done in (GROWN, self._cells):
            self.seen[self._done] = held()


def held():
    """The process's memory: the number of small objects, and resident bytes."""
    gc.collect()
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return sys.getallocatedblocks(), resident_pages * resource.getpagesize()


@pytest.mark.parametrize(("cells", "terminal"), CASES)
def test_the_suite_takes_less_than_5_ms_a_cell_besides_the_worker_and_its_memory_is_flat(tmp_path, cells, terminal):
    swept = [
        replace(CELL, batch=batch, seqlen=seqlen) for batch in range(1, cells // 100 + 1) for seqlen in range(1, 101)
    ]
    plan = Plan(load_sweep("cpu-smoke"), swept, Settings(), Place({"device": "cpu"}, load_registry()))
    folder = RunFolder.create(tmp_path / "run", plan.sweep, {})
    worker = InstantWorker()
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        messages = Watching(nowhere, terminal)
        start = time.process_time()
        measure_lanes([Lane(folder, Version())], plan, messages, "again", start_worker=lambda *_: worker)
        per_cell_ms = 1000 * (time.process_time() - start - worker.own_s) / cells
    assert per_cell_ms < MOST_MS
    (blocks_before, resident_before), (blocks, resident) = messages.seen[GROWN], messages.seen[cells]
    assert blocks - blocks_before < (cells - GROWN) / 2, "cells leave objects behind"
    assert resident - resident_before < 8 * 2**20, "cells leave memory behind"
    start = time.process_time()
    assert [found.cell for found in folder.records()] == swept
    assert 1000 * (time.process_time() - start) / cells < MOST_MS
