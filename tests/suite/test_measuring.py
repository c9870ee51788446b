"""Measuring in one process, with a made-up clock: sampling, the accuracy gate, the passes, the runner's flow."""

import math
from dataclasses import replace

import fake_backends
import pytest
import torch
from fake_timer import FakeTimer, constant
from glabench.measure.process import WorkerDiedError, WorkerTimeoutError
from glabench.measure.runner import run_cells

from glabench.backends import load_registry
from glabench.measure.accuracy import check_accuracy, relative_error, small_cell
from glabench.measure.cell import CellMeter
from glabench.measure.outcome import failure_of, one_line
from glabench.measure.settings import Settings
from glabench.records import Record
from glabench.sweeps import Cell

CELL = Cell("linear-torch", "linear", "fwd+bwd", 2, 40, 2, 16, 16, None, None, "fp32", None, "cpu")
QUICK = Settings(min_samples=3, max_samples=5, time_limit_s=60, least_time_s=0, warm_up_s=0)


# Accuracy


@pytest.mark.parametrize("name", ["gla-torch", "gla-recurrent-torch", "linear-torch", "sdpa-flash", "sdpa-math"])
@pytest.mark.parametrize("dtype", ["fp32", "fp64", "bf16"])
def test_every_cpu_backend_passes_the_gate(name, dtype):
    backend = load_registry()[name]
    gate = "resets" if backend.definition().gated else None
    cell = replace(CELL, backend=name, op=backend.op, dtype=dtype, gate=gate)
    found = check_accuracy(backend, cell)
    assert found.problem is None
    assert set(found.rel_error) >= {"o", "dq", "dk", "dv"}


def test_the_gate_catches_a_result_that_is_ten_percent_off():
    found = check_accuracy(fake_backends.Wrong(), replace(CELL, seqlen=32))
    assert "o 1.0e-01" in found.problem


def test_the_gate_catches_nan():
    assert "nan" in check_accuracy(fake_backends.NotANumber(), replace(CELL, seqlen=32)).problem


@pytest.mark.parametrize("pass_", ["infer", "fwd"])
def test_a_forward_cell_checks_the_output_alone(pass_):
    assert set(check_accuracy(fake_backends.Good(), replace(CELL, pass_=pass_)).rel_error) == {"o"}


def test_the_small_cell_keeps_what_matters():
    big = replace(CELL, batch=32, seqlen=16384, heads=16, key_dim=128, pass_="bwd")
    small = small_cell(big)
    assert (small.batch, small.seqlen, small.heads, small.pass_) == (2, 256, 2, "fwd+bwd")
    assert (small.key_dim, small.dtype) == (128, "fp32")
    assert [small_cell(replace(big, pass_=name)).pass_ for name in ("infer", "fwd")] == ["infer", "fwd"]


@pytest.mark.parametrize("pass_", ["infer", "fwd", "bwd", "fwd+bwd"])
def test_inputs_ask_for_gradients_but_for_inference(pass_):
    workload = fake_backends.Good().prepare(replace(CELL, seqlen=16, pass_=pass_))
    assert all(x.requires_grad == (pass_ != "infer") for x in workload.inputs.values())
    assert workload.forward().requires_grad == (pass_ != "infer")


def test_relative_error_of_zero_against_zero_is_zero_and_of_more_is_not():
    zero, one = torch.zeros(3), torch.ones(3)
    assert relative_error(zero, zero) == 0
    assert relative_error(one, zero) == math.inf
    assert math.isnan(relative_error(one * math.nan, one))


def test_inputs_come_from_the_seed():
    op = load_registry()["gla-torch"].definition()
    cell = replace(CELL, gate="logsigmoid/16")
    first, again, other = (op.make_inputs(c) for c in (cell, cell, replace(cell, seed=1)))
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert not torch.equal(first["q"], other["q"])
    assert first["g"].max() <= 0


# The passes


