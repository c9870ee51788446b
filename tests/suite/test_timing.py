"""Taking samples: when to stop, which count, what the device did meanwhile, and what a time then says."""

import math
from itertools import cycle

import pytest
import torch
from fake_timer import FakeTimer, constant
from glabench.backends.ops import OPS
from glabench.measure.ceiling import copy_bandwidth_gbps, product_tflops
from glabench.records.nvml import DeviceState, Nvml

from glabench.measure.energy import energy_per_call
from glabench.measure.sampling import collect_samples, median_interval, relative_half_width
from glabench.measure.settings import Settings
from glabench.measure.timer import Sample, WallTimer
from glabench.measure.watch import Watch
from glabench.records import Ceilings, Record, with_rates
from glabench.records.diagnosis import Diagnosis, diagnose, drift
from glabench.sweeps import Cell

CELL = Cell("any", "gla", "fwd", 2, 40, 3, 8, 16, None, None, "bf16", "logsigmoid/16", "cpu")


def collect(times, settings, max_clock=None, **options):
    """Samples from an endless or long enough row of times or samples."""
    row = (time if isinstance(time, Sample) else Sample(time) for time in times)
    return collect_samples(lambda: next(row), settings, max_clock, **options)


def outcome(found):
    return len(found.kept), found.stop_reason


# When to stop


def test_equal_samples_stop_at_the_first_check():
    assert outcome(collect(constant(3.0), Settings(least_time_s=0))) == (10, "precision")


def test_noise_goes_on_to_the_sample_limit():
    found = collect(cycle([1.0, 2.0]), Settings(max_samples=50), clock=lambda: 0.0)
    assert outcome(found) == (50, "sample limit")


def test_a_slow_call_stops_at_the_time_limit_with_three_samples():
    ticks = iter(range(0, 1000, 5))
    found = collect(constant(5000.0), Settings(time_limit_s=3), clock=lambda: next(ticks))
    assert outcome(found) == (3, "time limit")


def test_a_short_call_is_not_judged_before_the_least_time_is_over():
    ticks = iter([i / 100 for i in range(1000)])
    found = collect(constant(1.0), Settings(least_time_s=0.25), clock=lambda: next(ticks))
    assert outcome(found) == (30, "precision")


def test_outliers_are_kept():
    found = collect([1.0] * 9 + [100.0] + [1.0] * 10, Settings(least_time_s=0))
    assert max(sample.ms for sample in found.kept) == 100.0
    assert outcome(found) == (20, "precision")


def test_the_medians_interval_holds_it_95_times_in_100():
    """Checked by simulation on a lopsided distribution whose median is known."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.empty(2000, 50, dtype=torch.float64).exponential_(generator=generator).sort(dim=1).values
    hits = 0
    for row in draws.tolist():
        low, high = median_interval(row)
        hits += low <= math.log(2) <= high
    assert 0.945 <= hits / 2000 <= 0.985


def test_the_interval_narrows_with_more_samples():
    few = [1.0 + i / 10 for i in range(10)]
    assert relative_half_width(few * 20) < relative_half_width(few)


# Which samples count


@pytest.mark.parametrize(("clock", "thrown"), [(1500, 0), (1485, 0), (1484, 4), (300, 4)])
def test_samples_below_three_quarters_of_the_highest_clock_are_thrown_out_and_counted(clock, thrown):
    slow = Sample(9.0, clock)
    row = [slow, *[Sample(1.0, 1980)] * 7] * 10
    found = collect(row, Settings(least_time_s=0, max_samples=32, precision=-1), 1980.0)
    assert len(found.thrown_out) == thrown
    assert len(found.kept) == 32 - thrown
    assert set(found.thrown_out) <= {slow}


def test_a_clock_that_the_work_itself_brings_throws_nothing_out():
    row = cycle([Sample(1.0, 1400)] * 3 + [Sample(0.9, 1980)])
    found = collect(row, Settings(max_samples=40, precision=-1), 1980.0)
    assert (len(found.kept), found.thrown_out) == (40, ())


def test_without_a_clock_every_sample_counts():
    assert collect([Sample(1.0, 300)] * 99, Settings(max_samples=20, precision=-1), None).thrown_out == ()
    assert collect([Sample(1.0, None)] * 99, Settings(max_samples=20, precision=-1), 1980.0).thrown_out == ()


# The device meanwhile


def reading(**changes):
    return DeviceState(
        **{"sm_clock_mhz": 1980.0, "memory_clock_mhz": 3201.0, "temperature_c": 50.0, "power_w": 400.0}
        | {"throttle": frozenset()}
        | changes
    )


class FakeNvml:
    def __init__(self, readings):
        self._readings = list(readings)

    def state(self):
        return self._readings.pop(0)


def test_readings_are_summed_up_and_not_taken_too_often():
    rows = [reading(temperature_c=40.0), reading(power_w=700.0, throttle=frozenset({"power cap"})), reading()]
    ticks = iter([0.0, 0.0, 0.01, 0.06, 0.06, 0.12, 0.12])
    watch = Watch(FakeNvml(rows), clock=lambda: next(ticks))
    for _ in range(4):  # the second comes too soon
        watch.look()
    seen = watch.summary()
    assert (seen.temperature_c, seen.power_w, seen.throttle, seen.memory_clock_mhz) == (
        50.0,
        400.0,
        "power cap",
        3201.0,
    )


def test_without_nvml_everything_is_unknown():
    watch = Watch(None)
    watch.look()
    assert set(vars(watch.summary()).values()) == {None}


def test_no_reason_seen_is_none_in_words_and_unreadable_is_null():
    for throttle, words in ((frozenset(), "none"), (None, None)):
        watch = Watch(FakeNvml([reading(throttle=throttle)]))
        watch.look()
        assert watch.summary().throttle == words


class Library:
    """The few names of pynvml that are used, over a made-up device."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self, **answers):
        self._answers = answers

    def __getattr__(self, name):
        if name not in self._answers:
            raise AttributeError(name)

        def call(handle, *arguments):
            answer = self._answers[name]
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


