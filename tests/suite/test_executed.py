"""What implementations say that they execute: as torch counts it, and as our kernels' launches have it."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from glabench.backends import load_registry
from glabench.backends.compiling import compiled
from glabench.sweeps import Cell, Parameters

REGISTRY = load_registry()


def cell_of(backend, pass_, dtype="bf16", seqlen=256, **sizes):
    one, op = REGISTRY[backend], REGISTRY.op_of(backend)
    known = {each.name: each.default for each in (*op.parameters, *one.parameters)}
    chosen = {**known, "heads": 2, "key_dim": 32, "value_dim": 48, **sizes}
    return Cell(backend, op.name, pass_, 2, seqlen, dtype, Parameters(chosen), "cpu")


@pytest.mark.parametrize("seqlen", [64, 256])
@pytest.mark.parametrize("pass_", ["infer", "fwd+bwd"])
@pytest.mark.parametrize(
    ("name", "scalar"), [("gla-torch", "all"), ("gla-torch-half", "pairs"), ("linear-torch", "none")]
)
def test_products_in_pytorch_are_those_that_torch_counts(name, scalar, pass_, seqlen):
    cell, op = cell_of(name, pass_, seqlen=seqlen), REGISTRY.op_of(name)
    inputs = {key: x.requires_grad_() for key, x in op.make_inputs(cell).items()}
    with FlopCounterMode(display=False) as counter:
        out = REGISTRY[name].bind(inputs, cell)()
        if pass_ == "fwd+bwd":
            torch.autograd.grad(out, list(inputs.values()), torch.ones_like(out))
    executed = REGISTRY[name].executes(cell)
    # Not counted by torch: pairs within subchunks of 16 tokens, four operations per channel of 32.
    pairs = 0 if op.name == "linear" else {"infer": 1, "fwd+bwd": 3}[pass_] * cell.tokens * 2 * 4 * 16 * 32
    assert executed.flops == counter.get_total_flops() + pairs
    assert executed.scalar_flops == {"all": executed.flops, "pairs": pairs, "none": 0}[scalar]
    assert executed.bytes > op.moved_bytes(cell)


@pytest.mark.parametrize("name", ["gla-recurrent-torch", "fla-gla-recurrent", "fla-both-recurrent"])
def test_token_by_token_nothing_is_on_the_tensor_cores(name):
    counts = REGISTRY[name].executes(cell_of(name, "fwd+bwd"))
    assert counts.scalar_flops == counts.flops == REGISTRY.op_of(name).flops(cell_of(name, "fwd+bwd"))


@pytest.mark.parametrize("name", ["gla-triton", "linear-triton", "simple-gla-triton", "retention-triton"])
@pytest.mark.parametrize(
    "sizes", [{}, {"key_dim": 40, "value_dim": 24}, {"packed": "on", "state": "both"}, {"seqlen": 16}], ids=str
)
def test_our_kernels_execute_what_their_launches_do(name, sizes):
    forward, both = (cell_of(name, pass_, **{"materialize": "states"} | sizes) for pass_ in ("fwd", "fwd+bwd"))
    one, two = (REGISTRY[name].executes(cell) for cell in (forward, both))
    assert REGISTRY.op_of(name).least_flops(forward) <= one.flops < two.flops
    assert REGISTRY.op_of(name).least_moved_bytes(forward) <= one.bytes < two.bytes
    assert one.scalar_flops == two.scalar_flops == 0
    assert REGISTRY[name].executes(cell_of(name, "fwd+bwd", **{**sizes, "materialize": "checkpoints"})) is None


@pytest.mark.parametrize("name", ["gla-both-triton", "gla-values-triton"])
def test_with_gates_of_values_there_are_no_checkpoints(name):
    """Those kernels keep all states or nothing, so that a record of checkpoints would be of something else."""
    refused = cell_of(name, "fwd+bwd", materialize="checkpoints")
    assert REGISTRY[name].limits(refused) == "keeps the states of all chunks, or nothing; got checkpoints"
    for taken in ({"materialize": "states"}, {"materialize": "nothing"}):
        assert REGISTRY[name].limits(cell_of(name, "fwd+bwd", **taken)) is None
    assert REGISTRY[name].limits(cell_of(name, "infer")) is None


def test_counting_needs_no_memory_for_the_tensors():
    cell = cell_of("gla-triton", "fwd", seqlen=2**26, heads=64, materialize="states")  # tensors of 400 GiB
    assert REGISTRY["gla-triton"].executes(cell).flops > 2**45


def test_what_is_not_known_is_not_said():
    class OfAnotherOp(type(REGISTRY["gla-triton"])):
        op = "mine"

    assert OfAnotherOp().executes(cell_of("gla-triton", "fwd", materialize="states")) is None
    # Few tokens without gradients go one by one, in a kernel whose operations are not products.
    assert REGISTRY["gla-triton"].executes(cell_of("gla-triton", "infer", seqlen=8)) is None
    assert REGISTRY["gla-torch-compiled"].executes(cell_of("gla-torch-compiled", "fwd")) is None


def test_no_variant_of_a_compiled_function_runs_uncompiled():
    """Torch goes on without compiling after the eighth, and does not say so."""
    graphs = []

    def compile_graph(graph, _):
        graphs.append(graph)
        return graph.forward

    twice = compiled(lambda x: 2 * x, dynamic=False, backend=compile_graph)
    assert [twice(torch.ones(n)).sum() for n in range(2, 14)] == [2 * n for n in range(2, 14)]
    assert len(graphs) == 12
