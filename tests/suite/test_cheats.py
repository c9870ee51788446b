"""Backends that cheat or err are refused in every pass, and an honest one in none."""

import random
import time
from dataclasses import replace
from functools import partial
from itertools import count, pairwise, product
from random import Random

import cheats
import kept_cheats
import pytest
import torch
from cheated import BACKWARDS, FORWARDS, JOB, LINEAR, SETTINGS, SIZES, measure
from fake_timer import FakeTimer, constant
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from glabench.backends import load_registry
from glabench.devices.nvml import DeviceState, Processes
from glabench.measure.cell import CellMeter, why_idle
from glabench.measure.contexts import active_contexts
from glabench.measure.job import Job
from glabench.measure.repeats import why_kept
from glabench.measure.settings import Settings
from glabench.measure.timer import EagerTimer, Sample, WallTimer
from glabench.measure.work import OpWork
from glabench.sweeps import Cell, Parameters


@pytest.mark.parametrize("pass_", [*FORWARDS, *BACKWARDS])
@pytest.mark.parametrize("timing", ["hot", "cold"])
def test_an_honest_backend_passes(pass_, timing):
    record = measure(cheats.Honest(), pass_, timing)
    assert (record.status, record.reason) == ("ok", None)
    assert len(record.samples_ms) == 12


