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


@pytest.mark.parametrize("gate", ["mild", "resets"])
def test_a_nan_gate_shows_in_its_sequence_alone(gate):
    case = make_case(gate, T=64, K=64, V=64, dtype=torch.bfloat16, device="cuda")
    clean = run(chunk_gla, case.inputs, case.grads)
    case.inputs["g"][0, 40, 0, 5] = float("nan")
    found = run(chunk_gla, case.inputs, case.grads)
    assert found["o"][0, 40:, 0].isnan().all()
    for name in ("dq", "dg"):
        assert found[name][0, :, 0].isnan().any()
    for name in ("o", "dq", "dk", "dv", "dg"):
        assert torch.equal(found[name][:, :, 1], clean[name][:, :, 1])


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


def test_tensors_of_more_than_2_to_the_31_elements_are_addressed_right():
    B, T, H, K = 513, 4096, 16, 64
    if torch.cuda.mem_get_info()[0] < 110 * 2**30:
        pytest.skip("needs 110 GiB of free memory")
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(dtype):
        return torch.randn(B, T, H, K, generator=generator, device="cuda", dtype=dtype)

    inputs = [
        normal(torch.bfloat16),
        normal(torch.bfloat16),
        normal(torch.bfloat16),
        normal(torch.bfloat16).abs_().neg_(),
    ]
    alone = [x[-1:].clone() for x in inputs]
    found = []
    for tensors in (inputs, alone):
        leaves = [x.requires_grad_() for x in tensors]
        o, _ = chunk_gla(*leaves)
        o.backward(leaves[2].detach())
        found.append([o[-1:].detach().clone(), *(x.grad[-1:].clone() for x in leaves)])
        del o
    assert all(torch.equal(large, small) for large, small in zip(*found, strict=True))


def test_tensors_on_another_device_than_the_current_one_are_right():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    case = make_case("resets", T=300, K=64, V=64, dtype=torch.bfloat16, device="cuda:1")
    assert_close(run(chunk_gla, case.inputs, case.grads, materialize=False), case, 5e-3)