@pytest.mark.parametrize("pass_", ["infer", "fwd", "bwd", "fwd+bwd"])
def test_a_cell_is_measured_with_all_samples_kept(pass_):
    timer = FakeTimer(iter([9.0, 9.0, 1.0, 2.0, 3.0, 4.0, 5.0]))
    meter = CellMeter(fake_backends.Good(), replace(QUICK, min_samples=5), timer, "run")
    record = meter.measure(replace(CELL, pass_=pass_))
    assert record.status == "ok"
    assert record.samples_ms == (1.0, 2.0, 3.0, 4.0, 5.0)  # the two warm-up calls are not among them
    assert (record.time_ms, record.time_ms_p20, record.time_ms_p80) == (3.0, pytest.approx(1.8), pytest.approx(4.2))
    assert (record.stop_reason, record.timing) == ("sample limit", "made up")
    assert record.first_call_s > 0
    assert record.rel_error["o_at_size"] < 1e-5
    assert record.peak_allocated_mib is None  # a CPU has no such figure


def test_the_launch_that_a_backend_tells_is_recorded():
    class Telling(fake_backends.Good):
        def launch(self, inputs, cell):
            return f"C=16, T={inputs['q'].shape[1]}"

    assert CellMeter(Telling(), QUICK, FakeTimer(constant()), "run").measure(CELL).launch == f"C=16, T={CELL.seqlen}"
    assert CellMeter(fake_backends.Good(), QUICK, FakeTimer(constant()), "run").measure(CELL).launch is None


def test_a_fault_that_only_large_sizes_show_is_caught():
    class Misplacing(fake_backends.Good):
        def bind(self, inputs, cell):
            # What a wrong offset into a large tensor would do: the last sequence gets the first one's output.
            return lambda: fake_backends.correct(inputs).roll(cell.batch - 2, 0)

    record = CellMeter(Misplacing(), QUICK, FakeTimer(constant()), "run").measure(replace(CELL, batch=3))
    assert record.status == "inaccurate"
    assert "o_at_size" in record.reason


def test_the_call_warms_up_for_the_asked_time():
    import time

    began = []

    class Slow(FakeTimer):
        def sample(self, prepare, call):
            began.append(time.monotonic())
            time.sleep(0.02)
            return super().sample(prepare, call)

    settings = replace(QUICK, warm_up_s=0.2, max_samples=3)
    CellMeter(fake_backends.Good(), settings, Slow(constant()), "run").measure(CELL)
    assert began[-3] - began[0] >= 0.2  # the last three are the samples


def test_the_backward_pass_does_not_time_the_forward():
    class Probe(fake_backends.Good):
        forwards = 0

        def act(self, inputs):
            Probe.forwards += 1
            return fake_backends.correct(inputs)

    class Watching(FakeTimer):
        def sample(self, prepare, call):
            prepare()
            before = Probe.forwards
            call()
            assert Probe.forwards == before
            return next(self._times)

    cell = replace(CELL, pass_="bwd", seqlen=Probe.bad_seqlen)
    assert CellMeter(Probe(), QUICK, Watching(constant()), "run").measure(cell).status == "ok"
    assert Probe.forwards > 3


def test_gradients_are_not_accumulated():
    workload = fake_backends.Good().prepare(CELL)
    workload.gradients(workload.forward())
    assert all(x.grad is None for x in workload.inputs.values())


@pytest.mark.parametrize(
    ("backend", "reason"),
    [(fake_backends.NotANumber(), "o holds NaN or Inf"), (fake_backends.Wrong(), "relative error beyond 2e-03")],
)
def test_a_wrong_result_is_inaccurate_and_has_no_time(backend, reason):
    record = CellMeter(backend, QUICK, FakeTimer(constant()), "run").measure(replace(CELL, seqlen=32))
    assert record.status == "inaccurate"
    assert record.reason.startswith(reason)
    assert record.time_ms is None


def test_the_gate_runs_once_for_cells_that_share_it(monkeypatch):
    calls = []
    monkeypatch.setattr("glabench.measure.cell.check_accuracy", lambda b, c: calls.append(c) or check_accuracy(b, c))
    meter = CellMeter(fake_backends.Good(), QUICK, FakeTimer(constant()), "run")
    for cell in (CELL, replace(CELL, batch=4), replace(CELL, key_dim=32)):
        meter.measure(cell)
    assert [c.key_dim for c in calls] == [16, 32]


# The runner


class FakeWorker:
    """Answers from a script: a record's time, or an exception to raise."""

    def __init__(self, backend, script):
        self._backend, self._script, self.closed = backend, script, False

    def measure(self, cell):
        assert not self.closed
        answer = self._script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return Record("run", cell, answer)

    def close(self):
        self.closed = True


