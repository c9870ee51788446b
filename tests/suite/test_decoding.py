"""Decoding by models: what is recorded, how wrong steps are found, what is refused, what a step counts."""

import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from glabench.backends import load_registry
from glabench.backends.decoding import Decoder, GlaDecode, TransformerDecode
from glabench.backends.graphs import uses_graph
from glabench.measure import decoding
from glabench.measure.decoding import DecodeMeter
from glabench.measure.job import Job
from glabench.measure.kinds import KINDS
from glabench.measure.settings import Settings
from glabench.measure.worker import _Cells
from glabench.records import RunFolder
from glabench.records.environment import Ceilings
from glabench.records.metrics import derived
from glabench.scheduling.plan import _more_packages
from glabench.sweeps import load_sweep
from glabench.sweeps.expand import expand, resolve
from glabench.sweeps.model import Cell, Parameters

REGISTRY = load_registry()
OP = REGISTRY.ops["decode"]
SIZES = {"model_width": 128, "layers": 1, "vocabulary": 64}
SETTINGS = Settings(time_limit_s=0.02, max_samples=3, warm_up_s=0.0, least_time_s=0.0)
JOB = Job("gla-decode", "run", "cpu", SETTINGS, ceilings=Ceilings(copy_gbps=20.0, product_tflops=2.0))
BACKENDS = [name for name, each in REGISTRY.items() if each.work == "decode"]
pytestmark = pytest.mark.usefixtures("one_thread", "soon_settled")


def cell_of(backend="gla-decode", batch=2, prefix=24, dtype="fp32", **parameters):
    own = Parameters(SIZES | {"prefix": prefix} | parameters)
    return Cell(backend, "decode", "infer", batch, 1, dtype, own, "cpu")


def measured(cell, backend=None, job=JOB):
    return DecodeMeter(OP, backend or REGISTRY[cell.backend], job).measure(cell)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_model_decodes_and_is_measured(backend):
    record = measured(cell_of(backend))
    assert record.status == "ok", record.reason
    assert max(record.rel_error.values()) < 1e-5
    assert record.rel_error.keys() == {"prefill", "steps", "steps_at_size"}
    assert record.timing == "eager, calls back to back, wall clock"
    assert min(record.time_ms, record.prefill_ms, record.first_call_s) > 0
    assert record.peak_resident_mib >= 0  # memory of an earlier test may do
    assert record.allocated_state_kib >= record.state_kib > 0


@pytest.mark.parametrize("backend", ["gla-decode", "transformer-decode", "mamba2-decode"])
def test_in_half_precision_logits_have_their_rounding_and_no_more(backend):
    record = measured(cell_of(backend, dtype="bf16"))
    assert record.status == "ok", record.reason
    assert 1e-4 < record.rel_error["steps"] < 2e-2


def test_what_a_sequence_needs_and_what_is_there_for_it_are_recorded():
    gla, attention = measured(cell_of()), measured(cell_of("transformer-decode"))
    assert gla.state_kib == gla.allocated_state_kib == 4 * 16 * 32 * 4 / 1024
    # Keys and values of 128 channels in float32, with room for 128 more tokens.
    assert (attention.state_kib, attention.allocated_state_kib) == (24, 24 + 128)
    assert attention.launch == "prefill sdpa-math, step scaled_dot_product_attention with a mask"


def test_tokens_per_second_are_one_per_sequence_and_step():
    record = measured(cell_of(batch=3))
    row = {**record.to_json(), "samples": None}
    assert derived(row)["tokens_per_s"] == pytest.approx(3e3 / record.time_ms)
    assert record.roofline_pct == pytest.approx(100 * max(record.gbps / 20, record.tflops / 2))


class Forgetful(GlaDecode):
    """Its steps leave the states as they were after the prefix."""

    name = "forgetful-decode"

    def decoder(self, inputs, cell):
        decoder = super().decoder(inputs, cell)
        step = decoder.step

        def without_states():
            before = [x.clone() for layer in decoder.states.layers for x in layer.fixed]
            logits = step()
            for x, old in zip((x for layer in decoder.states.layers for x in layer.fixed), before, strict=True):
                x.copy_(old)
            return logits

        decoder.step = without_states
        return decoder


class Displaced(TransformerDecode):
    """Its tokens are one place too far behind the prefix."""

    name = "displaced-decode"

    def decoder(self, inputs, cell):
        decoder = super().decoder(inputs, cell)
        prefill = decoder.prefill

        def shifted(before):
            logits = prefill(before)
            decoder.rewind(before.shape[1] + 1)
            return logits

        decoder.prefill = shifted
        return decoder


