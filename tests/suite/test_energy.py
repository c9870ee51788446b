"""Energy per call, from a counter that changes now and then."""

import time
from functools import partial

import pytest

from glabench.measure.energy import Change, changes_seen, energy_between, energy_per_call


class Board:
    """A device whose calls take `call_s`, at `watts` in their first part and at half of them in the last `low_share`.

    The host needs `host_s` to queue a call. Waiting for the next one takes no power. The counter changes every 0.1 s.
    """

    def __init__(self, call_s, watts, low_share=0.0, host_s=0.0):
        self.call_s, self._watts, self._low_share, self._host_s = call_s, watts, low_share, host_s
        self.calls, self._now, self.changes = 0, 0.0, []

    @property
    def joules_per_call(self):
        return self.call_s * self._watts * (1 - self._low_share / 2)

    @property
    def seconds_per_call(self):
        return max(self.call_s, self._host_s)

    def call(self):
        self.calls += 1
        self._now += self._host_s

    def mark(self):
        return partial(self.finish, self.calls)

    def finish(self, calls):
        """The device has done so many calls, and the counter's changes until then were seen."""
        self._now = max(self._now, calls * self.seconds_per_call)
        for number in range(len(self.changes), int(self._now / 0.1 + 1e-9)):
            at = 0.1 * (number + 1)
            self.changes.append(Change(at, 1000.0 + self._joules(at)))

    def _joules(self, at):
        whole, part = divmod(at, self.seconds_per_call)
        high = (1 - self._low_share) * self.call_s
        low = max(0.0, min(part, self.call_s) - high)
        return whole * self.joules_per_call + self._watts * (min(part, high) + low / 2)

    def clock(self):
        return self._now

    def energy(self):
        return energy_between(self.changes, self.call, self.seconds_per_call, self.mark, self.clock)


@pytest.mark.parametrize("call_s", [0.002, 0.43, 0.9, 2.5])
@pytest.mark.parametrize("low_share", [0.0, 0.1, 0.5])
def test_energy_is_that_of_whole_calls_whatever_parts_they_have(call_s, low_share):
    board = Board(call_s, 600.0, low_share)
    found = board.energy()
    assert found.call_j == pytest.approx(board.joules_per_call, rel=0.012)
    assert found.call_ms == pytest.approx(1e3 * call_s)
    assert board.clock() == board.calls * call_s  # nothing is left in the queue
    assert board.clock() <= 1.2 + 4 * call_s


@pytest.mark.parametrize(
    ("call_s", "host_s"), [(0.5, 0.4), (0.876, 0.603), (0.133, 0.119), (0.002, 0.0019), (0.002, 0.003), (1.41, 1.48)]
)
def test_energy_is_that_of_whole_calls_whatever_time_the_host_needs_to_queue_them(call_s, host_s):
    board = Board(call_s, 600.0, host_s=host_s)
    found = board.energy()
    assert found.call_j == pytest.approx(board.joules_per_call, rel=0.02)
    assert found.call_ms == pytest.approx(1e3 * board.seconds_per_call, rel=0.01)
    assert board.clock() <= 4.5 + 4 * board.seconds_per_call


def test_a_counter_that_is_set_back_gives_no_energy():
    board = Board(0.002, 600.0)
    finish = board.finish

    def finish_with_less(calls):
        finish(calls)
        board.changes = [Change(each.at_s, each.joules % 1300.0) for each in board.changes]

    board.finish = finish_with_less
    assert board.energy() is None


@pytest.mark.parametrize("joules", [[], [5.0] * 30, [9.0, 5.0, 2.0]])
def test_a_counter_that_does_not_grow_gives_no_energy(joules):
    board = Board(0.002, 0.0)
    board.changes = [Change(0.3 * number, value) for number, value in enumerate(joules)]
    board.finish = lambda calls: setattr(board, "_now", calls * board.call_s)
    assert board.energy() is None
    assert board.clock() < 3.1


@pytest.mark.parametrize(("call_s", "joules"), [(0.002, None), (4.0, 5.0)])
def test_without_a_counter_or_of_long_calls_there_is_no_energy_and_no_call(call_s, joules):
    board = Board(call_s, 0.0)
    assert energy_per_call(board.call, call_s, board.mark, lambda: joules) is None
    assert board.calls == 0


def test_a_thread_sees_when_the_counter_changes():
    """One reading fails, and two are so far apart that nobody knows when the counter changed."""
    readings = iter([3.0, 3.0, 3.0, 5.0, None, 7.0, 8.0, 9.0, 9.0])
    times = iter([0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.1, 0.11])
    with changes_seen(lambda: next(readings, None), lambda: next(times, 1.0)) as changes:
        deadline = time.monotonic() + 5
        while len(changes) < 2 and time.monotonic() < deadline:
            time.sleep(1e-3)
        time.sleep(0.05)
    assert changes == [Change(0.03, 5.0), Change(0.06, 8.0)]