class Process:
    def __init__(self, pid, memory):
        self.pid, self.usedGpuMemory = pid, memory


def test_what_the_driver_does_not_tell_is_null_and_the_rest_is_read():
    library = Library(
        nvmlDeviceGetClockInfo=1980,
        nvmlDeviceGetTemperature=Library.NVMLError("not supported"),
        nvmlDeviceGetPowerUsage=123400,
        nvmlDeviceGetCurrentClocksThrottleReasons=0x4 | 0x1,
    )
    state = Nvml(library, None).state()
    assert state == DeviceState(1980.0, 1980.0, None, 123.4, frozenset({"power cap"}))
    assert Nvml(library, None).energy_j() is None
    assert Nvml(library, None).processes().others is None


@pytest.mark.parametrize(
    ("pids", "computes", "others"),
    [([], True, 0), (["own"], True, 0), (["own", 4], True, 1), ([77], True, 0), ([77, 78], True, 1), ([77], False, 1)],
)
def test_other_processes_are_counted_whether_or_not_numbers_are_those_of_a_container(pids, computes, others):
    import os

    found = [Process(os.getpid() if pid == "own" else pid, 2**30) for pid in pids]
    processes = Nvml(Library(nvmlDeviceGetComputeRunningProcesses=found), None).processes(computes)
    assert processes.others == others
    assert processes.own_memory_mib == (1024 if "own" in pids else None)


