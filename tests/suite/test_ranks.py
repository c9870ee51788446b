"""Ranks: GPUs, or processes on a CPU, that share steps of training: what they measure, and what becomes of faults."""

import json
import re
import time
from dataclasses import replace

import pytest
import torch
from fake_workers import Workers
from test_survival import ends, lives  # noqa: F401 - a fixture

from glabench.backends import load_registry
from glabench.errors import UsageError
from glabench.measure.job import Job
from glabench.measure.kinds import KINDS
from glabench.measure.ranks import ALONE, Ranks
from glabench.measure.sampling import collect_samples
from glabench.measure.settings import Settings
from glabench.measure.timer import EagerTimer
from glabench.measure.training import small_step
from glabench.records import Record, RunFolder
from glabench.records.run import rows_of
from glabench.scheduling.loop import Lane, Version, measure_lanes
from glabench.scheduling.observer import Observer
from glabench.scheduling.plan import Place, estimate_cells, make_plan
from glabench.scheduling.process import ProcessWorker, WorkerDiedError, WorkerTimeoutError
from glabench.sweeps import Cell, Parameters, Sweep, Variant, expand, load_sweep, resolve

REGISTRY = load_registry()
OP = REGISTRY.ops["training"]
SIZES = {"model_width": 128, "layers": 1, "vocabulary": 64, "weights": "fp32"}

APART = """
from glabench.backends.models import GlaModel

class Apart(GlaModel):
    name, title = "apart-model", "ranks that never hear of each other"

    def loss_of(self, model, cell):
        return model.loss

BACKENDS = [Apart]
"""
ODD = """
import os, signal, subprocess, sys, time
from glabench.backends import Backend

class Odd(Backend):
    name, op, title, bind = "odd", "linear", "whose rank 1 misbehaves, while rank 0 waits", None

    def limits(self, cell):
        if os.environ["RANK"] == "1":
            if cell.seqlen == 16:
                raise RuntimeError("a made-up fault")
            if cell.seqlen == 32:
                os.kill(os.getpid(), signal.SIGKILL)
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", os.environ["FAKE_CHILD"]])
        time.sleep(600)

BACKENDS = [Odd]
"""


def cell_of(gpus=2, batch=4, **parameters):
    parameters = Parameters(SIZES | {"gpus": gpus} | parameters)
    return Cell("gla-model", "training", "fwd+bwd", batch, 16, "fp32", parameters, "cpu")


# Real ones


TINY = ["--width", "128", "--layers", "1", "--vocabulary", "64", "--seqlen", "16", "--batch", "2", "--device", "cpu"]
TRAIN = ["run", "train-340m-gpus", *TINY, "--gpus", "2", "--time-limit", "0.1", "--json", "-"]


@pytest.mark.parametrize(("ways", "more"), [(["ddp", "fsdp"], []), (["sequence"], ["--recompute", "on"])])
def test_two_processes_train_as_one_does(command, ways, more):
    code, text, error = command(*TRAIN, "--backend", "gla-model", "--parallel", ",".join(ways), *more)
    records = json.loads(text)
    assert ([record.get("parallel", "ddp") for record in records], code) == (ways, 0), (records, error)
    for record, parallel in zip(records, ways, strict=True):
        assert record["gpus"] == 2
        assert record["rel_error"]["gradient"] < 1e-4
        assert record["rel_error"]["loss"] < 1e-5
        assert len(record["samples_ms"]) >= 3
        assert min(record["time_ms"], record["peak_resident_mib"], record["tflops"]) > 0
        shares_sequences = parallel == "sequence"
        missing = [record.get(name) is None for name in ("mixer_ms", "sent_mib")]
        assert missing == [shares_sequences, not shares_sequences]


def test_ranks_that_do_not_share_gradients_are_found(command, tmp_path):
    (tmp_path / "apart.py").write_text(APART)
    code, text, _ = command(*TRAIN, "--backend", "apart-model", "--plugin", "apart.py", "--parallel", "ddp")
    (record,) = json.loads(text)
    assert (record["status"], code) == ("inaccurate", 4)
    assert re.search(r"gradient \S+ \(allowed 1e-02\)", record["reason"])


@pytest.fixture
def odd(tmp_path):
    """Starts two ranks whose second one misbehaves, asks for a cell, and ends them."""
    plugin = tmp_path / "odd.py"
    plugin.write_text(ODD)
    started = []

    def ask(seqlen, timeout_s=60.0):
        job = Job("odd", "run", "cpu", Settings(cell_timeout_s=timeout_s), (str(plugin),), gpus=2)
        started.append(ProcessWorker(job, {"FAKE_CHILD": str(tmp_path)}))
        return started[-1].measure(Cell("odd", "linear", "fwd", 1, seqlen, "fp32", Parameters({"gpus": 2}), "cpu"))

    ask.close = lambda: [each.close() for each in started]
    yield ask
    ask.close()


