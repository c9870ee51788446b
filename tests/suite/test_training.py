"""Steps of training: what is measured of them, how wrong ones are found, what they count, and the command."""

import math
import re
from dataclasses import replace

import pytest
import torch
from product import product

from glabench.backends import load_registry
from glabench.backends.models import GlaModel
from glabench.backends.torch_forms import GlaTorch
from glabench.measure import training
from glabench.measure.accuracy import worst_gradient
from glabench.measure.job import Job
from glabench.measure.kinds import KINDS
from glabench.measure.settings import Settings
from glabench.measure.training import StepMeter, small_step
from glabench.models import LanguageModel
from glabench.records import Record, RunFolder
from glabench.records.environment import Ceilings
from glabench.records.metrics import derived
from glabench.report.series import make_view
from glabench.sweeps import load_sweep
from glabench.sweeps.model import Cell, Parameters

REGISTRY = load_registry()
OP = REGISTRY.ops["training"]
SIZES = {"model_width": 128, "layers": 2, "vocabulary": 64, "weights": "fp32"}
NARROW = {"model_width": 64, "layers": 1}  # where the size tells nothing
SETTINGS = Settings(time_limit_s=0.05, max_samples=5, warm_up_s=0.0, least_time_s=0.0)
JOB = Job("gla-model", "run", "cpu", SETTINGS, ceilings=Ceilings(product_tflops=2.0))
pytestmark = pytest.mark.usefixtures("one_thread", "soon_settled")


def cell_of(backend="gla-model", batch=2, seqlen=64, dtype="fp32", **parameters):
    return Cell(backend, "training", "fwd+bwd", batch, seqlen, dtype, Parameters(SIZES | parameters), "cpu")


def measured(cell, backend=None):
    return StepMeter(OP, backend or REGISTRY[cell.backend], JOB).measure(cell)


MODELS = [name for name, each in REGISTRY.items() if each.work == "training" and "cpu" in each.devices]


@pytest.mark.parametrize("backend", MODELS)
def test_a_step_of_every_model_is_measured(backend):
    record = measured(cell_of(backend, seqlen=16, **NARROW))
    assert record.status == "ok", record.reason
    assert record.rel_error["loss"] < 1e-5
    assert record.rel_error["gradient"] < 1e-4
    assert record.launch == REGISTRY[backend].kernel_of(record.cell)
    assert record.timing == "eager, calls back to back, wall clock"
    assert min(record.time_ms, record.first_call_s, record.tflops, record.peak_resident_mib) > 0
    assert (record.mixer_ms is None) == (REGISTRY[backend].kernel_of(record.cell) == "reference")


@product(
    lambda backend, weights: backend == "gla-model",
    backend=["gla-model", "mamba2-model"],
    weights=["fp32", "pure"],
)
def test_a_step_in_half_precision_has_its_rounding_and_no_more(backend, weights):
    record = measured(cell_of(backend, seqlen=32, dtype="bf16", weights=weights, **NARROW))
    assert record.status == "ok", record.reason
    assert 1e-6 < record.rel_error["loss"] < (2e-3 if weights == "fp32" else 4e-2)


