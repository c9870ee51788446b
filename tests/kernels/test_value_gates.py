"""Gates of values: `chunk_gla` with gv, alone and beside gates of keys, on the portable kernels."""

import pytest
import torch
from gla_cases import assert_close, cumulative, large_and_small, run, run_with_a_tail, value_gated_case
from gla_kernels import chunk_gla, chunk_linear_attn, chunk_retention, fused_recurrent_gla, naive_recurrent_gla
from gla_kernels.simple import retention_gates
from gla_kernels.value_gated import calls
from product import product
from torch import library

EXACT, HALF = 2e-5, 2e-3


GATES = [
    ("mild", "mild"), ("logsigmoid", "strong"), ("strong", "resets"), ("-inf", "dead channel"), (None, "mild"),
    (None, "logsigmoid"), (None, "resets"), ("resets", "zero"), ("mild", "-100"),
]  # fmt: skip


@product(
    lambda gates, kept: kept == ("nothing" if "resets" in gates else "states"),
    gates={f"{gate} and {of_values}": (gate, of_values) for gate, of_values in GATES},
    materialize=["states", "nothing"],
)
def test_outputs_and_gradients_are_right(gates, materialize):
    gate, of_values = gates
    case = value_gated_case(gate, of_values, T=70, H=1, K=20, V=36)
    assert_close(run(chunk_gla, case.inputs, case.grads, materialize=materialize), case, EXACT)


def test_outputs_and_gradients_in_float16():
    case = value_gated_case("logsigmoid", "logsigmoid", T=40, K=80, V=16, dtype=torch.float16)
    assert_close(run(chunk_gla, case.inputs, case.grads), case, HALF)


@pytest.mark.parametrize("T", [1, 31, 32, 33])
def test_any_length(T):
    case = value_gated_case("logsigmoid", "logsigmoid", T=T, B=2, K=16, V=16, initial=False)
    assert_close(run(chunk_gla, case.inputs, case.grads), case, EXACT)


@pytest.mark.parametrize("gate", ["logsigmoid", None])
def test_packed_sequences_and_what_is_behind_them(gate):
    lengths = [40, 0, 1, 64, 33]
    case = value_gated_case(gate, "resets", lengths=lengths, K=16, V=16)
    assert_close(run_with_a_tail(chunk_gla, case, cumulative(lengths)), case, EXACT)


@pytest.mark.parametrize("power", [50, 60])
@pytest.mark.parametrize("alone", [False, True], ids=["keys", "values alone"])
def test_large_and_small_numbers(alone, power):
    case = large_and_small(alone, power, T=70, H=1, K=16, V=24)
    assert_close(run(chunk_gla, case.inputs, case.grads), case, EXACT)


@pytest.mark.parametrize("gate", ["mild", None])
@pytest.mark.parametrize("keep", [True, False])
def test_the_operators_are_well_defined(gate, keep):
    case = value_gated_case(gate, "mild", T=40, K=16, V=24)
    names = ("q", "k", "v", "g", "gv", "initial")
    tensors = [None if case.inputs[name] is None else case.inputs[name].float() for name in names]
    do, dfinal = torch.randn_like(tensors[2]), torch.randn_like(tensors[5])
    forward, backward = (getattr(torch.ops.gla_kernels, f"value_gated_{which}") for which in ("forward", "backward"))
    states = forward(*tensors, None, 0.25, keep)[2]
    library.opcheck(forward.default, (*tensors, None, 0.25, keep))
    library.opcheck(backward.default, (*tensors, None, do, dfinal, states, 0.25))


def test_special_cases_are_other_functions():
    """Without gates linear attention, with the decay of a head RetNet, with a constant one GLA with that gate."""
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, 50, 3, 16) for _ in range(4))
    zeros = torch.zeros_like(v)
    constant = retention_gates(3)[:, None].expand(zeros.shape)

    def assert_same(one, other):
        found, wanted = [], []
        for function, results in ((one, found), (other, wanted)):
            inputs = [x.clone().requires_grad_() for x in (q, k, v)]
            o = function(*inputs)[0]
            results += [o, *torch.autograd.grad(o, inputs, do)]
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)

    assert_same(lambda *x: chunk_gla(*x, None, gv=zeros), chunk_linear_attn)
    assert_same(lambda *x: chunk_gla(*x, None, gv=constant), chunk_retention)
    assert_same(lambda *x: chunk_gla(*x, constant, gv=zeros), lambda *x: chunk_gla(*x, constant))


