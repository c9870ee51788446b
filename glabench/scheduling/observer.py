"""Who is told how far a measurement is. By default nobody."""

from glabench.records import Record
from glabench.sweeps import Cell


class Observer:
    """Override what you want to hear of. A plain run has one lane, without a name; rounds have one lane each."""

    def say(self, text: str) -> None:
        """A message for a person."""

    def begin(self, cells: int) -> None:
        """So many cells are about to be measured."""

    def start(self, cell: Cell, lane: str) -> None:
        """A cell is being measured."""

    def record(self, record: Record, lane: str) -> None:
        """A cell has its record, which is on the disk."""

    def end(self) -> None:
        """Nothing more of what was begun is measured, for whatever reason."""
