"""Measuring one cell in this process, with a made-up clock: accuracy, the passes, finished records."""

import json
import math
import time
import weakref
from dataclasses import replace
from itertools import product

import fake_backends
import pytest
import torch
from fake_timer import FakeTimer, constant

from glabench.backends import load_registry
from glabench.backends.base import Counts
from glabench.measure.accuracy import check_accuracy, relative_error, small_cell
from glabench.measure.cell import CellMeter
from glabench.measure.job import Job
from glabench.measure.outcome import failure_of, one_line
from glabench.measure.rates import with_rates
from glabench.measure.settings import Settings
from glabench.measure.work import OpWork
from glabench.measure.workload import prepare
from glabench.ops import Op
from glabench.ops.base import Spec
from glabench.records import Record
from glabench.records.environment import Ceilings
from glabench.sweeps import Cell, Parameters

REGISTRY = load_registry()
LINEAR = REGISTRY.ops["linear"]
SIZES = Parameters({"heads": 2, "key_dim": 16, "value_dim": 16})
CELL = Cell("linear-torch", "linear", "fwd+bwd", 2, 40, "fp32", SIZES, "cpu")
QUICK = Settings(min_samples=3, max_samples=5, time_limit_s=60, least_time_s=0, warm_up_s=0)
JOB = Job("linear-torch", "run", "cpu", QUICK, code="c0de")


def resized(cell, **sizes):
    return replace(cell, parameters=Parameters({**cell.parameters, **sizes}))


def measure(backend, cell=CELL, timer=None, **settings):
    job = replace(JOB, settings=replace(QUICK, **settings))
    return CellMeter(OpWork(LINEAR, backend), job, timer or FakeTimer(constant())).measure(cell)


# Accuracy


ON_CPU = list(
    product(
        ("gla-torch", "gla-recurrent-torch", "linear-torch", "sdpa-flash", "sdpa-math", "hyena-fft"),
        ("fp32", "fp64", "bf16"),
    )
)
# Every backend, every dtype.
CHECKED = [ON_CPU[number] for number in (0, 2, 4, 8, 9, 13, 15, 17)]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*CHECKED, *(pytest.param(*pair, marks=pytest.mark.full) for pair in ON_CPU if pair not in CHECKED)],
)
def test_every_cpu_backend_passes_the_check(name, dtype):
    op, backend = REGISTRY.op_of(name), REGISTRY[name]
    sizes = {
        "gla": {**SIZES, "gate": "resets"},
        "linear": SIZES,
        "softmax": {"heads": 2, "head_dim": 16},
        "hyena": {"inner": 8},
    }[op.name]
    found = check_accuracy(
        op, backend, replace(CELL, op=op.name, backend=name, dtype=dtype, parameters=Parameters(sizes))
    )
    assert found.problem is None
    assert set(found.rel_error) >= {"o", "dq", "dk", "dv"}


@pytest.mark.parametrize("name", ["gla-torch", "gla-recurrent-torch", "linear-torch", "sdpa-flash", "sdpa-math"])
def test_a_token_after_a_prefix_passes_the_check(name):
    op = REGISTRY.op_of(name)
    sizes = {"heads": 3, **({"head_dim": 16} if op.name == "softmax" else SIZES), "prefix": 500}
    sizes |= {"gate": "resets"} if op.name == "gla" else {}
    cell = replace(CELL, op=op.name, backend=name, pass_="infer", seqlen=1, parameters=Parameters(sizes))
    assert REGISTRY[name].limits(cell) is None
    found = check_accuracy(op, REGISTRY[name], cell)
    assert found.problem is None
    assert set(found.rel_error) == {"o"} | set(op.outputs(cell))


def test_the_check_catches_a_result_that_is_ten_percent_off():
    found = check_accuracy(LINEAR, fake_backends.Wrong(), replace(CELL, seqlen=32))
    assert "o 1.0e-01" in found.problem


