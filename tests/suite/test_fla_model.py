"""fla's own language model, by a stand-in with the names and shapes of the real one (flash-linear-attention 0.6)."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch.nn.functional as F
from torch import nn

from glabench.backends import load_registry
from glabench.backends.fla_models import FlaGlaModel
from glabench.measure.job import Job
from glabench.measure.training import StepMeter
from glabench.ops import GLA
from glabench.sweeps import Cell, Parameters

REGISTRY = load_registry()
SIZES = {"model_width": 64, "layers": 2, "vocabulary": 64, "weights": "fp32"}
pytestmark = pytest.mark.usefixtures("one_thread")


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        d, H = config.hidden_size, config.num_heads
        keys, values = round(d * config.expand_k), round(d * config.expand_v)
        self.heads = H
        self.q_proj, self.k_proj = (nn.Linear(d, keys, bias=False) for _ in "qk")
        self.v_proj, self.g_proj = (nn.Linear(d, values, bias=False) for _ in "vg")
        self.gk_proj = nn.Sequential(nn.Linear(d, 16, bias=False), nn.Linear(16, keys))
        self.o_proj = nn.Linear(values, d, bias=False)
        self.g_norm_swish_gate = nn.RMSNorm(values // H, eps=config.norm_eps)

    def forward(self, x):
        q, k, v, gate, g = (
            project(x).unflatten(-1, (self.heads, -1))
            for project in (self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.gk_proj)
        )
        o = GLA.reference({"q": q, "k": k, "v": v, "g": F.logsigmoid(g) / 16})[0]
        return self.o_proj((self.g_norm_swish_gate(o) * F.silu(gate)).flatten(-2))


class Mlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        d, inner = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = nn.Linear(d, inner, bias=False), nn.Linear(d, inner, bias=False)
        self.down_proj = nn.Linear(inner, d, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attn_norm, self.mlp_norm = (nn.RMSNorm(config.hidden_size, eps=config.norm_eps) for _ in "am")
        self.attn, self.mlp = Attention(config), Mlp(config)

    def forward(self, x):
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GLAForCausalLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.model = nn.Module()
        self.model.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.model.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids):
        x = self.model.embeddings(input_ids)
        for layer in self.model.layers:
            x = layer(x)
        return SimpleNamespace(logits=self.lm_head(self.model.norm(x)))


class FusedCrossEntropyLoss(nn.CrossEntropyLoss):
    def __init__(self, inplace_backward):
        super().__init__()


@pytest.fixture
def backend(monkeypatch):
    """The backend, as if a CPU were its device."""
    models, modules = ModuleType("fla.models"), ModuleType("fla.modules")
    models.GLAConfig, models.GLAForCausalLM = SimpleNamespace, GLAForCausalLM
    modules.FusedCrossEntropyLoss = FusedCrossEntropyLoss
    for name, module in {"fla": ModuleType("fla"), "fla.models": models, "fla.modules": modules}.items():
        monkeypatch.setitem(sys.modules, name, module)
    own = FlaGlaModel()
    own.join(REGISTRY)
    return own


def measured(backend):
    cell = Cell(backend.name, "training", "fwd+bwd", 2, 100, "fp32", Parameters(SIZES), "cpu")
    return StepMeter(REGISTRY.ops["training"], backend, Job(backend.name, "run", "cpu")).measure(cell)


def test_a_step_has_the_gradients_and_losses_of_our_model(backend):
    record = measured(backend)
    assert record.status == "ok", record.reason
    assert record.rel_error["gradient"] < 1e-4
    assert record.rel_error["loss"] < 1e-5


def test_a_model_that_computes_something_else_is_refused(backend, monkeypatch):
    monkeypatch.setattr(Block, "forward", lambda self, x: x + self.attn(self.attn_norm(x)))
    record = measured(backend)
    assert record.status == "inaccurate"
    assert "gradient" in record.reason


def test_several_gpus_are_refused(backend):
    cell = Cell(backend.name, "training", "fwd+bwd", 2, 100, "fp32", Parameters({**SIZES, "gpus": 2}), "cuda")
    assert backend.limits(cell) == "is measured on one GPU; use --gpus 1"
