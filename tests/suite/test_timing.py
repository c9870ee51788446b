"""Sampling: when to stop, which samples count, the device's state meanwhile, clocks that cannot be trusted."""

import math
import time
from itertools import cycle

import numpy as np
import pytest
from fake_timer import constant
from scipy.signal import lfilter
from simulated import CELL

from glabench.devices.nvml import DeviceState
from glabench.measure.job import Job
from glabench.measure.outcome import failure_of
from glabench.measure.sampling import ClockError, collect_samples, relative_half_width
from glabench.measure.settings import Settings
from glabench.measure.timer import Sample, WallTimer, median_ms, timer_for, timer_refuses
from glabench.measure.watch import Watch

JOB = Job(CELL.backend, "run", "cpu")


def collect(times, settings, max_clock=None, **options):
    """Collects samples from an iterable of times or samples."""
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
    found = collect([1.0] * 8 + [100.0] + [1.0] * 11, Settings(least_time_s=0))
    assert max(sample.ms for sample in found.kept) == 100.0
    assert outcome(found) == (10, "precision")


@pytest.mark.parametrize("trials", [40, pytest.param(400, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("correlation", "noise"),
    [(0.0, 0.02), (0.5, 0.02), (0.7, 0.01), (0.9, 0.003), (0.9, 0.01), (0.95, 0.01), (0.95, 0.02)],
)
def test_a_stop_by_precision_is_within_it_however_long_samples_remember(correlation, noise, trials):
    """Checked by simulation; where a trial stops for another reason, it promises nothing."""
    hits = []
    for seed in range(trials):
        steps = np.random.default_rng(seed).normal(size=1200) * math.sqrt(1 - correlation**2)
        times = np.exp(noise * lfilter([1], [1, -correlation], steps)[200:])
        found = collect(times, Settings(least_time_s=0), clock=lambda: 0.0)
        if found.stop_reason == "precision":
            hits.append(abs(np.median([sample.ms for sample in found.kept]) - 1) <= 0.01)
    assert len(hits) < 5 or np.mean(hits) >= 0.95
    assert len(hits) == trials or correlation * noise > 0.008


def test_the_medians_interval_holds_it_whatever_the_distribution():
    """Checked by simulation on a lopsided distribution whose median is known."""
    draws = np.random.default_rng(0).exponential(size=(300, 100))
    hits = [abs(np.median(row) - math.log(2)) <= relative_half_width(row) * np.median(row) for row in draws]
    assert np.mean(hits) >= 0.95


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


# The device's state


def reading(**changes):
    return DeviceState(
        **{"sm_clock_mhz": 1980.0, "memory_clock_mhz": 3201.0, "temperature_c": 50.0, "power_w": 400.0}
        | {"throttle": frozenset()}
        | changes
    )


class FakeNvml:
    def __init__(self, readings, utilization=()):
        self._readings, self._utilization = list(readings), list(utilization)

    def state(self):
        return self._readings.pop(0)

    def utilization_pct(self):
        return self._utilization.pop(0) if self._utilization else None


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


def test_the_device_idles_when_no_kernel_runs():
    watch = Watch(FakeNvml([reading()] * 3, [100.0, 70.0, 85.0]), iter(range(99)).__next__, is_loop=True)
    for _ in range(3):
        watch.look()
    assert watch.idle_pct() == 15.0


def test_without_nvml_everything_is_unknown():
    for watch in (Watch(None, is_loop=True), Watch(FakeNvml([reading()]), is_loop=True)):
        watch.look()
        assert watch.idle_pct() is None
    assert set(vars(Watch(None).summary()).values()) == {None}


def test_no_reason_seen_is_none_in_words_and_unreadable_is_null():
    for throttle, words in ((frozenset(), "none"), (None, None)):
        watch = Watch(FakeNvml([reading(throttle=throttle)]))
        watch.look()
        assert watch.summary().throttle == words


# The wall clock


@pytest.mark.parametrize("timing", ["cold", "hot"])
def test_the_wall_timer_measures_the_call_and_not_its_preparation(timing):
    timer = WallTimer(timing)
    assert 10 <= timer.bind(lambda: time.sleep(0.2), lambda: time.sleep(0.01))().ms < 150
    assert timer.name.startswith(timing)


class Costly:
    """An output that takes long to free."""

    freed = 0

    def __del__(self):
        time.sleep(0.2)
        Costly.freed += 1


def test_the_wall_timer_does_not_time_the_freeing_of_an_output():
    before = Costly.freed
    assert WallTimer("hot").bind(None, Costly)().ms < 100
    assert Costly.freed == before + 1  # and it is not freed during the next sample


def test_the_median_leaves_out_the_calls_of_the_warm_up():
    class Rising:
        name = "rising"
        times = iter([9.0, 9.0, 1.0, 5.0, 2.0])

        def bind(self, prepare, call):
            return lambda: Sample(next(self.times))

    assert median_ms(Rising(), lambda: None, warm_up_calls=2, samples=3) == 2.0


# Clocks


@pytest.mark.parametrize("bad", [0.0, -0.5, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 7])
def test_a_sample_that_no_call_can_take_ends_as_an_error_and_not_as_a_time(bad, at):
    times = iter([1.0] * at + [bad] + [1.0] * 100)
    with pytest.raises(ClockError) as caught:
        collect_samples(lambda: Sample(next(times)), Settings(least_time_s=0))
    failed = failure_of(JOB, CELL, caught.value)
    assert failed.status == "error"
    assert failed.reason.startswith("ClockError: the clock gave ")


def test_samples_without_a_size_never_count_as_settled():
    assert relative_half_width([0.0] * 20) == math.inf


def test_a_clock_that_goes_back_does_not_prolong_the_sampling():
    ticks = iter([*range(0, 3), *range(-1000, 1000)])
    found = collect_samples(lambda: Sample(5.0), Settings(time_limit_s=5, least_time_s=99), clock=lambda: next(ticks))
    assert (len(found.kept), found.stop_reason) == (7, "time limit")


def test_a_clock_that_leaps_ends_the_sampling_as_one_that_did_not_settle():
    ticks = iter([0.0, 0.1, 0.2, *(1e9 + i for i in range(100))])
    found = collect_samples(lambda: Sample(5.0), Settings(time_limit_s=5), clock=lambda: next(ticks))
    assert (len(found.kept), found.stop_reason) == (3, "time limit")


# Calls back to back


def test_eager_times_calls_back_to_back_and_not_what_happens_between():
    class Between:
        looked = 0
        signs = (lambda: "left",)

        def renew(self, delay):
            delay(True)
            time.sleep(0.05)

        def renew_gradients(self):
            time.sleep(0.05)

        def keep(self, result, left):
            assert (result, left) == ("out", ("left",))

        def look(self, result):
            assert result == "out"
            self.looked += 1
            time.sleep(0.05)

    calls = []

    def call():
        calls.append(time.sleep(0.002))
        return "out"

    between = Between()
    sample = timer_for("cpu", "eager").bind(None, call, between)
    found = sample()
    assert 2 <= found.ms < 20
    assert 2 <= found.alone_ms < 20
    assert len(calls) >= 4
    assert between.looked == 2


def test_a_backward_alone_cannot_be_repeated_back_to_back():
    assert "with --timing eager measure fwd+bwd" in timer_refuses("eager", "bwd")
    assert timer_refuses("eager", "fwd+bwd") is timer_refuses("cold", "bwd") is None
