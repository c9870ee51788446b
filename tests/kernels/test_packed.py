"""Packed sequences (`cu_seqlens`) through the same kernels, against the float64 recurrence on each sequence."""

import pytest
import torch
from gla_cases import assert_close, cumulative, make_case, run, run_with_a_tail
from gla_kernels import chunk_gla, chunk_linear_attn
from product import product

BOUND = 5e-6
LENGTHS = {
    "uneven": [33, 1, 16, 50],
    "an empty one first": [0, 16],
    "empty ones between and last": [17, 0, 0, 30, 0],
    "one": [40],
}
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning")


def both_gates_one_with_states(gate, kept, lengths):
    return ((gate == "mild") == (kept == "states")) == (lengths in ("uneven", "one"))


@product(
    both_gates_one_with_states,
    gate=["mild", "resets"],
    materialize={"states": True, "checkpoints": False},
    lengths=LENGTHS,
)
def test_every_sequence_is_as_it_is_alone(gate, materialize, lengths):
    case = make_case(gate, K=16, V=20, lengths=lengths)
    cu_seqlens = cumulative(lengths)
    found = run(chunk_gla, case.inputs, case.grads, cu_seqlens=cu_seqlens, materialize=materialize, chunk_size=16)
    assert_close(found, case, BOUND)


@product(
    lambda dtype, initial: (dtype == torch.int64) == initial,
    dtype=[torch.int32, torch.int64],
    initial=[True, False],
)
def test_both_types_of_marks_are_taken(dtype, initial):
    lengths = [20, 5, 0, 40]
    case = make_case("mild", K=16, V=16, lengths=lengths, initial=initial)
    assert_close(run(chunk_gla, case.inputs, case.grads, cu_seqlens=cumulative(lengths, dtype)), case, BOUND)


def test_not_materializing_is_right_when_one_sequence_is_far_longer_than_the_others():
    lengths = [3, 400, 3, 3]
    case = make_case("mild", H=1, K=16, V=16, lengths=lengths)
    found = run(chunk_gla, case.inputs, case.grads, cu_seqlens=cumulative(lengths), materialize=False, chunk_size=16)
    assert_close(found, case, BOUND)


@pytest.fixture
def poisoned_memory():
    """Memory that is not initialised is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_tokens_behind_the_last_sequence_are_ignored(gated, materialize):
    """Also with o and gradients in several parts."""
    lengths = [20, 17]
    case = make_case("resets" if gated else None, K=48, V=80, lengths=lengths)

    function = chunk_gla if gated else chunk_linear_attn
    options = {"materialize": materialize, "chunk_size": 16}
    assert_close(run_with_a_tail(function, case, cumulative(lengths), **options), case, BOUND)


def test_linear_attention_takes_packed_sequences():
    lengths = [18, 30]
    case = make_case(None, K=16, V=16, lengths=lengths)
    assert_close(run(chunk_linear_attn, case.inputs, case.grads, cu_seqlens=cumulative(lengths)), case, BOUND)
