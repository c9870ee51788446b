"""Energy of one call: calls back to back between two steps of the board's own counter, over their number."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

# The counter moves ten times a second: its steps are waited for, and half a second is then known within a few percent.
_LEAST_S, _MOST_S = 0.5, 3.0
_BATCH_S = 0.02


@dataclass(frozen=True)
class Energy:
    """Joules of the whole board a call, and the milliseconds that a call took while they were counted."""

    call_j: float
    call_ms: float


def energy_per_call(
    call: Callable[[], object],
    call_s: float,
    mark: Callable[[], Callable[[], None]],
    counter: Callable[[], float | None],
    clock: Callable[[], float] = time.monotonic,
) -> Energy | None:
    """What the board draws a call, also while it waits for the host.

    `call_s` is about how long a call takes; calls are queued in batches of some 20 ms, without flushes between them,
    and the next batch is queued before the last one's end is waited for, so that the device does not rest while the
    counter is read. `mark` notes a place in the device's queue and gives a function that waits for it. None if the
    counter cannot be read, or does not move.
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
            last = None  # reading the counter takes milliseconds, in which a host-bound call leaves the device idle
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
