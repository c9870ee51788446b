"""Adapters of other libraries, with stand-ins that have the signatures and layouts of the real functions."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from glabench.backends import Requirement, load_registry
from glabench.backends.fla import _Fla
from glabench.ops import BUILTIN, MAMBA1, RWKV4, SOFTMAX
from glabench.ops.recurrence import delta_recurrence, gated_recurrence, packed_recurrence
from glabench.sweeps import Cell, Parameters

REGISTRY = load_registry()
OPS = {op.name: op for op in BUILTIN}
HEADS = {"heads": 3, "key_dim": 8, "value_dim": 4, "gate": "logsigmoid/16"}


def selective_scan_fn(
    u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False
):
    """As of mamba-ssm 2.3: tensors [B, D, T] and [B, N, T]."""
    assert (z, delta_bias, delta_softplus) == (None, None, True)
    o, final = MAMBA1.reference({"u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D})
    return (o, final) if return_last_state else o


def selective_state_update(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False):
    """As of mamba-ssm 2.3: state [B, (H,) P, N], x and dt [B, (H,) P], B and C [B, (1,) N]; fails without a bias."""
    assert (z, dt_softplus, dt_bias.shape) == (None, True, D.shape)
    step = F.softplus(dt + dt_bias)[..., None]
    of_b, of_c = (y[..., None, :] for y in (B, C))
    state *= (step * A).exp()
    state += step * of_b * x[..., None]
    return (state * of_c).sum(-1) + D * x


def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, dt_softplus=False,
    return_final_states=False,
):  # fmt: skip
    """As of mamba-ssm 2.3: x [B, T, H, P], dt [B, T, H], B and C [B, T, groups, N]; states [B, H, P, N]."""
    assert (z, dt_bias, dt_softplus) == (None, None, True)
    assert x.shape[1] % chunk_size == 0
    step, state = F.softplus(dt), x.new_zeros((x.shape[0], x.shape[2], B.shape[-1], x.shape[3]))
    if initial_states is not None:
        state = initial_states.mT
    groups, outputs = x.shape[2] // B.shape[2], []
    for t in range(x.shape[1]):
        of_b, of_c = (y[:, t].repeat_interleave(groups, 1) for y in (B, C))
        state = (step[:, t] * A).exp()[..., None, None] * state
        state = state + of_b[..., None] * (step[:, t][..., None] * x[:, t])[..., None, :]
        outputs.append((of_c[..., None] * state).sum(-2))
    o = torch.stack(outputs, 1) + D[:, None] * x
    return (o, state.mT) if return_final_states else o


def recurrence(q, k, v, g, initial_state, output_final_state, cu_seqlens, gv=None):
    """What fla's functions share: o and, if it is asked for, the final state."""
    if cu_seqlens is None:
        o, final = gated_recurrence(q, k, v, g, initial_state, gv)
    else:
        o, final = packed_recurrence(q, k, v, g, cu_seqlens.tolist(), initial_state, gv)
    return o, final if output_final_state else None


