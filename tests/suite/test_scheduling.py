"""The measuring loop with made-up workers: order, fresh workers, rounds, interruptions; plans and their estimates."""

import errno
import json
import os
from dataclasses import replace

import pytest
from conftest import FAKES
from fake_workers import Workers, measured
from simulated import record

from glabench.backends import load_registry
from glabench.checking import _Look
from glabench.devices.environment import collect
from glabench.errors import (
    GlabenchError,
    InterruptedRunError,
    NothingToRunError,
    RecordNotKeptError,
    UsageError,
)
from glabench.measure.job import Job
from glabench.measure.settings import Settings
from glabench.records import Record, RunFolder
from glabench.scheduling.folders import lanes_of_rounds, latest_run, rounds_in
from glabench.scheduling.loop import Lane, Version, measure_lanes
from glabench.scheduling.observer import Observer
from glabench.scheduling.plan import Place, Plan, estimate_cells, expected_seconds, make_plan
from glabench.scheduling.process import WorkerDiedError, WorkerTimeoutError
from glabench.scheduling.runs import Request, announce, check_settings
from glabench.scheduling.versions import Rounds, Trial
from glabench.sweeps import Cell, Parameters, Sweep, Variant
from glabench.verdicts import Limits

AXES = {"seqlen": "1..3:+1", "batch": "1", "heads": "1", "head_dim": "16", "dtype": "fp32", "pass": "fwd"}
SETTINGS = Settings(time_limit_s=0.02)
OLD, NEW = (Version(name, {"SIDE": name}, code={"kernels": name}) for name in ("old", "new"))


@pytest.fixture(scope="module")
def place():
    return Place(collect("cpu"), load_registry([str(FAKES)]), (str(FAKES),))


@pytest.fixture
def plan(place):
    """Three cells of two backends."""
    sweep = Sweep("small", AXES, (Variant("linear-torch"), Variant("gla-torch")), title="A small sweep")
    return make_plan(sweep, {}, SETTINGS, place)


class Heard(Observer):
    """Records all calls; at a record whose number is in `then`, raises the exception stored there."""

    def __init__(self, then=()):
        self.said, self.events, self.then = [], [], dict(then)

    def say(self, text):
        self.said.append(text)

    def begin(self, cells, done):
        self.events.append(("begin", cells, done))

    def start(self, cell, lane):
        self.events.append(("start", lane, cell.backend, cell.seqlen))

    def record(self, record, lane):
        self.events.append((record.status, lane, record.cell.backend, record.cell.seqlen))
        if len(self.records) in self.then:
            raise self.then[len(self.records)]

    def end(self):
        self.events.append(("end",))

    @property
    def records(self):
        return [event for event in self.events if event[0] not in ("begin", "start", "end")]


@pytest.fixture
def lane(tmp_path, plan):
    return Lane(RunFolder.create(tmp_path / "here", plan.sweep, plan.environment()), OLD)


def measure(lanes, plan, script=(), heard=None, **options):
    workers, heard = Workers(script), heard or Heard()
    measure_lanes(lanes, plan, heard, "again", start_worker=workers, **options)
    return workers, heard


# One lane


def test_one_worker_serves_all_cells_of_a_backend(lane, plan):
    workers, heard = measure([lane], plan)
    assert [(w.job.backend, len(w.asked), w.closed) for w in workers.started] == [
        ("linear-torch", 3, True),
        ("gla-torch", 3, True),
    ]
    assert [found.cell for found in lane.folder.records()] == plan.cells
    assert heard.events[0] == ("begin", 6, 0)
    assert heard.events[-1] == ("end",)


def test_a_worker_is_told_everything_that_its_records_need(lane, plan):
    file = lane.folder.path / "environment.json"
    ceilings = {"copy_gbps": 4000.0, "product_tflops": None}
    file.write_text(json.dumps({**json.loads(file.read_text()), "ceilings": ceilings}))
    worker = measure([lane], plan)[0].started[0]
    job = worker.job
    assert (job.run_id, job.device, job.settings, job.code) == ("here", "cpu", SETTINGS, OLD.hash)
    assert (job.ceilings.copy_gbps, job.ceilings.product_tflops) == (4000.0, None)
    assert worker.variables == {"SIDE": "old"}
    assert {found.code for found in lane.folder.records()} == {OLD.hash}  # the parent adds no values


