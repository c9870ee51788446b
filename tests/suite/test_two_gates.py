"""The papers' two levels of chunks with gates of keys and of values in PyTorch: right at every gate and length."""

import pytest
import torch
from gla_cases import GATES
from gla_kernels import naive_recurrent_gla

from glabench.backends import load_registry
from glabench.backends.papers.two_gates import two_gates_gla
from glabench.sweeps import Cell, Parameters

REGISTRY = load_registry()
NAMES = ("o", "dq", "dk", "dv", "dg", "dgv")


def recurrence(q, k, v, g, gv):
    return naive_recurrent_gla(q, k, v, g, gv=gv)[0]


def errors(gate, of_values, T, dtype=torch.float32, **chunks):
    """Relative errors of o and of all gradients; those of gates relative to k * dk or o * do if gates block all."""
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(2, T, 2, D).to(dtype) for D in (20, 20, 12, 12))
    tensors = [q, k, v, GATES[gate](torch.randn(2, T, 2, 20)), GATES[of_values](torch.randn(2, T, 2, 12))]
    leaves = [x.clone().requires_grad_() for x in tensors]
    o = two_gates_gla(*leaves, **chunks)
    assert o.dtype == dtype
    found = (o.detach(), *torch.autograd.grad(o, leaves, do))
    wide = [x.double().requires_grad_() for x in tensors]
    exact = recurrence(*wide)
    truth = dict(zip(NAMES, (exact.detach(), *torch.autograd.grad(exact, wide, do.double())), strict=True))
    sizes = {name: x.norm() for name, x in truth.items()}
    sizes["dg"] = max(sizes["dg"], 1e-6 * (k * truth["dk"]).norm())
    sizes["dgv"] = max(sizes["dgv"], 1e-6 * (truth["o"] * do).norm())
    return {
        name: float((x.double() - truth[name]).norm() / sizes[name]) if sizes[name] else float(x.norm())
        for name, x in zip(NAMES, found, strict=True)
    }


@pytest.mark.parametrize(
    "gates",
    [("mild", "strong"), ("strong", "resets"), ("-inf", "mild"), ("zero", "logsigmoid"), ("resets", "zero")],
    ids=" and ".join,
)
@pytest.mark.parametrize("T", [1, 64, 150])
def test_outputs_and_gradients_are_right(gates, T):
    assert max(errors(*gates, T).values()) < 2e-6


@pytest.mark.parametrize(("chunk", "subchunk"), [(16, 16), (32, 16), (64, 32), (128, 16)])
def test_any_chunks(chunk, subchunk):
    assert max(errors("logsigmoid", "strong", 150, chunk=chunk, subchunk=subchunk).values()) < 2e-6


def test_bfloat16_is_computed_in_float32():
    """K = 32 has a scale that bfloat16 rounds; o has the type of v."""
    torch.manual_seed(0)
    q, k = (torch.randn(1, 100, 2, 32).bfloat16() for _ in range(2))
    v, g, gv = torch.randn(1, 100, 2, 16), -torch.rand(1, 100, 2, 32), -torch.rand(1, 100, 2, 16)
    truth = recurrence(*(x.double() for x in (q, k, v, g, gv)))
    assert (two_gates_gla(q, k, v, g, gv).double() - truth).norm() < 1e-6 * truth.norm()
    assert max(errors("mild", "mild", 100, torch.bfloat16).values()) < 5e-3


@pytest.mark.parametrize("name", ["gla-both-torch", "gla-values-torch"])
@pytest.mark.parametrize("seqlen", [40, 130])
def test_the_backends_compute_their_ops(name, seqlen):
    backend, op = REGISTRY[name], REGISTRY.op_of(name)
    sizes = {"heads": 2, "key_dim": 16, "value_dim": 24, "gate": "strong", "chunk": 32}
    cell = Cell(name, op.name, "fwd", 2, seqlen, "fp64", Parameters(sizes), "cpu")
    inputs = op.make_inputs(cell)
    truth = recurrence(*(inputs[x].double() for x in "qkv"), inputs.get("g"), inputs["gv"])
    torch.testing.assert_close(backend.bind(inputs, cell)(), truth, rtol=1e-9, atol=1e-11)


def test_chunks_that_have_no_whole_subchunks_are_refused():
    sizes = Parameters({"heads": 2, "key_dim": 16, "value_dim": 24, "chunk": 40})
    cell = Cell("gla-both-torch", "gla-both", "fwd", 2, 64, "fp32", sizes, "cpu")
    assert REGISTRY["gla-both-torch"].limits(cell) == "chunk sizes are multiples of 16; got 40"
