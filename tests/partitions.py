"""Groups of warps on a CPU: partitions of a Gluon kernel take turns, each in a thread, and meet at barriers.

Only one runs at a time. Which one is decided anew, at random but the same in every run, whenever one comes to a point
where another could be ahead of it. Copies that are to arrive at a barrier end at random points, too.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# For how many points a partition may be favoured: long enough to be ahead of the others by all that barriers allow.
LENGTHS = (1, 4, 16, 64)


@dataclass
class Copy:
    """An asynchronous copy; `run` makes it."""

    run: Callable[[], None]
    done: bool = False

    def finish(self) -> None:
        if not self.done:
            self.done = True
            self.run()


@dataclass
class Barrier:
    """An `mbarrier`: a phase ends with `count` arrivals."""

    count: int
    arrived: int = 0
    phases: int = 0  # that have ended

    def arrive(self, count: int) -> None:
        self.arrived += count
        assert self.arrived <= self.count, "more arrivals than a phase has"
        if self.arrived == self.count:
            self.arrived, self.phases = 0, self.phases + 1

    def has_ended(self, parity: int) -> bool:
        """Whether the latest phase that has ended, or phase -1 if none has, is of this parity."""
        return self.phases % 2 != parity


@dataclass
class Partition:
    """What a group of warps has under way."""

    warps: int = 4
    copies: list[list[Copy]] = field(default_factory=lambda: [[]])
    products: list[Any] = field(default_factory=list)
    arrivals: list[tuple[list[Copy], Barrier]] = field(default_factory=list)

    def commit(self) -> None:
        self.copies.append([])

    def wait_for_copies(self, left: int) -> None:
        for group in self.copies[: max(len(self.copies) - 1 - left, 0)]:
            for copy in group:
                copy.finish()
        self.arrive()

    def arrive_after_copies(self, barrier: Barrier) -> None:
        """Every thread arrives when its copies up to now have ended."""
        self.arrivals.append(([copy for group in self.copies for copy in group], barrier))
        self.arrive()

    def end_one_arrival(self) -> bool:
        """Ends the copies of the first arrival; whether there was one."""
        for copy in self.arrivals[0][0] if self.arrivals else []:
            copy.finish()
        return self.arrive()

    def arrive(self) -> bool:
        waiting = [(copies, barrier) for copies, barrier in self.arrivals if not all(copy.done for copy in copies)]
        for copies, barrier in self.arrivals:
            if all(copy.done for copy in copies):
                barrier.arrive(32 * self.warps)
        ended = len(waiting) < len(self.arrivals)
        self.arrivals = waiting
        return ended

    def assert_idle(self) -> None:
        assert all(copy.done for group in self.copies for copy in group), "a copy was not waited for"
        assert not self.products, "a product was not waited for"


class Turns:
    """Runs partitions until all have ended. `enter` makes one the current partition."""

    def __init__(self, partitions: list[Partition], enter: Callable[[Partition], None], seed: int) -> None:
        self.partitions, self.enter, self.random = partitions, enter, random.Random(seed)
        self.batons = [threading.Semaphore(0) for _ in partitions]
        self.ended = [False] * len(partitions)
        self.blocked: list[Callable[[], bool] | None] = [None] * len(partitions)
        self.current, self.error = 0, None
        self.favoured, self.turns = 0, 0  # one that goes on whenever it can, at so many points
        self.over = threading.Semaphore(0)

    def run(self, functions: list[Callable[[], None]]) -> None:
        threads = [threading.Thread(target=self._run, args=(i, f), daemon=True) for i, f in enumerate(functions)]
        for thread in threads:
            thread.start()
        self._give_to(self.random.randrange(len(functions)))
        self.over.acquire()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error

    def _run(self, me: int, function: Callable[[], None]) -> None:
        self.batons[me].acquire()
        try:
            if self.error is None:
                function()
                self.partitions[me].assert_idle()
        except BaseException as error:
            self.error = self.error or error
        self.ended[me] = True
        if all(self.ended):
            self.over.release()
        else:
            self._give_to(self._next())

    def _give_to(self, partition: int) -> None:
        self.current = partition
        self.enter(self.partitions[partition])
        self.batons[partition].release()

    def _next(self) -> int:
        """One that can go on; if there is none, copies end until there is. After an error, any."""
        left = [i for i, ended in enumerate(self.ended) if not ended]
        while self.error is None:
            ready = [i for i in left if self.blocked[i] is None or self.blocked[i]()]
            if ready:
                if self.turns == 0:
                    self.favoured, self.turns = self.random.choice(left), self.random.choice(LENGTHS)
                self.turns -= 1
                return self.favoured if self.favoured in ready else self.random.choice(ready)
            ended = [partition.end_one_arrival() for partition in self.partitions]
            if not any(ended):
                self.error = AssertionError("every partition waits at a barrier")
        return left[0]

    def point(self, until: Callable[[], bool] | None = None) -> None:
        """Lets another partition go on, or not; comes back once `until` holds."""
        if self.random.random() < 0.3:
            self.random.choice(self.partitions).end_one_arrival()
        me, self.blocked[self.current] = self.current, until
        chosen = self._next()
        if chosen != me:
            self._give_to(chosen)
            self.batons[me].acquire()
        self.blocked[me] = None
        if self.error is not None:
            raise SystemExit  # of this thread: another one has failed