@pytest.mark.parametrize(
    ("answer", "status"),
    [(WorkerDiedError("gone"), "crashed"), (WorkerTimeoutError("late"), "timeout"), ("oom", "oom"), ("error", "error")],
)
def test_a_fresh_worker_follows_a_failure_and_the_other_cells_are_measured(lane, plan, answer, status):
    workers, heard = measure([lane], plan, {("linear-torch", 2): answer})
    assert [event[0] for event in heard.records] == ["ok", status, "ok", "ok", "ok", "ok"]
    assert [len(worker.asked) for worker in workers.started] == [2, 1, 3]
    failed = lane.folder.records()[1]
    assert (failed.status, failed.run_id, failed.code) == (status, "here", OLD.hash)


@pytest.mark.parametrize("status", ["unsupported", "inaccurate"])
def test_a_harmless_failure_keeps_the_worker(lane, plan, status):
    workers, heard = measure([lane], plan, {("linear-torch", 2): status})
    assert [event[0] for event in heard.records] == ["ok", status, "ok", "ok", "ok", "ok"]
    assert len(workers.started) == 2


@pytest.mark.parametrize("answer", [record([1.0]), ValueError("not JSON")], ids=["another cell", "no record"])
def test_an_answer_that_makes_no_sense_costs_its_cell_only(lane, plan, answer):
    _, heard = measure([lane], plan, {("linear-torch", 2): answer})
    assert [event[0] for event in heard.records] == ["ok", "crashed", "ok", "ok", "ok", "ok"]


def test_a_failure_of_the_last_cell_starts_no_worker_for_nothing(lane, plan):
    workers, _ = measure([lane], plan, {("linear-torch", 3): "oom"})
    assert [len(worker.asked) for worker in workers.started] == [3, 3]


def test_a_record_is_on_the_disk_before_it_is_told_of_and_told_of_before_its_worker_is_closed(lane, plan):
    workers, seen = Workers({1: "oom"}), []

    class Looking(Observer):
        def record(self, record, lane_name):
            seen.append((len(lane.folder.records()), workers.started[-1].closed))

    measure_lanes([lane], plan, Looking(), "again", start_worker=workers)
    assert seen[:2] == [(1, False), (2, False)]


@pytest.mark.parametrize("when", ["asked", "told"])
def test_an_interruption_closes_the_worker_keeps_the_records_and_says_how_to_go_on(lane, plan, when):
    heard = Heard({1: KeyboardInterrupt()} if when == "told" else ())
    script = {("linear-torch", 2): KeyboardInterrupt()} if when == "asked" else {}
    workers = Workers(script)
    with pytest.raises(InterruptedRunError, match=r"interrupted; what was measured is kept, again$"):
        measure_lanes([lane], plan, heard, "again", start_worker=workers)
    assert [worker.closed for worker in workers.started] == [True]
    assert len(lane.folder.records()) == 1
    assert heard.events[-1] == ("end",)
    _, heard = measure([lane], plan)
    assert heard.said == ["1 of 6 cells are already measured"]
    assert heard.events[0] == ("begin", 6, 1)
    assert len(lane.folder.records()) == 6


def test_what_failed_is_measured_again_only_if_that_is_asked_for(lane, plan):
    measure([lane], plan, {("linear-torch", 2): "error"})
    workers, heard = measure([lane], plan)
    assert (workers.started, heard.said) == ([], ["6 of 6 cells are already measured"])
    workers, heard = measure([lane], plan, retry_failed=True)
    assert [(cell.backend, cell.seqlen) for cell in workers.asked] == [("linear-torch", 2)]
    assert heard.said == ["5 of 6 cells are already measured"]
    assert {found.status for found in lane.folder.records()} == {"ok"}


def test_no_room_for_a_worker_ends_the_run_with_a_line(lane, plan):
    def start(*_):
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with pytest.raises(GlabenchError, match=r"cannot be measured: Resource temporarily unavailable; what was measured"):
        measure_lanes([lane], plan, Heard(), "again", start_worker=start)


# Several lanes: rounds in turns


@pytest.fixture
def rounds(plan, tmp_path):
    """Makes the lanes of two rounds of two versions."""

    def lanes(resume=False, changed=plan, count=2, new=NEW):
        return lanes_of_rounds(changed, {"base": OLD, "new": new}, count, tmp_path / "rounds", Observer(), resume)

    return lanes


