"""Models that learn to recall: what is recorded, how wrong ones are found, and which cells there are."""

import re
from dataclasses import replace

import pytest
import torch

from glabench.backends import load_registry
from glabench.backends.recall import TransformerRecall
from glabench.measure import recall
from glabench.measure.job import Job
from glabench.measure.recall import Lessons, RecallMeter
from glabench.ops.mqar import make_rows
from glabench.records import RunFolder
from glabench.sweeps import load_sweep
from glabench.sweeps.axis import parse_amounts
from glabench.sweeps.expand import expand, resolve
from glabench.sweeps.model import Cell, Parameters

REGISTRY = load_registry()
pytestmark = pytest.mark.usefixtures("one_thread")
OP = REGISTRY.ops["recall"]
SIZES = {"model_width": 32, "layers": 2, "vocabulary": 32, "pairs": 2, "rate": 1e-2, "rows": 512, "epochs": 12}


def cell_of(backend="transformer-recall", **changes):
    return Cell(backend, "recall", "fwd+bwd", 32, 16, "fp32", Parameters(SIZES | changes), "cpu")


def measured(cell, backend=None):
    return RecallMeter(OP, backend or REGISTRY[cell.backend], Job(cell.backend, "run", "cpu")).measure(cell)


def measured_by(plugin):
    """The record of a backend that a plugin adds."""
    load_registry().add(plugin, "a test")
    return measured(replace(cell_of(), backend=plugin.name), plugin)


def test_attention_learns_to_recall_and_stops_when_it_can():
    record = measured(replace(cell_of(rows=4096, epochs=20, rate=3e-3), batch=64))
    assert record.status == "ok", record.reason
    assert record.accuracy >= 0.99
    assert 1 < record.epochs_trained < 20
    assert record.train_s > 0
    assert str(record).endswith(f"{100 * record.accuracy:.1f} % after {record.epochs_trained} epochs")


@pytest.mark.parametrize("backend", [name for name, each in REGISTRY.items() if each.work == "recall"])
def test_every_model_is_trained_and_right(backend):
    record = measured(cell_of(backend, rows=64, epochs=1))
    assert record.status == "ok", record.reason
    assert record.rel_error["logits"] < 1e-5
    assert record.epochs_trained == 1
    assert 0 <= record.accuracy <= 1


def test_filters_are_as_long_as_the_rows_and_widths_need_no_heads():
    cell = cell_of("hyena-recall", model_width=7)
    assert REGISTRY["hyena-recall"].limits(cell) is None
    assert REGISTRY["rwkv4-recall"].limits(replace(cell, backend="rwkv4-recall", device="cpu")) is None
    assert REGISTRY["hyena-recall"].build(cell).config.layer_sizes == {"inner": 7, "longest": 16}


def test_a_model_that_diverges_has_no_accuracy():
    record = measured(cell_of("linear-recall", rows=64, epochs=2, rate=1e18))
    assert (record.status, record.accuracy) == ("inaccurate", None)
    assert record.reason == "the weights are not finite after 2 epochs; take a smaller learning rate (--rate)"


def test_the_same_seed_gives_the_same_accuracy_and_another_one_another():
    cell = cell_of(epochs=2)
    first, again, other = measured(cell), measured(cell), measured(replace(cell, seed=1))
    assert first.accuracy == again.accuracy
    assert first.accuracy != other.accuracy


def test_graphs_need_a_gpu():
    assert REGISTRY["gla-recall"].limits(cell_of("gla-recall", graphs="on")) == (
        "CUDA graphs need a GPU; use --graphs off"
    )
    assert REGISTRY["gla-recall"].limits(cell_of("gla-recall", graphs="off")) is None


def test_replayed_steps_see_each_batch_and_rate(monkeypatch):
    """With a stand-in for a graph, which does nothing while it is made."""
    cell = cell_of("gla-recall")
    generator = torch.Generator().manual_seed(0)
    batches = [make_rows(count, 16, 2, 32, generator) for count in (*[32] * 6, 20, 32)]
    replays = []

    def replayed(function):
        replays.append(0)

        def replay():
            replays[0] += 1
            function()

        return replay

    found = []
    for is_replayed in (True, False):
        monkeypatch.setattr(recall, "uses_graph", lambda _, answer=is_replayed: answer)
        monkeypatch.setattr(recall, "replayed", replayed)
        monkeypatch.setattr(Lessons, "_apart", Lessons._step)
        model = REGISTRY["gla-recall"].build(cell)
        lessons = Lessons(REGISTRY["gla-recall"], model, cell)
        for number, rows in enumerate(batches):
            lessons.set_rate(1e-3 / (1 + number))
            lessons.learn(rows)
        found.append(torch.cat([x.flatten() for x in model.parameters()]))
    assert replays == [4]  # of whole batches but the first three
    assert torch.equal(*found)