def run_with(scripts, cells):
    records, workers = [], []

    def start(backend):
        workers.append(FakeWorker(backend, scripts[backend]))
        return workers[-1]

    run_cells(cells, start, "run", records.append)
    return records, workers


def cells_of(*backends, count=3):
    return [replace(CELL, backend=b, seqlen=t) for b in backends for t in range(1, count + 1)]


def test_one_worker_serves_all_cells_of_a_backend():
    records, workers = run_with({"a": ["ok"] * 3, "b": ["ok"] * 3}, cells_of("a", "b"))
    assert [w._backend for w in workers] == ["a", "b"]
    assert all(w.closed for w in workers)
    assert len(records) == 6


@pytest.mark.parametrize(
    ("answer", "status"),
    [(WorkerDiedError("gone"), "crashed"), (WorkerTimeoutError("late"), "timeout"), ("oom", "oom"), ("error", "error")],
)
def test_a_fresh_worker_follows_a_failure_and_the_other_cells_are_measured(answer, status):
    records, workers = run_with({"a": ["ok", answer, "ok"]}, cells_of("a"))
    assert [r.status for r in records] == ["ok", status, "ok"]
    assert len(workers) == 2


def test_an_answer_that_makes_no_sense_costs_its_cell_only():
    class Confused(FakeWorker):
        def measure(self, cell):
            return super().measure(CELL) if cell.seqlen == 2 else super().measure(cell)

    records = []
    run_cells(cells_of("a"), lambda backend: Confused(backend, ["ok"] * 3), "run", records.append)
    assert [r.status for r in records] == ["ok", "crashed", "ok"]
    records, _ = run_with({"a": ["ok", ValueError("not JSON"), "ok"]}, cells_of("a"))
    assert [r.status for r in records] == ["ok", "crashed", "ok"]


def test_a_record_is_handed_on_before_its_worker_is_closed():
    worker = FakeWorker("a", ["oom"])
    run_cells(
        cells_of("a", count=1), lambda b: worker, "run", lambda record: open_when_handed.append(not worker.closed)
    )
    assert open_when_handed == [True]


open_when_handed = []


@pytest.mark.parametrize("status", ["unsupported", "inaccurate"])
def test_a_harmless_failure_keeps_the_worker(status):
    records, workers = run_with({"a": ["ok", status, "ok"]}, cells_of("a"))
    assert [r.status for r in records] == ["ok", status, "ok"]
    assert len(workers) == 1


def test_an_interruption_closes_the_worker():
    worker = FakeWorker("a", [])

    def interrupted(cell):
        raise KeyboardInterrupt

    worker.measure = interrupted
    with pytest.raises(KeyboardInterrupt):
        run_cells(cells_of("a"), lambda backend: worker, "run", lambda record: None)
    assert worker.closed


# Failures as data


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
        (ValueError("at 30:15:\n  x = y\n  ^\ny is not defined"), "error", "ValueError: at 30:15: y is not defined"),
        (ValueError("x: got 1; it needs 2"), "error", "ValueError: x: got 1; it needs 2"),
    ],
)
def test_an_exception_becomes_a_record_with_one_line(problem, status, reason):
    record = failure_of("run", CELL, problem)
    assert record.status == status
    assert record.reason.startswith(reason)
    assert "\n" not in record.reason


def test_a_reason_holds_no_path_of_the_machine_and_is_not_endless():
    assert one_line("cannot open /home/somebody/code/file.py: no") == "cannot open file.py: no"
    assert one_line("a/b and 3 /4 stay") == "a/b and 3 /4 stay"
    assert len(one_line("x" * 1000)) == 300


@pytest.mark.parametrize(("K", "keeps_all"), [(128, False), (256, False), (272, True)])
def test_a_forward_without_gradients_is_estimated_to_hold_all_states_where_no_program_holds_all_keys(K, keeps_all):
    cell = Cell("gla-triton", "gla", "infer", 8, 4096, 4, K, 64, None, None, "bf16", "logsigmoid/16", "cuda")
    kept = load_registry()["gla-triton"].working_bytes(replace(cell, pass_="fwd", materialize=True))
    assert (load_registry()["gla-triton"].working_bytes(cell) == kept) == keeps_all
