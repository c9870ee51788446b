"""A gate per head and token, on a GPU: all outputs and gradients against the float64 recurrence."""

import pytest
import torch
from gla_cases import assert_close, cumulative, make_case, make_values, per_head_case, run, run_with_a_tail
from gla_kernels import (
    chunk_gla,
    chunk_retention,
    chunk_simple_gla,
    fused_recurrent_gla,
    fused_recurrent_retention,
    fused_recurrent_simple_gla,
    naive_recurrent_gla,
)
from gla_kernels.simple import retention_gates

BOUNDS = {torch.bfloat16: 5e-3, torch.float16: 2e-3, torch.float32: 5e-6}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# B, T, H, K, V, dtype: narrow heads, whole and in pieces; wide ones; those of the portable kernels.
SHAPES = [
    (2, 600, 2, 64, 64, BF16), (40, 300, 17, 64, 64, BF16), (3, 191, 5, 32, 48, BF16), (1, 4096, 2, 64, 48, BF16),
    (1, 1, 1, 16, 16, BF16), (8, 300, 4, 128, 112, BF16), (1, 2100, 2, 256, 64, BF16), (27, 191, 4, 128, 256, BF16),
    (27, 300, 4, 128, 128, BF16), (1, 4096, 2, 128, 256, BF16), (9, 300, 4, 256, 512, BF16), (2, 300, 2, 512, 80, BF16),
    (34, 150, 4, 128, 256, BF16), (17, 150, 4, 128, 512, BF16), (8, 700, 4, 128, 48, BF16), (1, 1500, 2, 64, 32, BF16),
    (10, 330, 4, 112, 512, BF16), (2, 300, 2, 64, 64, FP16), (1, 300, 2, 60, 100, FP32), (3, 200, 3, 60, 100, BF16),
    (2, 200, 2, 200, 136, BF16), (2, 200, 2, 256, 128, FP16), (2, 200, 2, 144, 72, FP32),
]  # fmt: skip
GATES = ["mild", "logsigmoid", "strong", "resets", "hard resets", "one reset", "at the limit", "zero", "-100", "-inf"]


@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: ",".join(map(str, shape)).replace("torch.", ""))
def test_outputs_and_gradients_are_right(shape, gate, materialize):
    """The third call and the fourth are repeated ones, and have the same bits."""
    B, T, H, K, V, dtype = shape
    case = per_head_case(gate, B=B, T=T, H=H, K=K, V=V, dtype=dtype, device="cuda")
    first, *others = (run(chunk_simple_gla, case.inputs, case.grads, materialize=materialize) for _ in range(4))
    assert_close(first, case, BOUNDS[dtype])
    assert all(torch.equal(other[name], first[name]) for other in others for name in first)


@pytest.mark.parametrize("gate", ["mild", "strong", "resets"])
@pytest.mark.parametrize(("K", "V", "C", "dtype"), [
    *((K, V, C, BF16) for K, V in ((64, 64), (40, 200)) for C in (16, 32, 128)), (128, 128, 16, BF16),
    (128, 128, 32, BF16), (80, 72, 64, BF16), *((64, 64, C, dtype) for C in (32, 64) for dtype in (FP16, FP32)),
])  # fmt: skip
def test_portable_chunks_of_any_length(K, V, C, dtype, gate):
    case = per_head_case(gate, B=2, T=300, H=3, K=K, V=V, dtype=dtype, device="cuda")
    assert_close(run(chunk_simple_gla, case.inputs, case.grads, chunk_size=C), case, BOUNDS[dtype])


@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize(("K", "V", "dtype"), [(60, 100, BF16), (128, 128, FP16), (64, 64, FP32)])
def test_packed_sequences_for_the_portable_kernels(K, V, dtype, materialize):
    lengths = [300, 1, 0, 700]
    case = per_head_case("resets", H=4, K=K, V=V, dtype=dtype, device="cuda", lengths=lengths)
    found = run_with_a_tail(chunk_simple_gla, case, cumulative(lengths, device="cuda"), materialize=materialize)
    assert_close(found, case, BOUNDS[dtype])


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("T", [1, 12, 50])
def test_token_by_token(T, dtype):
    """The third call and the fourth are repeated ones."""
    case = per_head_case("logsigmoid", B=3, T=T, H=4, K=64, V=96, dtype=dtype, device="cuda")
    g = case.inputs["g"]
    strided = torch.stack([g, torch.full_like(g, torch.nan)], -1)[..., 0]
    for _ in range(4):
        for function in (chunk_simple_gla, fused_recurrent_simple_gla):
            o, final = function(
                *(case.inputs[name] for name in "qkv"), strided, initial_state=case.inputs["initial"],
                output_final_state=True,
            )  # fmt: skip
            for name, found in (("o", o), ("final", final)):
                assert (found.double() - case.truth[name]).norm() < BOUNDS[dtype] * case.truth[name].norm()


@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize("gate", ["logsigmoid", "resets"])
@pytest.mark.parametrize("lengths", [[300, 1, 0, 700], [64] * 40, [9000, 50]], ids=["few", "many", "pieces"])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 128), (128, 256), (256, 96)])
def test_packed_sequences_and_what_is_behind_them(lengths, gate, materialize, K, V):
    case = per_head_case(gate, H=4, K=K, V=V, dtype=BF16, device="cuda", lengths=lengths)
    found = run_with_a_tail(chunk_simple_gla, case, cumulative(lengths, device="cuda"), materialize=materialize)
    assert_close(found, case, BOUNDS[BF16])