class Deaf(TransformerRecall):
    """Its models see only the first half of a row."""

    name = "deaf-recall"

    def build(self, cell):
        model = super().build(cell)
        if cell.dtype != "fp64":
            model.register_forward_pre_hook(lambda module, given: (given[0] * (given[0] % 3 > 0), *given[1:]))
        return model


def test_a_model_whose_logits_are_wrong_is_not_trained():
    record = measured_by(Deaf())
    assert record.status == "inaccurate"
    assert record.accuracy is None
    assert re.search("relative error against the same model in float64: logits", record.reason)


class Numb(TransformerRecall):
    """Its mixers have no gradients."""

    name = "numb-recall"

    def build(self, cell):
        model = super().build(cell)
        model.blocks[0].mixer.register_forward_hook(lambda module, x, y: y.detach())
        return model


def test_a_model_whose_gradients_are_wrong_is_not_trained():
    record = measured_by(Numb())
    assert record.status == "inaccurate"
    assert record.accuracy is None
    assert record.rel_error["logits"] < 1e-5
    assert re.search(r"float64: gradient .*; the worst gradient is blocks.(\d|\*).(norm|mixer)", record.reason)


class AlwaysDeaf(TransformerRecall):
    """The same, and so does its model in float64."""

    name = "always-deaf-recall"

    def build(self, cell):
        model = super().build(cell)
        model.register_forward_pre_hook(lambda module, given: (given[0] * (given[0] % 3 > 0), *given[1:]))
        return model


def test_what_a_model_is_compared_with_is_not_its_own_doing():
    record = measured_by(AlwaysDeaf())
    assert record.status == "inaccurate"
    assert record.accuracy is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pairs": 5}, "rows of 16 tokens take up to 4 pairs"),
        ({"vocabulary": 4}, "2 pairs need a vocabulary of at least 6 tokens"),
        ({"kernel": "gla-torch"}, "the kernel 'gla-torch' does not compute softmax"),
        ({}, None),
    ],
)
def test_cells_that_cannot_be_are_refused(changes, said):
    found = REGISTRY["transformer-recall"].limits(cell_of(**changes))
    assert found is None if said is None else found.startswith(said)


def test_learning_rates_are_an_axis_of_numbers():
    assert parse_amounts("1e-3,0.01, 1e-3") == (0.001, 0.01)
    for text in ("", "fast", "0", "-1", "nan", "inf"):
        with pytest.raises(ValueError, match="is not a number"):
            parse_amounts(text)


def test_the_papers_grid_is_theirs():
    traits = REGISTRY.traits()
    cells = expand(resolve(load_sweep("mqar-paper"), "cuda", {}, traits), traits, "cuda")
    assert {(c.seqlen, c.get("pairs"), c.batch) for c in cells} == {
        (64, 4, 512),
        (128, 8, 512),
        (256, 16, 256),
        (512, 64, 128),
    }
    assert {c.get("model_width") for c in cells} == {64, 128, 256, 512}
    assert sorted({c.get("rate") for c in cells}) == pytest.approx(torch.logspace(-4, -2, 4).tolist(), rel=1e-2)


def test_the_command_trains_the_models_that_are_named(run, tmp_path):
    sizes = ["--width", "32", "--pairs", "2", "--seqlen", "16", "--rows", "64", "--epochs", "1", "--batch", "32"]
    out = tmp_path / "run"
    code, text, error = run("recall", "--backend", "gla-recall,transformer-recall", *sizes, "--out", str(out))
    assert code == 0, error
    assert "recall" in text.lower()
    cells = [record.cell for record in RunFolder.open(out).load().records]
    assert [(cell.backend, cell.get("pairs"), cell.get("rate")) for cell in cells] == [
        ("gla-recall", 2, 3e-3), ("transformer-recall", 2, 3e-3)
    ]  # fmt: skip
