"""Every backend of an op, with the packages that are installed, is right on a GPU: outputs and gradients."""

import time

import pytest
import torch

from glabench.backends import load_registry
from glabench.measure.cell import CellMeter
from glabench.measure.job import Job
from glabench.measure.outcome import failure_of
from glabench.measure.settings import Settings
from glabench.measure.timer import timer_for
from glabench.measure.work import OpWork
from glabench.sweeps import Cell, Parameters

# torch's compiler looks at the gradients of inputs that are views, which warns.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
REGISTRY = load_registry()
SETTINGS = Settings(max_samples=10, least_time_s=0, warm_up_s=0, precision=1e-9, energy=False, cell_timeout_s=300)
# fla-core says so itself, and gives wrong gradients if it is asked to go on.
REFUSES_TRITON = {"fla-simple-gla", "fla-gated-delta"}


def measure(name, seqlen, pass_="fwd+bwd", **changes):
    backend, op = REGISTRY[name], REGISTRY.op_of(name)
    sizes = {each.name: each.default for each in (*op.parameters, *backend.parameters)} | op.published(1024) | changes
    cell = Cell(name, op.name, pass_, 2, seqlen, "bf16", Parameters(sizes), "cuda")
    if refusal := backend.unavailable("cuda") or backend.supports(cell):
        pytest.skip(refusal)
    job = Job(name, "run", "cuda:0", SETTINGS)
    try:
        return CellMeter(OpWork(op, backend), job, timer_for("cuda", "cold")).measure(cell)
    except Exception as problem:
        return failure_of(job, cell, problem)


# What a package gets wrong, by backend and whether chunks may be partial, and how the suite says so.
KNOWN = {
    # The gate's gradient is a sum over all later tokens of q dq - k dk, from dq and dk that have been rounded.
    ("mlstm-kernels", False): "df",
    # Rows behind the end of a partial chunk have a factor of infinity, times 0.
    ("fla-lightning", True): "NaN",
}


def assert_right(name, record, partial=False):
    if fault := KNOWN.get((name, partial)):
        assert record.status == "inaccurate"
        assert fault in record.reason
        return
    if name in REFUSES_TRITON and "triton" in (record.reason or "").lower():
        pytest.skip(record.reason)
    assert record.status == "ok", record.reason


@pytest.mark.parametrize("name", [name for name, backend in REGISTRY.items() if backend.work == "op"])
def test_a_backend_computes_its_op(name):
    if name in ("gla-parallel-naive", "gla-closed-form"):
        pytest.skip("is right for short sequences alone: see tests/suite/test_papers.py")
    assert_right(name, measure(name, 512))


def test_the_gates_gradient_as_printed_is_right_for_short_sequences_alone():
    sizes = {"heads": 8, "key_dim": 64, "value_dim": 64}
    assert_right("gla-closed-form", measure("gla-closed-form", 64, **sizes))
    long = measure("gla-closed-form", 16384, **sizes)
    assert (long.status, "dg" in long.reason) == ("inaccurate", True)


@pytest.mark.parametrize("T", [64, 2048])
@pytest.mark.parametrize("name", ["gla-two-level", "linear-two-pass"])
def test_the_papers_algorithms_that_keep_nothing_are_right(name, T):
    assert_right(name, measure(name, T, materialize="nothing"))
    assert_right(name, measure(name, T, materialize="nothing", heads=16, key_dim=64, value_dim=64))


# The papers' systems, and ours with gates of values, which share no kernel with `gla-triton`.
GATED = [
    "gla-two-level", "gla-five-step", "gla-stored-states", "gla-both-stored-states", "gla-scan-torch",
    "gla-parallel-torch", "gla-torch-half", "gla-both-triton", "gla-values-triton",
    "gla-both-torch", "gla-values-torch",
]  # fmt: skip


@pytest.mark.parametrize("gate", ["logsigmoid", "strong", "resets", "dead-channel", "one-strong-chunk"])
@pytest.mark.parametrize("name", GATED)
def test_forms_other_than_our_main_kernels_are_right_at_all_gates(name, gate):
    pass_ = "infer" if name == "gla-five-step" else "fwd+bwd"
    assert_right(name, measure(name, 512, pass_=pass_, gate=gate, heads=4, key_dim=64, value_dim=64))


@pytest.mark.parametrize("gate", ["strong", "resets"])
def test_the_papers_algorithm_that_keeps_nothing_is_right_at_strong_gates(gate):
    sizes = {"heads": 4, "key_dim": 64, "value_dim": 64}
    assert_right("gla-two-level", measure("gla-two-level", 512, gate=gate, materialize="nothing", **sizes))


@pytest.mark.parametrize("name", [name for name, backend in REGISTRY.items() if "packed" in backend.features])
def test_a_backend_takes_packed_documents_and_states(name):
    assert_right(name, measure(name, 1500, packed="on", state="both"), partial=True)


@pytest.mark.parametrize(
    "name", [name for name, backend in REGISTRY.items() if backend.work == "op" and "prefix" in backend.features]
)
def test_a_backend_computes_a_token_after_a_prefix(name):
    assert_right(name, measure(name, 1, pass_="infer", prefix=1000), partial=True)


def test_the_parts_of_flas_forward_give_its_output():
    backend, op = REGISTRY["fla-gla"], REGISTRY.op_of("fla-gla")
    sizes = {each.name: each.default for each in op.parameters}
    cell = Cell("fla-gla", op.name, "fwd", 2, 512, "bf16", Parameters(sizes), "cuda")
    if refusal := backend.unavailable("cuda"):
        pytest.skip(refusal)
    inputs = op.make_inputs(cell)
    found = {name: part.call() for name, part in backend.parts(inputs, cell).items()}
    assert len(found) == 4
    assert torch.equal(found["outputs of both"], backend.bind(inputs, cell)())


def test_the_clock_of_flash_attention_4_is_the_hosts():
    """CuTe's kernels could run on a stream that events do not see."""
    name = "flash-attn-4"
    record = measure(name, 8192)
    assert_right(name, record)
    cell = record.cell
    op = REGISTRY.op_of(name)
    inputs = {each: x.requires_grad_() for each, x in op.make_inputs(cell).items()}
    call, given = REGISTRY[name].bind(inputs, cell), op.make_grad_outputs(cell)["o"]
    calls = 20
    torch.autograd.grad(call(), list(inputs.values()), given)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        torch.autograd.grad(call(), list(inputs.values()), given)
    torch.cuda.synchronize()
    host_ms = (time.perf_counter() - start) / calls * 1e3
    assert record.time_ms == pytest.approx(host_ms, rel=0.2)
