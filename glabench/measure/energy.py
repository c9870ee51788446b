"""Energy per call: what the board's counter says of the device's power while it repeats a call, times the call's time.

The counter moves ten times per second or so, and steps of a model may take longer than that. So power is measured from
one change of the counter to another, wherever in a call they fall, and never from the end of a call to that of another.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

# From change to change, half a second is known within a percent or so: a reading takes 3 ms. Pauses between readings
# leave the interpreter to the thread that makes the calls.
_LEAST_S, _MOST_S, _PAUSE_S = 0.5, 3.0, 1e-3
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
        last = counter()
        while last is not None and not ended.wait(_PAUSE_S):
            reading = counter()
            if reading is not None and reading != last:
                changes.append(Change(clock(), reading))
            last = reading

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

    Returns None as well if the counter cannot be read.
    """
    if counter() is None:
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
    that the device has work from the first change that counts to the last. `mark` marks a place in the device's queue
    and returns a function that waits for it. Returns None if within 3 s no two changes are half a second apart.
    """
    batch = max(1, round(_BATCH_S / call_s)) if call_s > 0 else 1

    def queue_batch() -> Callable[[], None]:
        for _ in range(batch):
            call()
        return mark()

    wait, wait_for_next = queue_batch(), queue_batch()
    wait()
    began = clock()
    for batches in count(1):
        wait, wait_for_next = wait_for_next, queue_batch()
        wait()
        now = clock()
        within = [change for change in tuple(changes) if began <= change.at_s <= now]
        seconds = within[-1].at_s - within[0].at_s if within else 0.0
        if seconds >= _LEAST_S:
            wait_for_next()
            watts = (within[-1].joules - within[0].joules) / seconds
            seconds_a_call = (now - began) / (batches * batch)
            return Energy(watts * seconds_a_call, 1e3 * seconds_a_call)
        if now - began > _MOST_S:
            wait_for_next()
            return None
    raise AssertionError("unreachable")