def test_what_raises_in_the_check_is_said_to_be_of_its_size():
    with pytest.raises(RuntimeError, match="in the check of 32 tokens: RuntimeError: a made-up fault"):
        check_accuracy(LINEAR, fake_backends.Raising(), replace(CELL, seqlen=32))


def test_the_check_catches_nan():
    assert "nan" in check_accuracy(LINEAR, fake_backends.NotANumber(), replace(CELL, seqlen=32)).problem


@pytest.mark.parametrize(("pass_", "names"), [("infer", {"o"}), ("fwd", {"o", "dq", "dk", "dv"})])
def test_a_forward_of_training_is_compared_with_its_gradients(pass_, names):
    assert set(check_accuracy(LINEAR, fake_backends.Good(), replace(CELL, pass_=pass_)).rel_error) == names


def test_the_small_cell_keeps_what_matters():
    big = resized(replace(CELL, batch=32, seqlen=16384, pass_="bwd"), heads=16, key_dim=128, chunk=64)
    small = small_cell(LINEAR, big)
    assert (small.batch, small.seqlen, small.get("heads"), small.pass_) == (2, 256, 2, "fwd+bwd")
    assert (small.get("key_dim"), small.get("chunk"), small.dtype) == (128, 64, "fp32")
    assert small_cell(LINEAR, small) == small
    assert [small_cell(LINEAR, replace(big, pass_=name)).pass_ for name in ("infer", "fwd")] == ["infer", "fwd+bwd"]


@pytest.mark.parametrize(("device", "heads", "compared"), [("cpu", 16, 2), ("cuda", 16, 16), ("cuda", 64, 16)])
def test_on_a_gpu_more_heads_are_compared_as_autotuners_tune_for_each_number(device, heads, compared):
    cell = resized(replace(CELL, device=device), heads=heads)
    assert small_cell(LINEAR, cell).get("heads") == compared
    few = resized(cell, heads=1)
    assert small_cell(LINEAR, few).get("heads") == 1


def test_an_op_without_heads_has_a_small_cell_too():
    class Headless(Op):
        name, equation, parameters, independent = "headless", "o = q", (), ("batch",)
        reference_name = "itself"
        published = output = reference = forward_flops = None

        def inputs(self, cell):
            return {"q": Spec(("batch", "seqlen"), (cell.batch, cell.seqlen))}

    cell = replace(CELL, op="headless", batch=9, parameters=Parameters())
    assert small_cell(Headless(), cell) == replace(cell, batch=2)


@pytest.mark.parametrize("pass_", ["infer", "fwd", "bwd", "fwd+bwd"])
def test_inputs_ask_for_gradients_but_for_inference(pass_):
    workload = prepare(LINEAR, fake_backends.Good(), replace(CELL, seqlen=16, pass_=pass_))
    assert all(x.requires_grad == (pass_ != "infer") for x in workload.inputs.values())
    assert workload.forward().requires_grad == (pass_ != "infer")


def test_relative_error_of_zero_against_zero_is_zero_and_of_more_is_not():
    zero, one = torch.zeros(3), torch.ones(3)
    assert relative_error(zero, zero) == 0
    assert relative_error(one, zero) > 1e20
    assert relative_error(one * 1e-8, zero, least=1e-4) < 1e-3  # what cancels is not held against anyone
    assert math.isnan(relative_error(one * math.nan, one))


# The passes


@pytest.mark.parametrize("pass_", ["infer", "fwd", "bwd", "fwd+bwd"])
def test_a_cell_is_measured_with_all_samples_kept(pass_):
    timer = FakeTimer([9.0, 9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 0.5, 0.5, 0.5])
    record = measure(fake_backends.Good(), replace(CELL, pass_=pass_), timer, min_samples=5)
    assert record.status == "ok"
    assert record.samples_ms == (
        1.0,
        2.0,
        3.0,
        4.0,
        5.0,
    )  # not warming up, nor what is after the samples
    assert (record.time_ms, record.time_ms_p20, record.time_ms_p80) == (3.0, pytest.approx(1.8), pytest.approx(4.2))
    assert (record.stop_reason, record.timing) == ("sample limit", "made up")
    assert record.first_call_s > 0
    assert record.rel_error["o_at_size"] < 1e-5
    assert ("dv_at_size" in record.rel_error) == (pass_ != "infer")
    assert record.check_seed is not None
    assert record.peak_allocated_mib is None  # only on a GPU
    assert record.peak_resident_mib >= 0


