"""Sequences that several GPUs share: threads stand for their processes."""

import threading
from dataclasses import replace

import pytest
import torch
from torch import distributed

from glabench.backends import load_registry
from glabench.measure.training import small_step
from glabench.models import LanguageModel, ModelConfig
from glabench.models.model import mean_loss
from glabench.models.sequence import Stretch
from glabench.sweeps import Cell, Parameters

REGISTRY = load_registry()
B, T, H, K, V = 2, 48, 4, 3, 5
MODELS = {"gla": "gla-model", "linear": "linear-model", "simple-gla": "simple-gla-model", "retnet": "retnet-model",
          "transformer": "transformer-model"}  # fmt: skip
MIXERS = [*MODELS, "fixed-gate", "gla-values", "gla-both"]

KERNEL = {"kernel": "reference"}
ALONE = "sequences are shared without segments and torch's compiler; use --segments 1 --compile off"


class Threads:
    """Runs a function as several processes would, with collectives, and counts the bytes that one of them sends."""

    def __init__(self, monkeypatch):
        self.sent = 0
        self._own = threading.local()
        monkeypatch.setattr(distributed, "all_gather", self._all_gather)
        monkeypatch.setattr(distributed, "all_to_all_single", self._all_to_all)

    def run(self, size, function):
        """What the function of a stretch returns in each of `size` threads."""
        self._barrier, self._given, found = threading.Barrier(size, timeout=60), [None] * size, [None] * size

        def work(rank):
            self._own.rank = rank
            try:
                found[rank] = function(Stretch(rank, size))
            except BaseException as problem:  # the main thread says so
                found[rank] = problem
                self._barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        problems = [x for x in found if isinstance(x, BaseException)]
        for problem in sorted(problems, key=lambda x: isinstance(x, threading.BrokenBarrierError)):
            raise problem
        return found

    def _meet(self, x):
        self._given[self._own.rank] = x
        self._barrier.wait()
        given = list(self._given)
        self._barrier.wait()
        return given

    def _all_gather(self, found, x):
        for into, given in zip(found, self._meet(x), strict=True):
            into.copy_(given)
        if self._own.rank == 0:
            self.sent += (len(found) - 1) * x.nbytes

    def _all_to_all(self, y, x):
        for into, given in zip(y, self._meet(x), strict=True):
            into.copy_(given[self._own.rank])
        if self._own.rank == 0:
            self.sent += x.nbytes - x[0].nbytes


@pytest.fixture
def threads(monkeypatch):
    return Threads(monkeypatch)


