"""Token by token, without tokens, and with the arguments of fla's functions."""

import inspect

import pytest
import torch
from gla_cases import cumulative, make_case, truth
from gla_kernels import chunk_gla, chunk_linear_attn, fused_chunk_gla, fused_recurrent_gla, naive_recurrent_gla
from gla_kernels.operators import passes
from product import product
from torch import library

BOUND = 2e-6


def error(found, right):
    return ((found.double() - right).norm() / right.norm()).item()


def inputs_of(case):
    return [case.inputs[name] for name in ("q", "k", "v", "g", "initial")]


@product(
    lambda gate, v_first, initial: (gate == "resets") == v_first or initial,
    gate=["mild", "resets", "-inf", None],
    v_first={"state V first": True, "state K first": False},
    initial={"from a state": True, "from zero": False},
)
@pytest.mark.parametrize(("K", "V"), [(16, 48), (40, 20)])
def test_the_recurrence_is_right(K, V, gate, v_first, initial):
    case = make_case(gate, B=2, T=9, K=K, V=V, initial=initial)
    q, k, v, g, state = inputs_of(case)
    state = state.mT.contiguous() if v_first and initial else state
    o, final = fused_recurrent_gla(
        q, k, v, g, initial_state=state, output_final_state=True, state_v_first=v_first
    )  # fmt: skip
    assert error(o, case.truth["o"]) < BOUND
    assert error(final.mT if v_first else final, case.truth["final"]) < BOUND
    assert fused_recurrent_gla(q, k, v, g, initial_state=state, state_v_first=v_first)[1] is None


def test_packed_sequences_are_as_they_are_alone():
    lengths = [3, 1, 0, 12]
    case = make_case("resets", K=16, V=16, lengths=lengths)
    q, k, v, g, state = inputs_of(case)
    o, final = fused_recurrent_gla(
        q, k, v, g, initial_state=state, output_final_state=True, cu_seqlens=cumulative(lengths)
    )  # fmt: skip
    assert error(o, case.truth["o"]) < BOUND
    assert error(final, case.truth["final"]) < BOUND


def test_tokens_behind_the_last_sequence_are_ignored():
    o, _ = fused_recurrent_gla(
        *(torch.ones(1, 9, 1, 16) for _ in range(3)), cu_seqlens=torch.tensor([0, 3, 5]), scale=1.0
    )  # fmt: skip
    assert o[0, :, 0, 0].tolist() == [16.0, 32.0, 48.0, 16.0, 32.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("v_first", [True, False])
def test_a_prompt_and_then_single_tokens_give_what_one_pass_gives(v_first):
    case = make_case("mild", B=2, T=80, K=16, V=32)
    q, k, v, g, state = inputs_of(case)
    state = state.mT.contiguous() if v_first else state.clone()
    parts = []
    o, state = chunk_gla(*(x[:, :70] for x in (q, k, v, g)), None, state, True, v_first)
    parts.append(o)
    for t in range(70, 80):
        token = [x[:, t : t + 1] for x in (q, k, v, g)]
        o, same = fused_recurrent_gla(*token, initial_state=state, state_v_first=v_first, inplace_final_state=True)
        assert same is state
        parts.append(o)
    assert error(torch.cat(parts, 1), case.truth["o"]) < BOUND
    assert error(state.mT if v_first else state, case.truth["final"]) < BOUND


@pytest.mark.parametrize("function", [chunk_gla, fused_recurrent_gla])
def test_states_of_bfloat16_are_taken(function):
    case = make_case("mild", T=5, K=16, V=16)
    q, k, v, g, state = inputs_of(case)
    state = state.half()
    right, _ = naive_recurrent_gla(*(x.double() for x in (q, k, v, g)), initial_state=state.double())
    assert error(function(q, k, v, g, initial_state=state)[0], right) < 5e-6


def test_a_state_of_float16_in_place_stays_float16():
    case = make_case("mild", T=2, K=16, V=16)
    q, k, v, g, state = inputs_of(case)
    state = state.half()
    _, right = naive_recurrent_gla(
        *(x.double() for x in (q, k, v, g)), initial_state=state.double(), output_final_state=True
    )  # fmt: skip
    _, final = fused_recurrent_gla(q, k, v, g, initial_state=state, inplace_final_state=True)
    assert final is state
    assert error(state, right) < 1e-3


def test_gradients_come_from_the_chunk_kernels():
    case = make_case("mild", T=20, K=16, V=16, initial=False)
    leaves = [case.inputs[name].clone().requires_grad_() for name in ("q", "k", "v", "g")]
    found = torch.autograd.grad(fused_recurrent_gla(*leaves)[0], leaves, case.grads["o"])
    right = truth(case.inputs, case.grads | {"final": torch.zeros_like(case.grads["final"])})
    for name, x in zip(("dq", "dk", "dv", "dg"), found, strict=True):
        assert error(x, right[name]) < BOUND


@pytest.mark.parametrize("T", [65, 70])
def test_long_inputs_go_to_the_chunk_kernels(T, monkeypatch):
    monkeypatch.setattr("gla_kernels.operators.recurrent._run", None)
    case = make_case("mild", T=T, K=16, V=16)
    q, k, v, g, state = inputs_of(case)
    o, final = fused_recurrent_gla(q, k, v, g, initial_state=state, inplace_final_state=True)
    assert final is state
    assert error(o, case.truth["o"]) < BOUND
    assert error(state, case.truth["final"]) < BOUND


def test_the_operators_pass_torchs_checks():
    case = make_case("mild", T=3, K=16, V=16)
    tensors = inputs_of(case)
    library.opcheck(torch.ops.gla_kernels.recurrent.default, (*tensors, None, 0.25, True, False))
    library.opcheck(torch.ops.gla_kernels.recurrent_in_place.default, (*tensors, None, 0.25, False))


def test_a_compiled_call_in_place_is_one_graph_and_gives_the_same():
    case = make_case("mild", T=1, K=16, V=16)
    q, k, v, g, state = inputs_of(case)

    def step(q, k, v, g, state):
        return fused_recurrent_gla(q * 2, k, v, g, initial_state=state, inplace_final_state=True)[0] + 1

    states = [state.clone(), state.clone()]
    expected = step(q, k, v, g, states[0])
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v, g, states[1]), expected)
    assert torch.equal(*states)


