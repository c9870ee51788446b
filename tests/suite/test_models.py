"""Models around the mixers: what layers compute, how many parameters they have, and that they train."""

import math

import pytest
import torch
import torch.nn.functional as F
from copy_task import copying_model, losses_of
from small_models import REGISTRY, SMALL, VOCABULARY, WIDTH, model_of, tokens_of

from glabench.errors import UsageError
from glabench.models import MIXERS, LanguageModel, ModelConfig
from glabench.models.fla import their_name
from glabench.models.parts import Rotary

pytestmark = pytest.mark.usefixtures("one_thread")


def parameters_of(mixer, d, H=0, K=0, V=0, E=0, N=0):
    """As the docstrings of the layers say."""
    linear = d * H * (2 * K + 3 * V) + V
    gate, value_gate = (16 * (d + H * D) + H * D for D in (K, V))
    return {
        "linear": linear,
        "gla": linear + gate,
        "gla-values": linear + value_gate,
        "gla-both": linear + gate + value_gate,
        "fixed-gate": linear,
        "simple-gla": linear + (d + 1) * H,
        "retnet": linear,
        "transformer": 4 * d * H * K,
        "mamba1": 3 * d * E + E * (2 * math.ceil(d / 16) + 2 * N) + E * (N + 7),
        "mamba2": 3 * d * E + 2 * d * N + d * H + 5 * (E + 2 * N) + 3 * H + E,
        "hyena": 4 * d * E + d + 16 * E + 64 * (4 + 2 * 65 + 1 + E),
        "rwkv4": 4 * d * E + 3 * d + 2 * E,
    }[mixer]


def count(module):
    return sum(x.numel() for x in module.parameters())


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_layer_has_as_many_parameters_as_it_says(mixer):
    sizes = SMALL[mixer]
    H, K = sizes.get("heads", 0), sizes.get("key_dim", sizes.get("head_dim", 0))
    E = sizes.get("inner", H * K)
    expected = parameters_of(mixer, WIDTH, H, K, sizes.get("value_dim", 0), E, sizes.get("state_size", 0))
    assert count(model_of(mixer).blocks[0].mixer) == expected


# Parameters of fla's and mamba-ssm's models of these widths, in millions, with a table of 32,000 tokens and a head.
@pytest.mark.parametrize(
    ("mixer", "width", "millions"), [("gla", 1024, 374.5), ("gla", 2048, 1365.5), ("transformer", 2048, 1364.3)]
)
def test_models_have_the_sizes_that_are_published(mixer, width, millions):
    config = ModelConfig(mixer, width, 24)
    with torch.device("meta"):
        model = LanguageModel(config, REGISTRY)
    assert count(model) / 1e6 == pytest.approx(millions, abs=0.05)
    mixers = [block.mixer for block in model.blocks]
    rest = 2 * 32_000 * width + width + 24 * (2 * width + 3 * width * config.hidden)
    assert count(model) == rest + sum(count(each) for each in mixers)
    assert count(mixers[0]) == pytest.approx(4 * width**2, rel=0.01)


def test_models_without_an_mlp_have_twice_as_many_blocks():
    assert [len(model_of(mixer, layers=2).blocks) for mixer in ("mamba1", "mamba2", "gla")] == [4, 4, 2]
    assert model_of("mamba1").blocks[0].mlp is None


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_token_changes_what_comes_after_it_and_nothing_before(mixer):
    model, tokens = model_of(mixer, layers=2), tokens_of(2, 40)
    other = tokens.clone()
    other[0, 20] = (other[0, 20] + 1) % VOCABULARY
    with torch.no_grad():
        difference = (model(tokens) - model(other)).abs().amax(-1)
    assert difference[0, :20].max() < 1e-12
    assert difference[1].max() < 1e-12
    assert difference[0, 20:].min() > 1e-9


def heads(x, H):
    return x.unflatten(-1, (H, -1))


def recurrent(layer, x, decay):
    """The equation of a gated linear layer, token by token; `decay` gives the factors of the state."""
    q, k = layer.queries_and_keys(x)
    v, swish = heads(layer.v(x), 2), heads(layer.swish(x), 2)
    S, outputs = torch.zeros(*q.shape[:1], 2, q.shape[-1], v.shape[-1], dtype=x.dtype), []
    for t in range(x.shape[1]):
        S = decay(x[:, t]) * S + k[:, t, :, :, None] * v[:, t, :, None]
        outputs.append((q[:, t, :, None] @ S)[:, :, 0] / math.sqrt(q.shape[-1]))
    o = torch.stack(outputs, dim=1)
    o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.norm.weight
    return layer.out((o * swish * swish.sigmoid()).flatten(-2))


