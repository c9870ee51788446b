"""Workers that are started before their turn."""

import errno
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from fake_workers import Workers as MadeUp

from glabench.measure.job import Job
from glabench.measure.settings import Settings
from glabench.records import RunFolder
from glabench.scheduling.loop import Lane, Version, measure_lanes
from glabench.scheduling.observer import Observer
from glabench.scheduling.process import CAN_PAUSE, ProcessWorker, WorkerDiedError, WorkerTimeoutError
from glabench.scheduling.starting import Order, Workers
from glabench.sweeps import Cell, Parameters

MARKING = """
import pathlib
from glabench.backends import Backend

pathlib.Path(__file__).with_name("was-loaded").touch()

class Marking(Backend):
    name, op, title = "marking", "linear", "leaves a mark as soon as it is imported"
    def supports(self, cell):
        return "never"
    def bind(self, inputs, cell):
        raise AssertionError

BACKENDS = [Marking]
"""


def orders(*names, **options):
    return [Order(Job(name, "run", "cpu", Settings()), {}, **options) for name in names]


@pytest.fixture
def made_up():
    return MadeUp()


def names_of(workers):
    return [worker.job.backend for worker in workers]


def test_workers_that_start_early_are_told_what_was_ordered(made_up):
    job, variables, told = Job("a", "run", "cpu", Settings(), ("a.py",), code="c0de"), {"MARK": "1"}, []
    Workers(lambda *order: told.append(order) or made_up(*order), [Order(job, variables)] * 2, at_once=2).take(0)
    assert told == [(replace(job, early=True), variables)] * 2


def test_workers_are_started_several_at_a_time_and_taken_in_turn(made_up):
    workers = Workers(made_up, orders("a", "b", "c", "d", "e"), at_once=2)
    taken, started = [], []
    for number in range(5):
        taken.append(workers.take(number))
        started.append(len(made_up.started))
    assert started == [2, 2, 4, 4, 5]
    assert taken == made_up.started
    assert not any(worker.closed for worker in taken)


def test_a_worker_that_starts_alone_loads_torch_when_it_needs_it(made_up):
    Workers(made_up, orders("a", "b"), at_once=1).take(0)
    Workers(made_up, orders("a"), at_once=2).take(0)
    Workers(made_up, orders("a", "b"), at_once=2).take(0)
    assert [(each.job.backend, each.job.early) for each in made_up.started] == [
        ("a", False),
        ("a", False),
        ("a", True),
        ("b", True),
    ]


def test_all_that_were_started_have_loaded_torch_before_one_is_taken(made_up, monkeypatch):
    waited_for = []
    monkeypatch.setattr("fake_workers.MadeUpWorker.is_loaded", lambda each: waited_for.append(each) is None)
    taken = Workers(made_up, orders("a", "b", "c"), at_once=2).take(0)
    assert taken in waited_for
    assert names_of(waited_for) == ["a", "b"]


def test_those_that_wait_are_paused_once_all_have_loaded_torch(made_up, monkeypatch):
    done = []
    monkeypatch.setattr("fake_workers.MadeUpWorker.is_loaded", lambda each: done.append(("loaded", each)) is None)
    monkeypatch.setattr("fake_workers.MadeUpWorker.pause", lambda each: done.append(("paused", each)))
    Workers(made_up, orders("a", "b", "c"), at_once=2).take(0)
    assert [(what, each.job.backend) for what, each in done] == [("loaded", "a"), ("loaded", "b"), ("paused", "b")]


def test_one_that_has_not_loaded_torch_in_time_does_not_wait(made_up, monkeypatch):
    """Stopped at its start, it would outlive a parent that is killed."""
    monkeypatch.setattr("fake_workers.MadeUpWorker.is_loaded", lambda each: each.job.backend == "a")
    workers = Workers(made_up, orders("a", "b"), at_once=2)
    workers.take(0)
    assert [(each.paused, each.closed) for each in made_up.started] == [(False, False), (False, True)]
    assert workers.take(1) is made_up.started[2]


def test_where_a_paused_worker_would_outlive_a_killed_parent_each_starts_in_its_turn(made_up, monkeypatch):
    monkeypatch.setattr("glabench.scheduling.starting.CAN_PAUSE", False)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    Workers(made_up, orders("a", "b")).take(0)
    assert names_of(made_up.started) == ["a"]


def test_a_fresh_worker_of_the_same_group_leaves_the_next_one_waiting(made_up):
    workers = Workers(made_up, orders("a", "b"), at_once=2)
    workers.take(0)
    workers.take(0)
    assert names_of(made_up.started) == ["a", "b", "a"]
    assert workers.take(1) is made_up.started[1]


