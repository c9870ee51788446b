"""`specialized_forward` on a CPU: its two groups of warps are right in any order, and need every barrier they have."""

import inspect
import sys

import pytest
import torch
from gla_cases import assert_close, cumulative, linear_or_per_head, per_head_case, run, run_with_a_tail
from gla_kernels import chunk_simple_gla
from gla_kernels.hopper.wide.pieces import SUMS_OF_SEQUENCES
from hopper_on_cpu import leave_out, on_hopper, set_multiprocessors

BF16 = torch.bfloat16
BOUND = 5e-3


@pytest.fixture
def hopper(monkeypatch):
    with on_hopper(monkeypatch):
        # One multiprocessor has sequences whole, and then states of 256 columns.
        set_multiprocessors(monkeypatch, 1)
        yield sys.modules["gla_kernels.hopper.wide.specialized"]


def compare(gate, keep, T=330, K=128, V=256, initial=True, H=2):
    """Compares all outputs and gradients with the recurrence in float64.

    Two programs take two rounds, and sums of gates are then made by a kernel of their own; one program makes them.
    """
    function, case = linear_or_per_head(gate, dtype=BF16, B=1, T=T, H=H, K=K, V=V, initial=initial)
    assert_close(run(function, case.inputs, case.grads, materialize=keep), case, BOUND)


def forward_in_every_way():
    for gate, H in ((None, 2), ("logsigmoid", 2), ("logsigmoid", 1)):
        for keep in ("nothing", "states"):
            compare(gate, keep, T=380, H=H)


@pytest.mark.parametrize("keep", ["states", "checkpoints", "nothing"])
@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize(("K", "V"), [(128, 256), (112, 512), (64, 256)])
@pytest.mark.parametrize("gate", [None, "logsigmoid", "-inf"])
def test_all_outputs_and_gradients(hopper, gate, K, V, initial, keep):
    compare(gate, keep, 200 if V == 256 else 130, K, V, initial)


@pytest.mark.parametrize("keep", ["states", "checkpoints", "nothing"])
@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize(("gate", "T"), [("logsigmoid", 200), ("-inf", 64), ("resets", 450)])
def test_the_sums_of_gates_made_here(hopper, gate, T, initial, keep):
    compare(gate, keep, T, initial=initial, H=1)


@pytest.mark.parametrize("keep", ["checkpoints", "nothing"])
def test_the_sums_of_as_many_chunks_as_a_program_makes_them_for(hopper, keep):
    compare("resets", keep, 64 * SUMS_OF_SEQUENCES, H=1)


@pytest.mark.parametrize("gate", [None, "resets"])
@pytest.mark.parametrize("T", [1, 64, 65, 129])
def test_few_chunks(hopper, gate, T):
    compare(gate, "states", T)


def test_gates_in_bfloat16_with_any_strides(hopper):
    case = per_head_case("logsigmoid", BF16, B=2, T=150, H=3, K=128, V=256, dtype=BF16)
    g = case.inputs["g"]
    strided = torch.stack([g, torch.full_like(g, float("nan"))], -1).transpose(1, 2).contiguous().transpose(1, 2)
    o, _ = chunk_simple_gla(
        *(case.inputs[name] for name in "qkv"), strided[..., 0], initial_state=case.inputs["initial"]
    )
    assert (o.double() - case.truth["o"]).norm() < BOUND * case.truth["o"].norm()


@pytest.mark.parametrize("gate", [None, "logsigmoid"])
def test_packed_sequences(hopper, gate):
    lengths = [70, 0, 1, 300]
    function, case = linear_or_per_head(gate, dtype=BF16, H=1, K=112, V=256, lengths=lengths)
    assert_close(run_with_a_tail(function, case, cumulative(lengths)), case, BOUND)


def waits():
    """Lines of the module on which a group of warps waits."""
    from gla_kernels.hopper.wide import specialized

    lines = inspect.getsource(specialized).splitlines()
    return [number for number, line in enumerate(lines, 1) if "mbarrier.wait(" in line or ".wait_group(" in line]


@pytest.mark.parametrize("line", waits())
def test_no_wait_can_be_left_out(hopper, monkeypatch, line):
    leave_out(monkeypatch, hopper, line)
    with pytest.raises(AssertionError):
        forward_in_every_way()