@pytest.mark.parametrize(
    ("backend", "pass_"),
    [
        *product(cheats.IN_ALL_PASSES, (*FORWARDS, *BACKWARDS)),
        *product(kept_cheats.IN_FORWARDS, FORWARDS),
        *product([*kept_cheats.IN_FORWARDS, *cheats.IN_BACKWARDS], BACKWARDS),
        (cheats.WithoutAGraph, "fwd"),
        *cheats.LATE,
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_cheat_is_refused(backend, pass_):
    record = measure(backend(), pass_)
    assert record.status in ("inaccurate", "error", "suspicious")
    assert (record.time_ms, record.peak_resident_mib) == (None, None)
    assert record.reason


@pytest.mark.parametrize(
    ("enter", "name"),
    [
        (lambda: torch.autocast("cpu", torch.bfloat16), "autocast"),
        (torch.inference_mode, "inference mode"),
        (TorchFunctionMode, "a function mode"),
        (TorchDispatchMode, "a dispatch mode"),
        (torch.autograd.graph.save_on_cpu, "hooks for saved tensors"),
    ],
)
def test_contexts_that_are_left_behind_are_named(enter, name):
    with enter():
        assert active_contexts() == [name]
    assert active_contexts() == []


def test_which_of_the_calls_back_to_back_is_looked_at_cannot_be_known():
    """Whoever reads the state of `random` foresees what is drawn from it, so nothing is."""
    sample, before = EagerTimer("cpu").bind(None, lambda: None), random.getstate()
    for _ in range(3):
        sample()
    assert random.getstate() == before


@pytest.fixture
def looks():
    """Spot checks of a small cell, by a made-up clock, each of which takes ten times as long as a sample."""
    cell = Cell(
        "honest", "linear", "infer", 1, 8, "fp32", Parameters({"heads": 1, "key_dim": 2, "value_dim": 2}), "cpu"
    )
    work = OpWork(LINEAR, cheats.Honest())
    checks, clock = work.spot_checks(cell, work.prepare(cell), False), [0.0]
    checks._draw = random.Random(1)

    def find_problem(_):
        clock[0] += 0.01

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("glabench.measure.spot_checks.time.monotonic", lambda: clock[0])
        patch.setattr(checks, "_find_problem", find_problem)
        patch.setattr(checks, "keep", lambda _: None)
        yield checks, clock


def test_all_before_a_call_is_the_same_whether_its_result_will_be_looked_at_or_not(looks, monkeypatch):
    checks, _ = looks
    drawn, delays = [], []
    monkeypatch.setattr("glabench.measure.spot_checks.draw_parts", lambda *_: drawn.append(1))
    for is_expected in (True, False, True):
        if is_expected:
            checks.expect()
        checks.renew(delays.append)
    assert delays == [True, False, True]
    assert len(drawn) == 3


def test_a_look_does_not_tell_that_the_next_results_will_not_be_looked_at(looks):
    checks, clock = looks
    checks.begin()
    looked = []
    for _ in range(3000):
        checks.renew(lambda _: None)
        looked.append(checks.looked)
        clock[0] += 0.001
        checks.look(())
    places = [place for place, was in enumerate(looked) if was]
    soon = sum(later - place <= 20 for place, later in pairwise(places))
    assert 0.1 < len(places) * 0.01 / clock[0] < 0.25
    assert soon > len(places) // 5


def test_if_results_that_are_right_take_longer_than_others_more_are_looked_at(monkeypatch):
    class SkipsMostCalls(cheats.Honest):
        """Right where it is looked at in this test: in the first calls, and in the one after the samples."""

        def at_size(self, q, k, v):
            calls = count(1)
            return lambda: cheats.correct(q, k, v) if next(calls) in (1, 2, 3, 4, 17) else v.clone()

    monkeypatch.setattr("glabench.measure.spot_checks._LOOKS", 0)
    monkeypatch.setattr("glabench.measure.spot_checks._LEAST_LIKELY", 0)
    record = measure(SkipsMostCalls(), "infer")
    assert record.status == "inaccurate"
    assert record.reason.startswith("a timed call's result does not fit the inputs")


@pytest.mark.parametrize(
    ("looked_at_ms", "looked_ms", "other_ms", "looks", "is_idle"),
    [
        ([3.0, 1.1], 3.0, 1.0, 0, False),
        ([1.25], 3.0, 1.0, 0, False),
        ([3.0, 1.3], 1.0, 1.0, 1, False),
        ([3.0, 2.0], 3.0, 3.0, 10, False),  # the machine has become slower
        ([3.0, 2.0], 3.0, 1.0, 10, True),
    ],
)
def test_calls_that_take_longer_whenever_they_are_looked_at_are_idle_otherwise(
    looked_at_ms, looked_ms, other_ms, looks, is_idle
):
    calls = Looks()

    def sample():
        calls.take()
        return Sample(looked_ms if calls.looked else other_ms)

    expected = "a call takes 1 ms, but at least 3 if its result is looked at" if is_idle else None
    assert why_idle(sample, calls, looked_at_ms, 1.0) == expected
    assert calls.count == looks
    shared = why_idle(sample, calls, looked_at_ms, 1.0, others=2)
    assert shared == (expected and f"{expected}, perhaps because other processes use the GPU; end them and run again")


def test_a_result_that_is_wrong_in_the_last_call_alone_is_found_at_the_bound_of_its_dtype():
    class WrongAtLast(cheats.Honest):
        def at_size(self, q, k, v):
            calls = count(1)
            # One call for the check, one for memory, two to warm up, twelve samples, and the last.
            return lambda: cheats.correct(q, k, v) * (1.04 if next(calls) >= 17 else 1.0)

    record = measure(WrongAtLast(), "infer")
    assert record.status == "inaccurate"
    assert record.reason.startswith(
        "a timed call's result does not fit the inputs that it had, relative error: o 4.0e-02"
    )


@pytest.mark.parametrize("cheat", [kept_cheats.KeptAsACopy, cheats.LateInAnotherType])
def test_sampling_stops_at_the_first_result_that_is_wrong(cheat):
    timer = FakeTimer(constant())
    job = replace(JOB, settings=replace(SETTINGS, min_samples=1000, max_samples=1000))
    record = measure(cheat(), "infer", timer=timer, job=job)
    assert record.status == "inaccurate"
    assert "timed call" in record.reason
    assert timer.calls < 500


@pytest.mark.parametrize("pass_", ["infer", "fwd"])
def test_a_result_that_is_kept_while_its_inputs_stay_is_suspicious_if_calls_follow_back_to_back(pass_):
    assert measure(cheats.Honest(), pass_, timer=EagerTimer("cpu")).status == "ok"
    record = measure(kept_cheats.KeptWhileItsInputsStay(), pass_, timer=EagerTimer("cpu"))
    if pass_ == "infer":
        assert record.status == "suspicious"
        assert "ms is too short: one call alone takes" in record.reason
    else:  # a kept forward allows only one backward
        assert record.status == "error"
        assert "backward through the graph a second time" in record.reason


@pytest.mark.parametrize(
    ("cheat", "reason"),
    [
        (cheats.SaysThatItsBackwardDoesNotFit, "no memory for the backward that compares a forward of training"),
        (cheats.SaysSoLate, "the suite's check of results ran out of memory"),
    ],
)
def test_a_forward_of_training_whose_backward_does_not_fit_has_no_time(cheat, reason):
    record = measure(cheat(), "fwd")
    assert (record.status, record.time_ms) == ("oom", None)
    assert record.reason.startswith(reason)


@pytest.mark.parametrize(
    "of_the_suite", ["work.check_parts", "spot_checks.take", "spot_checks.find_changed", "spot_checks.check_everything"]
)
@pytest.mark.parametrize("problem", [torch.OutOfMemoryError("CUDA out of memory. Tried to"), MemoryError()])
def test_memory_that_the_check_of_results_lacks_is_not_said_to_be_the_backends(monkeypatch, of_the_suite, problem):
    def fail(*_):
        raise problem

    monkeypatch.setattr(f"glabench.measure.{of_the_suite}", fail)
    record = measure(cheats.Honest(), "infer")
    assert record.status == "oom"
    assert record.reason.startswith("the suite's check of results ran out of memory, not the backend")
    assert "--check small" in record.reason
    assert str(problem) in record.reason


@pytest.mark.parametrize("calls", [0, 3])
def test_memory_that_a_backend_lacks_is_said_to_be_its_own(calls):
    class Hungry(cheats.Honest):
        def at_size(self, q, k, v):
            made = count()

            def call():
                if next(made) >= calls:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to")
                return cheats.correct(q, k, v)

            return call

    record = measure(Hungry(), "infer")
    assert (record.status, record.reason) == ("oom", "CUDA out of memory. Tried to")


@pytest.fixture
def cpu_time(monkeypatch):
    """The time of this process alone, so that others on the machine do not count; and short batches."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(time, "perf_counter", time.process_time)
    monkeypatch.setattr(time, "perf_counter_ns", time.process_time_ns)
    monkeypatch.setattr("glabench.measure.cell.why_kept", partial(why_kept, clock=time.process_time))
    monkeypatch.setattr("glabench.measure.repeats._BATCH_S", 0.01)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("cpu_time")
@pytest.mark.parametrize("pass_", ["infer", "fwd"])
def test_a_kept_result_that_takes_half_of_a_calls_time_is_suspicious(pass_):
    job = replace(JOB, settings=replace(SETTINGS, timing="eager"))
    assert measure(cheats.Honest(), pass_, timer=EagerTimer("cpu"), job=job).status == "ok"
    record = measure(kept_cheats.KeptAndPadded(), pass_, timer=EagerTimer("cpu"), job=job)
    assert record.status == ("suspicious" if pass_ == "infer" else "error")


class Looks:
    """Looks at the results that are expected to be looked at, and counts them."""

    count, looked, is_expected = 0, False, False

    def expect(self):
        self.is_expected = True

    def take(self):
        self.looked, self.is_expected = self.is_expected, False
        self.count += self.looked


class Calls:
    """Inputs, and calls on them, by a made-up clock. A call on inputs that it has seen takes a share of the time."""

    def __init__(self, share, noise, seed, copy_s=0.0):
        self.share, self.noise, self.copy_s = share, noise, copy_s
        self.draw, self.now, self.batches, self.looks = Random(seed), 0.0, 0, 0
        self.values, self.seen = 0, None
        self.factor = 1.0

    def expect(self, everything=False):
        pass

    def renew(self, delay):
        self.values += 1

    def renew_gradients(self):
        pass

    def shifts(self, count):
        def write(changes):
            self.values += changes
            self.now += self.copy_s

        return [partial(write, 0)] * count, [partial(write, 1)] * count

    def call(self):
        self.now += self.factor * (0.002 if self.values != self.seen else 0.002 * self.share)
        self.seen = self.values

    def synchronize(self):
        self.batches += 1
        self.factor = 1 + self.draw.expovariate(1 / self.noise) if self.noise else 1.0

    def keep(self, result, left=()):
        pass

    def look(self, result):
        self.looks += 1

    def why_kept(self):
        return why_kept(self.call, self, self.synchronize, lambda: self.now)


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
def test_calls_that_save_work_while_their_inputs_stay_are_told_from_noise(noise):
    honest = [Calls(1.0, noise, seed) for seed in range(300)]
    assert not any(each.why_kept() for each in honest)
    assert all(3 <= each.looks <= 6 for each in honest)
    padded = [Calls(0.55, noise, seed, copy_s) for seed in range(150) for copy_s in (0.0, 0.0008)]
    assert sum(each.why_kept() is None for each in padded) <= 3
    assert Calls(0.55, 0.0, 0).why_kept() == "on inputs that stay, calls take 55% of their time on new ones"


@pytest.mark.parametrize("pass_", [*FORWARDS, *BACKWARDS])
def test_the_result_of_the_call_whose_memory_is_measured_is_looked_at(pass_):
    record = measure(cheats.WrongWhileMemoryIsMeasured(), pass_)
    assert record.status == "inaccurate"
    assert record.reason.startswith("a timed call's result does not fit the inputs")


class Board:
    """A device's energy counter that steps ten times per second, by 5 J."""

    def state(self):
        return DeviceState(None, None, None, None, None)

    def processes(self):
        return Processes(None, None)

    def max_sm_clock_mhz(self):
        return None

    def energy_j(self):
        return 5.0 * (time.monotonic() // 0.1)


@pytest.mark.parametrize("pass_", ["infer", "fwd+bwd"])
def test_an_honest_backend_has_an_energy(pass_):
    found = measure(cheats.Honest(), pass_, nvml=Board())
    assert (found.status, found.reason) == ("ok", None)
    assert found.energy_j > 0


@pytest.mark.usefixtures("cpu_time")
@pytest.mark.parametrize(
    ("cheat", "status"), [(kept_cheats.KeptAndPadded, "suspicious"), (cheats.TiresOfItsInputs, "inaccurate")]
)
def test_the_calls_whose_energy_is_measured_must_do_their_work(cheat, status):
    record = measure(cheat(), "infer", nvml=Board())
    assert (record.status, record.time_ms, record.energy_j) == (status, None, None)


def test_without_memory_to_tell_kept_results_single_calls_keep_their_time_alone(monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("glabench.measure.cell.why_kept", fail)
    record = measure(cheats.Honest(), "infer", nvml=Board())
    assert (record.status, record.energy_j) == ("ok", None)
    assert record.time_ms > 0
    eager = replace(JOB, settings=replace(SETTINGS, timing="eager"))
    assert measure(cheats.Honest(), "infer", timer=EagerTimer("cpu"), job=eager).status == "oom"


@pytest.mark.parametrize(
    ("name", "seqlen", "dtype"),
    [
        *product(("sdpa-flash", "sdpa-math", "gla-torch"), (1, 17), ("fp32", "bf16")),
        *product(("sdpa-flash", "gla-torch"), (2,), ("fp64",)),
        ("sdpa-flash", 1000, "bf16"),
        pytest.param("sdpa-flash", 4000, "bf16", marks=pytest.mark.full),
        pytest.param("sdpa-flash", 4000, "fp32", marks=pytest.mark.full),
        pytest.param("sdpa-flash", 4000, "fp64", marks=pytest.mark.full),
    ],
)
def test_odd_lengths_raise_no_alarm(name, seqlen, dtype):
    registry = load_registry()
    sizes = {"heads": 2, "head_dim": 32} if name != "gla-torch" else {**SIZES, "gate": "strong"}
    cell = Cell(name, registry[name].op, "fwd+bwd", 1, seqlen, dtype, Parameters(sizes), "cpu")
    job = Job(name, "run", "cpu", Settings(min_samples=3, max_samples=3, least_time_s=0, warm_up_s=0, time_limit_s=60))
    record = CellMeter(OpWork(registry.op_of(name), registry[name]), job, WallTimer("hot")).measure(cell)
    assert (record.status, record.reason) == ("ok", None)