def test_rounds_are_measured_in_turns_each_in_a_fresh_worker(rounds, plan):
    lanes = rounds()
    assert [lane.name for lane in lanes] == ["base-1", "new-1", "new-2", "base-2"]
    workers, heard = measure(lanes, plan)
    assert heard.events[0] == ("begin", 24, 0)
    turns = [(worker.job.backend, worker.job.run_id, worker.variables["SIDE"]) for worker in workers.started]
    assert turns == [
        (backend, name, "old" if name.startswith("base") else "new")
        for backend in ("linear-torch", "gla-torch")
        for name in ("base-1", "new-1", "new-2", "base-2")
    ]
    assert all(worker.closed for worker in workers.started)
    assert [event[1] for event in heard.records[:12:3]] == ["base-1", "new-1", "new-2", "base-2"]
    assert {found.code for lane in lanes for found in lane.folder.records()} == {OLD.hash, NEW.hash}
    assert {found.code for found in lanes[1].folder.records()} == {NEW.hash}


def test_every_folder_of_rounds_is_locked_and_none_stays_locked(rounds, plan):
    lanes = rounds()
    for other in lanes:
        with other.folder.locked(), pytest.raises(UsageError, match=f"another glabench.*{other.name}"):
            measure(lanes, plan)
    locked = []

    class Looking(Observer):
        def record(self, *_):
            for lane in lanes:
                with pytest.raises(UsageError, match=r"another glabench"), RunFolder(lane.folder.path).locked():
                    pass
                locked.append(lane.name)

    measure(lanes, plan, heard=Looking())
    assert set(locked) == {lane.name for lane in lanes}
    for lane in lanes:
        with lane.folder.locked():
            pass


def test_interrupted_rounds_go_on_where_they_stopped(rounds, plan):
    with pytest.raises(InterruptedRunError):
        measure(rounds(), plan, heard=Heard({8: KeyboardInterrupt()}))
    with pytest.raises(UsageError, match=r"is not empty; rounds need a new folder, or --resume"):
        rounds()
    lanes = rounds(resume=True)
    assert [len(lane.folder.records()) for lane in lanes] == [3, 3, 2, 0]
    workers, heard = measure(lanes, plan)
    assert heard.said == ["8 of 24 cells are already measured"]
    assert heard.events[0] == ("begin", 24, 8)
    assert workers.started[0].job.run_id == "new-2"
    assert [len(lane.folder.records()) for lane in lanes] == [6, 6, 6, 6]


def test_a_full_disk_ends_rounds_with_a_line_and_they_go_on(rounds, plan, monkeypatch):
    lanes, sync, calls = rounds(), os.fsync, []

    def fail(file):
        calls.append(file)
        if len(calls) == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(file)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RecordNotKeptError, match=r"No space left on device; what was measured is kept, again$"):
        measure(lanes, plan)
    measure(rounds(resume=True), plan)
    assert [len(lane.folder.records()) for lane in lanes] == [6, 6, 6, 6]


def test_rounds_of_other_code_settings_or_cells_do_not_go_on(rounds, plan):
    measure(rounds(count=1), plan)
    with pytest.raises(UsageError, match=r"--precision: .* was measured with 0.01, not 0.5"):
        rounds(resume=True, changed=replace(plan, settings=replace(SETTINGS, precision=0.5)))
    other = replace(plan, sweep=replace(plan.sweep, axes={**AXES, "seqlen": "7"}))
    with pytest.raises(UsageError, match=r"--seqlen: .* another sweep"):
        rounds(resume=True, changed=other)
    rounds(resume=True, changed=replace(plan, settings=replace(SETTINGS, cell_timeout_s=9.0)))
    with pytest.raises(UsageError, match=r"with other code .it differs in: code"):
        rounds(resume=True, new=replace(NEW, code={"kernels": "edited"}))


def test_more_rounds_may_be_added_to_those_that_are_there(rounds, plan, tmp_path):
    measure(rounds(count=1), plan)
    lanes = rounds(resume=True, count=3)
    assert measure(lanes, plan)[1].said == ["12 of 36 cells are already measured"]
    assert len(rounds_in(tmp_path / "rounds/base-2")) == 1


