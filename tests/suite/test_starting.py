"""Workers that are started before their turn."""

import errno

import pytest
from fake_workers import Workers as MadeUp

from glabench.measure.job import Job
from glabench.measure.settings import Settings
from glabench.scheduling.process import ProcessWorker
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


def test_workers_are_started_several_at_a_time_and_taken_in_turn(made_up):
    workers = Workers(made_up, orders("a", "b", "c", "d", "e"), at_once=2)
    taken, started = [], []
    for number in range(5):
        taken.append(workers.take(number))
        started.append(len(made_up.started))
    assert started == [2, 2, 4, 4, 5]
    assert taken == made_up.started
    assert not any(worker.closed for worker in taken)


def test_all_that_were_started_have_loaded_torch_before_one_is_taken(made_up, monkeypatch):
    waited_for = []
    monkeypatch.setattr("fake_workers.MadeUpWorker.is_loaded", lambda each: waited_for.append(each) is None)
    taken = Workers(made_up, orders("a", "b", "c"), at_once=2).take(0)
    assert taken in waited_for
    assert names_of(waited_for) == ["a", "b"]


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


def test_a_waiting_process_has_torch_but_no_plugin(tmp_path):
    """A plugin's code must not run while another backend is measured."""
    plugin = tmp_path / "marking.py"
    plugin.write_text(MARKING)
    worker = ProcessWorker(Job("marking", "run", "cpu", Settings(), (str(plugin),)), {})
    try:
        assert worker.is_loaded()
        assert not (tmp_path / "was-loaded").exists()
        sizes = Parameters({"heads": 1, "key_dim": 16, "value_dim": 16})
        assert worker.measure(Cell("marking", "linear", "fwd", 1, 16, "fp32", sizes, "cpu")).reason == "never"
        assert (tmp_path / "was-loaded").exists()
    finally:
        worker.close()
    assert not worker.is_loaded()
