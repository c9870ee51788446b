"""Token by token on a GPU, in the dtypes of models, against the float64 recurrence."""

import pytest
import torch
from gla_cases import make_case
from gla_kernels import chunk_gla, fused_recurrent_gla

BOUNDS = {torch.bfloat16: 3e-3, torch.float16: 6e-4, torch.float32: 2e-6}


def error(found, right):
    return ((found.double() - right).norm() / right.norm()).item()


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize("gate", [None, "mild", "strong", "-inf"])
@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 256), (60, 100), (512, 512)])
@pytest.mark.parametrize("T", [1, 17])
def test_the_recurrence_is_right(T, K, V, v_first, gate, dtype):
    case = make_case(gate, B=3, T=T, K=K, V=V, dtype=dtype, device="cuda")
    q, k, v, g, state = (case.inputs[name] for name in ("q", "k", "v", "g", "initial"))
    state = state.mT.contiguous() if v_first else state.clone()
    o, final = fused_recurrent_gla(
        q, k, v, g, initial_state=state, output_final_state=True, state_v_first=v_first
    )  # fmt: skip
    assert error(o, case.truth["o"]) < BOUNDS[dtype]
    assert error(final.mT if v_first else final, case.truth["final"]) < 2e-6
    o_in_place, same = fused_recurrent_gla(
        q, k, v, g, initial_state=state, state_v_first=v_first, inplace_final_state=True
    )  # fmt: skip
    assert same is state
    assert torch.equal(state, final)
    assert torch.equal(o_in_place, o)


@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 256), (256, 512)])
def test_a_prompt_and_then_single_tokens_give_what_one_pass_gives(K, V):
    case = make_case("mild", B=2, T=520, K=K, V=V, dtype=torch.bfloat16, device="cuda")
    q, k, v, g, state = (case.inputs[name] for name in ("q", "k", "v", "g", "initial"))
    o, state = chunk_gla(*(x[:, :500] for x in (q, k, v, g)), initial_state=state, output_final_state=True)
    parts = [o]
    for t in range(500, 520):
        token = [x[:, t : t + 1] for x in (q, k, v, g)]
        parts.append(fused_recurrent_gla(*token, initial_state=state, inplace_final_state=True)[0])
    assert error(torch.cat(parts, 1), case.truth["o"]) < 3.5e-3
    assert error(state, case.truth["final"]) < 3.5e-3


def test_decoding_in_a_cuda_graph_goes_on_from_the_state():
    case = make_case("mild", T=8, K=64, V=64, dtype=torch.bfloat16, device="cuda")
    q, k, v, g, state = (case.inputs[name] for name in ("q", "k", "v", "g", "initial"))
    state, token = state.clone(), [x[:, :1].clone() for x in (q, k, v, g)]
    fused_recurrent_gla(*token, initial_state=state.clone(), inplace_final_state=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _ = fused_recurrent_gla(*token, initial_state=state, inplace_final_state=True)
    parts = []
    for t in range(8):
        for place, x in zip(token, (q, k, v, g), strict=True):
            place.copy_(x[:, t : t + 1])
        graph.replay()
        parts.append(o.clone())
    assert error(torch.cat(parts, 1), case.truth["o"]) < BOUNDS[torch.bfloat16]
    assert error(state, case.truth["final"]) < 2e-6


@pytest.mark.parametrize("function", [chunk_gla, fused_recurrent_gla])
def test_calls_that_are_replayed_give_what_the_first_one_gave(function):
    case = make_case("mild", B=3, T=12, K=128, V=256, dtype=torch.bfloat16, device="cuda")
    q, k, v, g, state = (case.inputs[name] for name in ("q", "k", "v", "g", "initial"))
    with torch.no_grad():
        found = [function(q, k, v, g, initial_state=state, output_final_state=True) for _ in range(4)]
    assert error(found[0][0], case.truth["o"]) < BOUNDS[torch.bfloat16]
    for o, final in found[1:]:
        assert torch.equal(o, found[0][0])
        assert torch.equal(final, found[0][1])
