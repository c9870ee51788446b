"""Models that learn text: what they learn from, what is recorded, and how wrong ones are found."""

import re
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from glabench.backends import load_registry
from glabench.backends.text import GlaText
from glabench.measure.job import Job
from glabench.measure.kinds import KINDS
from glabench.measure.text import TextMeter
from glabench.ops.corpus import Corpus, python_source
from glabench.sweeps import load_sweep
from glabench.sweeps.expand import expand, resolve
from glabench.sweeps.model import Cell, Parameters

REGISTRY = load_registry()
pytestmark = pytest.mark.usefixtures("one_thread")
OP = REGISTRY.ops["text"]
SIZES = {"model_width": 32, "layers": 1, "rate": 1e-2, "steps": 5}
TEXTS = [name for name, each in REGISTRY.items() if each.work == "text"]


@pytest.fixture
def alphabet(monkeypatch):
    """A text that is easy to learn in place of Python's source."""
    corpus = Corpus(b"abcdefghijklmnopqrstuvwxyz" * 200, b"abcdefghijklmnopqrstuvwxyz" * 40, "the alphabet")
    monkeypatch.setattr("glabench.ops.corpus.python_source", lambda: corpus)
    return corpus


def cell_of(backend="gla-text", **changes):
    return Cell(backend, "text", "fwd+bwd", 4, 32, "fp32", Parameters(SIZES | changes), "cpu")


def measured(cell, backend=None):
    return TextMeter(OP, backend or REGISTRY[cell.backend], Job(cell.backend, "run", "cpu")).measure(cell)


def measured_by(plugin):
    """The record of a backend that a plugin adds."""
    load_registry().add(plugin, "a test")
    return measured(replace(cell_of(), backend=plugin.name), plugin)


@pytest.mark.usefixtures("alphabet")
def test_a_model_learns_what_comes_next():
    few, many = measured(cell_of(steps=1)), measured(cell_of(steps=80))
    assert many.status == "ok", many.reason
    assert 6 < few.bits_per_byte < 9  # 256 bytes are 8 bits
    assert many.bits_per_byte < 1
    assert many.text == "the alphabet"
    assert len(many.samples_ms) == 3  # of 25 steps each, without the first ones
    assert str(many).endswith("per step")


@pytest.mark.usefixtures("alphabet")
@pytest.mark.parametrize("backend", TEXTS)
def test_every_model_is_trained_and_right(backend):
    record = measured(cell_of(backend, steps=2))
    assert record.status == "ok", record.reason
    assert record.rel_error.keys() == {"logits", "gradient", "trained"}
    assert max(record.rel_error.values()) < 1e-5
    assert record.time_ms > 0
    assert record.train_s > 0


@pytest.mark.usefixtures("alphabet")
def test_the_same_seed_gives_the_same_bits_and_another_one_others():
    first, again, other = (measured(replace(cell_of(), seed=seed)) for seed in (0, 0, 1))
    assert first.bits_per_byte == again.bits_per_byte
    assert first.bits_per_byte != other.bits_per_byte


class SeesWhatComes(GlaText):
    """Its models are told the byte that they have to predict."""

    name = "sees-text"

    def build(self, cell):
        model = super().build(cell)
        if cell.dtype == "fp64":
            return model
        model.embedding.register_forward_hook(lambda module, tokens, known: known + known.roll(-1, 1))
        return model


def test_a_model_that_sees_what_comes_is_not_trained():
    record = measured_by(SeesWhatComes())
    assert record.status == "inaccurate"
    assert record.bits_per_byte is None
    assert re.search("relative error against the same model in float64: logits", record.reason)


class SeesWhatComesInBatches(GlaText):
    """Right for the two rows that are compared before training."""

    name = "sees-in-batches-text"

    def build(self, cell):
        model = super().build(cell)
        if cell.batch > 2:
            model.embedding.register_forward_hook(lambda module, tokens, known: known + known.roll(-1, 1))
        return model


@pytest.mark.usefixtures("alphabet")
def test_a_model_that_is_wrong_at_its_own_size_has_no_bits():
    record = measured_by(SeesWhatComesInBatches())
    assert record.status == "inaccurate"
    assert record.bits_per_byte is None
    assert record.time_ms is None
    assert re.search("trained model beyond 2e-03 against the same model in float64", record.reason)