def test_the_launch_that_a_backend_tells_is_recorded():
    class Telling(fake_backends.Good):
        def launch(self, inputs, cell):
            return f"C=16, T={inputs['q'].shape[1]}"

    assert measure(Telling()).launch == f"C=16, T={CELL.seqlen}"
    assert measure(fake_backends.Good()).launch is None


def test_a_fault_that_only_large_sizes_show_is_caught():
    class Misplacing(fake_backends.Good):
        def bind(self, inputs, cell):
            # As with a wrong offset into a large tensor: the last sequence gets the first one's output.
            return lambda: fake_backends.correct(inputs).roll(cell.batch - 2, 0)

    record = measure(Misplacing(), replace(CELL, batch=3))
    assert record.status == "inaccurate"
    assert record.reason.startswith("relative error at the cell's own size: o ")
    assert "allowed 2e-03" in record.reason


def test_the_small_check_alone_looks_at_no_large_size():
    record = measure(fake_backends.Good(), check="small")
    assert set(record.rel_error) == {"o", "dq", "dk", "dv"}
    assert record.check_seed is None


def test_the_call_warms_up_for_the_asked_time():
    began = []

    class Slow(FakeTimer):
        def sample(self, *steps):
            began.append(time.monotonic())
            time.sleep(0.02)
            return super().sample(*steps)

    measure(fake_backends.Good(), timer=Slow(constant()), warm_up_s=0.2, max_samples=3)
    assert began[-4] - began[0] >= 0.2  # then come three samples, and one for the check


def test_the_backward_pass_does_not_time_the_forward():
    class Probe(fake_backends.Good):
        forwards = 0

        def act(self, inputs):
            Probe.forwards += 1
            return fake_backends.correct(inputs)

    class Watching(FakeTimer):
        def sample(self, prepare, call, between):
            prepare()
            before = Probe.forwards
            call()
            assert Probe.forwards == before
            return next(self._times)

    cell = replace(CELL, pass_="bwd", seqlen=Probe.bad_seqlen)
    assert measure(Probe(), cell, Watching(constant()), check="small").status == "ok"
    assert Probe.forwards > 3


def test_gradients_are_not_accumulated():
    workload = prepare(LINEAR, fake_backends.Good(), CELL)
    workload.gradients(workload.forward())
    assert all(x.grad is None for x in workload.inputs.values())


@pytest.mark.parametrize(
    ("backend", "reason"),
    [(fake_backends.NotANumber(), "o holds NaN or Inf"), (fake_backends.Wrong(), "relative error beyond 2e-03")],
)
def test_a_wrong_result_is_inaccurate_and_has_no_time(backend, reason):
    record = measure(backend, replace(CELL, seqlen=32))
    assert record.status == "inaccurate"
    assert record.reason.startswith(reason)
    assert record.time_ms is None
    assert record.code == "c0de"


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda o: o[:1, :1], r"a tensor \[1, 1, 2, 16\] in float32"),
        (lambda o: o.double(), r"a tensor \[2, 40, 2, 16\] in float64"),
        (lambda o: (o, None), "a tuple"),
        (lambda o: None, "a NoneType"),
        (lambda o: o.sum().item(), "a float"),
    ],
)
def test_output_of_another_kind_shape_or_dtype_is_an_error_that_says_what_is_needed(spoil, found):
    class Odd(fake_backends.Good):
        def bind(self, inputs, cell):
            call = super().bind(inputs, cell)
            return lambda: spoil(call())

    with pytest.raises(TypeError, match=rf"must be a plain tensor \[2, 40, 2, 16\] in float32, but is {found}$"):
        measure(Odd())


