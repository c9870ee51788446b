"""The measuring loop with made-up workers: order, fresh workers, rounds, interruptions."""

import errno
import json
import os
from contextlib import nullcontext
from dataclasses import replace

import pytest
from fake_workers import Workers, measured
from simulated import record
from small_plan import AXES, SETTINGS, Heard

from glabench.checking import _Look
from glabench.errors import (
    GlabenchError,
    InterruptedRunError,
    RecordNotKeptError,
    UsageError,
)
from glabench.records import RunFolder
from glabench.scheduling.folders import check_same_machine, lanes_of_rounds, rounds_in
from glabench.scheduling.loop import Lane, Version, measure_lanes
from glabench.scheduling.observer import Observer
from glabench.scheduling.process import WorkerDiedError, WorkerTimeoutError
from glabench.scheduling.versions import Rounds, Trial
from glabench.verdicts import Limits

OLD, NEW = (Version(name, {"SIDE": name}, code={"kernels": name}) for name in ("old", "new"))


@pytest.fixture
def lane(tmp_path, plan):
    return Lane(RunFolder.create(tmp_path / "here", plan.sweep, plan.environment()), OLD)


@pytest.fixture
def one_at_a_time(monkeypatch):
    """No worker is started before its turn."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)


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
def test_a_fresh_worker_follows_a_failure_and_the_other_cells_are_measured(one_at_a_time, lane, plan, answer, status):
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


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("when", ["asked", "told"])
def test_an_interruption_closes_the_workers_keeps_the_records_and_says_how_to_go_on(
    monkeypatch, lane, plan, when, at_once
):
    monkeypatch.setattr("os.cpu_count", lambda: at_once)
    heard = Heard({1: KeyboardInterrupt()} if when == "told" else ())
    script = {("linear-torch", 2): KeyboardInterrupt()} if when == "asked" else {}
    workers = Workers(script)
    with pytest.raises(InterruptedRunError, match=r"interrupted; what was measured is kept, again$"):
        measure_lanes([lane], plan, heard, "again", start_worker=workers)
    assert [worker.closed for worker in workers.started] == [True] * at_once
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


@pytest.mark.parametrize(("device", "refused"), [("cpu", True), ("cuda", False)])
def test_only_on_a_cpu_a_run_needs_as_many_threads_as_before(plan, tmp_path, device, refused):
    begun = plan.environment() | {"device": device, "torch_threads": 16}
    folder = RunFolder.create(tmp_path / "begun", plan.sweep, begun)
    found = begun | {"torch_threads": 20}
    with pytest.raises(UsageError, match="torch_threads: 16, now 20") if refused else nullcontext():
        check_same_machine(folder, plan, found)


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
