"""Callbacks for the progress of a measurement. By default they do nothing."""

from glabench.records import Record
from glabench.sweeps import Cell


class Observer:
    """Override the methods that you need. `lane` names the round; it is empty in a plain run."""

    def say(self, text: str) -> None:
        """Called with a message for the user."""

    def begin(self, cells: int, done: int) -> None:
        """Called before measuring, with the number of all cells and of those that are already measured."""

    def start(self, cell: Cell, lane: str) -> None:
        """Called before a cell is measured."""

    def record(self, record: Record, lane: str) -> None:
        """Called after a cell's record was written to the disk."""

    def end(self) -> None:
        """Called after measuring, also if it was interrupted or failed."""