@pytest.mark.parametrize(("options", "calls"), [({}, 1), ({"recompute": "on"}, 1.5), ({"segments": 4}, 4)])
def test_a_steps_rates_are_shares_of_the_devices_and_of_the_step(options, calls, monkeypatch):
    """The mixers' time is that of one call for each layer and segment; a block run again has its forward once more."""
    timed, steps_of = [], training.steps_of

    def noted(prepared, cell):
        timed.append((cell, steps_of(prepared, cell)))
        return timed[-1][1]

    monkeypatch.setattr(training, "steps_of", noted)
    monkeypatch.setattr(training, "median_ms", lambda _, call, *__: 0.25 if call is timed[-1][1].call else 0.125)
    record = measured(cell_of(**options))
    (mixer, _) = timed.pop()
    assert (mixer.batch, mixer.seqlen, mixer.pass_) == (2, 64 // options.get("segments", 1), "fwd+bwd")
    assert record.status == "ok", record.reason
    row = {**record.to_json(), "samples": None}
    found = derived(row)
    assert found["mfu_pct"] == pytest.approx(100 * record.tflops / 2.0)
    assert record.mixer_ms == SIZES["layers"] * calls * 0.25
    assert found["mixer_pct"] == pytest.approx(100 * record.mixer_ms / record.time_ms)
    assert found["tokens_per_s"] == pytest.approx(1e3 * 128 / record.time_ms)


CARRYING = ["gla-model", "linear-model", "simple-gla-model", "retnet-model"]


@pytest.mark.parametrize("backend", CARRYING)
def test_a_sequence_in_segments_is_measured_and_right(backend):
    record = measured(cell_of(backend, seqlen=48, segments=3, **NARROW))
    assert record.status == "ok", record.reason
    assert max(record.rel_error.values()) < 1e-4


@pytest.mark.parametrize("options", [{}, {"recompute": "on"}])
@pytest.mark.parametrize("backend", CARRYING)
def test_segments_are_the_whole_sequence_without_gradients_through_their_states(backend, options):
    """The loss is that of the whole sequence; gradients are not, but for a head, which no state lies behind."""
    cell = cell_of(backend, seqlen=48, dtype="fp64", kernel="reference", **options)
    batch, model = OP.make_inputs(cell), REGISTRY[backend]
    cut = replace(cell, parameters=Parameters({**cell.parameters, "segments": 3}))
    losses = [float(model.bind(batch, each)()) for each in (cell, cut)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    whole, in_segments = (model.gradients(batch, each) for each in (cell, cut))
    torch.testing.assert_close(in_segments["head.weight"], whole["head.weight"], rtol=1e-7, atol=1e-12)
    behind = "blocks.0.mixer.k.weight"
    assert 1e-4 < float((in_segments[behind] - whole[behind]).norm() / whole[behind].norm()) < 1


def test_the_small_model_has_segments_of_more_than_a_chunk():
    small = small_step(OP, cell_of(seqlen=2400, segments=12))
    assert (small.seqlen, small.get("segments")) == (198, 3)
    assert small_step(OP, cell_of(seqlen=2400)).get("segments") is None


class Lazy(GlaModel):
    """Looks at the first half of the tokens alone."""

    name = "lazy-model"

    def bind(self, inputs, cell):
        half = {name: x[:, : x.shape[1] // 2] for name, x in inputs.items()}
        return super().bind(half, cell)


class Frozen(GlaModel):
    """Never changes a weight."""

    name = "frozen-model"

    def bind(self, inputs, cell):
        model = self.build(cell)
        return lambda: model.loss(inputs["tokens"], inputs["targets"]).detach()


class Loud(GlaModel):
    """Right while it is small, and far off at the size that is timed."""

    name = "loud-model"

    def bind(self, inputs, cell):
        step = super().bind(inputs, cell)
        return step if cell == small_step(OP, cell) else lambda: 2 * step()


class Flipped(GlaModel):
    """The gradients of its gates have the wrong sign."""

    name = "flipped-model"

    def build(self, cell):
        model = super().build(cell)
        for name, parameter in model.named_parameters():
            if "mixer.gate" in name:
                parameter.register_hook(lambda gradient: -gradient)
        return model


class Stateless(GlaModel):
    """Every segment begins without a state."""

    name = "stateless-model"

    def build(self, cell):
        model = super().build(cell)
        segment_loss = model.segment_loss
        model.segment_loss = lambda tokens, targets, initial, start: segment_loss(tokens, targets, None, start)
        return model


class Lapsing(GlaModel):
    """Loses its loss for some steps."""

    name = "lapsing-model"

    def bind(self, inputs, cell):
        step, count = super().bind(inputs, cell), iter(range(10**6))
        return lambda: step() * (math.nan if 2 < next(count) < 9 else 1.0)


class ForgetfulKernel(GlaTorch):
    """Loses its state every 64 tokens."""

    name = "forgetful"

    def bind(self, inputs, cell):
        def forward():
            pieces = [{name: x[:, at : at + 64] for name, x in inputs.items()} for at in range(0, cell.seqlen, 64)]
            calls = [super(ForgetfulKernel, self).bind(each, cell) for each in pieces]
            return torch.cat([call() for call in calls], dim=1)

        return forward


class Forgetful(GlaModel):
    """Has a kernel that errs after 64 tokens."""

    name = "forgetful-model"

    def kernel_of(self, cell):
        return super().kernel_of(cell) if cell.get("kernel") else "forgetful"


class Diverging(GlaModel):
    """Ends in NaN after some steps."""

    name = "diverging-model"

    def bind(self, inputs, cell):
        step, count = super().bind(inputs, cell), iter(range(10**6))
        return lambda: step() * (math.nan if next(count) > 10 else 1.0)


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        (Lazy, r"relative error against the same model in float64: loss .* \(allowed 1e-04\)"),
        (Frozen, r"float64: loss .* \(allowed 1e-04\)"),
        (Flipped, r"float64: gradient 2.0e\+00 \(allowed 1e-02\).*; the worst gradient is blocks.\d.mixer.gate"),
        (Lapsing, r"float64: loss inf \(allowed 1e-04\)"),
        (Forgetful, r"float64: gradient .*, loss .*; the worst gradient is"),
        (Loud, r"the first loss is 8.\d+; a guess among the tokens has 4.17"),
        (Diverging, "the loss is nan after some steps"),
    ],
)
def test_a_model_that_does_not_train_as_it_should_has_no_time(backend, said):
    registry = load_registry()
    registry.add(ForgetfulKernel(), "a test")
    registry.add(made := backend(), "a test")
    tokens = 240 if backend is Loud else 80  # more than the small model has, or than a chunk
    layers = 2 if backend is Flipped else 1  # gradients of as few numbers as a bias are judged over all blocks
    record = measured(replace(cell_of(seqlen=tokens, **NARROW | {"layers": layers}), backend=backend.name), made)
    assert record.status == "inaccurate"
    assert re.search(said, record.reason)


def test_segments_without_a_state_are_found():
    registry = load_registry()
    registry.add(made := Stateless(), "a test")
    record = measured(replace(cell_of(seqlen=48, segments=3, **NARROW), backend=made.name), made)
    assert record.status == "inaccurate"
    assert re.search(r"float64: gradient \S+ \(allowed 1e-02\)", record.reason)


def test_a_step_that_is_faster_than_products_can_be_is_suspicious():
    slow = replace(JOB, ceilings=Ceilings(product_tflops=1e-6))
    record = StepMeter(OP, REGISTRY["gla-model"], slow).measure(cell_of(seqlen=16))
    assert (record.status, record.time_ms) == ("suspicious", None)
    assert "but a large product reaches 1e-06 TFLOP/s" in record.reason


def test_operations_are_six_per_weight_of_a_matrix_and_token_and_the_mixers_own():
    cell = cell_of("transformer-model", batch=2, seqlen=64)
    model = LanguageModel(REGISTRY["transformer-model"].config(cell), REGISTRY)
    matrices = sum(x.numel() for name, x in model.named_parameters() if x.ndim == 2 and "embedding" not in name)
    attention = 2 * 2 * 2 * (64 * 65 // 2) * 4 * 64  # layers, sequences, heads, pairs, products of 64
    assert REGISTRY["transformer-model"].executes(cell).flops == 6 * matrices * 128 + 3 * attention


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kernel": "gla-triton"}, "gla-triton: needs a GPU; none is used here; name another with --kernel"),
        ({"kernel": "linear-torch"}, "the kernel 'linear-torch' does not compute gla"),
        ({"kernel": "reference"}, None),
        ({"model_width": 100}, "width 100: whole heads need a multiple of 8; use 96 or 104"),
        ({"vocabulary": 1}, "a vocabulary has 2 tokens at least"),
        ({"segments": 5}, "64 tokens are not whole segments of one length; 5 have to divide them"),
        ({"segments": 4, "kernel": "gla-scan-torch"}, "the kernel 'gla-scan-torch' returns no states (allowed: ref"),
        ({"segments": 4}, None),
        ({"dtype": "fp16", "weights": "pure"}, "AdamW's moments are too small for fp16; use --weights fp32"),
        ({}, None),
    ],
)
def test_kernels_that_cannot_run_are_refused_before(changes, said):
    found = REGISTRY["gla-model"].limits(cell_of(**changes))
    assert found is None if said is None else found.startswith(said)


@pytest.mark.parametrize("backend", ["transformer-model", "mamba1-model", "mamba2-model"])
def test_models_that_carry_no_state_refuse_segments(backend):
    said = "carries no state from segment to segment; use --segments 1, or GLA's model or one of its kin"
    assert REGISTRY[backend].limits(cell_of(backend, segments=2)) == said


def test_other_passes_are_refused():
    assert "use --pass fwd+bwd" in GlaModel().limits(replace(cell_of(), pass_="fwd"))


def test_tokens_differ_between_batches_and_targets_are_the_next_ones():
    cell = cell_of()
    first, second = OP.make_batch(cell, 0), OP.make_batch(cell, 1)
    assert torch.equal(first["tokens"][:, 1:], first["targets"][:, :-1])
    assert not torch.equal(first["tokens"], second["tokens"])
    assert torch.equal(first["tokens"], OP.make_batch(cell, 0)["tokens"])
    assert not torch.equal(first["tokens"], OP.make_batch(replace(cell, seed=1), 0)["tokens"])


def test_a_step_is_made_ready_for_a_profile():
    inputs, steps = KINDS["training"].make_ready(OP, REGISTRY["gla-model"], cell_of())
    assert inputs.keys() == {"tokens", "targets"}
    assert float(steps.call()) == pytest.approx(math.log(64), rel=0.05)


def test_the_command_measures_a_preset(run, tmp_path):
    axes = ["--layers", "1", "--seqlen", "16", "--vocabulary", "64", "--time-limit", "0.05"]
    out = tmp_path / "run"
    code, text, error = run("train", "--backend", "gla-model,transformer-model", *axes, "--out", str(out))
    assert code == 0, error
    assert "tokens, thousand/s" in text
    records = RunFolder.open(out).load().records
    assert {record.status for record in records} == {"ok", "unsupported"}
    assert {record.cell.get("kernel") for record in records} == {None, "fla-gla", "flash-attn"}


def test_a_table_has_whole_sequences_before_segments(tmp_path):
    folder = RunFolder.create(tmp_path / "run", load_sweep("train-340m"), {})
    for segments in (4, None, 2):
        folder.append(Record(run_id="run", cell=cell_of(segments=segments), status="ok", time_ms=1.0))
    view = make_view([folder.load()])
    assert (view.x_name, view.panels[0].x_values) == ("segments", [1, 2, 4])


class Partly(GlaModel):
    """Never trains queries and keys, but for the gradients that are compared."""

    name, is_training = "partly-model", False

    def bind(self, inputs, cell):
        self.is_training = True
        return super().bind(inputs, cell)

    def build(self, cell):
        model = super().build(cell)
        for block in model.blocks if self.is_training else ():
            block.mixer.q.requires_grad_(False)
            block.mixer.k.requires_grad_(False)
        return model


@product(lambda weights: weights == "fp32", weights=["fp32", "pure"])
def test_in_half_precision_losses_tell_what_is_not_trained(weights):
    registry = load_registry()
    registry.add(partly := Partly(), "a test")
    cell = replace(cell_of("gla-model", dtype="bf16", weights=weights), backend="partly-model")
    record = StepMeter(OP, partly, JOB).measure(cell)
    assert record.status == "inaccurate"
    assert re.search(r"float64: loss \S+ \(allowed", record.reason)


def test_gradients_of_few_numbers_are_judged_over_all_blocks_and_have_to_be_there():
    few, many = torch.tensor([3.0]), torch.ones(65)
    expected = {"blocks.0.a": few, "blocks.1.a": 1e-9 * few, "blocks.0.b.0": many, "blocks.1.b.0": 1e-9 * many}
    assert worst_gradient({**expected, "blocks.1.a": 2e-9 * few}, expected)[1] < 1e-8
    assert worst_gradient({**expected, "blocks.1.a": 0 * few}, expected) == ("blocks.*.a", 1.0)
    off = {**expected, "blocks.1.b.0": 1.5e-9 * many}
    assert worst_gradient(off, expected) == ("blocks.1.b.0", pytest.approx(0.5))
    broken = {**expected, "blocks.0.a": torch.tensor([torch.nan])}
    assert worst_gradient(broken, expected)[0] == "blocks.*.a"
    assert not worst_gradient(broken, expected)[1] <= 1e9
