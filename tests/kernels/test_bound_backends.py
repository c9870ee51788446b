"""Our backends, in Triton's interpreter: packed documents and states are those of the op."""

import pytest
import torch

from glabench.backends import load_registry
from glabench.measure.accuracy import relative_error
from glabench.measure.workload import prepare
from glabench.ops.base import as_tuple
from glabench.sweeps import Cell, Parameters

REGISTRY = load_registry()


@pytest.mark.parametrize(("packed", "state"), [(None, None), (None, "both"), ("on", "in"), ("on", "out")])
@pytest.mark.parametrize("name", ["gla-triton", "linear-triton"])
def test_outputs_and_gradients_are_the_ops(name, packed, state):
    op = REGISTRY.op_of(name)
    sizes = {"heads": 1, "key_dim": 32, "value_dim": 32, "packed": packed, "state": state, "materialize": "states"}
    gate = {"gate": "logsigmoid/16"} if op.name == "gla" else {}
    cell = Cell(name, op.name, "fwd+bwd", 2, 50, "fp32", Parameters(sizes | gate), "cpu")
    found = prepare(op, REGISTRY[name], cell)
    outputs = as_tuple(found.forward())
    results = (*outputs, *found.gradients(outputs))
    leaves = {name: x.detach().double().requires_grad_() for name, x in found.differentiable.items()}
    expected = op.reference({**found.inputs, **leaves})
    given = tuple(x.double() for x in found.grad_outputs.values())
    wanted = (*expected[: len(outputs)], *torch.autograd.grad(expected[: len(outputs)], tuple(leaves.values()), given))
    assert len(outputs) == (2 if state in ("out", "both") else 1)
    assert len(results) == len(wanted)
    assert max(relative_error(x, y) for x, y in zip(results, wanted, strict=True)) < 1e-5
