"""Every kernel in Triton's interpreter, and every plain-PyTorch form, against the float64 recurrence.

The interpreter computes in float32 here (its bfloat16 is not a GPU's), so errors are those of the algorithm.
"""

import math

import numpy as np
import pytest
import torch
from gla_cases import GATES, Case, assert_close, make_case, run, truth
from gla_kernels import (
    chunk_gla,
    chunk_linear_attn,
    naive_recurrent_gla,
    two_level_chunk_gla,
    unaware_chunk_linear_attn,
)
from gla_kernels.launching.call import Call
from product import product

BOUND = 5e-6
SHAPES = {
    "even": {"T": 64, "K": 32, "V": 32},
    "odd T, K < V, no power of two": {"T": 37, "K": 20, "V": 40},
    "one token over, V in two blocks": {"T": 33, "K": 48, "V": 80},
    "one token": {"T": 1, "K": 16, "V": 16},
}
# The plain form overflows on purpose if the exact one takes over, and numpy warns about it.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning")


def every_gate_somewhere(gate, shape):
    """Odd sizes take every gate; others those for which the plain form suffices, fails, or fails at a few tokens."""
    return shape in ("one token", "odd T, K < V, no power of two") or gate in ("mild", "strong", "resets")


@product(every_gate_somewhere, gate=GATES.keys(), shape=SHAPES)
def test_gla_kernels_are_right_for_every_gate(gate, shape):
    case = make_case(gate, **shape)
    assert_close(run(chunk_gla, case.inputs, case.grads, chunk_size=16), case, BOUND)


@product(
    lambda gate, chunk_size: (gate, chunk_size) not in [("resets", 32), ("strong", 64)],
    gate=["mild", "strong", "resets"],
    chunk_size=[32, 64],
)
def test_gla_kernels_are_right_at_every_chunk_size(gate, chunk_size):
    case = make_case(gate, T=70, K=16, V=16)
    assert_close(run(chunk_gla, case.inputs, case.grads, chunk_size=chunk_size), case, BOUND)


@product(
    lambda gate, initial: (gate == "mild") == initial,
    gate=["mild", "resets"],
    initial=[True, False],
)
def test_not_materializing_is_right_over_several_checkpoints(gate, initial):
    case = make_case(gate, B=2, T=131, K=16, V=16, initial=initial)
    found = run(chunk_gla, case.inputs, case.grads, chunk_size=16, materialize=False)
    assert_close(found, case, BOUND)


def overflowing(case, *head):
    """The case with scaled queries beyond float32 in one head, which the exact kernels have to compute."""
    case.inputs["q"][head] *= 1e25
    case.inputs["g"][head] = -110 * math.log(2) / 16
    return Case(case.inputs, case.grads, truth(case.inputs, case.grads))


def test_not_materializing_is_right_where_the_exact_kernels_cut_chunks_further():
    case = overflowing(make_case("mild", T=260, H=1, K=16, V=16), slice(None), slice(None), 0)
    assert_close(run(chunk_gla, case.inputs, case.grads, chunk_size=32, materialize=False), case, BOUND)


def test_a_piece_that_fails_leaves_strong_chunks_of_later_pieces_complete():
    """Not materialized, 10 chunks are two pieces of at most 8. The first one's gradients are not finite."""
    case = make_case("mild", T=160, H=2, K=32, V=32)
    case.inputs["g"][:, 140:, :, 3] = -1e4
    case.grads["o"][:, 5] = math.inf
    finite = slice(144, None)
    found = run(chunk_gla, case.inputs, case.grads, chunk_size=16, materialize=False)
    right = truth(case.inputs, case.grads)
    for name in ("dq", "dk", "dv", "dg"):
        part, whole = right[name][:, finite], found[name][:, finite].double()
        assert ((whole - part).norm() / part.norm()).item() < BOUND


@product(lambda programs, V: programs == 1 and V == 16, programs=[1, 3], V=[16, 80])
def test_few_programs_find_the_flagged_sequence_and_head(programs, V, monkeypatch):
    """The last of more flags than a program reads at once."""
    monkeypatch.setattr(Call, "exact_programs", programs)
    case = overflowing(make_case("mild", B=3, T=16, H=11, K=16, V=V), -1, slice(None), -1)
    assert_close(run(chunk_gla, case.inputs, case.grads, chunk_size=16), case, BOUND)


