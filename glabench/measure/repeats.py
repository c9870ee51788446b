"""Calls back to back: whether they take less time while their inputs stay, because a result was kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

from glabench.measure.spot_checks import SpotChecks
from glabench.measure.timer import Step, nothing

# Of this many pairs of batches, so many must show the same before it counts: one alone may be noise.
_PAIRS, _TELLING = 12, 10
# The share of the time on new inputs that a call takes at least. Both batches do the same besides, so it is 1.
_LEAST_SHARE = 0.8
_BATCH_S, _MOST_CALLS = 0.02, 100


def why_kept(
    call: Step, inputs: SpotChecks, synchronize: Step, clock: Callable[[], float] = time.perf_counter
) -> str | None:
    """Why calls on inputs that stay cannot all have done their work, in a line; None if they can.

    Before every call of a batch an input is written, in one batch of a pair with the values that it has, in the other
    with new ones. An honest call takes as long in both: launches, bytes and caches are the same.
    """

    def batch(steps: Sequence[Step]) -> tuple[float, object]:
        steps[0]()
        call()
        synchronize()
        start = clock()
        for step in steps[1:]:
            step()
            result = call()
        synchronize()
        return clock() - start, result

    single = batch([nothing] * 2)[0]
    count = max(1, min(_MOST_CALLS, round(_BATCH_S / single))) if single > 0 else 1
    shares: list[float] = []
    inputs.expect()
    while sum(share >= _LEAST_SHARE for share in shares) <= _PAIRS - _TELLING:
        if len(shares) == _PAIRS:
            return f"on inputs that stay, calls take {median(shares):.0%} of their time on new ones"
        inputs.renew(nothing)
        inputs.renew_gradients()
        staying, changing = inputs.shifts(count + 1)
        kept_s = batch(staying)[0]
        new_s, result = batch(changing)
        shares.append(kept_s / new_s)
        inputs.keep(result)
        inputs.look(result)
    return None
