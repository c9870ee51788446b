"""The results of `glabench validate` as Markdown: timers against true times, and the spread between processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, stdev
from typing import Any

from glabench.records import Record
from glabench.records.metrics import significant
from glabench.report.grid import Grid
from glabench.sweeps import Cell

_TIMERS = (
    ("cold_ms", "cold"),
    ("hot_ms", "hot"),
    ("graph_ms", "graph"),
    ("do_bench_ms", "do_bench"),
    ("cuda_bench_ms", "cuda-bench"),
)


@dataclass(frozen=True)
class Spread:
    """The spread of a cell's median between fresh processes: median (ms); standard deviation and range as shares."""

    cell: str
    processes: int
    time_ms: float
    deviation: float
    range: float


def spreads(rounds: Sequence[Sequence[Record]]) -> list[Spread]:
    """The spread of each cell that has a time in every process."""
    times: dict[Cell, list[float | None]] = {}
    for records in rounds:
        for record in records:
            times.setdefault(record.cell, []).append(record.time_ms)
    found = []
    for cell, all_times in times.items():
        known = [time for time in all_times if time]
        if len(known) == len(all_times) > 1:
            middle = median(known)
            found.append(
                Spread(str(cell), len(known), middle, stdev(known) / middle, (max(known) - min(known)) / middle)
            )
    return found


def markdown(known: Sequence[Mapping[str, Any]], spread: Sequence[Spread], surroundings: str) -> str:
    """The report: two tables and how to read them. A timer that was not there has no column."""
    present = [(key, name) for key, name in _TIMERS if any(row.get(key) is not None for row in known)]
    timers = ["work", "truth, ms", *(name for _, name in present)]
    works = [
        [f"{row['work']} ({row['what']})", significant(row["true_ms"], 4)]
        + [_against(row.get(key), row["true_ms"]) for key, _ in present]
        for row in known
    ]
    heads = ["cell", "processes", "median, ms", "standard deviation", "lowest to highest"]
    cells = [[s.cell, str(s.processes), significant(s.time_ms), f"{s.deviation:.2%}", f"{s.range:.2%}"] for s in spread]
    return f"""# Validation of the timers

{surroundings}

## Against work of a known size

The truth is the device's own timer within a kernel that spins; for copies and products the host's clock over calls \
back to back, no device event involved. Other columns: median ms, and its distance from the truth.

{Grid("", "", timers, works).to_markdown()}
## Between fresh processes

Medians of the same cell in processes of their own: their standard deviation, and the distance from the lowest to the \
highest, as shares of their median.

{Grid("", "", heads, cells).to_markdown()}"""


def _against(value: float | None, truth: float) -> str:
    return "" if value is None else f"{significant(value, 4)} ({value / truth - 1:+.1%})"
