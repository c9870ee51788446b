"""Packed sequences (`cu_seqlens`) through the same kernels, against the float64 recurrence one by one."""

import pytest
import torch
from gla_cases import assert_close, cumulative, make_case, run
from gla_kernels import chunk_gla, chunk_linear_attn

BOUND = 5e-6
LENGTHS = [
    pytest.param([33, 1, 16, 50], id="uneven"),
    pytest.param([0, 16], id="an empty one first"),
    pytest.param([17, 0, 0, 30, 0], id="empty ones between and last"),
    pytest.param([40], id="one"),
]
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning")


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize("gate", ["mild", "resets"])
def test_every_sequence_is_as_it_is_alone(lengths, materialize, gate):
    case = make_case(gate, K=16, V=20, lengths=lengths)
    cu_seqlens = cumulative(lengths)
    found = run(chunk_gla, case.inputs, case.grads, cu_seqlens=cu_seqlens, materialize=materialize, chunk_size=16)
    assert_close(found, case, BOUND)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("initial", [True, False])
def test_both_types_of_marks_are_taken(dtype, initial):
    lengths = [20, 5, 0, 40]
    case = make_case("mild", K=16, V=16, lengths=lengths, initial=initial)
    assert_close(run(chunk_gla, case.inputs, case.grads, cu_seqlens=cumulative(lengths, dtype)), case, BOUND)


def test_not_materializing_is_right_when_one_sequence_is_far_longer_than_the_others():
    lengths = [3, 400, 3, 3]
    case = make_case("mild", H=1, K=16, V=16, lengths=lengths)
    found = run(chunk_gla, case.inputs, case.grads, cu_seqlens=cumulative(lengths), materialize=False, chunk_size=16)
    assert_close(found, case, BOUND)


def test_linear_attention_takes_packed_sequences():
    lengths = [18, 30]
    case = make_case(None, K=16, V=16, lengths=lengths)
    assert_close(run(chunk_linear_attn, case.inputs, case.grads, cu_seqlens=cumulative(lengths)), case, BOUND)