def chunk_gla(q, k, v, g, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    return recurrence(q, k, v, g, initial_state, output_final_state, cu_seqlens)


def fused_recurrent_gla(
    q, k, v, gk=None, gv=None, scale=None, initial_state=None, output_final_state=False, reverse=False, cu_seqlens=None
):
    assert (scale, reverse) == (None, False)
    return recurrence(q, k, v, gk, initial_state, output_final_state, cu_seqlens, gv)


def fused_chunk_linear_attn(
    q, k, v, scale=None, initial_state=None, output_final_state=False, normalize=True, cu_seqlens=None
):
    assert not normalize
    return recurrence(q, k, v, None, initial_state, output_final_state, cu_seqlens)


def chunk_linear_attn(
    q, k, v, scale=None, initial_state=None, output_final_state=False, normalize=True, cu_seqlens=None
):
    return fused_chunk_linear_attn(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens)


def chunk_simple_gla(
    q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False, state_v_first=False,
    cu_seqlens=None,
):  # fmt: skip
    """g [B, T, H]."""
    assert g_gamma is None
    return recurrence(q, k, v, g[..., None].expand_as(q), initial_state, output_final_state, cu_seqlens)


def with_decays(decays, q, k, v, *rest):
    return recurrence(q, k, v, decays.log().to(q.dtype)[:, None].expand_as(q), *rest)


def chunk_retention(q, k, v, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    decays = 1 - 2.0 ** (-5.0 - torch.arange(q.shape[2], dtype=torch.float64))
    return with_decays(decays, q, k, v, initial_state, output_final_state, cu_seqlens)


def chunk_lightning_attn(
    q, k, v, layer_idx, num_layers, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None
):
    slope = -(8 / q.shape[2] * (1 - layer_idx / num_layers))
    decays = (slope * torch.arange(q.shape[2], dtype=torch.float64)).exp()
    return with_decays(decays, q, k, v, initial_state, output_final_state, cu_seqlens)


def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, **others):
    """g and beta [B, T, H]."""
    assert (initial_state, output_final_state, others) == (None, False, {})
    return delta_recurrence(q, k, v, g[..., None].expand_as(q), beta)[0], None


def chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, **others):
    """g [B, T, H, K] and beta [B, T, H]."""
    assert (initial_state, output_final_state, others) == (None, False, {})
    return delta_recurrence(q, k, v, g, beta)[0], None


def fused_recurrent_rwkv4(w, u, k, v, state):
    """k and v [B, T, D]; the state [B, 3, 1, D] as it is, sums without terms too. States have the type of k."""
    values, weights, exponent = state[:, :, 0].to(k.dtype).unbind(1)
    outputs = []
    for t in range(k.shape[1]):
        most = torch.maximum(exponent, k[:, t] + u)
        old, own = (exponent - most).exp(), (k[:, t] + u - most).exp()
        outputs.append((old * values + own * v[:, t]) / (old * weights + own))
        most = torch.maximum(exponent - w.exp(), k[:, t])
        old, own = (exponent - w.exp() - most).exp(), (k[:, t] - most).exp()
        values, weights, exponent = (x.to(k.dtype) for x in (old * values + own * v[:, t], old * weights + own, most))
    return torch.stack(outputs, 1).to(k.dtype), None


def mlstm_siging_chunkwise__xl_chunk(
    q, k, v, i, f, c_initial=None, n_initial=None, return_last_states=False, eps=1e-6, normalize=True, chunk_size=128,
    autocast_kernel_dtype=torch.float32,
):  # fmt: skip
    """As of mlstm-kernels 2.0: [B, H, T, D] and [B, H, T]."""
    assert (normalize, autocast_kernel_dtype, q.shape[2] % chunk_size) == (False, q.dtype, 0)
    decay = F.logsigmoid(f).cumsum(-1)
    between = (decay[..., :, None] - decay[..., None, :] + F.logsigmoid(i)[..., None, :]).exp().tril()
    return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 * between) @ v


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    """As of flash-attn 2.8: [B, T, H, D]."""
    assert causal
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, softmax_scale=None, causal=False):
    """As of flash-attn 2.8: the mask ends at the last key."""
    assert causal
    return SOFTMAX.reference({"q": q, "k": k_cache, "v": v_cache})


def flash_attn_func_with_sums(q, k, v, softmax_scale=None, causal=False):
    """As of some versions of flash-attn-3 and -4."""
    return flash_attn_func(q, k, v, causal=causal), None