def test_a_rank_that_fails_makes_the_record(odd):
    record = odd(16)
    assert (record.status, record.reason) == ("error", "rank 1: RuntimeError: a made-up fault")


def test_a_rank_that_is_killed_is_named(odd):
    with pytest.raises(WorkerDiedError, match="ended with exit code 1: rank 1 was killed by signal SIGKILL"):
        odd(32)


def test_ranks_that_hang_are_killed_with_their_children(odd, lives):  # noqa: F811
    with pytest.raises(WorkerTimeoutError, match=r"no result within 6 s \(--cell-timeout\)"):
        odd(48, timeout_s=6.0)
    assert lives()  # the child of rank 1, and torchrun and its ranks, whose arguments name the plugin
    odd.close()
    assert ends(lives)


# What they agree on


class Scripted(Ranks):
    """Two ranks, of which the other says what is in `says`, in turn, then as this one."""

    says = ()

    def gather(self, x):
        other, *rest = self.says or (x,)
        object.__setattr__(self, "says", rest)
        return [x, other] if self.rank == 0 else [other, x]


def two(rank=0, *says):
    ranks = Scripted(rank, 2)
    object.__setattr__(ranks, "says", says)
    return ranks


def test_a_process_alone_says_everything_itself():
    assert [ALONE.first(1.0), ALONE.most(2.0), ALONE.mean(3.0), ALONE.gather(4.0)] == [1.0, 2.0, 3.0, [4.0]]
    x = torch.arange(6).view(3, 2)
    assert torch.equal(ALONE.share({"x": x})["x"], x)


def test_ranks_agree():
    assert two(1, 5.0).first(2.0) == 5.0
    assert two(0, 5.0).first(2.0) == 2.0
    assert two(0, 5.0).most(2.0) == two(1, 2.0).most(5.0) == 5.0
    assert two(0, float("nan")).most(2.0) == float("inf")
    assert two(0, 4.0).mean(2.0) == 3.0


def test_shares_are_the_rows_of_the_batch_in_order():
    batch = OP.make_batch(cell_of(), 0)
    parts = [Ranks(rank, 4).share(batch) for rank in range(4)]
    for name, x in batch.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), x)
        assert {len(part[name]) for part in parts} == {1}


def test_a_sample_takes_as_long_as_for_the_slowest_and_as_many_calls_for_all():
    calls = []
    # Says how long one call takes, waits, says how long a sample took.
    sample = EagerTimer("cpu", two(0, 0.01, 0.0, 3.0)).bind(None, lambda: calls.append(1))
    calls.clear()
    assert sample().ms == 1500.0  # 3 s for the 2 calls that make 20 ms where one takes 10
    assert len(calls) == 3  # with the one alone


def test_ranks_begin_a_sample_together():
    heard = []

    class Heard(Ranks):
        def wait(self):
            heard.append("all are here")

        def most(self, x):
            return 1.0

    EagerTimer("cpu", Heard()).bind(None, lambda: heard.append("call"))()
    assert heard == ["call", "call", "all are here", "call"]  # for the number of calls, alone, and timed


def test_sampling_ends_by_the_first_ranks_clock():
    ranks = two(1, *(float(second) for second in range(100)))
    timer_sample = EagerTimer("cpu").bind(None, lambda: time.sleep(1e-3))
    settings = Settings(time_limit_s=4.5, precision=1e-9)
    found = collect_samples(timer_sample, settings, clock=lambda: ranks.first(0.0))
    assert (len(found.kept), found.stop_reason) == (5, "time limit")


# Workers and machines


def place_of(device, **environment):
    return Place({"device": device, "gpus": 0, **environment}, REGISTRY)


def test_a_cell_that_gpus_share_has_a_worker_of_its_own(tmp_path):
    sizes = {"width": "128", "layers": "1", "vocabulary": "64", "batch": "8", "dtype": "fp32", "pass": "fwd+bwd"}
    sweep = Sweep("s", {**sizes, "gpus": "1,2,8", "seqlen": "16,32"}, (Variant("gla-model"),), title="GPUs")
    plan = make_plan(sweep, {}, Settings(), place_of("cpu", cpu_cores=4))
    lane = Lane(RunFolder.create(tmp_path / "run", plan.sweep, plan.environment()), Version())
    workers = Workers()
    measure_lanes([lane], plan, Observer(), "again", start_worker=workers)
    assert [(w.job.gpus, [c.gpus for c in w.asked], w.closed) for w in workers.started] == [
        (1, [1, 1], True),
        (2, [2], True),
        (2, [2], True),
    ]
    refused = [record for record in lane.folder.records() if record.status != "ok"]
    assert {(record.cell.gpus, record.status, record.reason) for record in refused} == {
        (8, "unsupported", "--gpus 8: on a CPU these are processes, at most 4 here")
    }
    assert [each.unsupported for each in estimate_cells(plan) if each.cell.gpus == 8] == [refused[0].reason] * 2