def test_states_with_values_first_and_the_recurrent_form():
    case = value_gated_case("mild", "mild", T=20, K=16, V=24)
    tensors = [case.inputs[name] for name in "qkv"]
    options = {"initial_state": case.inputs["initial"].mT.contiguous(), "output_final_state": True}
    o, final = fused_recurrent_gla(
        *tensors, case.inputs["g"], case.inputs["gv"], state_v_first=True, inplace_final_state=True, **options
    )
    assert final is options["initial_state"]
    torch.testing.assert_close(final.mT.double(), case.truth["final"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(o.double(), case.truth["o"], rtol=1e-4, atol=1e-5)


def test_frozen_gates_have_no_gradient():
    case = value_gated_case("mild", "mild", T=40, K=16, V=16)
    found = run(chunk_gla, case.inputs, case.grads, frozen={"g", "gv", "initial"})
    assert not found.keys() & {"dg", "dgv", "dinitial"}
    assert_close(found, case, EXACT)


def test_no_tokens_leave_the_state_as_it_is():
    q, v, state = torch.zeros(2, 0, 2, 16), torch.zeros(2, 0, 2, 24), torch.randn(2, 2, 16, 24)
    o, final = chunk_gla(q, q, v, q, gv=v, initial_state=state, output_final_state=True)
    assert o.shape == v.shape
    assert torch.equal(final, state)


def test_a_nan_stays_in_its_head():
    case = value_gated_case("mild", "mild", T=70, K=16, V=16)
    gv = case.inputs["gv"].clone()
    gv[0, 40, 1, 3] = float("nan")
    found = run(chunk_gla, case.inputs | {"gv": gv}, case.grads)
    assert found["o"][0, 40:, 1, 3].isnan().all()
    assert not found["o"][0, :32, 1].isnan().any()
    assert not any(found[name][:, :, 0].isnan().any() for name in ("o", "dq", "dk", "dv", "dg", "dgv"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gv": torch.zeros(1, 8, 2, 16)}, "gv: got shape"),
        ({"gv": torch.zeros(1, 8, 2, 24, dtype=torch.float64)}, "gv: got torch.float64"),
        ({"gv": 1.0}, "gv: got float"),
        ({"chunk_size": 64}, "chunk_size: got 64 beside gv"),
        ({"gv": torch.ones(1, 8, 2, 24), "check": True}, "gv: got a gate of 1.0"),
    ],
)
def test_what_is_not_allowed_is_refused(change, message):
    q, v = torch.zeros(1, 8, 2, 16), torch.zeros(1, 8, 2, 24)
    with pytest.raises(ValueError, match=message):
        chunk_gla(q, q, v, q, **({"gv": v} | change))


def test_a_state_in_place_is_refused_if_gates_of_values_train():
    q, v, state = torch.zeros(1, 8, 2, 16), torch.zeros(1, 8, 2, 24), torch.ones(1, 2, 16, 24)
    with pytest.raises(ValueError, match="inplace_final_state"):
        fused_recurrent_gla(q, q, v, q, gv=v.clone().requires_grad_(), initial_state=state, inplace_final_state=True)
    assert torch.equal(state, torch.ones_like(state))


@pytest.mark.parametrize("gated", [True, False], ids=["beside gates of keys", "alone"])
def test_checks_of_values_ignore_what_is_behind_the_last_sequence(gated):
    q, v = torch.zeros(1, 8, 2, 16), torch.zeros(1, 8, 2, 24)
    gv = v.clone()
    gv[:, 5:] = float("nan")
    chunk_gla(q, q, v, q if gated else None, gv=gv, cu_seqlens=torch.tensor([0, 5]), check=True)


def test_an_initial_state_may_be_overwritten_before_the_backward_pass_if_states_are_kept():
    case = value_gated_case("mild", "mild", T=40, K=16, V=24)
    tensors = [case.inputs[name].float() for name in "qkvg"]
    state = case.inputs["initial"].float().clone()

    def gradient(overwrite: bool) -> torch.Tensor:
        start, gv = state.clone(), case.inputs["gv"].float().clone().requires_grad_()
        o, final = chunk_gla(*tensors, gv=gv, initial_state=start, output_final_state=True)
        if overwrite:
            start.copy_(final.detach())
        return torch.autograd.grad(o.sum(), gv)[0]

    assert torch.equal(gradient(overwrite=True), gradient(overwrite=False))


def test_the_operator_takes_an_initial_state_of_any_strides():
    case = value_gated_case("mild", "mild", T=40, K=16, V=24)
    tensors = [case.inputs[name] for name in ("q", "k", "v", "g", "gv")]
    state = case.inputs["initial"].float()
    call = torch.ops.gla_kernels.value_gated_forward
    expected = call(*tensors, state.contiguous(), None, 0.25, True)
    found = call(*tensors, state.mT.contiguous().mT, None, 0.25, True)
    assert all(torch.equal(a, b) for a, b in zip(found[:2], expected[:2], strict=True))


def test_the_reference_is_the_recurrence():
    case = value_gated_case("mild", "mild", T=5)
    x = {name: tensor.double() for name, tensor in case.inputs.items()}
    o, _ = naive_recurrent_gla(*(x[name] for name in ("q", "k", "v", "g")), 1.0, x["initial"], gv=x["gv"])
    state = x["initial"]
    for t in range(5):
        decay = x["g"][:, t, :, :, None].exp() * x["gv"][:, t, :, None].exp()
        state = state * decay + x["k"][:, t, :, :, None] * x["v"][:, t, :, None]
        torch.testing.assert_close(o[:, t], (x["q"][:, t, :, None] @ state).squeeze(2))


def test_calls_without_gates_of_values_never_reach_their_kernels(monkeypatch):
    """So these cost nothing where they are not used."""
    monkeypatch.setattr(calls, "chunk_value_gated", None)
    case = value_gated_case("mild", "mild", T=40, H=1, K=16, V=16, initial=False)
    inputs = [case.inputs[name] for name in ("q", "k", "v", "g")]
    plain, none = chunk_gla(*inputs)[0], chunk_gla(*inputs, gv=None)[0]
    assert torch.equal(plain, none)
