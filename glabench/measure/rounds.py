"""Measuring cells several times, each time in a fresh process; two versions of the code in turns, A B B A."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from glabench.measure.process import Worker
from glabench.measure.runner import run_cells
from glabench.records import Record
from glabench.sweeps.model import Cell


@dataclass(frozen=True)
class Turn:
    """One side's turn at the cells of a backend; rounds count from 1."""

    side: str
    round: int


def turns(sides: Sequence[str], rounds: int) -> list[Turn]:
    """A B, B A, A B, ...: what drifts steadily meets both sides alike, and every pair ran next to each other."""
    return [
        Turn(side, index) for index in range(1, rounds + 1) for side in (sides if index % 2 else list(reversed(sides)))
    ]


def run_turns(
    cells: Sequence[Cell],
    order: Sequence[Turn],
    start_worker: Callable[[Turn, str], Worker],
    run_id: Callable[[Turn], str],
    on_record: Callable[[Turn, Record], None],
    on_start: Callable[[Cell], None] | None = None,
) -> None:
    """Backend by backend, gives each turn the backend's cells in a fresh worker."""
    for _, group in groupby(cells, key=lambda cell: cell.backend):
        own = list(group)
        for turn in order:
            run_cells(own, partial(start_worker, turn), run_id(turn), partial(on_record, turn), on_start)
