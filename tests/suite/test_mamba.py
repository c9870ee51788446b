"""Adapters of mamba-ssm, with a stand-in of the package's signatures."""

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from glabench.backends.mamba import Mamba1, Mamba2
from glabench.ops import MAMBA1, MAMBA2
from glabench.sweeps import Cell, Parameters


def selective_scan_fn(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False):
    """As of mamba-ssm 2.3: tensors [B, D, T] and [B, N, T]."""
    assert (z, delta_bias, delta_softplus) == (None, None, True)
    return MAMBA1.reference({"u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D})


def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, dt_softplus=False):
    """As of mamba-ssm 2.3: x [B, T, H, P], dt [B, T, H], B and C [B, T, groups, N]."""
    assert (z, dt_bias, dt_softplus) == (None, None, True)
    assert x.shape[1] % chunk_size == 0
    step, state = F.softplus(dt), x.new_zeros((x.shape[0], x.shape[2], B.shape[-1], x.shape[3]))
    groups, outputs = x.shape[2] // B.shape[2], []
    for t in range(x.shape[1]):
        of_b, of_c = (y[:, t].repeat_interleave(groups, 1) for y in (B, C))
        state = (step[:, t] * A).exp()[..., None, None] * state
        state = state + of_b[..., None] * (step[:, t][..., None] * x[:, t])[..., None, :]
        outputs.append((of_c[..., None] * state).sum(-2))
    return torch.stack(outputs, 1) + D[:, None] * x


@pytest.fixture(autouse=True)
def package(monkeypatch):
    for name, function in (
        ("mamba_ssm.ops.selective_scan_interface", selective_scan_fn),
        ("mamba_ssm.ops.triton.ssd_combined", mamba_chunk_scan_combined),
    ):
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
        setattr(sys.modules[name], function.__name__, function)


@pytest.mark.parametrize(
    ("backend", "op", "sizes"),
    [
        (Mamba1(), MAMBA1, {"inner": 6, "state_size": 4}),
        (Mamba2(), MAMBA2, {"heads": 3, "head_dim": 8, "state_size": 4, "chunk": 16}),
    ],
    ids=["mamba1", "mamba2"],
)
def test_an_adapter_computes_its_op(backend, op, sizes):
    cell = Cell(backend.name, op.name, "fwd+bwd", 2, 32, "fp64", Parameters(sizes), "cpu")
    inputs = {name: x.requires_grad_() for name, x in op.make_inputs(cell).items()}
    found, wanted = backend.bind(inputs, cell)(), op.reference(inputs)
    assert torch.allclose(found, wanted, rtol=1e-10, atol=1e-12)
    given = op.make_grad_outputs(cell)["o"]
    grads = (torch.autograd.grad(out, list(inputs.values()), given) for out in (found, wanted))
    assert all(torch.allclose(x, y, rtol=1e-10, atol=1e-12) for x, y in zip(*grads, strict=True))