# By backend: the module of its function, the stand-in, the name, and sizes.
ADAPTERS = {
    "mamba1": ("mamba_ssm.ops.selective_scan_interface", selective_scan_fn, {"inner": 6, "state_size": 4}),
    "mamba2": (
        "mamba_ssm.ops.triton.ssd_combined", mamba_chunk_scan_combined,
        {"heads": 3, "head_dim": 8, "state_size": 4, "chunk": 16},
    ),
    "fla-gla": ("fla.ops.gla", chunk_gla, HEADS),
    "fla-gla-recurrent": ("fla.ops.gla", fused_recurrent_gla, HEADS),
    "fla-both-recurrent": ("fla.ops.gla", fused_recurrent_gla, HEADS),
    "fla-linear": ("fla.ops.linear_attn", fused_chunk_linear_attn, HEADS),
    "fla-linear-chunk": ("fla.ops.linear_attn", chunk_linear_attn, HEADS),
    "fla-simple-gla": ("fla.ops.simple_gla", chunk_simple_gla, HEADS),
    "fla-retention": ("fla.ops.retention", chunk_retention, HEADS),
    "fla-lightning": ("fla.ops.lightning_attn", chunk_lightning_attn, HEADS),
    "fla-gated-delta": ("fla.ops.gated_delta_rule", chunk_gated_delta_rule, HEADS),
    "fla-kda": ("fla.ops.kda", chunk_kda, HEADS),
    "fla-rwkv4": ("fla.ops.rwkv4", fused_recurrent_rwkv4, {"inner": 6}),
    "mlstm-kernels": (
        "mlstm_kernels.torch.chunkwise.triton_xl_chunk_siging", mlstm_siging_chunkwise__xl_chunk, HEADS | {"chunk": 16}
    ),
    "flash-attn": ("flash_attn", flash_attn_func, {"heads": 3, "head_dim": 8}),
    "flash-attn-3": ("flash_attn_interface", flash_attn_func_with_sums, {"heads": 3, "head_dim": 8}),
    "flash-attn-4": ("flash_attn.cute", flash_attn_func_with_sums, {"heads": 3, "head_dim": 8}),
}  # fmt: skip


# Those of one token after a prefix, in the same way.
STEPS = {
    "mamba1-step": (
        "mamba_ssm.ops.triton.selective_state_update", selective_state_update, {"inner": 6, "state_size": 4}
    ),
    "mamba2-step": (
        "mamba_ssm.ops.triton.selective_state_update", selective_state_update,
        {"heads": 3, "head_dim": 8, "state_size": 4},
    ),
    "flash-attn-kvcache": ("flash_attn", flash_attn_with_kvcache, {"heads": 3, "head_dim": 8}),
}  # fmt: skip


def install(monkeypatch, module, *functions):
    """Puts stand-ins where an adapter imports the functions from."""
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
    for function in functions:
        setattr(sys.modules[module], function.__name__.removesuffix("_with_sums"), function)


def assert_computes_its_op(backend, sizes):
    op = OPS[backend.op]
    cell = Cell(backend.name, op.name, "fwd+bwd", 2, 32, "fp64", Parameters(sizes), "cpu")
    inputs = op.make_inputs(cell)
    leaves = {name: x.requires_grad_() for name, x in inputs.items() if x.is_floating_point()}
    found, wanted = backend.bind(inputs, cell)(), op.reference(inputs)
    many = len(op.outputs(cell))
    found, wanted = (x[:many] if isinstance(x, tuple) else (x,) for x in (found, wanted))
    assert all(torch.allclose(x, y, rtol=1e-9, atol=1e-11) for x, y in zip(found, wanted, strict=True))
    given = list(op.make_grad_outputs(cell).values())
    grads = (torch.autograd.grad(out, list(leaves.values()), given) for out in (found, wanted))
    assert all(torch.allclose(x, y, rtol=1e-9, atol=1e-11) for x, y in zip(*grads, strict=True))


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_computes_its_op(name, monkeypatch):
    module, function, sizes = ADAPTERS[name]
    install(monkeypatch, module, function)
    assert_computes_its_op(REGISTRY[name], sizes)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_rwkv_is_computed_in_float32_from_an_empty_state(dtype, monkeypatch):
    """With keys so small that a token's weight would vanish beside a state with an exponent of 0."""
    install(monkeypatch, "fla.ops.rwkv4", fused_recurrent_rwkv4)
    cell = Cell("fla-rwkv4", "rwkv4", "fwd", 2, 32, dtype, Parameters({"inner": 6}), "cpu")
    inputs = RWKV4.make_inputs(cell)
    inputs["k"] -= 200
    found = REGISTRY["fla-rwkv4"].bind(inputs, cell)()
    wanted = RWKV4.reference({name: x.double() for name, x in inputs.items()})[0]
    assert found.dtype == inputs["k"].dtype
    assert (found - wanted).norm() / wanted.norm() < (3e-3 if dtype == "bf16" else 1e-4)


