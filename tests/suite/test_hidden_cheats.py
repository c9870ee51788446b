"""Backends that hide their work where the suite writes inputs or reads results are refused, or gain nothing."""

import sys
import time
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import hidden_cheats
import pytest
import torch
from cheated import BACKWARDS, FORWARDS, JOB, LINEAR, SIZES, measure
from torch._C._dynamo import eval_frame

from glabench.measure import cell as cell_module
from glabench.measure import spot_checks
from glabench.measure.cell import CellMeter
from glabench.measure.contexts import active_contexts
from glabench.measure.spot_checks import SpotChecks
from glabench.measure.timer import WallTimer
from glabench.measure.work import OpWork
from glabench.ops import MAMBA1
from glabench.sweeps import Cell, Parameters


@pytest.fixture(autouse=True)
def left():
    yield
    hidden_cheats.leave_everything()
    assert active_contexts() == []


@pytest.mark.parametrize(
    ("backend", "pass_"),
    [
        *product(hidden_cheats.IN_ALL_PASSES, (*FORWARDS, *BACKWARDS)),
        *product(hidden_cheats.IN_BACKWARDS, BACKWARDS),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_work_that_is_hidden_is_found(backend, pass_):
    record = measure(backend(), pass_)
    assert record.status in ("inaccurate", "error")
    assert record.time_ms is None
    assert record.reason


@pytest.mark.parametrize("pass_", FORWARDS)
def test_outputs_come_in_a_plain_tuple(pass_):
    record = measure(hidden_cheats.ComputesWhenItsTupleIsRead(), pass_, state="out")
    assert (record.status, record.reason) == ("error", "TypeError: the call must return a tuple of 2 tensors: o, final")


@pytest.mark.parametrize("pass_", [*FORWARDS, "fwd+bwd"])
def test_what_a_backend_does_to_its_inputs_between_looks_sees_nothing_written(pass_):
    backend = hidden_cheats.ChangesTheTypeBetweenLooks
    backend.gained = 0
    measure(backend(), pass_)
    assert backend.gained == 0


def test_an_output_that_the_backward_completes_is_seen_as_it_was(monkeypatch):
    """Also if no part that is compared closely is the one that was missing."""
    monkeypatch.setattr(spot_checks, "check_drawn", lambda *given: {})
    record = measure(hidden_cheats.WritesAHeadInTheBackward(), "fwd")
    assert record.status == "inaccurate"


@pytest.fixture
def nothing_is_drawn(monkeypatch):
    """Chance has no sample looked at, as if that took very long; and none is between the samples and the last one.

    So nothing would tell a busy machine from a backend that idles, and how long looks take does not count here.
    """
    monkeypatch.setattr(SpotChecks, "_draws_next", lambda self: False)
    monkeypatch.setattr(cell_module.secrets, "randbelow", lambda most: 0)
    monkeypatch.setattr(cell_module, "why_idle", lambda *given: None)


@pytest.mark.parametrize("pass_", [*FORWARDS, *BACKWARDS])
@pytest.mark.usefixtures("nothing_is_drawn")
def test_samples_are_compared_when_all_are_taken(pass_):
    """Some of them, which nobody could know before."""
    record = measure(hidden_cheats.WorksWhereItsCallsAreKnown(), pass_)
    assert record.status == "inaccurate"
    assert record.reason.startswith("a timed call's result does not fit the inputs that it had")
    record = measure(hidden_cheats.Honest(), pass_)
    assert (record.status, record.reason) == ("ok", None)


@pytest.mark.parametrize("pass_", ["infer", "fwd"])
@pytest.mark.usefixtures("nothing_is_drawn")
def test_few_samples_are_compared_in_several_parts(pass_, monkeypatch):
    """Of each of three samples."""
    parts = []
    monkeypatch.setattr(spot_checks, "check_drawn", lambda *given: parts.append(len(given[5])) or {})
    few = replace(JOB, settings=replace(JOB.settings, max_samples=3))
    assert measure(hidden_cheats.Honest(), pass_, job=few).status == "ok"
    assert min(parts[-3:]) >= 2


@pytest.mark.parametrize("pass_", BACKWARDS)
@pytest.mark.usefixtures("nothing_is_drawn")
def test_gradients_that_parts_share_are_compared_for_a_sample(pass_):
    cell = Cell("honest", "mamba1", pass_, 2, 300, "fp32", Parameters({"inner": 6, "state_size": 4}), "cpu")
    work = OpWork(MAMBA1, hidden_cheats.ForgetsSharedGradients(MAMBA1))
    record = CellMeter(work, JOB, WallTimer("hot")).measure(cell)
    assert record.status == "inaccurate"
    assert "dA" in record.reason


def test_a_backward_that_is_slow_on_purpose_does_not_make_looks_rare(monkeypatch):
    """A look's time is the suite's own."""

    class SleepsInTheBackward(hidden_cheats.Honest):
        def at_size(self, q, k, v):
            def call():
                out = hidden_cheats.correct(q, k, v)
                if out.requires_grad:
                    out.register_hook(lambda grad: time.sleep(0.2))
                return out

            return call

    looked_s = []
    look = SpotChecks.look

    def noted(self, result):
        before = self._looked_s
        look(self, result)
        looked_s.append(self._looked_s - before)

    monkeypatch.setattr(SpotChecks, "look", noted)
    assert measure(SleepsInTheBackward(), "fwd").status == "ok"
    assert 0 < max(looked_s) < 0.2


def test_a_cell_of_a_backend_is_its_own():
    cell = Cell("honest", "linear", "fwd", 1, 4, "fp32", SIZES, "cpu")
    own = cell.copy()
    assert own == cell
    assert own.parameters is not cell.parameters
    with pytest.raises(TypeError):
        own.parameters._values["heads"] = 1


def test_anomaly_detection_is_named():
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        assert active_contexts() == ["anomaly detection"]


def test_compilers_that_are_left_on_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._dynamo.compiled_autograd", SimpleNamespace(compiled_autograd_enabled=True))
    assert active_contexts() == ["compiled autograd"]
    monkeypatch.setattr(eval_frame, "get_eval_frame_callback", lambda: print)
    assert active_contexts() == ["compiled autograd", "a callback for frames"]


def test_a_default_device_is_a_context_too():
    """Its class could be changed during a call, and back."""
    with torch.device("cpu"):
        assert active_contexts() == ["a function mode"]


def test_as_many_inputs_may_come_as_a_generator_has_seeds():
    """A generator on a CPU takes the lower 32 bits of what it is given."""
    cell = Cell("honest", "linear", "bwd", 1, 4, "fp32", SIZES, "cpu")
    others = [*range(1, 2050), *(5 + (1 << bit) for bit in range(12, 62))]
    first = {float(LINEAR.make_values(cell, other)["q"].flatten()[0]) for other in others}
    assert len(first) > 0.99 * len(others)
    # The gradients of one sample's outputs are no other sample's inputs, made from a neighbouring seed.
    grads = {float(LINEAR.make_grad_outputs(cell, other)["o"].flatten()[0]) for other in others}
    assert not first & grads
