"""Gates of values, on a GPU: all outputs and gradients against the float64 recurrence."""

import pytest
import torch
from gla_cases import Case, assert_close, cumulative, large_and_small, run, run_with_a_tail, truth, value_gated_case
from gla_kernels import chunk_gla

BOUNDS = {torch.bfloat16: 5e-3, torch.float16: 2e-3, torch.float32: 1e-5}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
GATES = [
    ("mild", "mild"), ("logsigmoid", "strong"), ("strong", "resets"), ("-inf", "dead channel"), (None, "mild"),
    (None, "logsigmoid"), (None, "resets"), ("resets", "zero"), ("mild", "-100"),
]  # fmt: skip
# B, T, H, K, V, dtype
SHAPES = [
    (2, 300, 2, 64, 64, BF16), (2, 191, 3, 128, 256, BF16), (1, 1, 1, 16, 16, BF16), (1, 1000, 2, 20, 100, BF16),
    (1, 130, 1, 512, 1024, BF16), (2, 100, 2, 64, 48, FP16), (2, 100, 2, 60, 100, FP32),
]  # fmt: skip


@pytest.mark.parametrize("materialize", ["states", "nothing"])
@pytest.mark.parametrize("gates", GATES, ids=lambda gates: f"{gates[0]} and {gates[1]}")
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: ",".join(map(str, shape)).replace("torch.", ""))
def test_outputs_and_gradients_are_right(shape, gates, materialize):
    """A second call has the same bits."""
    B, T, H, K, V, dtype = shape
    case = value_gated_case(*gates, B=B, T=T, H=H, K=K, V=V, dtype=dtype, device="cuda")
    first, second = (run(chunk_gla, case.inputs, case.grads, materialize=materialize) for _ in range(2))
    assert_close(first, case, BOUNDS[dtype])
    assert all(torch.equal(second[name], first[name]) for name in first)


@pytest.mark.parametrize("gate", ["logsigmoid", None])
@pytest.mark.parametrize("lengths", [[300, 1, 0, 700], [33] * 40], ids=["few", "many"])
def test_packed_sequences_and_what_is_behind_them(lengths, gate):
    case = value_gated_case(gate, "resets", H=2, K=64, V=128, dtype=BF16, device="cuda", lengths=lengths)
    found = run_with_a_tail(chunk_gla, case, cumulative(lengths, device="cuda"))
    assert_close(found, case, BOUNDS[BF16])


@pytest.mark.parametrize("gate", ["logsigmoid", None])
def test_a_compiled_call_has_the_same_bits(gate):
    case = value_gated_case(gate, "logsigmoid", B=2, T=100, H=2, K=64, V=64, dtype=BF16, device="cuda")
    eager = run(chunk_gla, case.inputs, case.grads)
    compiled = run(torch.compile(chunk_gla, fullgraph=True), case.inputs, case.grads)
    assert all(torch.equal(eager[name], compiled[name]) for name in eager)


@pytest.mark.parametrize("power", [50, 80])
@pytest.mark.parametrize("alone", [False, True], ids=["keys", "values alone"])
def test_large_and_small_numbers(alone, power):
    case = large_and_small(alone, power, B=2, T=150, H=2, K=64, V=64, dtype=BF16, device="cuda")
    assert_close(run(chunk_gla, case.inputs, case.grads), case, BOUNDS[BF16])


@pytest.mark.parametrize("gate", [None, "zero"])
def test_scores_that_a_frame_of_values_cannot_hold(gate):
    """Queries and keys are not too large for one, nor are values, but scores times values are."""
    case = value_gated_case(gate, "mild", B=2, T=150, H=2, K=64, V=64, dtype=BF16, device="cuda", initial=False)
    inputs = case.inputs | {name: case.inputs[name] * 2.0**50 for name in "qk"}
    inputs["gv"] = torch.full_like(inputs["gv"], -2.0)
    case = Case(inputs, case.grads, truth(inputs, case.grads))
    assert_close(run(chunk_gla, case.inputs, case.grads), case, BOUNDS[BF16])
