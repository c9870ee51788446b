"""`head_forward` on a CPU: wide heads up to 128 value columns, without gates or with one per head."""

import inspect
import sys

import pytest
import torch
from gla_cases import assert_close, cumulative, linear_or_per_head, run, run_with_a_tail
from gluon_on_cpu import Kernel
from hopper_on_cpu import leave_out, on_hopper, set_multiprocessors

BF16 = torch.bfloat16
BOUND = 5e-3


@pytest.fixture
def hopper(monkeypatch):
    with on_hopper(monkeypatch):
        yield sys.modules["gla_kernels.hopper.wide.head_forward"]


def compare(gate, keep, T, K=128, V=48, lengths=None, initial=True):
    """Compares all outputs and gradients with the recurrence in float64."""
    sizes = {"B": 1, "T": T, "H": 1, "K": K, "V": V, "dtype": BF16, "lengths": lengths, "initial": initial}
    function, case = linear_or_per_head(gate, **sizes)
    if lengths is None:
        found = run(function, case.inputs, case.grads, materialize=keep)
    else:
        found = run_with_a_tail(function, case, cumulative(lengths), materialize=keep)
    assert_close(found, case, BOUND)
    assert "head_forward" in Kernel.flops


@pytest.mark.parametrize("gate", [None, "logsigmoid", "-inf"])
@pytest.mark.parametrize("keep", ["states", "nothing"])
@pytest.mark.parametrize(("V", "initial"), [(48, True), (48, False), (144, True)])
def test_all_outputs_and_gradients(hopper, monkeypatch, gate, keep, V, initial):
    set_multiprocessors(monkeypatch, 1)
    compare(gate, keep, 330, V=V, initial=initial)


@pytest.mark.parametrize("gate", [None, "resets"])
@pytest.mark.parametrize("T", [1, 64, 65, 129])
def test_few_chunks(hopper, gate, T):
    compare(gate, "states", T, K=112, V=128)


@pytest.mark.parametrize("multiprocessors", [1, 132])
def test_packed_sequences(hopper, monkeypatch, multiprocessors):
    set_multiprocessors(monkeypatch, multiprocessors)
    compare("logsigmoid", "states", None, lengths=[70, 0, 1, 300])


def waits():
    """Lines of the module on which copies are waited for that results depend on."""
    from gla_kernels.hopper.wide import head_forward

    lines = inspect.getsource(head_forward).splitlines()
    return [number for number, line in enumerate(lines, 1) if ".wait_group(1)" in line]


def forward_in_every_way():
    for gate in (None, "logsigmoid"):
        compare(gate, "nothing", 330)


@pytest.mark.parametrize("line", waits())
def test_no_wait_can_be_left_out(hopper, monkeypatch, line):
    leave_out(monkeypatch, hopper, line)
    set_multiprocessors(monkeypatch, 1)
    with pytest.raises(AssertionError):
        forward_in_every_way()
