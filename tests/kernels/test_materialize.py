"""What a forward keeps for the backward, by its words."""

import pytest
import torch
from gla_cases import make_case, per_head_case, run
from gla_kernels import chunk_gla, chunk_linear_attn, chunk_simple_gla

CASES = {
    chunk_gla: make_case("logsigmoid", T=70),
    chunk_linear_attn: make_case(None, T=70),
    chunk_simple_gla: per_head_case("logsigmoid", T=70),
}
by_function = pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)


@pytest.mark.parametrize(
    ("function", "word", "same"),
    [(chunk_gla, "states", True), (chunk_gla, "checkpoints", False), *((each, "nothing", False) for each in CASES)],
)
def test_a_word_gives_the_bits_of_the_boolean_that_it_stands_for(function, word, same):
    case = CASES[function]
    found, other = (run(function, case.inputs, case.grads, materialize=keeps) for keeps in (word, same))
    assert all(torch.equal(found[name], other[name]) for name in other)


@by_function
def test_nothing_but_the_inputs_is_kept(function):
    case = CASES[function]
    inputs = {name: x for name, x in case.inputs.items() if x is not None}
    known = {x.untyped_storage().data_ptr() for x in inputs.values()}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        leaves = {name: x.requires_grad_() for name, x in inputs.items()}
        initial = leaves.pop("initial")
        function(*leaves.values(), initial_state=initial, materialize="nothing")
    assert all(x.untyped_storage().data_ptr() in known for x in kept if isinstance(x, torch.Tensor) and x.numel())


def test_without_gradients_there_is_nothing_to_recompute():
    case = CASES[chunk_gla]
    with torch.no_grad():
        o, final = chunk_gla(
            *(case.inputs[name] for name in ("q", "k", "v", "g")), output_final_state=True, materialize="nothing"
        )
    assert not o.requires_grad
    assert final is not None


@pytest.mark.parametrize("word", ["all", None, 0, 2])
def test_another_word_is_refused(word):
    q = torch.zeros(1, 9, 2, 32)
    with pytest.raises(ValueError, match=f"materialize: got {word!r}; it needs 'states', 'checkpoints', 'nothing'"):
        chunk_gla(q, q, q, q, materialize=word)


@pytest.mark.parametrize("word", ["states", "checkpoints", "nothing"])
def test_boundaries_that_have_changed_before_the_backward_are_an_error(word):
    q = torch.randn(1, 70, 1, 16, requires_grad=True)
    borders = torch.tensor([0, 30, 70])
    o, _ = chunk_linear_attn(q, q, q, cu_seqlens=borders, materialize=word)
    borders.copy_(torch.tensor([0, 60, 70]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()