class Board:
    """A device on which ten calls of 2 ms make a batch; its counter steps every fifth batch, 0.1 s."""

    def __init__(self, joules_a_step):
        self._joules = joules_a_step
        self.batches = self.calls = 0

    def call(self):
        self.calls += 1

    def mark(self):
        return self.finish_batch

    def finish_batch(self):
        self.batches += 1

    def clock(self):
        return 0.02 * self.batches

    def counter(self):
        return None if self._joules is None else 1000.0 + self._joules * (self.batches // 5)


def test_energy_is_counted_between_two_steps_of_the_counter():
    board = Board(50.0)  # a step for fifty calls
    found = energy_per_call(board.call, 0.002, board.mark, board.counter, board.clock)
    assert found.call_j == pytest.approx(1.0)
    assert found.call_ms == pytest.approx(2.0)
    assert 0.5 <= board.clock() <= 0.9
    assert board.calls == 10 * board.batches


@pytest.mark.parametrize("joules", [0.0, None])
def test_a_counter_that_stands_still_or_is_not_there_gives_no_energy(joules):
    board = Board(joules)
    assert energy_per_call(board.call, 0.002, board.mark, board.counter, board.clock) is None


# The wall clock


@pytest.mark.parametrize("timing", ["cold", "hot"])
def test_the_wall_timer_measures_the_call_and_not_its_preparation(timing):
    import time

    timer = WallTimer(timing)
    assert 10 <= timer.bind(lambda: time.sleep(0.2), lambda: time.sleep(0.01))().ms < 150
    assert timer.name.startswith(timing)


# What a time says


# A token and head at K = 8 and V = 16, by hand: q, k 16 bytes each and v, o 32 in bf16, g 32 in float32.
@pytest.mark.parametrize(
    ("op", "pass_", "per_token"),
    [
        ("gla", "infer", 16 + 16 + 32 + 32 + 32),
        ("gla", "fwd", 16 + 16 + 32 + 32 + 32),
        ("gla", "bwd", 2 * (16 + 16 + 32 + 32) + 32),
        ("gla", "fwd+bwd", 3 * (16 + 16 + 32 + 32) + 2 * 32),
        ("linear", "fwd", 16 + 16 + 32 + 32),
        ("linear", "fwd+bwd", 3 * (16 + 16 + 32) + 2 * 32),
    ],
)
def test_a_perfect_pass_moves_every_tensor_once(op, pass_, per_token):
    cell = Cell("any", op, pass_, 2, 40, 3, 8, 16, None, None, "bf16", "logsigmoid/16", "cpu")
    assert OPS[op].moved_bytes(cell) == 2 * 40 * 3 * per_token


# A token and head at K = 8 and V = 16, by hand: 2 * 8 * 16 for the update and as many for the readout; the gate's decay
# takes another 8 * 16. Attention's 40 tokens make 820 pairs of 2 * (8 + 16). Mamba's channels are 3 * 16, its states 8.
@pytest.mark.parametrize(
    ("op", "forward"),
    [
        ("gla", 2 * 40 * 3 * (256 + 256 + 128)),
        ("linear", 2 * 40 * 3 * (256 + 256)),
        ("softmax", 2 * 3 * 820 * 48),
        ("mamba1", 2 * 40 * 48 * (6 * 8 + 3)),
    ],
)
def test_flops_are_those_of_the_equation_and_a_backward_has_twice_as_many(op, forward):
    found = [
        OPS[op].flops(Cell("any", op, p, 2, 40, 3, 8, 16, None, None, "bf16", None, "cpu"))
        for p in ("infer", "fwd", "bwd", "fwd+bwd")
    ]
    assert found == [forward, forward, 2 * forward, 3 * forward]


def test_a_copy_counts_what_it_reads_and_writes_at_its_median_time():
    timer = FakeTimer([9.0, 9.0, 9.0, *[2.0] * 7, *[1.0] * 4, *[3.0] * 4])
    assert copy_bandwidth_gbps(timer, "cpu", buffer_bytes=4000) == pytest.approx(2 * 4000 / 2.0 / 1e6)


def test_a_product_counts_two_flops_a_pair():
    assert product_tflops(FakeTimer(constant(2.0)), "cpu", size=16) == pytest.approx(2 * 16**3 / 2.0 / 1e9)


@pytest.mark.parametrize(("moved", "flops", "share"), [(10**9, 10**9, 50.0), (10**6, 9 * 10**11, 90.0)])
def test_the_roofline_is_the_nearer_of_both_ceilings(moved, flops, share):
    record = with_rates(Record("run", CELL, "ok", time_ms=2.0), moved, flops, Ceilings(1000.0, 500.0))
    assert (record.gbps, record.tflops) == (moved / 2e6, flops / 2e9)
    assert (record.copy_gbps, record.product_tflops) == (1000.0, 500.0)
    assert record.roofline_pct == pytest.approx(share)


def test_without_ceilings_there_are_rates_and_no_share_and_without_a_time_neither():
    record = with_rates(Record("run", CELL, "ok", time_ms=2.0), 10**9, 10**9, Ceilings())
    assert (record.gbps, record.roofline_pct, record.copy_gbps) == (500.0, None, None)
    assert with_rates(Record("run", CELL, "oom"), 10**9, 10**9, Ceilings(1.0, 1.0)).gbps is None


# Doubts


def measured(**fields):
    samples = fields.pop("samples_ms", (1.0,) * 40)
    return Record("run", CELL, "ok", time_ms=1.0, samples_ms=samples, **fields)


@pytest.mark.parametrize(
    ("fields", "diagnosis"),
    [
        ({"stop_reason": "time limit"}, Diagnosis.UNSETTLED),
        ({"exposed_samples": 11}, Diagnosis.EXPOSED),
        ({"thrown_out_ms": (2.0,)}, Diagnosis.THROTTLED),
        ({"throttle": "power cap, temperature"}, Diagnosis.HOT),
        ({"other_processes": 1}, Diagnosis.SHARED),
        ({"samples_ms": (1.0,) * 37 + (1.6,) * 3}, Diagnosis.OUTLIERS),
        ({"samples_ms": tuple(1 + i / 1000 for i in range(40))}, Diagnosis.DRIFT),
    ],
)
def test_each_doubt_is_named_alone(fields, diagnosis):
    assert diagnose(measured(**fields)) == [diagnosis]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stop_reason": "precision", "exposed_samples": 10, "thrown_out_ms": (), "throttle": "power cap"},
        {"throttle": "none", "other_processes": 0, "samples_ms": (1.0,) * 38 + (9.0,) * 2},
    ],
)
def test_a_sound_measurement_is_not_doubted(fields):
    assert diagnose(measured(**fields)) == []


def test_a_failure_is_not_doubted():
    assert diagnose(Record("run", CELL, "oom", other_processes=3)) == []


def test_drift_needs_samples_and_shows_its_sign():
    assert drift((1.0, 2.0)) == 0
    assert drift((2.0,) * 10 + (1.0,) * 10) == -0.5
