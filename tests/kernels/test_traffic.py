"""What kernels read, write and compute at the least, against numbers computed by hand and what they do."""

from collections import Counter

import pytest
import torch
from gla_cases import make_case, per_head_case, run
from gla_kernels import chunk_linear_attn
from gla_kernels.inspection.traffic import kernel_work
from gla_kernels.launching import call
from gla_kernels.launching.plans import hopper_plan
from gluon_on_cpu import Kernel, gluon_on_cpu
from hopper_on_cpu import on_hopper, set_multiprocessors

WORDS = 4


@pytest.fixture
def hopper(monkeypatch):
    """Calls are planned for Hopper; nothing runs."""
    monkeypatch.setattr(call, "plan", lambda K, V, dtype, chunk, *_: hopper_plan(K, V, dtype, chunk))
    monkeypatch.setattr(call, "_remembered_call", call._call)
    with gluon_on_cpu():
        yield


def tensors(case):
    return [case.inputs[name] for name in ("q", "k", "v", "g")]


def bytes_of(*args, **options):
    return {name: work.bytes for name, work in kernel_work(*args, **options).items()}


def test_each_tensor_of_a_wide_call_counts_once(hopper, monkeypatch):
    """2 sequences of 2 chunks, K = 128, V = 256: states of a chunk take 64 KiB."""
    set_multiprocessors(monkeypatch, 1)
    case = make_case("mild", B=2, T=128, H=1, K=128, V=256, dtype=torch.bfloat16, initial=False)
    found = bytes_of(*tensors(case))
    keys, values, states = 256 * 128 * 2, 256 * 256 * 2, 4 * 128 * 256 * 2
    flags, marks = 2 * WORDS, 4 * WORDS
    gates, excesses = 2 * keys, 4 * 128 * WORDS
    assert found["wide_forward"] == 2 * keys + gates + 2 * values + states + flags + marks
    # q, g and do in; the gradients of states lie in the memory of dq, dk and dg, those of initial states in float32.
    ends = 2 * 128 * 256 * 4
    assert found["wide_recurrence"] == keys + gates + values + 2 * keys + gates + ends + excesses + flags
    assert set(found) == {"wide_forward", "wide_recurrence", "wide_gradients"}


def test_passes_are_told_apart(hopper, monkeypatch):
    set_multiprocessors(monkeypatch, 1)
    case = make_case("mild", B=2, T=128, H=1, K=64, V=64, dtype=torch.bfloat16, initial=False)
    by_pass = {name: dict(bytes_of(*tensors(case), passes=name)) for name in ("infer", "fwd", "bwd", "fwd+bwd")}
    assert set(by_pass["infer"]) == set(by_pass["fwd"]) == {"gla_forward_hopper"}
    states = 4 * 64 * 64 * 2
    assert by_pass["fwd"]["gla_forward_hopper"] - by_pass["infer"]["gla_forward_hopper"] == states
    assert by_pass["fwd+bwd"] == by_pass["fwd"] | by_pass["bwd"]


@pytest.mark.parametrize("T", [128, 2112])
def test_a_gate_per_head_counts_once_and_so_do_its_sums(hopper, monkeypatch, T):
    set_multiprocessors(monkeypatch, 2)
    case = per_head_case("mild", T=T, H=2, K=16, V=16, dtype=torch.bfloat16, initial=False)
    found, kept = (bytes_of(*tensors(case), passes=passes) for passes in ("infer", "fwd"))
    gates = T * 2 * WORDS
    rows, states = T * 2 * 16 * 2 * 4, T // 64 * 2 * 16 * 16 * 2
    if T == 128:  # the forward makes sums, and keeps them with states
        assert found == {"gla_forward_hopper": rows + gates}
        assert kept == {"gla_forward_hopper": rows + states + 2 * gates}
    else:
        assert found == {"head_gate_sums": 2 * gates, "gla_forward_hopper": rows + gates}
    assert "head_gate_sums" not in bytes_of(*tensors(case), passes="bwd")  # the forward's are kept