class Hasty(GlaDecode):
    """Looks at the last half of the prefix alone."""

    name = "hasty-decode"

    def decoder(self, inputs, cell):
        decoder = super().decoder(inputs, cell)
        prefill = decoder.prefill
        decoder.prefill = lambda before: prefill(before[:, before.shape[1] // 2 :])
        return decoder


class Loud(GlaDecode):
    """Right while it is small, and far off at the size that is timed."""

    name = "loud-decode"

    def decoder(self, inputs, cell):
        decoder = super().decoder(inputs, cell)
        step = decoder.step
        decoder.step = step if cell.batch <= 2 else lambda: 1.5 * step()
        return decoder


class Tired(GlaDecode):
    """Does its steps until it is timed."""

    name = "tired-decode"

    def decoder(self, inputs, cell):
        decoder, calls = super().decoder(inputs, cell), iter(range(10**6))
        step, last = decoder.step, []

        def lazy():
            if next(calls) < 6:
                last[:] = [step()]
            return last[0]

        decoder.step = lazy
        return decoder


class Remembering(GlaDecode):
    """At the size that is timed it does the first step alone, and then names the same logits."""

    name = "remembering-decode"

    def decoder(self, inputs, cell):
        decoder = super().decoder(inputs, cell)
        step, known = decoder.step, []
        if cell.batch <= 2:
            return decoder

        def remembered():
            known[:] = known or [step().clone()]
            return known[0]

        decoder.step = remembered
        return decoder


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        (Remembering, r"beyond 0.01 after the timing, against all tokens at once: steps"),
        (Forgetful, r"beyond 0.002 against the same model's logits of all tokens at once in float64: steps \S+$"),
        (Displaced, r"float64: steps \S+$"),
        (Hasty, r"float64: prefill \S+, steps \S+$"),
        (Loud, r"beyond 0.01 against all tokens at once: steps_at_size 5.0e-01$"),
        (Tired, r"beyond 0.01 after the timing, against all tokens at once: steps"),
    ],
)
def test_a_model_that_does_not_go_on_as_it_should_has_no_time(backend, said):
    registry = load_registry()
    registry.add(made := backend(), "a test")
    cell = replace(cell_of("gla-decode", batch=4), backend=backend.name)
    record = measured(cell, made)
    assert record.status == "inaccurate"
    assert record.time_ms is record.prefill_ms is record.samples_ms is None
    assert re.search(said, record.reason)


def test_sequences_never_walk_off_the_end_of_their_cache(monkeypatch):
    places = []

    class Watched(Decoder):
        def step(self):
            places.append(int(self.states.place.max()) + 1 - self.states.room)
            return super().step()

    monkeypatch.setattr("glabench.backends.decoding.Decoder", Watched)
    monkeypatch.setattr("glabench.measure.timer._LEAST_BATCH_S", 1e3)  # as many steps in a sample as there can be
    record = measured(cell_of("transformer-decode", batch=1, prefix=4))
    assert record.status == "ok", record.reason
    assert -30 < max(places) <= 0


def test_a_step_that_is_faster_than_products_or_copies_can_be_is_suspicious(monkeypatch):
    slow = replace(JOB, ceilings=Ceilings(product_tflops=1e-9, copy_gbps=1e6))
    record = measured(cell_of(), job=slow)
    assert (record.status, record.time_ms) == ("suspicious", None)
    assert "but a large product reaches 1e-09 TFLOP/s" in record.reason
    monkeypatch.setattr(decoding, "_LEAST_READ", 0)
    record = measured(cell_of(), job=replace(JOB, ceilings=Ceilings(product_tflops=1e6, copy_gbps=1e-6)))
    assert "but a copy reaches 0 GB/s" in record.reason


def test_a_step_counts_its_weights_once_and_what_a_sequence_needs():
    backend, cell = REGISTRY["transformer-decode"], cell_of("transformer-decode", batch=3, prefix=40, dtype="bf16")
    weights = sum(x.numel() for name, x in backend.build(cell).named_parameters() if "embedding" not in name)
    matrices = weights - 3 * 128  # all but the norms'
    counts = backend.executes(cell)
    assert counts.flops == 3 * (2 * matrices + 41 * 4 * 128)
    assert counts.bytes == 2 * weights + 3 * 41 * 2 * 128 * 2
    gla = REGISTRY["gla-decode"]
    assert gla.executes(cell_of(prefix=40)) == gla.executes(cell_of(prefix=4000))


@pytest.mark.parametrize(
    ("backend", "changes", "said"),
    [
        ("gla-decode", {"prefix": None}, "a step goes on after a prefix: give --prefix"),
        ("gla-decode", {"graphs": "on"}, "CUDA graphs need a GPU; use --graphs off"),
        ("gla-decode", {"kernel": "gla-scan-torch"}, "the kernel 'gla-scan-torch' returns no states (allowed: ref"),
        ("gla-decode", {"kernel": "linear-torch"}, "the kernel 'linear-torch' does not compute gla"),
        ("gla-decode", {"model_width": 100}, "width 100: whole heads need a multiple of 8"),
        ("transformer-decode", {"kernel": "sdpa-math", "graphs": "off"}, None),
        ("gla-decode", {}, None),
    ],
)  # fmt: skip
def test_cells_that_cannot_be_are_refused(backend, changes, said):
    found = REGISTRY[backend].limits(cell_of(backend, **changes))
    assert found is None if said is None else found.startswith(said)


