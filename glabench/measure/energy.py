"""Energy per call: the joules between the ends of two calls, by the board's counter, over the number of calls.

The counter changes ten times per second or so, and steps of a model may take longer than that, at a power that differs
from part to part. So a thread notes when the counter changes, and its value at the end of a call is taken to lie on the
line between the changes around it.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

# Over a second, what a line between changes leaves open is a percent (an H200, calls of 44 and 253 ms; over half a
# second 2.5). Pauses between readings, which take 3 ms, leave the interpreter to the thread that makes the calls.
_LEAST_S, _MOST_S, _PAUSE_S = 1.0, 3.0, 1e-3
# A change is not known well enough if the two readings around it are further apart: the thread had to wait.
_CLOSE_S = 0.02
# Batches without an energy before it is given up: long calls need an end with a change before it and one after it.
_FEWEST = 4
_BATCH_S = 0.02


@dataclass(frozen=True)
class Energy:
    """Joules of the whole board per call, and the mean milliseconds per call meanwhile."""

    call_j: float
    call_ms: float


@dataclass(frozen=True)
class Change:
    """A change of the counter: the second at which it was seen, and the joules from then on."""

    at_s: float
    joules: float


@contextmanager
def changes_seen(
    counter: Callable[[], float | None], clock: Callable[[], float] = time.monotonic
) -> Iterator[Sequence[Change]]:
    """The changes of a counter of joules, as a thread sees them that reads it again and again: the sequence grows."""
    changes: list[Change] = []
    ended = threading.Event()

    def look() -> None:
        last, at = counter(), clock()
        while not ended.wait(_PAUSE_S):
            reading, now = counter(), clock()
            if reading is not None and last is not None and reading != last and now - at <= _CLOSE_S:
                changes.append(Change(now, reading))
            last, at = reading, now

    thread = threading.Thread(target=look, name="energy counter", daemon=True)
    thread.start()
    try:
        yield changes
    finally:
        ended.set()
        thread.join()


def energy_per_call(
    call: Callable[[], object],
    call_s: float,
    mark: Callable[[], Callable[[], None]],
    counter: Callable[[], float | None],
) -> Energy | None:
    """Energy per call of a device whose counter of joules is read by `counter`; see `energy_between`.

    Returns None as well, and makes no calls, if the counter cannot be read or a call takes more than 3 s.
    """
    if call_s > _MOST_S or counter() is None:
        return None
    with changes_seen(counter) as changes:
        return energy_between(changes, call, call_s, mark)


def energy_between(
    changes: Sequence[Change],
    call: Callable[[], object],
    call_s: float,
    mark: Callable[[], Callable[[], None]],
    clock: Callable[[], float] = time.monotonic,
) -> Energy | None:
    """Energy per call while calls follow each other, including time in which the device waits.

    `changes` are those of the counter as they are seen, by `clock`. `call_s` is the approximate seconds per call. Calls
    are queued in batches of about 20 ms, without cache flushes; the next batch is queued before the last one ends, so
    that the device has work from the first end that counts to the last. `mark` marks a place in the device's queue and
    returns a function that waits for it. Returns None if within 3 s no two ends of batches that lie between changes are
    a second apart, or if the counter does not grow.
    """
    batch = max(1, round(_BATCH_S / call_s)) if call_s > 0 else 1
    ends: list[float] = []

    def queue_batch() -> Callable[[], None]:
        for _ in range(batch):
            call()
        return mark()

    wait = queue_batch()
    while True:
        wait, wait_for_last = queue_batch(), wait
        wait_for_last()
        ends.append(clock())
        found = _energy_of(tuple(changes), ends, batch)
        if found is not None or (len(ends) >= _FEWEST and ends[-1] - ends[0] > _MOST_S):
            wait()
            return found if found is not None and found.call_j > 0 else None


def _energy_of(changes: Sequence[Change], ends: Sequence[float], batch: int) -> Energy | None:
    """Between the first and the last end of a batch that lie between changes; None if they are too close."""
    within = [at for at in ends if changes and changes[0].at_s <= at <= changes[-1].at_s]
    if not within or within[-1] - within[0] < _LEAST_S:
        return None
    calls = batch * (len(within) - 1)
    joules = _joules_at(changes, within[-1]) - _joules_at(changes, within[0])
    return Energy(joules / calls, 1e3 * (within[-1] - within[0]) / calls)


def _joules_at(changes: Sequence[Change], at_s: float) -> float:
    """The counter's value on the line between the changes around a time."""
    after = next(i for i, change in enumerate(changes) if change.at_s >= at_s)
    if after == 0:
        return changes[0].joules
    first, second = changes[after - 1], changes[after]
    share = (at_s - first.at_s) / (second.at_s - first.at_s)
    return first.joules + share * (second.joules - first.joules)
