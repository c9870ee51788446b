"""Calls of our kernels on a GPU: captured, compiled, checkpointed, repeated; what they keep between passes."""

import threading

import pytest
import torch
from gla_cases import GATES, make_case, run
from gla_kernels import chunk_gla, chunk_linear_attn
from gla_kernels.launching.replay import Replay
from gla_kernels.operators import kinds, ops, passes
from torch import library
from torch.utils.checkpoint import checkpoint
from triton import knobs
from triton.runtime import JITFunction

MODES = [True, False]


@pytest.mark.parametrize("materialize", MODES)
@pytest.mark.parametrize("K", [60, 64, 128, 256])
def test_a_captured_graph_replays_the_same(K, materialize):
    """This also shows that no call waits for the GPU, because a capture would fail."""
    case = make_case("mild", B=2, T=500, K=K, V=K, dtype=torch.bfloat16, initial=False, device="cuda")
    leaves = [case.inputs[name].clone().requires_grad_() for name in ("q", "k", "v", "g")]

    def step():
        o, _ = chunk_gla(*leaves, materialize=materialize)
        return [o.detach(), *torch.autograd.grad(o, leaves, case.grads["o"])]

    expected = step()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for x in captured:
        x.fill_(float("nan"))
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(expected, captured, strict=True))


@pytest.mark.parametrize("materialize", MODES)
@pytest.mark.parametrize("K", [64, 128, 256])
def test_a_compiled_call_is_one_graph_and_gives_the_same(K, materialize):
    case = make_case("mild", T=200, K=K, V=64, dtype=torch.bfloat16, device="cuda")

    def loss(q, k, v, g):
        o, final = chunk_gla(q, k, v, g, output_final_state=True, materialize=materialize)
        return o.float().square().sum() + final.sum()

    pair = [[case.inputs[name].clone().requires_grad_() for name in ("q", "k", "v", "g")] for _ in range(2)]
    loss(*pair[0]).backward()
    torch.compile(loss, fullgraph=True)(*pair[1]).backward()
    for x, y in zip(*pair, strict=True):
        assert torch.allclose(x.grad.float(), y.grad.float(), rtol=1e-2, atol=1e-2)


def test_checkpointing_and_autocast_work():
    case = make_case("mild", T=200, K=64, V=64, device="cuda")
    leaves = [case.inputs[name].clone().requires_grad_() for name in ("q", "k", "v", "g")]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        o = checkpoint(lambda *x: chunk_gla(*x)[0], *leaves, use_reentrant=False)
    assert o.dtype == torch.bfloat16
    o.float().sum().backward()
    assert all(x.grad.dtype == torch.float32 and x.grad.isfinite().all() for x in leaves)


@pytest.mark.parametrize("materialize", MODES)
@pytest.mark.parametrize("K", [60, 64, 128, 256])
def test_repeated_calls_go_straight_to_compiled_kernels_and_give_the_same_bits(K, materialize, monkeypatch):
    case = make_case("strong", T=300, K=K, V=64, dtype=torch.bfloat16, device="cuda")

    def results():
        return run(chunk_gla, case.inputs, case.grads, materialize=materialize)

    def hook(metadata):
        """Only its presence matters: launches that are watched go through Triton's JIT."""

    knobs.runtime.launch_enter_hook.add(hook)
    expected = results()
    knobs.runtime.launch_enter_hook.remove(hook)
    results()
    torch.cuda.synchronize()
    monkeypatch.delattr(JITFunction, "run")
    with torch.cuda.stream(torch.cuda.Stream()):
        found = results()
    torch.cuda.synchronize()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def poison_free_memory():
    """What is allocated next is full of NaN."""
    blocks = [torch.full((2**bits,), torch.nan, device="cuda") for bits in range(8, 26)]
    del blocks


REPEATED = [
    (2, 100, 2, 64, 64), (1, 3000, 4, 64, 64), (2, 500, 4, 128, 128), (2, 500, 50, 128, 128), (1, 4000, 4, 128, 256),
    (2, 700, 4, 256, 512), (2, 300, 4, 384, 64), (2, 300, 4, 60, 60),
]  # fmt: skip