def test_a_step_without_a_prefix_is_refused_before_it_runs(run):
    code, out, _ = run("decode", "--backend", "gla-decode", "--prefix", "none", "--batch", "1", "--dry-run")
    assert code == 0
    assert "unsupported: a step goes on after a prefix: give --prefix" in " ".join(out.split())


def test_other_passes_and_more_tokens_are_refused():
    limits = REGISTRY["gla-decode"].limits
    assert limits(replace(cell_of(), pass_="fwd")) == "decoding has no backward; use --pass infer"
    assert limits(replace(cell_of(), seqlen=2)).startswith("a step has one token per sequence; use --seqlen 1")


def test_steps_are_replayed_from_graphs_on_a_gpu_unless_they_are_off():
    on_gpu = [replace(cell_of(graphs=value), device="cuda") for value in (None, "on", "off")]
    assert [uses_graph(cell) for cell in on_gpu] == [True, True, False]
    assert not uses_graph(cell_of())


def test_a_step_is_made_ready_for_a_profile():
    inputs, steps = KINDS["decode"].make_ready(OP, REGISTRY["gla-decode"], cell_of())
    assert {name: tuple(x.shape) for name, x in inputs.items()} == {"before": (2, 24), "tokens": (2, 1)}
    assert steps.call().shape == (2, 64)
    assert not torch.equal(steps.call(), steps.call())


def test_the_preset_has_batches_of_half_a_million_tokens_at_most():
    traits = REGISTRY.traits()
    cells = expand(resolve(load_sweep("decode-340m"), "cuda", {}, traits), traits, "cuda")
    sizes = {(cell.get("prefix"), cell.batch) for cell in cells}
    k = 1024
    assert sizes == {(k, 1), (k, 16), (k, 256), (4 * k, 1), (4 * k, 16), (16 * k, 1), (16 * k, 16), (64 * k, 1)}
    assert {cell.backend for cell in cells} == set(BACKENDS)
    assert len(cells) == len(sizes) * len(BACKENDS)
    assert max(prefix * batch for prefix, batch in sizes) <= 512 * k


class Careless(GlaDecode):
    """Whose words of packages are wrong."""

    name = "careless-decode"

    def more_packages(self, cell):
        raise RuntimeError("a made-up fault")


def test_packages_that_decide_times_are_the_kernels_and_the_layers_and_none_if_a_plugin_is_wrong(monkeypatch):
    monkeypatch.delenv("FLA_DISABLE_BACKEND_DISPATCH", raising=False)
    found = {name: _more_packages(REGISTRY[name], cell_of(name, kernel=kernel)) for name, kernel in (
        ("gla-decode", "fla-gla"), ("transformer-decode", None), ("mamba2-decode", "mamba2")
    )}  # fmt: skip
    assert {"fla-core", "tilelang"} <= set(found["gla-decode"])
    assert "flash-attn" in found["transformer-decode"]
    assert {"mamba-ssm", "causal-conv1d"} <= set(found["mamba2-decode"])
    assert _more_packages(Careless(), cell_of()) == ()


@pytest.mark.parametrize("backend", ["gla-decode", "transformer-decode"])
def test_a_prefix_for_which_there_is_no_memory_is_not_tried(backend):
    """The system would kill the process."""
    record = _Cells(REGISTRY, replace(JOB, backend=backend)).record(cell_of(backend, prefix=10**11))
    assert record.status == "oom"
    assert re.fullmatch(r"it takes about \d+ GiB; \S+ GiB are free", record.reason)


def test_the_command_measures_a_preset(run, tmp_path):
    axes = ["--layers", "1", "--vocabulary", "64", "--prefix", "16", "--batch", "1", "--time-limit", "0.02"]
    out = tmp_path / "run"
    code, text, error = run("decode", "--backend", "gla-decode,transformer-decode", *axes, "--out", str(out))
    assert code == 0, error
    assert "tokens, thousand/s" in text
    records = RunFolder.open(out).load().records
    assert [(record.cell.backend, record.status) for record in records] == [
        ("gla-decode", "ok"), ("transformer-decode", "ok")
    ]  # fmt: skip


def test_a_captured_step_goes_on_from_a_prefix_that_follows(monkeypatch):
    """With a stand-in for CUDA's graphs: what is captured runs again, and writes where it wrote before."""
    cell = cell_of("transformer-decode")
    rows = OP.make_rows(cell, 2)
    decoder = REGISTRY["transformer-decode"].decoder({"tokens": rows[:, :1].clone()}, cell)
    eager, outputs = decoder._eager, []

    class Graph:
        def replay(self):
            outputs[-1].copy_(eager())

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda _: nullcontext())
    monkeypatch.setattr(decoder, "_eager", lambda: outputs.append(eager()) or outputs[-1])
    decoder.capture()
    assert len(outputs) == 4
    decoder.prefill(rows[:, :24])
    for place in (24, 25):
        decoder.tokens.copy_(rows[:, place : place + 1])
        assert decoder.step() is outputs[-1]
        torch.testing.assert_close(outputs[-1], decoder.model(rows)[:, place], rtol=1e-4, atol=1e-5)
