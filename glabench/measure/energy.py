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
from itertools import pairwise

# Over a second, what a line between changes leaves open is a percent (an H200, calls of 44 and 253 ms; over half a
# second 2.5). Pauses between readings, which take 3 ms, leave the interpreter to the thread that makes the calls.
_LEAST_S, _MOST_S, _PAUSE_S = 1.0, 3.0, 1e-3
# A change is not known well enough if the two readings around it are further apart: the thread had to wait.
_CLOSE_S = 0.02
# Batches without an energy before it is given up: long calls need an end with a change before it and one after it.
_FEWEST = 4
_BATCH_S, _MOST_CALLS = 0.01, 10_000
# An end is noted on time if the host waited for it. Batches that the host needs nearly as long to queue as the device
# to compute are noted too late at first, so that time is missing: over so many batches a percent at most.
_WAITED_S, _MANY = 1e-3, 100
# If the host never waits, its time counts, unless calls took less than this share of what they take in samples.
_LEAST_SHARE = 0.98


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


@dataclass(frozen=True)
class End:
    """The end of a batch: its number, the second at which it was noted, and whether the host had waited for it."""

    batch: int
    at_s: float
    waited: bool


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
    are queued in batches of about 10 ms, without cache flushes; the next batch is queued before the last one ends, so
    that the device has work from the first end that counts to the last. `mark` marks a place in the device's queue and
    returns a function that waits for it. Returns None if within 3 s of the first end that counts no two of them that
    lie between changes are a second apart, or if the counter does not grow.
    """
    calls = min(max(1, round(_BATCH_S / call_s)), _MOST_CALLS) if call_s > 0 else 1
    ends: list[End] = []

    def queue_batch() -> Callable[[], None]:
        for _ in range(calls):
            call()
        return mark()

    wait = queue_batch()
    while True:
        wait, wait_for_last = queue_batch(), wait
        asked = clock()
        wait_for_last()
        now = clock()
        ends.append(End(len(ends), now, now - asked >= _WAITED_S))
        counting = _on_time(ends)
        found = _energy_of(tuple(changes), counting, calls)
        is_late = len(ends) >= _FEWEST and now - (counting or ends)[0].at_s > _MOST_S
        if found is None and is_late and not counting:
            found = _energy_of(tuple(changes), ends, calls)
            found = found if found and found.call_ms >= 1e3 * _LEAST_SHARE * call_s else None
        if found is not None or is_late:
            wait()
            return found if found is not None and found.call_j > 0 else None


def _on_time(ends: Sequence[End]) -> Sequence[End]:
    """The ends that the host waited for; all if it never did and they are many."""
    return [end for end in ends if end.waited] or (ends if len(ends) > _MANY else [])


def _energy_of(changes: Sequence[Change], ends: Sequence[End], calls: int) -> Energy | None:
    """Between the first and the last end of a batch of `calls` that lie between changes.

    None if they are too close, or if the counter was set back.
    """
    within = [end for end in ends if changes and changes[0].at_s <= end.at_s <= changes[-1].at_s]
    if not within or within[-1].at_s - within[0].at_s < _LEAST_S:
        return None
    if any(second.joules < first.joules for first, second in pairwise(changes)):
        return None
    seconds = within[-1].at_s - within[0].at_s
    joules = _joules_at(changes, within[-1].at_s) - _joules_at(changes, within[0].at_s)
    made = calls * (within[-1].batch - within[0].batch)
    return Energy(joules / made, 1e3 * seconds / made)


def _joules_at(changes: Sequence[Change], at_s: float) -> float:
    """The counter's value on the line between the changes around a time."""
    after = next(i for i, change in enumerate(changes) if change.at_s >= at_s)
    if after == 0:
        return changes[0].joules
    first, second = changes[after - 1], changes[after]
    share = (at_s - first.at_s) / (second.at_s - first.at_s)
    return first.joules + share * (second.joules - first.joules)
