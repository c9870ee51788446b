"""Times that nothing can reach, and rates beyond the device's own, are refused."""

import cheats
import pytest
from cheated import BACKWARDS, FORWARDS, LINEAR, SIZES, measure

from glabench.backends import Counts
from glabench.measure.physics import Physics
from glabench.measure.timer import UNTOUCHED, Sample, WallTimer
from glabench.records.environment import Ceilings
from glabench.sweeps import Cell


class Instant(WallTimer):
    """A clock that shows a millionth of the time of backends, not of copies and products."""

    def bind(self, prepare, call, between=UNTOUCHED):
        sample = super().bind(prepare, call, between)
        return sample if between is UNTOUCHED else lambda: Sample(sample().ms * 1e-6)


@pytest.mark.parametrize("pass_", [*FORWARDS, *BACKWARDS])
def test_a_time_that_nothing_can_reach_is_suspicious_and_no_result(pass_):
    record = measure(cheats.Honest(), pass_, timer=Instant("hot"))
    assert record.status == "suspicious"
    assert record.time_ms is None
    assert "ms is too short: " in record.reason


@pytest.mark.parametrize(
    ("ceilings", "least", "ms", "reason"),
    [
        (Ceilings(), Counts(1, 2**20), 1e-7, "even a copy of as many bytes takes"),
        (Ceilings(1.0, 1.0), Counts(1, 2**20), 1e-7, "even a copy of as many bytes takes"),
        (Ceilings(1000.0, 1.0), Counts(1, 2**32), 4.2, None),
        (
            Ceilings(1000.0, 1.0),
            Counts(1, 2**32),
            4.0,
            "1074 GB/s, but nothing that reads and writes as much reaches more than 1000",
        ),
        (Ceilings(1000.0, 1.0, read_gbps=900.0), Counts(1, 2**32), 4.2, None),
        (Ceilings(1000.0, 1.0, read_gbps=1080.0), Counts(1, 2**32), 3.8, None),
        (Ceilings(1000.0, 1.0, read_gbps=4400.0), Counts(1, 2**32), 3.6, None),
        (
            Ceilings(1000.0, 1.0, read_gbps=4400.0),
            Counts(1, 2**32),
            3.5,
            "nothing that reads and writes as much reaches more than 1150",
        ),
        (
            Ceilings(1000.0, 1.0, read_gbps=1080.0),
            Counts(1, 2**32),
            3.7,
            "nothing that reads and writes as much reaches more than 1080",
        ),
        (Ceilings(1000.0, 1.0), Counts(10**9, 1), 0.96, None),
        (Ceilings(1000.0, 1.0), Counts(10**9, 1), 0.9, "1.11 TFLOP/s, but a large product reaches 1 TFLOP/s"),
        (Ceilings(), Counts(10**12, 1), 1e-3, "TFLOP/s, but a large product reaches"),
        (Ceilings(), Counts(10**9, 2**20), 1e3, None),
    ],
)
def test_rates_beyond_the_possible_by_five_percent_are_named(ceilings, least, ms, reason):
    found = Physics("cpu", WallTimer("hot"), ceilings).why_impossible(ms, least, 0.0)
    assert found is None if reason is None else reason in found


class Steady(WallTimer):
    """A clock by which every call takes a millisecond."""

    def bind(self, prepare, call, between=UNTOUCHED):
        return lambda: Sample(1.0)


@pytest.mark.parametrize(("ms", "is_refused"), [(0.89, False), (0.87, True)])
def test_few_bytes_may_be_faster_than_their_copy_by_as_much_as_a_large_read(ms, is_refused):
    physics = Physics("cpu", Steady("hot"), Ceilings(0.001, 1.0, read_gbps=0.00108))
    assert (physics.why_impossible(ms, Counts(1, 2**20), 0.0) is not None) == is_refused


@pytest.mark.parametrize(("written", "fastest"), [(0.0, 1.1), (0.25, 1.05), (0.5, 1.0), (1.0, 1.0)])
def test_the_more_is_written_the_less_counts_what_a_read_gains(written, fastest):
    physics = Physics("cpu", WallTimer("hot"), Ceilings(1000.0, 1.0, read_gbps=1100.0))
    copied_ms = 2**32 / 1000.0 / 1e6
    for times, is_refused in ((1.04, False), (1.06, True)):
        found = physics.why_impossible(copied_ms / (times * fastest), Counts(1, 2**32), written)
        assert (found is not None) == is_refused


@pytest.mark.parametrize(("pass_", "share"), [("infer", 1 / 4), ("fwd", 1 / 4), ("bwd", 3 / 4), ("fwd+bwd", 4 / 8)])
def test_what_is_written_are_outputs_and_gradients(pass_, share):
    """Of linear attention with heads of as many keys as values: q, k, v and o, and as many gradients."""
    assert LINEAR.written_share(Cell("honest", "linear", pass_, 2, 64, "fp32", SIZES, "cpu")) == share


@pytest.mark.parametrize(("seqlen", "is_fewer"), [(8, True), (4096, False)])
def test_the_least_operations_are_those_of_the_best_form(seqlen, is_fewer):
    cell = Cell("honest", "linear", "fwd+bwd", 2, seqlen, "fp32", SIZES, "cpu")
    assert (LINEAR.least_flops(cell) < LINEAR.flops(cell)) == is_fewer