def test_a_waiting_worker_that_has_ended_is_replaced(made_up):
    workers = Workers(made_up, orders("a", "b"), at_once=2)
    workers.take(0)
    made_up.started[1].closed = True
    assert workers.take(1) is made_up.started[2]
    assert names_of(made_up.started) == ["a", "b", "b"]


def test_none_is_started_early_for_a_cell_that_gpus_share_nor_beside_one(made_up):
    workers = Workers(made_up, [*orders("a"), *orders("b", early=False)], at_once=2)
    workers.take(0)
    assert names_of(made_up.started) == ["a"]
    workers.take(1, gpus=2)
    assert [(each.job.backend, each.job.gpus) for each in made_up.started] == [("a", 1), ("b", 2)]


def test_a_worker_that_cannot_start_early_starts_in_its_turn(made_up):
    full = True

    def start(job, variables):
        if full and job.backend == "b":
            raise OSError(errno.EAGAIN, "no process")
        return made_up(job, variables)

    workers = Workers(start, orders("a", "b"), at_once=2)
    workers.take(0)
    full = False
    assert workers.take(1).job.backend == "b"


def test_closing_ends_those_that_nobody_has_taken(made_up):
    workers = Workers(made_up, orders("a", "b"), at_once=2)
    workers.take(0)
    workers.close()
    assert [worker.closed for worker in made_up.started] == [False, True]


def test_if_there_is_no_room_for_a_worker_those_that_wait_make_it(made_up):
    room = 2

    def start(job, variables):
        if sum(not worker.closed for worker in made_up.started) >= room:
            raise OSError(errno.EAGAIN, "no process")
        return made_up(job, variables)

    workers = Workers(start, orders("a", "b"), at_once=2)
    workers.take(0).close()
    room = 1
    assert workers.take(0).job.backend == "a"
    assert names_of(made_up.started) == ["a", "b", "a"]


@pytest.mark.parametrize(("lanes", "started"), [(1, 2), (2, 1)], ids=["alone", "in turns"])
def test_of_lanes_that_are_compared_each_worker_starts_in_its_turn(
    made_up, monkeypatch, tmp_path, plan, lanes, started
):
    """Only one of them would follow the start of all; a site is no hindrance."""
    monkeypatch.setattr("glabench.scheduling.starting.CAN_PAUSE", True)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    plan = replace(plan, place=replace(plan.place, sites={"gla-torch": "a"}))
    folders = [RunFolder.create(tmp_path / str(number), plan.sweep, plan.environment()) for number in range(lanes)]
    seen = []
    heard = Observer()
    heard.start = lambda *_: seen.append(len(made_up.started))
    measure_lanes([Lane(folder, Version()) for folder in folders], plan, heard, "again", start_worker=made_up)
    assert seen[0] == started


SIZES = Parameters({"heads": 1, "key_dim": 16, "value_dim": 16})


@pytest.fixture
def process(tmp_path):
    """Starts a worker early, with modules of its own before all others, by their names; closes it at the end."""
    started = []

    def start(backend="linear-torch", plugins=(), **modules):
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        started.append(ProcessWorker(Job(backend, "run", "cpu", Settings(), plugins, early=True), {"PYTHONPATH": path}))
        return started[-1]

    yield start
    for worker in started:
        worker.close()


def ask(worker, backend="linear-torch"):
    return worker.measure(Cell(backend, "linear", "fwd", 1, 16, "fp32", SIZES, "cpu"))


def test_a_waiting_process_has_torch_but_no_plugin(process, tmp_path):
    """A plugin could take the device while another backend is measured."""
    plugin = tmp_path / "marking.py"
    worker = process("marking", (str(plugin),), marking=MARKING)
    assert worker.is_loaded()
    assert not (tmp_path / "was-loaded").exists()
    assert ask(worker, "marking").reason == "never"
    assert (tmp_path / "was-loaded").exists()
    worker.close()
    assert not worker.is_loaded()


def test_a_waiting_process_has_no_plugin_of_an_installed_package_either(process, tmp_path):
    entry = tmp_path / "marked-1.0.dist-info"
    entry.mkdir()
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: marked\nVersion: 1.0\n")
    (entry / "entry_points.txt").write_text("[glabench.backends]\nmarked = marking\n")
    worker = process(torch="", marking=MARKING)
    assert worker.is_loaded()
    assert not (tmp_path / "was-loaded").exists()
    ask(worker)
    assert (tmp_path / "was-loaded").exists()


def write_module(folder, name, text):
    """A module of a package, whose other modules are empty."""
    *packages, last = name.split(".")
    for package in packages:
        folder = folder / package
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").touch()
    (folder / f"{last}.py").write_text(text)