@product(lambda programs, V: programs == 3 and V == 16, programs=[1, 3], V=[16, 80])
def test_few_programs_find_the_marked_chunk(programs, V, monkeypatch):
    """The last of more marks than a program reads at once."""
    monkeypatch.setattr(Call, "strong_programs", programs)
    case = make_case("mild", B=3, T=16, H=11, K=16, V=V)
    case.inputs["g"][-1, 1:, -1] = -float("inf")
    case = Case(case.inputs, case.grads, truth(case.inputs, case.grads))
    assert_close(run(chunk_gla, case.inputs, case.grads, chunk_size=16), case, BOUND)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("materialize", [True, False])
def test_linear_attention_kernels_are_right(shape, materialize):
    case = make_case(None, **shape)
    assert_close(run(chunk_linear_attn, case.inputs, case.grads, materialize=materialize), case, BOUND)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_gates_and_inputs_of_other_dtypes_are_taken(dtype):
    case = make_case("mild", T=40, K=16, V=16, dtype=dtype)
    case.inputs["g"] = case.inputs["g"].half()
    found = run(chunk_gla, case.inputs, case.grads)
    assert (found["o"].dtype, found["dg"].dtype, found["final"].dtype) == (dtype, torch.float16, torch.float32)
    # The reference used the gates before they were rounded to float16.
    assert_close(found, case, 3e-3)


def test_only_the_final_state_can_be_differentiated():
    case = make_case("mild", T=40, K=16, V=16)
    leaves = {n: case.inputs[n].clone().requires_grad_() for n in ("q", "k", "v", "g")}
    _, final = chunk_gla(*leaves.values(), output_final_state=True)
    found = torch.autograd.grad(final.sum(), list(leaves.values()))
    wide = {n: x.detach().double().requires_grad_() for n, x in leaves.items()}
    _, exact = naive_recurrent_gla(*wide.values(), output_final_state=True)
    expected = torch.autograd.grad(exact.sum(), list(wide.values()), allow_unused=True)
    assert float(found[0].abs().max()) == 0.0  # the state does not depend on q
    for x, y in zip(found[1:], expected[1:], strict=True):
        assert torch.allclose(x.double(), y, rtol=1e-4, atol=1e-5)


def test_strided_inputs_and_a_given_scale_are_right():
    case = make_case("mild", T=30, K=16, V=16)
    strided = {n: x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 and n != "initial" else x
               for n, x in case.inputs.items()}  # fmt: skip
    assert not strided["q"].is_contiguous()
    found = chunk_gla(strided["q"], strided["k"], strided["v"], strided["g"], scale=0.7)[0]
    exact = naive_recurrent_gla(*(case.inputs[n].double() for n in ("q", "k", "v", "g")), scale=0.7)[0]
    assert torch.allclose(found.double(), exact, rtol=1e-4, atol=1e-5)


FACTORS = {
    "keys and values": {"k": 1e12, "v": 1e12},
    "queries": {"q": 1e25},
    "keys": {"k": 1e25},
    "tiny keys": {"k": 1e-25, "v": 1e-10},
    "gradients of o": {"do": 1e30},
    "gradients of o, tiny keys": {"do": 1e30, "k": 1e-20},
}


@product(
    lambda factors, kept: (kept == "states") == (factors in ("keys and values", "tiny keys", "gradients of o")),
    factors=FACTORS,
    materialize={"states": True, "checkpoints": False},
)
def test_finite_inputs_of_any_size_never_give_nan(factors, materialize, request):
    """Gates that span 110 in log2 per chunk: scaled operands are up to 2^55 larger than the values they stand for."""
    case = make_case("zero", T=40, K=16, V=16, initial=False)
    case.inputs["g"][...] = -110 / 16 * math.log(2)
    case.grads["final"].zero_()
    for name, factor in factors.items():
        (case.grads if name == "do" else case.inputs)["o" if name == "do" else name].mul_(factor)
    found = run(chunk_gla, case.inputs, case.grads, chunk_size=16, materialize=materialize)
    case = Case(case.inputs, case.grads, truth(case.inputs, case.grads))
    finite = {name for name, x in case.truth.items() if x.abs().max() < 1e38}
    assert finite
    assert all(found[name].isfinite().all() for name in finite)
    if (
        "tiny" not in request.node.callspec.id
    ):  # if the values that matter underflow in float32, we only promise finite results
        assert_close({name: found[name] for name in finite if name != "dg"}, case, BOUND)


