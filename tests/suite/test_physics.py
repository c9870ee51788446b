"""Times that nothing can reach, and rates beyond the device's own, are refused."""

import cheats
import pytest
from cheated import BACKWARDS, FORWARDS, LINEAR, SIZES, measure

from glabench.backends import Counts
from glabench.measure import physics
from glabench.measure.physics import Physics
from glabench.measure.timer import UNTOUCHED, Sample, WallTimer
from glabench.records.environment import Ceilings
from glabench.sweeps import Cell


class Instant(WallTimer):
    """A clock that shows a millionth of the time of backends, not of copies and products."""

    def bind(self, prepare, call, between=UNTOUCHED):
        sample = super().bind(prepare, call, between)
        return sample if between is UNTOUCHED else lambda: Sample(sample().ms * 1e-6)


class InTurn(WallTimer):
    """A clock by which all samples of a call take one of `times_ms`, the next for each call."""

    def __init__(self, *times_ms):
        super().__init__("hot")
        self._times_ms = iter(times_ms)

    def bind(self, prepare, call, between=UNTOUCHED):
        ms = next(self._times_ms)
        return lambda: Sample(ms)


@pytest.mark.parametrize("pass_", [*FORWARDS, *BACKWARDS])
def test_a_time_that_nothing_can_reach_is_suspicious_and_no_result(pass_):
    record = measure(cheats.Honest(), pass_, timer=Instant("hot"))
    assert record.status == "suspicious"
    assert record.time_ms is None
    assert "ms is too short: " in record.reason


@pytest.mark.parametrize(
    ("ceilings", "least", "ms", "reason"),
    [
        (Ceilings(), Counts(1, 2**20), 1e-7, "only to copy or read as many bytes takes"),
        (Ceilings(1.0, 1.0), Counts(1, 2**20), 1e-7, "only to copy or read as many bytes takes"),
        (Ceilings(1000.0, 1.0), Counts(1, 2**32), 4.2, None),
        (Ceilings(1000.0, 1.0), Counts(1, 2**32), 4.0, "1074 GB/s, but a copy or a read reaches 1000 GB/s"),
        (Ceilings(1000.0, 1.0), Counts(10**9, 1), 0.96, None),
        (Ceilings(1000.0, 1.0), Counts(10**9, 1), 0.9, "1.11 TFLOP/s, but a large product reaches 1 TFLOP/s"),
        (Ceilings(), Counts(10**12, 1), 1e-3, "TFLOP/s, but a large product reaches"),
        (Ceilings(), Counts(10**9, 2**20), 1e3, None),
    ],
)
def test_rates_beyond_the_possible_by_five_percent_are_named(ceilings, least, ms, reason, monkeypatch):
    monkeypatch.setattr(physics, "_LARGEST_MOVE", 2**20)
    found = Physics("cpu", WallTimer("hot"), ceilings).why_impossible(ms, least)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(("ms", "reason"), [(3.85, None), (3.75, "1145 GB/s, but a copy or a read reaches 1074 GB/s")])
def test_what_only_reads_may_be_faster_than_a_copy_but_not_than_a_read(ms, reason, monkeypatch):
    monkeypatch.setattr(physics, "_LARGEST_MOVE", 2**20)
    timer = InTurn(2**20 / 900e6, 2**20 / 1074e6)  # a copy, a read
    found = Physics("cpu", timer, Ceilings(1000.0, 1.0)).why_impossible(ms, Counts(1, 2**32))
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(("seqlen", "is_fewer"), [(8, True), (4096, False)])
def test_the_least_operations_are_those_of_the_best_form(seqlen, is_fewer):
    cell = Cell("honest", "linear", "fwd+bwd", 2, seqlen, "fp32", SIZES, "cpu")
    assert (LINEAR.least_flops(cell) < LINEAR.flops(cell)) == is_fewer
