"""Our kernels on a GPU, against the float64 recurrence: every output, every gradient, both modes."""

import pytest
import torch
from gla_cases import GATES, assert_close, make_case, run
from gla_kernels import chunk_gla, chunk_linear_attn

BOUNDS = {torch.bfloat16: 5e-3, torch.float16: 2e-3, torch.float32: 5e-6}
MODES = [True, False]


@pytest.mark.parametrize("materialize", MODES)
@pytest.mark.parametrize("gate", ["mild", "slow", "logsigmoid", "strong", "resets", "hard resets"])
def test_bf16_is_right_over_2048_tokens(gate, materialize):
    case = make_case(gate, B=2, T=2048, K=64, V=64, dtype=torch.bfloat16, device="cuda")
    assert_close(run(chunk_gla, case.inputs, case.grads, materialize=materialize), case, 5e-3)


@pytest.mark.parametrize("gate", list(GATES))
@pytest.mark.parametrize("chunk_size", [16, 32, 64, 128])
def test_every_chunk_size_is_right_for_every_gate(chunk_size, gate):
    case = make_case(gate, T=300, K=64, V=64, dtype=torch.bfloat16, device="cuda")
    assert_close(run(chunk_gla, case.inputs, case.grads, chunk_size=chunk_size), case, 5e-3)


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize("gate", ["mild", "resets"])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 128), (128, 256), (256, 256), (60, 100), (16, 200), (256, 64)])
def test_every_head_dim_and_dtype_is_right(K, V, gate, dtype):
    case = make_case(gate, T=257, K=K, V=V, dtype=dtype, device="cuda")
    assert_close(run(chunk_gla, case.inputs, case.grads), case, BOUNDS[dtype])


@pytest.mark.parametrize("materialize", MODES)
@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize(("T", "K", "V"), [(1, 64, 64), (512, 64, 64), (333, 128, 96)])
def test_linear_attention_is_right(T, K, V, dtype, materialize):
    case = make_case(None, T=T, K=K, V=V, dtype=dtype, device="cuda")
    found = run(chunk_linear_attn, case.inputs, case.grads, materialize=materialize)
    assert_close(found, case, BOUNDS[dtype])


@pytest.mark.parametrize("T", [1, 15, 16, 17, 63, 65, 1000])
def test_every_length_is_right(T):
    case = make_case("mild", T=T, K=64, V=64, dtype=torch.bfloat16, device="cuda")
    assert_close(run(chunk_gla, case.inputs, case.grads), case, 5e-3)


@pytest.mark.parametrize("gate", ["mild", "resets"])
def test_two_runs_and_both_modes_give_the_same_bits(gate):
    case = make_case(gate, B=4, T=1000, H=4, K=64, V=64, dtype=torch.bfloat16, device="cuda")
    first = run(chunk_gla, case.inputs, case.grads)
    for materialize in (True, False, True, False):
        again = run(chunk_gla, case.inputs, case.grads, materialize=materialize)
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_one_sequence_with_resets_does_not_touch_the_others():
    case = make_case("mild", B=2, T=256, K=64, V=64, dtype=torch.bfloat16, device="cuda")
    before = run(chunk_gla, case.inputs, case.grads)
    case.inputs["g"][0, 100, 0] = -float("inf")
    after = run(chunk_gla, case.inputs, case.grads)
    for name in ("o", "dq", "dk", "dv", "dg"):
        assert torch.equal(before[name][1], after[name][1])
        assert not torch.equal(before[name][0], after[name][0])


def test_not_materializing_keeps_less_between_forward_and_backward():
    case = make_case("mild", B=8, T=4096, H=4, K=64, V=64, dtype=torch.bfloat16, initial=False, device="cuda")
    held = {}
    for materialize in MODES:
        leaves = [case.inputs[name].clone().requires_grad_() for name in ("q", "k", "v", "g")]
        before = torch.cuda.memory_allocated()
        kept = chunk_gla(*leaves, materialize=materialize)
        held[materialize] = torch.cuda.memory_allocated() - before
        del kept
    assert held[False] < held[True] / 2