def test_a_second_look_that_was_interrupted_goes_on_with_the_same_command(plan, tmp_path, monkeypatch):
    def answer(job, cell):
        is_slow = job.run_id.startswith("new") and cell.seqlen == 2
        return measured(job, cell, 2.0 if is_slow else 1.0)

    def look(heard, resume):
        path, limits = tmp_path / "check", Limits.of(time=0.05, first_call=None)
        trial = Trial(plan, {"base": OLD, "new": NEW}, Rounds(2, path, resume), path, heard)
        both = _Look(trial, limits, expects_all=True)
        return both.again(both.first())

    monkeypatch.setattr("glabench.scheduling.versions.ProcessWorker", Workers({1: answer, 2: answer, 3: answer}))
    with pytest.raises(InterruptedRunError, match=f"the same call with resume=True, out='{tmp_path}/check'$"):
        look(Heard({24 + 3: KeyboardInterrupt()}), resume=False)
    heard = Heard()
    found = look(heard, resume=True)
    lanes = {event[1] for event in heard.records}
    assert lanes == {f"again {side}-{number}" for side in ("base", "new") for number in range(1, 7)}
    assert heard.said[1:4:2] == ["24 of 24 cells are already measured", "3 of 24 cells are already measured"]
    assert [str(cell) for cell in found.suspects()] == [str(cell) for cell in plan.cells if cell.seqlen == 2]


# Plans and their estimates


def test_a_plan_has_the_changed_axes_and_no_plan_is_empty(place):
    plan = make_plan("cpu-smoke", {"seqlen": [16, 32], "backend": "linear-torch", "pass": "fwd"}, None, place)
    assert [cell.seqlen for cell in plan.cells] == [16, 32]
    assert plan.settings.time_limit_s == 1.0  # a CPU's samples rarely settle
    with pytest.raises(UsageError, match=r"--timing: 'graph' needs a GPU"):
        make_plan("cpu-smoke", {}, Settings(timing="graph"), place)
    with pytest.raises(NothingToRunError, match=r"the sweep none has no cell"):
        make_plan(Sweep("none", {}, ()), {}, None, place)


