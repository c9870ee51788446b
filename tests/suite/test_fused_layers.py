"""Mamba's layers call the package's functions for a whole layer with the right arguments; stand-ins compute them."""

import sys
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from small_models import REGISTRY, WIDTH, model_of

from glabench.backends import load_registry
from glabench.backends.mamba import Mamba1
from glabench.models.kernels import Kernel
from glabench.sweeps.model import Cell, Parameters

pytestmark = pytest.mark.usefixtures("one_thread")


def convolved(x, weight, bias):
    """x [B, channels, T] through a causal convolution and Swish."""
    padded = F.pad(x, (weight.shape[-1] - 1, 0))
    return F.silu(F.conv1d(padded, weight[:, None], bias, groups=len(weight)))


def mamba_inner_fn(
    xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, B=None, C=None,
    D=None, delta_bias=None, B_proj_bias=None, C_proj_bias=None, delta_softplus=True,
):  # fmt: skip
    """As of mamba-ssm 2.3."""
    assert out_proj_bias is B is C is B_proj_bias is C_proj_bias is None
    assert delta_softplus
    x, z = xz.chunk(2, dim=1)
    x = convolved(x, conv1d_weight.squeeze(1), conv1d_bias)
    rank, states = delta_proj_weight.shape[1], A.shape[1]
    delta, B, C = (x.transpose(1, 2) @ x_proj_weight.T).split([rank, states, states], dim=-1)
    inputs = {
        "u": x, "delta": (delta @ delta_proj_weight.T + delta_bias).transpose(1, 2), "A": A, "B": B.transpose(1, 2),
        "C": C.transpose(1, 2), "D": D,
    }  # fmt: skip
    y, _ = REGISTRY.ops["mamba1"].reference(inputs)
    return (y * F.silu(z)).transpose(1, 2) @ out_proj_weight.T


def mamba_split_conv1d_scan_combined(
    zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states=None, seq_idx=None,
    dt_limit=(0.0, float("inf")), return_final_states=False, activation="silu", rmsnorm_weight=None, rmsnorm_eps=1e-6,
    outproj_weight=None, outproj_bias=None, headdim=None, ngroups=1, norm_before_gate=True,
):  # fmt: skip
    """As of mamba-ssm 2.3."""
    assert (activation, ngroups, norm_before_gate, chunk_size) == ("silu", 1, False, 256)
    H, E = len(A), len(A) * headdim
    N = (conv1d_weight.shape[0] - E) // 2
    z, xBC, step = zxbcdt.split([E, E + 2 * N, H], dim=-1)
    x, B, C = convolved(xBC.transpose(1, 2), conv1d_weight, conv1d_bias).transpose(1, 2).split([E, N, N], dim=-1)
    inputs = {"x": x.unflatten(-1, (H, headdim)), "delta": step + dt_bias, "A": A, "B": B, "C": C, "D": D}
    y, _ = REGISTRY.ops["mamba2"].reference(inputs)
    y = F.rms_norm(y.flatten(-2) * F.silu(z), (E,), rmsnorm_weight, rmsnorm_eps)
    return y @ outproj_weight.T


STAND_INS = {
    "mamba1": ("mamba_ssm.ops.selective_scan_interface", mamba_inner_fn),
    "mamba2": ("mamba_ssm.ops.triton.ssd_combined", mamba_split_conv1d_scan_combined),
}


def with_gradients(layer, x):
    y = layer(x)
    return [y, *torch.autograd.grad(y, [x, *layer.parameters()], torch.cos(torch.arange(y.numel()).view_as(y)).to(y))]


@pytest.mark.parametrize("mixer", STAND_INS)
def test_the_packages_layer_is_ours(mixer, monkeypatch):
    layer = model_of(mixer).blocks[0].mixer
    for x in layer.parameters():
        x.data += 0.1 * torch.randn_like(x)
    x = torch.randn(2, 20, WIDTH, dtype=torch.float64, requires_grad=True)
    ours = with_gradients(layer, x)
    function = STAND_INS[mixer][1]
    calls = []

    def noted(*args, **kwargs):
        calls.append(kwargs)
        return (partial(function, chunk_size=256) if mixer == "mamba2" else function)(*args, **kwargs)

    monkeypatch.setattr(Kernel, "fused_layer", lambda *_: noted)
    theirs = with_gradients(layer, x)
    assert len(calls) == 1
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


def install(monkeypatch, name, **contents):
    """A package that can be found."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        module = ModuleType(parts[end - 1])
        module.__spec__ = ModuleSpec(".".join(parts[:end]), None)
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), module)
    for key, value in contents.items():
        setattr(sys.modules[name], key, value)


def kernel_of(mixer, name, registry=REGISTRY):
    sizes = {"inner": 64, "state_size": 16} if mixer == "mamba1" else {"heads": 2, "head_dim": 32, "state_size": 16}
    return Kernel(registry, mixer, name, sizes)


NARROW, WIDE = torch.zeros(1), torch.zeros(1, dtype=torch.float64)


@pytest.mark.parametrize("mixer", STAND_INS)
def test_the_packages_kernel_has_one_but_for_float64(mixer, monkeypatch):
    module, function = STAND_INS[mixer]
    assert kernel_of(mixer, mixer).fused_layer(NARROW) is None  # nothing is installed
    install(monkeypatch, module, **{function.__name__: function})
    install(monkeypatch, "causal_conv1d")
    own = kernel_of(mixer, mixer)
    found = own.fused_layer(NARROW)
    assert getattr(found, "func", found) is function
    cell = Cell(f"{mixer}-model", "training", "fwd+bwd", 2, 64, "bf16", Parameters({}), "cuda")
    launch = f"{mixer}, layers by {function.__name__}"
    assert REGISTRY[f"{mixer}-model"].launch({}, cell) == launch
    assert own.fused_layer(WIDE) is kernel_of(mixer, "reference").fused_layer(NARROW) is None
    monkeypatch.setitem(sys.modules, "causal_conv1d", None)
    assert kernel_of(mixer, mixer).fused_layer(NARROW) is None


class Lazy(Mamba1):
    """Would leave out all of a layer."""

    name, requires = "lazy-mamba", ()

    def fused_layer(self):
        return lambda xz, *_, **__: 0 * xz


def test_a_plugins_backend_does_not_replace_layers():
    registry = load_registry()
    registry.add(Lazy(), "a test")
    assert kernel_of("mamba1", "lazy-mamba", registry).fused_layer(NARROW) is None


def test_channels_that_the_packages_convolution_does_not_take_are_not_given_to_it(monkeypatch):
    layer = model_of("mamba2").blocks[0].mixer
    monkeypatch.setattr(Kernel, "fused_layer", lambda *_: pytest.fail("asked for the package's layer"))
    monkeypatch.setattr("glabench.models.mamba._GROUP", 10**6)
    layer(torch.randn(1, 8, WIDTH, dtype=torch.float64))