def test_a_gate_per_head_adds_no_products(hopper):
    case = per_head_case("mild", T=128, H=2, K=64, V=64, dtype=torch.bfloat16, initial=False)
    gated, none = (kernel_work(*tensors(case)[:3], g) for g in (case.inputs["g"], None))
    assert gated["simple_gla_backward_hopper"].flops == none["gla_backward_hopper"].flops > 0
    assert gated["gla_forward_hopper"].flops == none["gla_forward_hopper"].flops


def test_a_gate_per_head_is_no_gate_per_channel_on_the_portable_kernels():
    """Sums of gates are float64 beside float32."""
    case = per_head_case("mild", T=40, H=2, K=16, V=16)
    found = bytes_of(*tensors(case), initial_state=case.inputs["initial"], output_final_state=True, passes="infer")
    tile, gates = 40 * 2 * 16 * 4, 40 * 2 * 4
    assert found == {"head_gate_sums": 3 * gates, "gla_forward_kernel": 4 * tile + 2 * gates + 2 * 2 * 16 * 16 * 4}
    assert kernel_work(*tensors(case))["gla_backward_kernel"].flops > 0


def test_the_portable_kernels_and_states():
    case = make_case("mild", T=40, H=2, K=16, V=16)
    found = bytes_of(*tensors(case), initial_state=case.inputs["initial"], output_final_state=True, passes="infer")
    tile = 40 * 2 * 16 * 4
    assert found["gla_forward_kernel"] == 5 * tile + 2 * 2 * 16 * 16 * 4 + 2 * WORDS + 3 * 2 * WORDS


@pytest.mark.parametrize(
    ("T", "K", "V", "multiprocessors"),
    [
        (128, 64, 64, 1),
        (128, 128, 256, 1),
        (128, 128, 128, 1),
        (128, 256, 256, 1),
        (128, 512, 64, 1),
        (768, 64, 64, 132),
    ],
    ids=["narrow", "a recurrence", "one backward", "a walk", "a readout", "pieces"],
)
def test_kernels_compute_little_more_than_is_counted(T, K, V, multiprocessors, monkeypatch):
    """Without gates, since sums of gates are not counted; whole chunks, so that there is no other work."""
    with on_hopper(monkeypatch):
        set_multiprocessors(monkeypatch, multiprocessors)
        case = make_case(None, T=T, H=1, K=K, V=V, dtype=torch.bfloat16, initial=False)
        counted = kernel_work(*(case.inputs[name] for name in ("q", "k", "v")), None)
        before = Counter(Kernel.flops)
        run(chunk_linear_attn, case.inputs, case.grads, materialize=True)
        done = Kernel.flops - before
    assert set(done) == {name for name, work in counted.items() if work.flops}
    for name, flops in done.items():
        assert 0.7 * flops <= counted[name].flops <= flops, name


@pytest.mark.parametrize("gate", ["none", "mild", "per head"])
@pytest.mark.parametrize("passes", ["infer", "fwd+bwd"])
def test_sequences_that_are_done_apart_count_once(hopper, monkeypatch, gate, passes):
    """34 sequences have products of 34, and 1/33 more bytes; and those that are cut walk the state once more."""

    def work(B):
        set_multiprocessors(monkeypatch, 132)
        like = {"dtype": torch.bfloat16, "device": "meta"}
        q, v = torch.empty(B, 2048, 4, 128, **like), torch.empty(B, 2048, 4, 256, **like)
        g = {"none": None, "mild": q, "per head": torch.empty(B, 2048, 4, **like)}[gate]
        return kernel_work(q, q, v, g, passes=passes)

    def total(works, part, *names):
        return sum(getattr(works[name], part) for name in names if name in works)

    less, more = work(33), work(34)
    assert "scan_pieces" in more
    forward = "wide_forward", "head_forward", "specialized_forward"
    for part in ("bytes", "flops"):
        assert total(more, part, *forward) == pytest.approx(34 / 33 * total(less, part, *forward), rel=0.03)
    walk = 2 * 2048 * 4 * 128 * 256  # of one sequence
    walks = {"infer": (0, 1), "fwd+bwd": (33, 36)}[passes]
    assert [total(works, "flops", "wide_recurrence") for works in (less, more)] == [n * walk for n in walks]