def test_the_check_is_made_once_for_cells_that_share_it(monkeypatch):
    calls = []
    check = check_accuracy
    monkeypatch.setattr("glabench.measure.work.check_accuracy", lambda *args: calls.append(args[-1]) or check(*args))
    meter = CellMeter(OpWork(LINEAR, fake_backends.Good()), JOB, FakeTimer(constant()))
    for cell in (CELL, replace(CELL, batch=4), resized(CELL, key_dim=32)):
        meter.measure(cell)
    assert [cell.get("key_dim") for cell in calls] == [16, 32]


def test_on_a_cpu_the_peak_is_what_the_pass_takes_above_its_inputs():
    class Wasteful(fake_backends.Good):
        def bind(self, inputs, cell):
            def call():
                torch.ones(32 * 2**18)
                return fake_backends.correct(inputs)

            return call

    record = measure(Wasteful(), replace(CELL, pass_="infer"))
    if record.peak_resident_mib is None:
        pytest.skip("this system does not tell")
    assert record.peak_resident_mib == pytest.approx(32, abs=3)
    assert (record.peak_allocated_mib, record.peak_reserved_mib, record.saved_mib) == (None, None, None)


# Rates


def test_a_record_leaves_the_meter_finished():
    class Telling(fake_backends.Good):
        def executes(self, cell):
            return Counts(flops=4 * 10**9, bytes=6 * 10**6, scalar_flops=10**9)

    job = replace(JOB, ceilings=Ceilings(1000.0, 500.0))
    record = CellMeter(OpWork(LINEAR, Telling()), job, FakeTimer(constant(2.0))).measure(CELL)
    assert (record.run_id, record.code) == ("run", "c0de")
    assert record.gbps == pytest.approx(LINEAR.moved_bytes(CELL) / 2e6)
    assert record.tflops == pytest.approx(LINEAR.flops(CELL) / 2e9)
    assert (record.executed_gbps, record.executed_tflops) == (pytest.approx(3.0), pytest.approx(2.0))
    assert record.scalar_pct is None  # a CPU has no tensor cores to be off
    on_gpu = with_rates(replace(record, cell=replace(CELL, device="cuda")), OpWork(LINEAR, Telling()), job.ceilings)
    assert on_gpu.scalar_pct == 25
    assert (record.copy_gbps, record.product_tflops) == (1000.0, 500.0)
    assert record.roofline_pct == pytest.approx(100 * max(record.gbps / 1000, record.tflops / 500))
    assert Record.from_line(record.to_line()) == record


def test_what_executes_no_operations_has_no_share_of_them():
    class Copying(fake_backends.Good):
        def executes(self, cell):
            return Counts(flops=0, bytes=10**6)

    record = CellMeter(OpWork(LINEAR, Copying()), JOB, FakeTimer(constant(2.0))).measure(CELL)
    assert (record.status, record.executed_tflops) == ("ok", 0)
    on_gpu = replace(record, cell=replace(CELL, device="cuda"))
    assert with_rates(on_gpu, OpWork(LINEAR, Copying()), JOB.ceilings).scalar_pct is None


class Counted:
    """An op with known counts."""

    def __init__(self, moved, flops):
        self._moved, self._flops = moved, flops

    def moved_bytes(self, cell):
        return self._moved

    def flops(self, cell):
        return self._flops

    def state_bytes(self, cell):
        return 3 * 2**20

    def layer_parameters(self, cell):
        return 5


def rated(moved, flops, ceilings, **fields):
    record = Record(run_id="run", cell=CELL, **{"status": "ok", "time_ms": 2.0, **fields})
    return with_rates(record, OpWork(Counted(moved, flops), REGISTRY["linear-torch"]), ceilings)