@pytest.mark.parametrize("size", [2, 3])
def test_states_go_on_from_stretch_to_stretch(threads, size):
    torch.manual_seed(0)
    own = torch.randn(size, B, H, K, V, dtype=torch.float64, requires_grad=True)
    decay = torch.rand(size, B, H, K, 1, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(size, B, H, K, V, dtype=torch.float64)
    state, expected = torch.zeros_like(own[0]), []
    for number in range(size):
        expected.append(state)
        state = state * decay[number] + own[number]
    expected_grads = torch.autograd.grad((torch.stack(expected) * weight).sum(), (own, decay), materialize_grads=True)

    def of_stretch(stretch):
        mine = [x[stretch.rank].detach().requires_grad_() for x in (own, decay)]
        before = stretch.states_before(*mine)
        return before.detach(), *torch.autograd.grad((before * weight[stretch.rank]).sum(), mine)

    found = zip(*threads.run(size, of_stretch), strict=True)
    for of_all, wanted in zip(found, (expected, *expected_grads), strict=True):
        for x, y in zip(of_all, wanted, strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("size", [2, 4])
def test_tokens_are_traded_for_heads_and_back(threads, size):
    whole = torch.randn(2, B, T, H, K)

    def of_stretch(stretch):
        q, k = (x.chunk(size, 1)[stretch.rank] for x in whole)
        traded = stretch.to_heads(q, k)
        return torch.stack(traded), torch.stack([stretch.to_tokens(x) for x in traded])

    for rank, (heads, tokens) in enumerate(threads.run(size, of_stretch)):
        assert torch.equal(heads, whole.chunk(size, 3)[rank])
        assert torch.equal(tokens, whole.chunk(size, 2)[rank])


@pytest.mark.parametrize("size", [2, 3])  # of two stretches, the decays cancel
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_model_by_stretches_is_the_whole_model_and_sends_what_is_said(threads, mixer, size):
    width = 64 * size
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(mixer, width, 2, 64), REGISTRY).double()
    tokens, targets = torch.randint(64, (2, B, T))
    weights = list(model.parameters())
    loss = model.loss(tokens, targets)
    expected = torch.autograd.grad(loss, weights)

    def of_stretch(stretch):
        own, wanted = (x.chunk(size, 1)[stretch.rank] for x in (tokens, targets))
        loss = mean_loss(model(own, stretch=stretch), wanted)
        return loss.detach(), torch.autograd.grad(loss, weights)

    found = threads.run(size, of_stretch)
    torch.testing.assert_close(torch.stack([own for own, _ in found]).mean(), loss.detach())
    for name, wanted, *grads in zip(dict(model.named_parameters()), expected, *(x for _, x in found), strict=True):
        torch.testing.assert_close(sum(grads) / size, wanted, msg=lambda said, name=name: f"{name}: {said}")
    if mixer not in MODELS:
        return
    sizes = Parameters({"model_width": width, "layers": 2, "vocabulary": 64, "gpus": size, "parallel": "sequence"})
    cell = Cell(MODELS[mixer], "training", "fwd+bwd", B, T, "fp64", sizes, "cpu")
    assert REGISTRY[MODELS[mixer]].sent_bytes(cell) == threads.sent


def test_only_shared_sequences_are_sent():
    sizes = {"model_width": 128, "layers": 2, "vocabulary": 64, "gpus": 2}
    cell = Cell("gla-model", "training", "fwd+bwd", B, T, "fp32", Parameters(sizes), "cpu")
    shared = replace(cell, parameters=Parameters({**sizes, "parallel": "sequence"}))
    again = replace(cell, parameters=Parameters({**sizes, "parallel": "sequence", "recompute": "on"}))
    model = REGISTRY["gla-model"]
    assert model.sent_bytes(cell) is None
    state, decay = 2 * 4 * B * 4 * 16 * 32, 2 * 4 * B * 4 * 16  # of two layers, for H, K, V = 4, 16, 32
    assert (model.sent_bytes(shared), model.sent_bytes(again)) == (2 * state + decay, 3 * state + 2 * decay)


@pytest.mark.parametrize("gpus", [2, 3, 4, 8])
@pytest.mark.parametrize("backend", MODELS.values())
def test_a_small_step_can_be_shared_as_the_cell_is(backend, gpus):
    sizes = {"model_width": 1536, "layers": 24, "vocabulary": 1000, "gpus": gpus, "parallel": "sequence", **KERNEL}
    cell = Cell(backend, "training", "fwd+bwd", 1, 6144, "fp32", Parameters(sizes), "cpu")
    small = small_step(REGISTRY.ops["training"], cell)
    assert (REGISTRY[backend].limits(cell), REGISTRY[backend].limits(small)) == (None, None)
    assert small.seqlen // gpus > 64  # a chunk
    assert small.tokens <= 1600


@pytest.mark.parametrize(
    ("backend", "change", "why"),
    [
        ("gla-model", {"seqlen": 49}, "49 tokens are not 2 stretches of one length; --gpus has to divide --seqlen"),
        ("gla-model", {"segments": 2}, ALONE),
        ("gla-model", {"compile": "on"}, ALONE),
        (
            "gla-model",
            {"weights": "pure"},
            "AdamW's moments are too small for fp16; use --weights fp32 or --dtype bf16",
        ),
        ("gla-model", {"batch": 3}, None),
        ("transformer-model", {"gpus": 3}, "3 GPUs cannot share 2 heads; use a --width that is a multiple of 192"),
        ("mamba1-model", {}, "has no --parallel sequence; use ddp or fsdp, or a model of attention, GLA or its kin"),
    ],
)
def test_what_cannot_be_shared_is_refused(backend, change, why):
    sizes = {"model_width": 128, "layers": 2, "vocabulary": 64, "gpus": 2, "parallel": "sequence", **KERNEL}
    kept = {name: change[name] for name in ("batch", "seqlen") if name in change}
    parameters = Parameters({**sizes, **{name: x for name, x in change.items() if name not in kept}})
    cell = Cell(backend, "training", "fwd+bwd", kept.get("batch", B), kept.get("seqlen", T), "fp16", parameters, "cpu")
    assert REGISTRY[backend].limits(cell) == why


def test_gradients_of_an_exchange_cannot_be_differentiated_again(threads):
    def of_stretch(stretch):
        q = torch.randn(1, 4, 2, 3, requires_grad=True)
        (g,) = torch.autograd.grad((stretch.to_heads(q)[0] ** 2).sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            g.sum().backward()

    threads.run(2, of_stretch)
