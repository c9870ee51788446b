"""fla's layer with nothing but its import changed: our functions in place of fla's give the same model."""

import copy

import gla_kernels
import pytest
import torch
from triton.runtime.autotuner import Autotuner

layers = pytest.importorskip("fla.layers.gla")
cache = pytest.importorskip("fla.models.utils")

NAMES = ("chunk_gla", "fused_chunk_gla", "fused_recurrent_gla")
# Errors are of rounding to bfloat16, so they are held against those that fla's own functions make. Some are large: the
# norm behind the operator makes do large for a token whose q k is small, and orthogonal to its o, so that terms cancel.
BOUND = 3.0


@pytest.fixture(autouse=True)
def _untuned(monkeypatch):
    """fla's kernels run with a small configuration, at once: to time hundreds of them takes minutes.

    The choice stays out of Triton's cache on disk, from which every later process on the machine would take it.
    """
    monkeypatch.setattr(Autotuner, "_bench", lambda *_, config, **__: [config.num_stages + abs(config.num_warps - 4)])
    monkeypatch.setattr(Autotuner, "check_disk_cache", lambda _, __, ___, choose: bool(choose()))


def layer(**options):
    torch.manual_seed(0)
    made = layers.GatedLinearAttention(hidden_size=256, num_heads=2, layer_idx=0, **options)
    return made.to("cuda", torch.bfloat16)


def swap_the_import(monkeypatch):
    for name in NAMES:
        monkeypatch.setattr(layers, name, getattr(gla_kernels, name))


def error(found, right):
    return ((found.double() - right.double()).norm() / right.double().norm()).item()


def assert_as_right(ours, theirs, right):
    """All results are in the order of the layer's."""
    for one, other, true in zip(ours, theirs, right, strict=True):
        assert error(one, true) < BOUND * error(other, true)


def results(model, x, **options):
    """The output, and the gradients of the input and of all parameters."""
    x = x.clone().requires_grad_()
    o, *_ = model(x, **options)
    leaves = [x, *model.parameters()]
    torch.manual_seed(1)
    do = torch.randn(o.shape, device="cuda", dtype=torch.bfloat16).to(o.dtype)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


def in_float32(run, model, x, *arguments, **options):
    """What fla's own functions give with the same values in float32."""
    return run(copy.deepcopy(model).float(), x.float(), *arguments, **options)


@pytest.mark.parametrize("options", [{}, {"expand_k": 1.0, "expand_v": 2.0}, {"num_kv_heads": 1}], ids=str)
@pytest.mark.parametrize("T", [40, 300])
@pytest.mark.parametrize("packed", [True, False])
def test_the_layer_trains_as_with_flas(T, packed, options, monkeypatch):
    model = layer(**options)
    x = torch.randn(1 if packed else 3, T, 256, device="cuda", dtype=torch.bfloat16)
    more = {"cu_seqlens": torch.tensor([0, T // 3, T], device="cuda")} if packed else {}
    right, theirs = in_float32(results, model, x, **more), results(model, x, **more)
    swap_the_import(monkeypatch)
    assert_as_right(results(model, x, **more), theirs, right)


def generate(model, x, prompt):
    """Outputs of a prompt and then of single tokens, from the cache."""
    states = cache.Cache()
    parts = []
    with torch.no_grad():
        for begin, end in [(0, prompt), *((t, t + 1) for t in range(prompt, x.shape[1]))]:
            o, _, states = model(x[:, begin:end], past_key_values=states, use_cache=True)
            parts.append(o)
    return torch.cat(parts, 1)


@pytest.mark.parametrize("prompt", [30, 100])
def test_the_layer_generates_as_with_flas(prompt, monkeypatch):
    model = layer()
    x = torch.randn(2, prompt + 6, 256, device="cuda", dtype=torch.bfloat16)
    right, theirs = in_float32(generate, model, x, prompt), generate(model, x, prompt)
    swap_the_import(monkeypatch)
    assert_as_right([generate(model, x, prompt)], [theirs], [right])


def test_the_layer_can_ask_for_the_fused_chunk_form(monkeypatch):
    """Which fla has given up."""
    model, fused = layer(), layer(mode="fused_chunk")
    x = torch.randn(2, 100, 256, device="cuda", dtype=torch.bfloat16)
    right, theirs = in_float32(results, model, x), results(model, x)
    swap_the_import(monkeypatch)
    assert_as_right(results(fused, x), theirs, right)