@pytest.mark.parametrize(("K", "V"), [(320, 24), (512, 16), (16, 1024)])
def test_head_dims_up_to_the_largest_are_right(K, V):
    case = make_case("mild", T=20, H=1, K=K, V=V)
    assert_close(run(chunk_gla, case.inputs, case.grads), case, BOUND)


@product(
    lambda gate, kept: (kept == "states") == (gate == "resets"),
    gate=["mild", "resets", "overflowing"],
    materialize={"states": True, "checkpoints": False},
)
def test_blocks_of_key_columns_add_up_to_the_whole(gate, materialize):
    """Three blocks of 32 columns."""
    case = make_case("mild" if gate == "overflowing" else gate, T=40, K=72, V=80)
    if gate == "overflowing":
        case = overflowing(case, slice(None), slice(None), -1)
    assert_close(run(chunk_gla, case.inputs, case.grads, chunk_size=16, materialize=materialize), case, BOUND)


def test_large_parts_of_a_float16_output_that_cancel_give_the_small_sum():
    """Each block of key columns alone gives o of 64,000 and more, beyond float16's 65,504 from the second one on."""
    q, k, v = torch.full((1, 8, 1, 320), 50.0), torch.full((1, 8, 1, 320), 100.0), torch.ones(1, 8, 1, 16)
    k[..., 256:] = -400.0
    o, _ = chunk_gla(q.half(), k.half(), v.half(), torch.zeros(1, 8, 1, 320), scale=0.4)
    assert o.abs().max() < 1.0


def test_a_cut_from_one_projection_is_taken_as_it_is():
    """q, k and v as views of one tensor give the same bits as separate tensors, without a copy."""
    case = make_case("mild", B=2, T=30, K=16, V=16)
    whole = torch.stack([case.inputs[name] for name in ("q", "k", "v")], dim=2)
    cut = whole.unbind(2)
    assert not cut[0].is_contiguous()
    found = chunk_gla(*cut, case.inputs["g"])[0]
    assert torch.equal(found, chunk_gla(*(case.inputs[name] for name in ("q", "k", "v", "g")))[0])


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("gate", list(GATES))
def test_the_two_level_torch_form_is_right_for_every_gate(gate, shape):
    case = make_case(gate, **shape)
    found = run(two_level_chunk_gla, case.inputs, case.grads, chunk_size=32)
    assert_close(found, case, BOUND)


@pytest.mark.parametrize("gate", ["mild", "strong", "resets", "-inf"])
def test_the_two_level_torch_form_multiplies_in_half_precision(gate):
    case = make_case(gate, T=70, dtype=torch.bfloat16)
    found = run(two_level_chunk_gla, case.inputs, case.grads, half=True)
    assert_close(found, case, 5e-3)
    assert not torch.equal(found["o"], run(two_level_chunk_gla, case.inputs, case.grads)["o"])


@pytest.mark.parametrize("chunk_size", [16, 64])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_unaware_torch_form_is_right(shape, chunk_size):
    case = make_case(None, **shape)
    assert_close(run(unaware_chunk_linear_attn, case.inputs, case.grads, chunk_size=chunk_size), case, BOUND)


def test_the_recurrence_is_what_the_papers_equation_says():
    """Three tokens, computed by hand in numpy without the library's code."""
    rng = np.random.default_rng(0)
    q, k, g = (rng.normal(size=(3, 2)) for _ in range(3))
    v, g = rng.normal(size=(3, 4)), -np.abs(g)
    state, outputs = np.zeros((2, 4)), []
    for t in range(3):
        state = np.diag(np.exp(g[t])) @ state + np.outer(k[t], v[t])
        outputs.append(q[t] @ state * 0.5)
    tensors = [torch.from_numpy(x)[None, :, None, :] for x in (q, k, v, g)]
    found, final = naive_recurrent_gla(*tensors, scale=0.5, output_final_state=True)
    assert np.allclose(found[0, :, 0].numpy(), np.stack(outputs))
    assert np.allclose(final[0, 0].numpy(), state)


def test_a_second_derivative_is_refused():
    case = make_case("mild", T=33, K=16, V=16, dtype=torch.float32, initial=False)
    leaves = [case.inputs[name].clone().requires_grad_() for name in ("q", "k", "v", "g")]
    o, _ = chunk_gla(*leaves)
    (dq,) = torch.autograd.grad(o.square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        dq.sum().backward()