@pytest.mark.parametrize(("backend", "loads"), [("mamba1", True), ("linear-torch", False)])
def test_a_waiting_process_has_what_its_backend_wants_early(process, tmp_path, backend, loads):
    text = f"from pathlib import Path\nPath({str(tmp_path / 'was-loaded')!r}).touch()"
    write_module(tmp_path, "transformers.generation.utils", text)
    assert process(backend, torch="").is_loaded()
    assert (tmp_path / "was-loaded").exists() == loads


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        ("torch", "RuntimeError"),
        ("torch", "ModuleNotFoundError"),
        ("torch.fx.experimental.symbolic_shapes", "RuntimeError"),
    ],
)
def test_records_say_why_what_is_loaded_early_cannot_be(process, tmp_path, module, problem):
    """A second attempt would say something else."""
    once = "import sys\nif hasattr(sys, 'tried'): raise KeyError('something else')\nsys.tried = True\n"
    write_module(tmp_path, module, once + f"raise {problem}('a library is missing')")
    record = ask(process())
    assert (record.status, record.reason) == ("error", f"{problem}: a library is missing")


TICK = """
import pathlib, time

def tick():
    while True:
        with pathlib.Path(__file__).with_name("ticks").open("a") as file:
            file.write(".")
        time.sleep(0.01)
"""
IN_A_THREAD = "import threading\nfrom ticking import tick\nthreading.Thread(target=tick, daemon=True).start()"
IN_A_CHILD = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import ticking; ticking.tick()'])"


def ticks(folder, more_than=0):
    """How often it has ticked, as soon as that is more."""
    until = time.monotonic() + 10
    while not (folder / "ticks").exists() or (folder / "ticks").stat().st_size <= more_than:
        assert time.monotonic() < until
        time.sleep(0.01)
    return (folder / "ticks").stat().st_size


@pytest.mark.parametrize("torch", [IN_A_THREAD, IN_A_CHILD], ids=["thread", "child"])
def test_a_paused_worker_does_not_run_until_it_measures(process, tmp_path, torch):
    """Nor does what a package has started that was loaded with torch, as from a site."""
    worker = process(torch=torch, ticking=TICK)
    assert worker.is_loaded()
    ticks(tmp_path)
    worker.pause()
    time.sleep(0.1)  # a signal needs a moment
    before = ticks(tmp_path)
    time.sleep(0.3)
    assert ticks(tmp_path) == before
    assert ask(worker).status == "error"
    assert ticks(tmp_path, more_than=before) > before
    worker.pause()
    worker.close()
    assert not worker.is_loaded()


def test_a_paused_worker_that_is_killed_says_so(process):
    worker = process(torch="")
    assert worker.is_loaded()
    worker.pause()
    os.kill(worker._process.pid, signal.SIGKILL)
    worker._process.wait()
    worker.pause()  # nobody else, who may have its number by now
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        ask(worker)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not CAN_PAUSE, reason="workers are not paused here")
def test_a_paused_worker_ends_with_its_parent(tmp_path):
    (tmp_path / "torch.py").touch()
    parent = """
import sys, time
from glabench.measure.job import Job
from glabench.measure.settings import Settings
from glabench.scheduling.process import ProcessWorker
worker = ProcessWorker(Job("linear-torch", "run", "cpu", Settings(), early=True), {"PYTHONPATH": sys.argv[1]})
assert worker.is_loaded()
worker.pause()
print(worker._process.pid, flush=True)
time.sleep(60)
"""
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen([sys.executable, "-c", parent, path], stdout=subprocess.PIPE) as process:
        worker = int(process.stdout.readline())
        assert is_running(worker)
        process.kill()
    try:
        until = time.monotonic() + 10
        while is_running(worker):
            assert time.monotonic() < until
            time.sleep(0.01)
    finally:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)


def test_torch_that_does_not_end_to_load_is_waited_for_once(process, monkeypatch):
    monkeypatch.setattr("glabench.scheduling.process._LONGEST_LOAD_S", 0.5)
    worker = process(torch="import time; time.sleep(60)")
    start = time.monotonic()
    assert not worker.is_loaded()
    assert not worker.is_loaded()
    with pytest.raises(WorkerTimeoutError, match=r"torch, or what is loaded with it, took more than 0.5 s"):
        ask(worker)
    assert time.monotonic() - start < 5


def test_a_first_line_of_something_else_is_no_sign_that_torch_is_loaded(process, monkeypatch):
    hello = "print('hello', flush=True)"
    monkeypatch.setattr("glabench.scheduling.process._LONGEST_LOAD_S", 0.5)
    assert not process(sitecustomize=hello, torch="import time; time.sleep(60)").is_loaded()


def test_what_an_environment_writes_at_its_start_harms_no_worker(process):
    worker = process(sitecustomize="print('hello', flush=True)", torch="raise RuntimeError('as if it were loaded')")
    assert worker.is_loaded()
    assert ask(worker).reason == "RuntimeError: as if it were loaded"