def test_a_cell_is_estimated_by_its_limits_and_by_its_work(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no run is stored

    def seconds(**axes):
        plan = make_plan("cpu-smoke", {"backend": "linear-torch", "pass": "fwd", "seqlen": "1k", **axes}, None, place)
        return [round(estimate.seconds, 1) for estimate in estimate_cells(plan)]

    assert seconds() == [5.1]  # warm-up, sampling and the rest
    assert seconds(seqlen="1m", batch="64", heads="64")[0] == 300  # no cell takes longer than its time-out


def test_a_cell_that_was_measured_is_estimated_by_that_and_an_unsupported_one_takes_nothing(
    place, plan, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    folder = RunFolder.create(tmp_path / "runs/small-20260101-000000", plan.sweep, plan.environment())
    folder.append(measured(Job("linear-torch", "run", "cpu"), plan.cells[0], first_call_s=2.0))
    (tmp_path / "runs/broken").mkdir()
    (tmp_path / "runs/broken/records.jsonl").write_text("nonsense\n")
    first, second, *_ = estimate_cells(plan)
    assert first.seconds == pytest.approx(2 + 2 * 0.04 + 0.1 + 1, abs=0.01)
    assert second.seconds > first.seconds
    picky = make_plan(Sweep("p", {**AXES, "seqlen": "16,32"}, (Variant("fake-picky"),)), {}, SETTINGS, place)
    assert [(e.seconds > 0, e.unsupported) for e in estimate_cells(picky)] == [
        (True, None),
        (False, "32 tokens are too many"),
    ]


def test_a_training_that_was_measured_is_estimated_by_all_of_its_steps(place, plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = RunFolder.create(tmp_path / "runs/small-20260101-000000", plan.sweep, plan.environment())
    folder.append(replace(measured(Job("linear-torch", "run", "cpu"), plan.cells[0]), train_s=3.0))
    folder.append(Record(run_id="run", cell=plan.cells[1], status="ok", accuracy=0.5, train_s=2.0))
    assert [round(each.seconds, 1) for each in estimate_cells(plan.on(plan.cells[:2]))] == [7.0, 6.0]


def test_a_cell_without_its_ops_parameters_is_expected_to_take_its_samples_time(plan):
    """As a baseline's may be, which anybody can write."""
    bare = plan.on([replace(plan.cells[0], parameters=Parameters())])
    assert expected_seconds(bare) == pytest.approx(expected_seconds(plan.on(plan.cells[:1])))


def test_a_backend_that_fails_at_telling_its_limits_hinders_no_estimate(place):
    sweep = Sweep("s", {**AXES, "seqlen": "16,32", "when": "limits"}, (Variant("fake-raising"),))
    plan = make_plan(sweep, {}, SETTINGS, place)
    told = [estimate.unsupported for estimate in estimate_cells(plan)]
    assert told == ["nothing to measure", "RuntimeError: a made-up fault with a second line"]
    assert (
        expected_seconds(plan) > 0
    )  # which does not call `limits`, so that a plugin cannot end a run before it starts


@pytest.mark.parametrize(("seqlens", "rounds", "words"), [("1..3:+1", 1, ""), ("1..99:+1", 1, "up to 14 minutes")])
def test_a_run_of_more_than_ten_minutes_says_so(place, tmp_path, monkeypatch, seqlens, rounds, words):
    monkeypatch.chdir(tmp_path)
    sweep = Sweep("long", {**AXES, "seqlen": seqlens}, (Variant("linear-torch"), Variant("gla-torch")))
    heard = Heard()
    announce(make_plan(sweep, {}, SETTINGS, place), heard, rounds)
    assert words in " ".join(heard.said)
    assert bool(heard.said) == bool(words)


def test_rounds_take_so_much_longer(place, plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    heard = Heard()
    announce(plan, heard, 100)
    assert "this may take up to 41 minutes; --dry-run shows details" in heard.said[0]


@pytest.mark.parametrize(
    ("busy", "words"),
    [
        ({"other_processes": 2, "utilization_pct": 37.0}, "the GPU is busy (2 processes, in use 37 % of the time)"),
        ({"other_processes": None, "utilization_pct": 90.0}, "the GPU is busy (0 processes, in use 90 % of the time)"),
        ({"other_processes": 1, "utilization_pct": None}, "the GPU is busy (1 processes)"),
        ({"other_processes": 0, "utilization_pct": 3.0}, ""),
        (None, ""),
    ],
)
def test_a_busy_gpu_is_warned_of(place, busy, words):
    def said(device):
        heard = Heard()
        environment = {"device": device, "gpu": {"index": 0}, "busy": busy}
        announce(Plan(Sweep("s", {}, ()), [], SETTINGS, replace(place, environment=environment)), heard, 1)
        return " ".join(heard.said)

    assert words in said("cuda")
    assert bool(said("cuda")) == bool(words)
    assert said("cpu") == ""


def test_the_latest_run_is_one_of_the_sweeps_and_not_of_one_with_a_longer_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ["head-dim-20260101-000000", "head-dim-2-20260102-000000", "a[1]-20260103-000000-2", "mine"]
    for age, name in enumerate(names):
        (tmp_path / "runs" / name).mkdir(parents=True)
        file = tmp_path / "runs" / name / "records.jsonl"
        file.touch()
        os.utime(file, (age, age))
    assert latest_run(["head-dim"]).name == names[0]
    assert latest_run(["head-dim", "head-dim-2"]).name == names[1]
    assert latest_run(["a[1]"]).name == names[2]
    assert latest_run([]).name == names[3]  # whatever its name
    with pytest.raises(UsageError, match=r"there is no run of a or b under runs/; name its folder: --resume FOLDER"):
        latest_run(["a", "b"])


@pytest.mark.parametrize("settings", [{"speed": 1}, {"precision": "x"}, {"warm_up_s": "0"}, {"time_limit_s": -1.0}])
def test_settings_that_cannot_be_are_refused_before_anything_is_measured(settings):
    with pytest.raises(UsageError, match=f"settings: .*{next(iter(settings))}.* .allowed: precision, "):
        check_settings(settings, {})
    check_settings({"warm_up_s": 0, "cell_timeout_s": 5}, {"seqlen": 16})


def test_a_request_takes_the_small_sweep_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr("glabench.scheduling.plan.probe", collect)
    plan = Request("paper-fig2", "cpu-smoke", {"seqlen": "16"}, {"time_limit_s": 0.5}, "cpu").plan()
    assert (plan.sweep.name, plan.settings.time_limit_s) == ("cpu-smoke", 0.5)
    assert {cell.device for cell in plan.cells} == {"cpu"}
    cell = Cell(
        "linear-torch", "linear", "fwd", 1, 16, "fp32", Parameters({"heads": 4, "key_dim": 64, "value_dim": 64})
    )
    assert replace(cell, device="cpu") in plan.cells