@pytest.mark.parametrize("materialize", MODES)
@pytest.mark.parametrize(
    ("gate", "lengths"), [("mild", None), ("strong", None), (None, None), ("dead channel", [700, 1, 299])]
)
@pytest.mark.parametrize("shape", REPEATED, ids=str)
def test_passes_that_are_repeated_give_the_same_bits(shape, gate, lengths, materialize, monkeypatch):
    """In poisoned memory, on another stream, in another thread, and captured in a graph."""
    monkeypatch.setattr(kinds, "_ATTEMPTS", 3)
    monkeypatch.setattr(kinds, "_passes_by_kind", {})
    repeated, repeat = [], Replay.__call__
    monkeypatch.setattr(Replay, "__call__", lambda *a: repeated.append(repeat(*a)) or repeated[-1])
    B, T, H, K, V = shape
    options = {"materialize": materialize}
    if lengths is not None:
        B, T = 1, sum(lengths)
        options["cu_seqlens"] = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, g, do = (torch.randn(B, T, H, D, device="cuda", generator=generator) for D in (K, K, V, K, V))
    leaves = [x.bfloat16().requires_grad_() for x in (q, k, v)]
    leaves += [] if gate is None else [GATES[gate](g).requires_grad_()]
    function = chunk_linear_attn if gate is None else chunk_gla
    state = torch.randn(B if lengths is None else len(lengths), H, K, V, device="cuda", generator=generator)
    leaves.append(state.requires_grad_())
    dfinal = torch.randn_like(state)

    def results():
        o, final = function(*leaves[:-1], initial_state=leaves[-1], output_final_state=True, **options)
        with torch.no_grad():
            inferred, _ = function(*leaves[:-1], **options)
        return [o.detach(), final.detach(), inferred, *torch.autograd.grad((o, final), leaves, (do.bfloat16(), dfinal))]

    def same(found):
        return all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))

    def repeated_results():
        """A forward, one without gradients, and a backward are all repeated, unless torch copies states in them."""
        repeated.clear()
        found = results()
        assert len(repeated) == 3 or (K > 256 and not materialize)
        assert all(x is not None for x in repeated)
        return found

    expected = results()
    for _ in range(3):
        poison_free_memory()
        assert same(results())
    poison_free_memory()
    assert same(repeated_results())
    torch.cuda.synchronize()
    side, graph, found = torch.cuda.Stream(), torch.cuda.CUDAGraph(), []
    with torch.cuda.stream(side):
        found.append(repeated_results())
        side.synchronize()
        with torch.cuda.graph(graph, stream=side):
            captured = repeated_results()

    def in_a_thread():
        with torch.cuda.stream(side):
            found.append(results())
        side.synchronize()

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    for x in captured:
        x.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert all(same(x) for x in (*found, captured))
    assert len(found) == 2


@pytest.mark.parametrize("K", [64, 128, 256])
def test_the_operator_passes_torchs_checks(K):
    case = make_case("mild", T=100, K=K, V=64, dtype=torch.bfloat16, device="cuda")
    leaves = [case.inputs[name].clone().requires_grad_() for name in ("q", "k", "v", "g", "initial")]
    library.opcheck(ops.chunk_forward, (*leaves, None, 0.125, True, passes.KEEP_STATES, None, None))


def test_not_materializing_keeps_less_between_forward_and_backward():
    case = make_case("mild", B=8, T=4096, H=4, K=64, V=64, dtype=torch.bfloat16, initial=False, device="cuda")
    held = {}
    for materialize in MODES:
        leaves = [case.inputs[name].clone().requires_grad_() for name in ("q", "k", "v", "g")]
        before = torch.cuda.memory_allocated()
        o, _ = chunk_gla(*leaves, materialize=materialize)
        held[materialize] = torch.cuda.memory_allocated() - before - o.numel() * o.element_size()
        del o
    assert held[False] < held[True] / 2
