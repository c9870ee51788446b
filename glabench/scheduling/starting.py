"""Starts workers, several at a time."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from glabench.measure.job import Job
from glabench.scheduling.process import CAN_PAUSE, Worker

# Workers that load torch and its like at the same time; each takes some hundred MiB of the host's memory.
_AT_ONCE = 16
StartWorker = Callable[[Job, Mapping[str, str]], Worker]


@dataclass(frozen=True)
class Order:
    """What the workers of a group of cells are started with, and whether that may be before the group's turn."""

    job: Job
    # Environment variables of the workers.
    variables: Mapping[str, str]
    early: bool = True


class Workers:
    """The workers of groups of cells, one group after another.

    Loading torch and its like takes seconds, so those of some groups do so at the same time, and then wait for their
    turns. Nothing is measured meanwhile. A worker that waits is paused and has loaded no plugin, which could hold the
    device while others are measured.
    """

    def __init__(self, start: StartWorker, orders: Sequence[Order], at_once: int | None = None) -> None:
        self._start = start
        self._orders = orders
        self._at_once = at_once or (min(_AT_ONCE, os.cpu_count() or 1) if CAN_PAUSE else 1)
        # Those that nobody has taken, by their group's number.
        self._waiting: dict[int, Worker] = {}

    def take(self, number: int, gpus: int = 1) -> Worker:
        """A worker of a group that no cell has used. If GPUs share its cell, nothing else is started.

        Raises OSError if there is no room for another process.
        """
        if gpus > 1:
            order = self._orders[number]
            return self._start(replace(order.job, gpus=gpus), order.variables)
        if number in self._waiting and not self._waiting[number].is_loaded():
            self._waiting.pop(number).close()  # perhaps memory was short, and it has ended
        if number not in self._waiting:
            try:
                self._start_from(number)
            except OSError:
                self.close()  # which makes room
                self._start_from(number)
        return self._waiting.pop(number)

    def _start_from(self, number: int) -> None:
        following = range(number + 1, min(number + self._at_once, len(self._orders)))
        others = [each for each in following if self._orders[each].early and each not in self._waiting]
        self._waiting[number] = self._started(number, early=bool(others))
        for each in others:
            with suppress(OSError):  # in its turn it may start
                self._waiting[each] = self._started(each, early=True)
        # Before its main program runs, a worker that is stopped would outlive this process if that is killed.
        loaded = {each: worker.is_loaded() for each, worker in self._waiting.items()}
        for each in self._waiting.keys() - {number}:
            if loaded[each]:
                self._waiting[each].pause()
            else:
                self._waiting.pop(each).close()

    def _started(self, number: int, early: bool) -> Worker:
        order = self._orders[number]
        return self._start(replace(order.job, early=early), order.variables)

    def close(self) -> None:
        """Ends the workers that nobody has taken."""
        while self._waiting:
            self._waiting.popitem()[1].close()