@pytest.mark.parametrize(
    ("place", "most", "why"),
    [
        (place_of("cpu", cpu_cores=1), 2, "on a CPU these are processes, at most 2 here"),
        (place_of("cuda", gpus=4, gpu={"index": 0}), 4, "torch sees 4 GPUs here"),
        (place_of("cuda", gpus=4, gpu={"index": 2}), 2, "torch sees 2 GPUs here from cuda:2 on"),
        (place_of("cuda", gpus=1, gpu={"index": 0}), 1, "torch sees 1 GPU here"),
    ],
    ids=lambda value: value.device if isinstance(value, Place) else None,
)
def test_a_machine_lacks_gpus_from_a_number_on(place, most, why):
    assert [gpus for gpus in range(1, 9) if place.lacks_gpus(cell_of(gpus)) is None] == list(range(1, most + 1))
    assert place.lacks_gpus(cell_of(8)) == f"--gpus 8: {why}"


# Cells, limits and numbers


def test_the_small_model_has_a_sequence_per_gpu():
    assert [small_step(OP, cell_of(gpus, batch=8)).batch for gpus in (None, 2, 4)] == [2, 2, 4]


TOKENS = {"seqlen": "64", "batch": "4", "dtype": "bf16", "pass": "fwd+bwd"}


def test_a_way_to_share_needs_gpus_that_share():
    traits = REGISTRY.traits()
    with pytest.raises(UsageError, match="parallel has no effect without gpus; give --gpus too"):
        expand(resolve(load_sweep("train-340m"), "cuda", {"parallel": "fsdp"}, traits), traits, "cuda")
    mixed = Sweep("s", {"parallel": "fsdp", **TOKENS}, (Variant("gla-model", {"gpus": "2"}), Variant("linear-model")))
    assert [cell.get("parallel") for cell in expand(mixed, traits, "cuda")] == ["fsdp", None]
    alone = expand(resolve(load_sweep("train-340m-gpus"), "cuda", {"gpus": "1"}, traits), traits, "cuda")
    assert [cell.get("parallel") for cell in alone] == [None, None]


def test_a_batch_that_gpus_cannot_share_is_refused():
    limits = REGISTRY["gla-model"].limits
    assert limits(cell_of(gpus=2, batch=4, kernel="reference")) is None
    assert limits(cell_of(gpus=4, batch=6)) == "4 GPUs need a batch that is a multiple of 4; it is 6 (--batch)"


def test_a_shard_of_weights_takes_less():
    one, ddp, fsdp = (OP.least_bytes(cell_of(gpus, parallel=by)) for gpus, by in ((1, None), (2, None), (2, "fsdp")))
    assert one == ddp == 2 * fsdp


def test_one_gpu_is_the_same_cell_however_several_share():
    found = expand(resolve(load_sweep("train-340m-gpus"), "cuda", {}, REGISTRY.traits()), REGISTRY.traits(), "cuda")
    own = [(cell.gpus, cell.get("gpus"), cell.get("parallel")) for cell in found if cell.backend == "gla-model"]
    assert sorted(own, key=str) == [
        *((1, None, None), (2, 2, "fsdp"), (2, 2, None), (4, 4, "fsdp"), (4, 4, None)),
    ]
    assert {cell.alone for cell in found if cell.gpus > 1} == {cell for cell in found if cell.gpus == 1}


def test_efficiency_is_of_the_same_cell_on_one_gpu_in_the_run():
    def record(cell, ms):
        return Record(run_id="r", status="ok", cell=cell, time_ms=ms, tflops=8.0, product_tflops=10.0)

    other = replace(cell_of(None), seqlen=32)
    rows = rows_of([record(cell_of(4, parallel="fsdp"), 5.0), record(cell_of(None), 16.0), record(other, 99.0)])
    assert rows[0]["tokens_per_s"] == pytest.approx(4 * 16 / 5e-3)
    assert rows[0]["tokens_per_s_gpu"] == pytest.approx(16 / 5e-3)
    assert [row["efficiency_pct"] for row in rows] == [pytest.approx(80.0), None, None]
    assert [row["mfu_pct"] for row in rows] == [pytest.approx(20.0), *[pytest.approx(80.0)] * 2]
    assert rows_of([record(cell_of(4), 5.0)])[0]["efficiency_pct"] is None


def test_a_profile_is_of_one_gpu():
    with pytest.raises(UsageError, match="--gpus: a profile is of one GPU; leave out --gpus"):
        KINDS["training"].make_ready(OP, REGISTRY["gla-model"], cell_of())


@pytest.mark.parametrize("stored", [0, -2, "four", 2.5, True])
def test_what_a_record_says_of_gpus_may_be_anything(stored):
    assert cell_of(stored).gpus == 1