@pytest.mark.parametrize("state", ["none", "both"])
@pytest.mark.parametrize("packed", ["off", "on"])
@pytest.mark.parametrize("name", [name for name in ADAPTERS if "packed" in REGISTRY[name].features])
def test_an_adapter_takes_packed_rows_and_states(name, packed, state, monkeypatch):
    module, function, sizes = ADAPTERS[name]
    install(monkeypatch, module, function)
    assert isinstance(REGISTRY[name], _Fla)
    others = {"packed": None if packed == "off" else packed, "state": None if state == "none" else state}
    assert_computes_its_op(REGISTRY[name], sizes | others)


@pytest.mark.parametrize(
    ("name", "state"), [("mamba1", "out"), ("mamba2", "in"), ("mamba2", "out"), ("mamba2", "both")]
)
def test_scans_of_mamba_take_and_return_states(name, state, monkeypatch):
    module, function, sizes = ADAPTERS[name]
    install(monkeypatch, module, function)
    backend = REGISTRY[name]
    cell = Cell(name, backend.op, "infer", 2, 32, "fp64", Parameters(sizes | {"state": state}), "cpu")
    inputs = OPS[name].make_inputs(cell)
    assert ("initial" in inputs) == (state != "out")
    found, wanted = backend.bind(inputs, cell)(), OPS[name].reference(inputs)
    if state == "in":
        found, wanted = (found,), wanted[:1]
    assert len(found) == len(OPS[name].outputs(cell))
    assert all(torch.allclose(x, y, rtol=1e-9, atol=1e-11) for x, y in zip(found, wanted, strict=True))


def test_the_scan_of_mamba_1_starts_without_states_and_gives_none_their_gradients():
    sizes = ADAPTERS["mamba1"][2]
    cell = Cell("mamba1", "mamba1", "infer", 2, 32, "fp32", Parameters(sizes | {"state": "both"}), "cuda")
    assert REGISTRY["mamba1"].limits(cell) == "starts without states; use --state out"
    trains = replace(cell, pass_="fwd+bwd", parameters=Parameters(sizes | {"state": "out"}))
    assert REGISTRY["mamba1"].limits(trains) == "final states have no gradients; use --pass infer, not fwd+bwd"


@pytest.mark.parametrize("name", ["mamba1", "mamba2", "mamba1-step", "mamba2-step", "fla-gla"])
def test_a_step_of_a_model_moves_the_states_on_in_place(name, monkeypatch):
    module, function, sizes = STEPS.get(f"{name.removesuffix('-step')}-step") or ADAPTERS["fla-gla-recurrent"]
    install(monkeypatch, module, function)
    backend = REGISTRY[name]
    op, own = OPS[backend.op], Parameters(sizes | {"state": "both"})
    cell = Cell(name, op.name, "infer", 2, 1, "fp64", own, "cpu")
    inputs = op.make_inputs(cell)
    wanted, final = op.reference({each: x.clone() for each, x in inputs.items()})
    assert torch.allclose(backend.bind_step(inputs, cell)(), wanted, rtol=1e-9, atol=1e-11)
    assert torch.allclose(inputs["initial"], final, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["sdpa-flash", "sdpa-cudnn", "sdpa-math"])
