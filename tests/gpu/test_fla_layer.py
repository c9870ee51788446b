"""fla's layer with nothing but its import changed: our functions in place of fla's give the same model."""

import gla_kernels
import pytest
import torch
from triton.runtime.autotuner import Autotuner

layers = pytest.importorskip("fla.layers.gla")
cache = pytest.importorskip("fla.models.utils")

NAMES = ("chunk_gla", "fused_chunk_gla", "fused_recurrent_gla")
# Both sides round to bfloat16 in other places.
BOUND = 2e-2


@pytest.fixture(autouse=True)
def _untuned(monkeypatch):
    """fla's kernels run with a small configuration, at once: to time hundreds of them takes minutes."""
    monkeypatch.setattr(Autotuner, "_bench", lambda *_, config, **__: [config.num_stages + abs(config.num_warps - 4)])


def layer(**options):
    torch.manual_seed(0)
    made = layers.GatedLinearAttention(hidden_size=256, num_heads=2, layer_idx=0, **options)
    return made.to("cuda", torch.bfloat16)


def swap_the_import(monkeypatch):
    for name in NAMES:
        monkeypatch.setattr(layers, name, getattr(gla_kernels, name))


def difference(ours, theirs):
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


def results(model, x, **options):
    """The output, and the gradients of the input and of all parameters."""
    x = x.clone().requires_grad_()
    o, *_ = model(x, **options)
    leaves = [x, *model.parameters()]
    torch.manual_seed(1)
    return [o.detach(), *torch.autograd.grad(o, leaves, torch.randn_like(o))]


@pytest.mark.parametrize("options", [{}, {"expand_k": 1.0, "expand_v": 2.0}, {"num_kv_heads": 1}], ids=str)
@pytest.mark.parametrize("T", [40, 300])
@pytest.mark.parametrize("packed", [True, False])
def test_the_layer_trains_as_with_flas(T, packed, options, monkeypatch):
    model = layer(**options)
    x = torch.randn(1 if packed else 3, T, 256, device="cuda", dtype=torch.bfloat16)
    more = {"cu_seqlens": torch.tensor([0, T // 3, T], device="cuda")} if packed else {}
    theirs = results(model, x, **more)
    swap_the_import(monkeypatch)
    ours = results(model, x, **more)
    assert max(difference(one, other) for one, other in zip(ours, theirs, strict=True)) < BOUND


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
    theirs = generate(model, x, prompt)
    swap_the_import(monkeypatch)
    assert difference(generate(model, x, prompt), theirs) < BOUND


def test_the_layer_can_ask_for_the_fused_chunk_form(monkeypatch):
    """Which fla has given up."""
    x = torch.randn(2, 100, 256, device="cuda", dtype=torch.bfloat16)
    theirs, *_ = layer()(x)
    swap_the_import(monkeypatch)
    ours, *_ = layer(mode="fused_chunk")(x)
    assert difference(ours, theirs) < BOUND