@pytest.mark.parametrize("frozen", [("g",), ("g", "initial")])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 256), (256, 64)])
def test_frozen_inputs_and_gates_in_bfloat16(frozen, K, V):
    case = per_head_case("logsigmoid", BF16, B=4, T=500, H=6, K=K, V=V, dtype=BF16, device="cuda")
    assert_close(run(chunk_simple_gla, case.inputs, case.grads), case, BOUNDS[BF16])
    assert_close(run(chunk_simple_gla, case.inputs, case.grads, frozen=frozen), case, BOUNDS[BF16])


@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("shape", [(2, 4096, 8, 128, 48), (8, 2048, 16, 128, 128), (16, 4096, 4, 128, 256)])
def test_inputs_may_come_from_a_kernel_just_before(shape, initial):
    """Which has not ended when the call's kernels are launched."""
    B, T, H, K, V = shape
    inputs, _ = make_values("logsigmoid", B=B, T=T, H=H, K=K, V=V, dtype=BF16, device="cuda", initial=initial)
    inputs["g"] = inputs["g"][..., 0]

    def outputs(shift, settled):
        moved = [inputs[name].roll(shift, dims=1) for name in "qkvg"]
        if settled:
            torch.cuda.synchronize()
        with torch.no_grad():
            return chunk_simple_gla(*moved, initial_state=inputs.get("initial"), output_final_state=True)

    at_once = [outputs(shift, settled=False) for shift in range(10)]
    torch.cuda.synchronize()
    for shift, found in enumerate(at_once):
        assert all(map(torch.equal, found, outputs(shift, settled=True)))


def test_a_compiled_call_has_the_same_bits():
    case = per_head_case("logsigmoid", B=2, T=300, H=4, K=64, V=64, dtype=BF16, device="cuda")
    eager = run(chunk_simple_gla, case.inputs, case.grads)
    compiled = run(torch.compile(chunk_simple_gla, fullgraph=True), case.inputs, case.grads)
    assert all(torch.equal(eager[name], compiled[name]) for name in eager)


@pytest.mark.parametrize("tokens", [5, 20])
def test_gates_per_head_are_none_of_the_kin_though_a_call_of_that_shape_is_known(tokens):
    q = torch.randn(1, tokens, 2, 32, device="cuda", dtype=BF16)
    g = torch.zeros(1, tokens, 2, device="cuda")
    for function, kin in ((chunk_simple_gla, chunk_gla), (fused_recurrent_simple_gla, fused_recurrent_gla)):
        for _ in range(3):
            function(q, q, q, g)
        with pytest.raises(ValueError, match=r"got shape \(1, \d+, 2\)"):
            kin(q, q, q, g)


def test_retention_and_its_recurrent_form():
    case = per_head_case("zero", B=2, T=500, H=8, K=64, V=64, dtype=BF16, device="cuda", initial=False)
    tensors = [case.inputs[name] for name in "qkv"]
    gates = retention_gates(8, "cuda")
    wide = naive_recurrent_gla(*(x.double() for x in tensors), gates.double()[:, None].expand_as(tensors[0]))[0]
    o, state = chunk_retention(*(x[:, :460] for x in tensors), output_final_state=True)
    step, _ = fused_recurrent_simple_gla(*(x[:, 460:] for x in tensors), g_gamma=gates, initial_state=state)
    both = torch.cat([o, step], 1).double()
    assert (both - wide).norm() < BOUNDS[BF16] * wide.norm()


@pytest.mark.parametrize("function", [chunk_retention, fused_recurrent_retention])
def test_constant_gates_are_made_in_a_captured_graph(function):
    q, k, v = torch.randn(3, 2, 40, 8, 64, device="cuda", dtype=BF16)
    expected, graph = function(q, k, v)[0], torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = function(q, k, v)[0]
    captured.fill_(torch.nan)
    graph.replay()
    assert torch.equal(captured, expected)


@pytest.mark.parametrize("function", [chunk_gla, chunk_simple_gla])
def test_nothing_kept_gives_the_bits_of_checkpoints_also_if_compiled(function):
    make = make_case if function is chunk_gla else per_head_case
    case = make("logsigmoid", B=2, T=1100, H=4, K=64, V=64, dtype=BF16, device="cuda")
    wanted = run(function, case.inputs, case.grads, materialize="checkpoints")
    for called in (function, function, torch.compile(function, fullgraph=True)):
        found = run(called, case.inputs, case.grads, materialize="nothing")
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("materialize", ["states", "checkpoints"])
@pytest.mark.parametrize(("K", "V"), [(512, 1024), (64, 1024)])
def test_values_of_1024_columns(K, V, materialize):
    case = make_case("logsigmoid", B=2, T=300, H=1, K=K, V=V, dtype=BF16, device="cuda")
    assert_close(run(chunk_gla, case.inputs, case.grads, materialize=materialize), case, BOUNDS[BF16])