def test_autocast_casts_as_for_the_chunk_kernels():
    case = make_case("mild", T=3, K=16, V=16)
    q, k, v, g, _ = inputs_of(case)
    with torch.autocast("cpu", torch.float16):
        o, _ = fused_recurrent_gla(q, k, v.half(), g)
    assert o.dtype == torch.float16
    assert torch.equal(o, fused_recurrent_gla(q.half(), k.half(), v.half(), g)[0])


REFUSED = {
    "reverse: got True": {"reverse": True},
    "inplace_final_state: got True": {"inplace_final_state": True},
    "gk: got shape": {"gk": torch.zeros(1, 2, 1, 8)},
    "initial_state: got shape .1, 1, 16, 8.": {"initial_state": torch.zeros(1, 1, 16, 8), "state_v_first": True},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_supported_is_named(message):
    q, v = torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 8)
    with pytest.raises(ValueError, match=message):
        fused_recurrent_gla(**{"q": q, "k": q, "v": v} | REFUSED[message])


def test_arguments_have_the_order_of_flas():
    """fla-core 0.6.0."""

    def names(function):
        return [x.name for x in inspect.signature(function).parameters.values() if x.kind is not x.KEYWORD_ONLY]

    assert names(chunk_gla) == [
        "q", "k", "v", "g", "scale", "initial_state", "output_final_state", "state_v_first", "cu_seqlens",
        "cu_seqlens_cpu",
    ]  # fmt: skip
    assert names(fused_recurrent_gla) == [
        "q", "k", "v", "gk", "gv", "scale", "initial_state", "output_final_state", "reverse", "state_v_first",
        "cu_seqlens",
    ]  # fmt: skip
    assert fused_chunk_gla is chunk_gla


@pytest.mark.parametrize("function", [chunk_gla, chunk_linear_attn, fused_recurrent_gla])
@pytest.mark.parametrize(("B", "T", "cu_seqlens"), [(2, 0, None), (0, 5, None), (1, 0, [0, 0, 0])])
def test_a_call_without_tokens_keeps_the_state(B, T, cu_seqlens, function):
    gated = function is not chunk_linear_attn
    q, v = torch.randn(B, T, 2, 16), torch.randn(B, T, 2, 32)
    state = torch.randn(B if cu_seqlens is None else 2, 2, 16, 32).requires_grad_()
    leaves = [x.requires_grad_() for x in (q, q.clone().detach(), v, *([torch.zeros_like(q)] if gated else []))]
    marks = None if cu_seqlens is None else torch.tensor(cu_seqlens)
    o, final = function(*leaves, initial_state=state, output_final_state=True, cu_seqlens=marks)
    assert o.shape == v.shape
    assert torch.equal(final, state)
    with torch.no_grad():
        assert torch.equal(function(*leaves, initial_state=state, output_final_state=True, cu_seqlens=marks)[1], state)
    gradients = torch.autograd.grad([o, final], [*leaves, state], [torch.ones_like(o), torch.ones_like(final)])
    assert [x.shape for x in gradients[:-1]] == [x.shape for x in leaves]
    assert torch.equal(gradients[-1], torch.ones_like(state))


@pytest.mark.parametrize(
    ("T", "options", "trains", "by_token"),
    [(12, {}, False, True), (13, {}, False, False), (12, {"chunk_size": 16}, False, False), (12, {}, True, False)],
    ids=["short", "longer", "a chunk size given", "a gradient needed"],
)
@pytest.mark.parametrize("packed", [True, False])
def test_the_chunk_functions_go_through_short_inputs_token_by_token(T, options, trains, by_token, packed, monkeypatch):
    calls = []
    run = passes.run_recurrence
    monkeypatch.setattr(passes, "run_recurrence", lambda *given: (calls.append(given), run(*given)))
    lengths = [T - 5, 0, 5] if packed else None
    case = make_case("resets", B=1 if packed else 2, T=T, K=16, V=16, lengths=lengths)
    q, k, v, g, state = inputs_of(case)
    cu_seqlens = cumulative(lengths) if packed else None
    o, final = chunk_gla(
        q.requires_grad_(trains), k, v, g, initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens,
        **options,
    )  # fmt: skip
    assert len(calls) == by_token
    assert error(o, case.truth["o"]) < 1e-5
    assert error(final, case.truth["final"]) < 1e-5