class AlwaysSeesWhatComes(GlaText):
    """The same, and so does its model in float64."""

    name = "sees-always-text"

    def build(self, cell):
        model = super().build(cell)
        model.embedding.register_forward_hook(lambda module, tokens, known: known + known.roll(-1, 1))
        return model


def test_what_a_model_is_compared_with_is_not_its_own_doing():
    record = measured_by(AlwaysSeesWhatComes())
    assert record.status == "inaccurate"
    assert record.bits_per_byte is None


@pytest.mark.usefixtures("alphabet")
def test_rows_that_are_longer_than_the_text_are_refused_before_training():
    record = measured(replace(cell_of(), seqlen=4096))
    assert record.status == "unsupported"
    assert record.reason == "rows of 4096 bytes are longer than the held-out files, 1039 bytes; use --seqlen"


def test_a_python_without_its_source_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr("glabench.ops.corpus.sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    python_source.cache_clear()
    record = measured(cell_of())
    python_source.cache_clear()
    assert record.status == "unsupported"
    assert record.reason == "this Python has no source of its standard library; install it"


@pytest.mark.usefixtures("alphabet")
def test_a_loss_that_is_not_finite_is_no_result():
    record = measured(cell_of(rate=1e30))
    assert record.status == "inaccurate"
    assert "nan" in record.reason
    assert record.bits_per_byte is None
    assert record.time_ms is None


def test_the_text_is_pythons_source_without_its_tests_and_files_are_held_out_whole():
    corpus, root = python_source(), Path(sysconfig.get_paths()["stdlib"])
    assert (
        corpus.learned.count((root / "dataclasses.py").read_bytes())
        + corpus.held_out.count((root / "dataclasses.py").read_bytes())
        == 1
    )
    assert 5 < len(corpus.learned) / len(corpus.held_out) < 20
    tests = root / "test" / "test_dataclasses.py"
    if tests.exists():
        assert tests.read_bytes() not in corpus.learned
    assert re.fullmatch(r"standard library of Python 3\.\d+\.\d+, \d+\.\d MB, sha256 [0-9a-f]{12}", corpus.name)


def test_what_a_training_takes_is_estimated_from_its_weights_tokens_and_steps():
    cell, backend = cell_of(model_width=64, layers=2, steps=30), REGISTRY["gla-text"]
    weights = 12 * 64 * 64 * 2 + 256 * 64
    assert OP.least_bytes(cell) == 4 * 4 * weights
    assert OP.forward_flops(cell) == 30 * 2 * cell.tokens * weights
    assert backend.working_bytes(cell) > 4 * cell.tokens * 256


def test_a_profile_is_of_a_step_with_its_backward_and_optimizer(monkeypatch):
    made = []
    build = GlaText.build
    monkeypatch.setattr(GlaText, "build", lambda self, cell: made.append(build(self, cell)) or made[-1])
    _, steps = KINDS["text"].make_ready(OP, REGISTRY["gla-text"], cell_of())
    before = [x.detach().clone() for x in made[0].parameters()]
    steps.call()
    assert all((x != old).any() for x, old in zip(made[0].parameters(), before, strict=True))


def test_the_preset_has_every_gate_once_at_the_same_sizes():
    traits = REGISTRY.traits()
    cells = list(expand(resolve(load_sweep("ablation"), "cuda", {}, traits), traits, "cuda"))
    assert sorted(cell.backend for cell in cells) == sorted(TEXTS)
    assert len({replace(cell, backend="", op="") for cell in cells}) == 1


def test_models_of_the_preset_differ_in_their_gates_alone():
    cell = cell_of(model_width=64)
    with torch.device("meta"):
        shapes = {
            name: {key: x.shape for key, x in REGISTRY[name].build(replace(cell, backend=name)).named_parameters()}
            for name in TEXTS
        }
    plain = shapes["linear-text"]
    for own in shapes.values():
        assert plain.items() <= own.items()
        assert all("gate" in key for key in own.keys() - plain.keys())