def decay_of(mixer, layer):
    """Factors [B, H, K, V] of the state, or 1 in place of K or V, from x [B, d]."""

    def gate(of, *shape):
        return lambda x: of(x).reshape(len(x), 2, *shape).sigmoid() ** (1 / 16)

    if mixer == "gla":
        return gate(layer.gate, 8, 1)
    if mixer == "gla-values":
        return gate(layer.value_gate, 1, 16)
    if mixer == "gla-both":
        keys, values = gate(layer.gate, 8, 1), gate(layer.value_gate, 1, 16)
        return lambda x: keys(x) * values(x)
    if mixer == "simple-gla":
        return gate(layer.gate, 1, 1)
    is_fixed = mixer in ("retnet", "fixed-gate")
    fixed = 1 - 2.0 ** (-5 - torch.arange(2, dtype=torch.float64)) if is_fixed else torch.ones(2)
    return lambda x: fixed.to(x.dtype)[None, :, None, None]


@pytest.mark.parametrize("mixer", ["gla", "linear", "simple-gla", "fixed-gate", "gla-values", "gla-both", "retnet"])
def test_layers_with_a_matrix_as_state_compute_their_equation(mixer):
    layer, x = model_of(mixer).blocks[0].mixer, torch.randn(2, 20, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(layer(x), recurrent(layer, x, decay_of(mixer, layer)), rtol=1e-6, atol=1e-9)


def test_hyena_is_a_long_convolution_between_two_gates():
    layer, x = model_of("hyena").blocks[0].mixer, torch.randn(2, 20, WIDTH, dtype=torch.float64)
    entered = F.pad(layer.enter(x), (0, 0, 2, 0))
    weight = layer.short.weight[:, 0].T
    short = torch.stack([(entered[:, t : t + 3] * weight).sum(1) + layer.short.bias for t in range(20)], 1)
    q, k, v = short.chunk(3, -1)
    h, u = layer.filter(20).T, k * v
    y = torch.stack([(h[: t + 1].flip(0) * u[:, : t + 1]).sum(1) for t in range(20)], 1) + layer.skip * u
    torch.testing.assert_close(layer(x), layer.out(q * y))
    torch.testing.assert_close(layer.filter(7), layer.filter(20)[:, :7])


def test_the_filters_of_hyena_are_those_of_an_mlp_over_places_and_fall():
    filters = model_of("hyena").blocks[0].mixer.filter
    places = torch.arange(20, dtype=torch.float64) / 64
    x = torch.stack((places, (2 * math.pi * places).cos(), (2 * math.pi * places).sin()), -1)
    for layer in (filters.first, filters.second, filters.third):
        x = (filters.frequency * layer(x)).sin()
    shares = torch.linspace(1 / 1.5, 1 / 0.3, 32, dtype=torch.float64)
    torch.testing.assert_close(filters(20), (x @ filters.last.weight.T).T * 100 ** -(shares[:, None] * places))


def test_the_filters_of_hyena_are_drawn_large_enough_and_fall():
    h = model_of("hyena").blocks[0].mixer.filter(64)
    assert h.norm(dim=-1).median() > 0.05
    assert h[:, 48:].abs().mean() < 0.5 * h[:, :16].abs().mean()


def test_rwkv_mixes_a_token_with_the_one_before_and_weighs_values():
    layer, x = model_of("rwkv4").blocks[0].mixer, torch.randn(2, 20, WIDTH, dtype=torch.float64)
    before = F.pad(x, (0, 0, 1, -1))
    mixed = (share * x + (1 - share) * before for share in layer.mix)
    r, k, v = (project(each) for project, each in zip((layer.receptance, layer.key, layer.value), mixed, strict=True))
    rows = []
    for t in range(20):
        ages = torch.arange(t - 1, -2, -1, dtype=torch.float64)[:, None]
        exponents = torch.where(ages < 0, k[:, : t + 1] + layer.u, k[:, : t + 1] - ages * layer.w.exp())
        rows.append((exponents.softmax(1) * v[:, : t + 1]).sum(1))
    torch.testing.assert_close(layer(x), layer.out(r.sigmoid() * torch.stack(rows, 1)))


def test_rotary_positions_make_scores_depend_on_distances():
    rotary, x = Rotary(16), torch.randn(2, 16, dtype=torch.float64)
    q, k = rotary(*(each.expand(1, 50, 1, 16) for each in x))
    scores = torch.einsum("bthd,bshd->ts", q, k)
    assert scores[30, 20].item() == pytest.approx(scores[40, 30].item(), abs=1e-5)
    assert scores[0, 0].item() == pytest.approx((x[0] @ x[1]).item())
    assert abs(scores[30, 20] - scores[30, 21]) > 1e-3


def convolved(conv, x):
    """x [B, T, channels], token by token."""
    B, T, _ = x.shape
    padded = torch.cat((torch.zeros(B, 3, x.shape[-1], dtype=x.dtype), x), dim=1)
    y = torch.stack([(padded[:, t : t + 4] * conv.weight.T).sum(1) + conv.bias for t in range(T)], dim=1)
    return y * y.sigmoid()


def test_mamba_1_computes_its_equation():
    layer, u = model_of("mamba1").blocks[0].mixer, torch.randn(2, 20, WIDTH, dtype=torch.float64)
    x, z = layer.enter(u).chunk(2, dim=-1)
    x = convolved(layer.conv, x)
    rank, B, C = layer.data(x).split([2, 4, 4], dim=-1)
    step, A = F.softplus(layer.step(rank)), -layer.A_log.exp()
    S, outputs = torch.zeros(2, 64, 4, dtype=u.dtype), []
    for t in range(20):
        S = (step[:, t, :, None] * A).exp() * S + (step[:, t] * x[:, t])[..., None] * B[:, t, None]
        outputs.append((S * C[:, t, None]).sum(-1) + layer.D * x[:, t])
    y = torch.stack(outputs, dim=1) * z * z.sigmoid()
    torch.testing.assert_close(layer(u), layer.out(y), rtol=1e-6, atol=1e-9)


def test_mamba_2_computes_its_equation():
    layer, u = model_of("mamba2").blocks[0].mixer, torch.randn(2, 20, WIDTH, dtype=torch.float64)
    z, xBC, step = layer.enter(u).split([64, 80, 4], dim=-1)
    x, B, C = convolved(layer.conv, xBC).split([64, 8, 8], dim=-1)
    x, step, A = heads(x, 4), F.softplus(step + layer.step), -layer.A_log.exp()
    S, outputs = torch.zeros(2, 4, 16, 8, dtype=u.dtype), []
    for t in range(20):
        new = (step[:, t, :, None] * x[:, t])[..., None] * B[:, t, None, None]
        S = (step[:, t] * A).exp()[..., None, None] * S + new
        outputs.append((S * C[:, t, None, None]).sum(-1) + layer.D[:, None] * x[:, t])
    y = torch.stack(outputs, dim=1).flatten(-2) * z * z.sigmoid()
    y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.norm.weight
    torch.testing.assert_close(layer(u), layer.out(y), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("mixer", ["gla", "mamba2"])
def test_blocks_that_are_computed_again_give_the_same_gradients(mixer):
    tokens, found = tokens_of(2, 24), []
    for recompute in (False, True):
        model = model_of(mixer, layers=2, recompute=recompute)
        model.loss(tokens, tokens).backward()
        found.append([x.grad for x in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("mixer", "kernel"),
    [
        ("gla", "gla-torch"),
        ("gla", "gla-recurrent-torch"),
        ("linear", "linear-torch"),
        ("transformer", "sdpa-math"),
    ],
)
def test_kernels_of_backends_give_what_the_reference_does(mixer, kernel):
    tokens = tokens_of(2, 70)
    reference, other = (model_of(mixer, name, layers=2) for name in ("reference", kernel))
    torch.testing.assert_close(other(tokens), reference(tokens), rtol=1e-6, atol=1e-9)


def test_a_model_is_one_graph():
    torch._dynamo.reset()
    model, tokens = model_of("gla", "gla-torch", dtype=torch.float32), tokens_of(1, 16)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens), model(tokens))


def test_a_model_learns_to_copy_as_with_the_reference_in_float64():
    found, expected = (
        losses_of(copying_model("gla", kernel, REGISTRY).to(dtype), steps=80)
        for kernel, dtype in (("gla-torch", torch.float32), ("reference", torch.float64))
    )
    # Without gates they differ by 8e-3.
    assert found[:50] == pytest.approx(expected[:50], rel=1e-5)
    assert sum(found[-10:]) == pytest.approx(sum(expected[-10:]), rel=1e-5)
    assert sum(expected[-10:]) < 0.85 * sum(expected[:10])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mixer": "rwkv"}, "mixer: 'rwkv' is unknown"),
        ({"layers": 0}, "layers: 0 is too small"),
        ({"width": 4, "sizes": {}}, "width: 4 is too small for gla"),
        ({"kernel": "linear-torch"}, "kernel: 'linear-torch' does not compute gla"),
        ({"kernel": "gla-triton"}, "kernel: gla-triton: needs a GPU"),
    ],
)
def test_what_there_is_not_is_named(changes, said):
    given = {"mixer": "gla", "width": WIDTH, "layers": 1, "vocabulary": VOCABULARY, "sizes": SMALL["gla"], **changes}
    with pytest.raises(UsageError, match=said):
        LanguageModel(ModelConfig(**given), REGISTRY)(tokens_of(1, 8))


def test_parameters_of_flas_model_have_other_names():
    ours = dict(model_of("gla", layers=2).named_parameters())
    theirs = [their_name(name) for name in ours]
    assert len(set(theirs)) == len(ours)
    assert [name for name in theirs if "layers" not in name] == [
        "model.embeddings.weight", "model.norm.weight", "lm_head.weight"
    ]  # fmt: skip
    second = {name.removeprefix("model.layers.1.") for name in theirs if name.startswith("model.layers.1.")}
    attention = ["q_proj.weight", "k_proj.weight", "v_proj.weight", "g_proj.weight", "o_proj.weight",
                 "gk_proj.0.weight", "gk_proj.1.weight", "gk_proj.1.bias", "g_norm_swish_gate.weight"]  # fmt: skip
    mlp = ["attn_norm.weight", "mlp_norm.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"]
    assert second == {*(f"attn.{name}" for name in attention), *mlp}