@pytest.mark.parametrize(("moved", "flops", "share"), [(10**9, 10**9, 50.0), (10**6, 9 * 10**11, 90.0)])
def test_the_roofline_is_the_nearer_of_both_ceilings(moved, flops, share):
    record = rated(moved, flops, Ceilings(1000.0, 500.0))
    assert (record.gbps, record.tflops) == (moved / 2e6, flops / 2e9)
    assert record.roofline_pct == pytest.approx(share)
    assert record.state_kib == 3 * 1024


def test_without_ceilings_there_are_rates_and_no_share_and_without_a_time_neither():
    record = rated(10**9, 10**9, Ceilings())
    assert (record.gbps, record.roofline_pct, record.copy_gbps) == (500.0, None, None)
    assert rated(10**9, 10**9, Ceilings(1.0, 1.0), status="oom", time_ms=None).gbps is None


# Jobs and settings


def test_a_job_survives_the_way_to_its_worker():
    job = Job("a", "run", "cuda:1", QUICK, ("one.py", "two.py"), Ceilings(4000.0, None), "c0de")
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job


@pytest.mark.parametrize("data", [{"precision": "x"}, {"max_samples": 0}, {"time_limit_s": -1}, {"speed": 1}])
def test_settings_that_cannot_be_are_refused_by_name(data):
    with pytest.raises(ValueError, match=next(iter(data))):
        Settings.from_json(data)


# Failures as data


# From fla-core 0.6.0.
FLA_REFUSES = "produces incorrect results for gated chunk_bwd_dqkwg (see #640). Please upgrade Triton to >= 3.7.1"


@pytest.mark.parametrize(
    ("problem", "status", "reason"),
    [
        (RuntimeError("first\nsecond"), "error", "RuntimeError: first"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "oom", "CUDA out of memory. Tried"),
        (MemoryError(), "oom", "out of memory"),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried"), "oom", "DefaultCPUAllocator"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "oom", "[enforce fail]"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "oom", "Triton Error"),
        (RuntimeError("No available kernel. Aborting execution."), "unsupported", "RuntimeError: No available"),
        (
            RuntimeError(f"Triton >= 3.4.0 and < 3.7.1 on Hopper GPUs {FLA_REFUSES}"),
            "unsupported",
            "RuntimeError: Triton",
        ),
        (ValueError("at 30:15:\n  x = y\n  ^\ny is not defined"), "error", "ValueError: at 30:15: y is not defined"),
        (ValueError("x: got 1; it needs 2"), "error", "ValueError: x: got 1; it needs 2"),
    ],
)
def test_an_exception_becomes_a_record_with_one_line(problem, status, reason):
    record = failure_of(JOB, CELL, problem)
    assert (record.status, record.run_id, record.code) == (status, "run", "c0de")
    assert record.reason.startswith(reason)
    assert "\n" not in record.reason


def test_a_reason_holds_no_path_of_the_machine_and_is_not_endless():
    assert one_line("cannot open /home/somebody/code/file.py: no") == "cannot open file.py: no"
    assert one_line("a/b and 3 /4 stay") == "a/b and 3 /4 stay"
    assert one_line("see https://example.org/a/b, folder c") == "see https://example.org/a/b, folder c"
    assert len(one_line("x" * 1000)) == 300


def test_no_more_than_two_sets_of_inputs_are_in_memory_at_once():
    """A cell's own, and one that it is renewed from or compared with: a cache may fill half of a GPU."""
    large = replace(CELL, seqlen=300)  # more than the small cell, which is compared first

    class Counting(type(LINEAR)):
        def __init__(self):
            self.made, self.most = [], 0

        def make_values(self, cell, other=0):
            if cell == large:
                self.most = max(self.most, 1 + sum(x() is not None for x in self.made))
            values = super().make_values(cell, other)
            if cell == large:
                self.made.append(weakref.ref(values["q"]))
            return values

    op = Counting()
    backend = REGISTRY["linear-torch"]
    assert CellMeter(OpWork(op, backend), JOB, FakeTimer(constant())).measure(large).status == "ok"
    assert op.most == 2