def test_attention_of_torch_asks_for_its_kernel_and_computes_its_op(name, monkeypatch):
    """By any kernel, as a CPU has not all of them."""
    asked = []
    monkeypatch.setattr("torch.nn.attention.sdpa_kernel", lambda kernel: nullcontext(asked.append(kernel.name)))
    assert_computes_its_op(REGISTRY[name], {"heads": 3, "head_dim": 16})
    assert asked == [REGISTRY[name].kernel]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_computes_its_op(monkeypatch):
    """Not compiled. It has no gradients on a CPU."""
    monkeypatch.setattr("glabench.backends.sdpa.compiled", lambda function, **_: function)
    cell = Cell("flex", "softmax", "infer", 2, 200, "fp64", Parameters({"heads": 3, "head_dim": 16}), "cpu")
    inputs = SOFTMAX.make_inputs(cell)
    assert torch.allclose(REGISTRY["flex"].bind(inputs, cell)(), SOFTMAX.reference(inputs), rtol=1e-9, atol=1e-11)


def test_every_adapter_has_a_stand_in():
    """Attention that is part of torch is tested above; models are in test_fla_model.py."""
    others = {
        name
        for name, backend in REGISTRY.items()
        if backend.requires and not backend.has_own_code and backend.work == "op"
    }
    assert others == set(ADAPTERS) | set(STEPS)


@pytest.mark.parametrize("name", STEPS)
def test_a_step_after_a_prefix_computes_its_op_and_leaves_its_inputs(name, monkeypatch):
    module, function, sizes = STEPS[name]
    install(monkeypatch, module, function)
    backend = REGISTRY[name]
    op, cell = OPS[backend.op], Cell(name, backend.op, "infer", 2, 1, "fp64", Parameters(sizes | {"prefix": 40}), "cpu")
    inputs = op.make_inputs(cell)
    before = {each: x.clone() for each, x in inputs.items()}
    found, wanted = (x if isinstance(x, tuple) else (x,) for x in (backend.bind(inputs, cell)(), op.reference(inputs)))
    assert len(found) == len(op.outputs(cell))
    for x, y, spec in zip(found, wanted, op.outputs(cell).values(), strict=True):
        assert x.shape == spec.shape
        assert torch.allclose(x, y, rtol=1e-9, atol=1e-11)
    assert all(torch.equal(x, before[each]) for each, x in inputs.items())


def test_packages_that_share_an_import_name_are_told_apart():
    """As flash_attn is the module of flash-attn and of flash-attn-4."""
    assert Requirement("pytest", "pip install pytest").present
    assert Requirement("pytest", "pip install pytest", "pytest").present
    assert not Requirement("pytest", "pip install pytest", "pytest-4").present


@pytest.mark.parametrize(
    ("name", "sizes", "why"),
    [
        ("flash-attn-4", {"heads": 1, "head_dim": 256}, "head dims go up to 128; got 256"),
        ("flex", {"heads": 1, "head_dim": 96}, "head dims are powers of two up to 256; got 96"),
        ("fla-kda", {"heads": 1, "key_dim": 512, "value_dim": 8}, "key head dims go up to 256; got 512"),
        ("flash-attn", {"heads": 1, "head_dim": 64, "prefix": 64}, "a prefix is for --pass infer; got fwd"),
        ("sdpa-cudnn", {"heads": 1, "head_dim": 64, "prefix": 64}, "a prefix is for --pass infer; got fwd"),
        ("mamba1-step", {"inner": 6, "state_size": 4}, "is a step after a prefix: give --prefix"),
        ("flash-attn-kvcache", {"heads": 1, "head_dim": 64}, "is for tokens after a prefix: give --prefix"),
        ("mlstm-kernels", HEADS | {"chunk": 48}, "whole chunks of 48 tokens only; got 64"),
    ],
)
def test_what_a_package_does_not_take_is_said(name, sizes, why):
    backend = REGISTRY[name]
    assert backend.limits(Cell(name, backend.op, "fwd", 1, 64, "bf16", Parameters(sizes))) == why
