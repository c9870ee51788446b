"""Energy per call: the joules between two steps of the board's counter, divided by the number of calls."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

# The counter moves ten times per second. From step to step, half a second is known within a few percent.
_LEAST_S, _MOST_S = 0.5, 3.0
_BATCH_S = 0.02


@dataclass(frozen=True)
class Energy:
    """Joules of the whole board per call, and the mean milliseconds per call meanwhile."""

    call_j: float
    call_ms: float


def energy_per_call(
    call: Callable[[], object],
    call_s: float,
    mark: Callable[[], Callable[[], None]],
    counter: Callable[[], float | None],
    clock: Callable[[], float] = time.monotonic,
) -> Energy | None:
    """Energy per call over at least half a second of calls in a row, including time in which the device waits.

    `call_s` is the approximate seconds per call. Calls are queued in batches of about 20 ms, without cache flushes; the
    next batch is queued before the last one ends, so that the device does not idle while the counter is read. `mark`
    marks a place in the device's queue and returns a function that waits for it. `counter` reads joules. Returns None
    if the counter cannot be read or does not move within 3 s.
    """
    batch = max(1, round(_BATCH_S / call_s)) if call_s > 0 else 1

    def queue_batch() -> Callable[[], None]:
        for _ in range(batch):
            call()
        return mark()

    last = counter()
    began = clock()
    first: tuple[float, float, int] | None = None
    wait = queue_batch()
    for batches in count(1):
        wait_for_next = queue_batch()
        wait()
        wait = wait_for_next
        now = clock()
        if first is not None and now - first[0] < _LEAST_S:
            last = None  # no reading: it takes milliseconds, in which the device may idle if calls are host-bound
            continue
        reading = counter()
        if reading is None or now - began > _MOST_S:
            return None
        stepped = last is not None and reading != last
        last = reading
        if stepped and first is not None:
            wait()
            calls = batch * (batches - first[2])
            return Energy((reading - first[1]) / calls, 1e3 * (now - first[0]) / calls)
        if stepped:
            first = (now, reading, batches)
    raise AssertionError("unreachable")
