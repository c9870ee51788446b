"""The truth of other tests: what autograd gives for the recurrence in float64."""

import pytest
import torch
from exact import outputs_and_gradients
from gla_cases import GATES, make_values, run, sequences_of, truth
from gla_kernels import naive_recurrent_gla


def by_autograd(inputs, grads):
    def recurrence(q, k, v, g=None, **options):
        return naive_recurrent_gla(q, k, v, g, **options)

    wide = {name: None if x is None else x.double() for name, x in inputs.items()}
    return run(recurrence, wide, {name: x.double() for name, x in grads.items()})


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(
            found[name], x, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("of_values", [None, "mild", "resets"])
@pytest.mark.parametrize("gate", [None, *GATES])
def test_all_outputs_and_gradients_are_those_of_autograd(gate, of_values, initial):
    inputs, grads = make_values(gate, B=2, T=37, H=2, K=5, V=7, initial=initial)
    if of_values is not None:
        inputs["gv"] = GATES[of_values](torch.randn_like(inputs["v"]))
    expected = by_autograd(inputs, grads)
    assert_same(truth(inputs, grads), expected)
    assert_same(outputs_and_gradients(inputs, grads, heads=3), expected)


@pytest.mark.parametrize("gate", [None, "logsigmoid"])
def test_packed_sequences_are_those_of_autograd_one_by_one(gate):
    lengths = [3, 0, 17, 1]
    inputs, grads = make_values(gate, H=2, K=5, V=7, lengths=lengths)
    found = truth(inputs, grads, lengths)
    parts = [sequences_of(tensors, lengths) for tensors in (found, inputs, grads)]
    for length, of_found, of_inputs, of_grads in zip(lengths, *parts, strict=True):
        if length:
            assert_same(of_found, by_autograd(of_inputs, of_grads))
        else:
            assert torch.equal(of_found["final"], of_inputs["initial"].double())
            assert torch.equal(of_found["dinitial"], of_grads["final"].double())
