"""Which passes can be repeated, and what is kept of them, without a GPU: see `fake_cuda.py`."""

import ctypes
import random

import fake_cuda
import pytest
import torch
from fake_cuda import FakeLauncher, forward_of, inputs_of
from gla_kernels.launching import call, native, recording, replay
from gla_kernels.launching.buffers import Inputs, flag_buffer
from gla_kernels.launching.call import Call, version_of
from gla_kernels.launching.plans import HOPPER, hopper_plan
from gla_kernels.launching.recording import UnrecordableError, _Buffer, _pack
from gla_kernels.launching.replay import Replay
from gla_kernels.operators import kinds, passes

driver, log = fake_cuda.driver, fake_cuda.log
pytestmark = pytest.mark.usefixtures("log")


def test_partial_sums_are_not_repeated():
    """The portable backward of several blocks of value columns ends with sums by torch."""
    tensors, do, _ = inputs_of(1, 100, 1, 60, 200, True, False, None)
    settings = 0.125, False, passes.KEEP_STATES, None, None
    outputs = passes.forward(*tensors, *settings)
    q, k, v, g, _, cu_seqlens = tensors
    backward_settings = 0.125, False, True, passes.KEEP_STATES, None, None
    passes.backward(q, k, v, g, cu_seqlens, do, None, *outputs[2:], *backward_settings)
    known = kinds.Passes()
    assert known.forward(settings, *forward_of(tensors)) is not None
    again = [known.backward(backward_settings, q, k, v, g, None, *outputs[2:], do, None) for _ in range(3)]
    assert again == [None] * 3


SIZES = (1, 64, 1, 64, 64, None, torch.float32, False, 1.0, torch.bfloat16, None, None, None)


def recorded(run, *inputs):
    return recording.record(call._call(*SIZES), -1, inputs, run)


def test_values_before_the_first_launch_are_repeated(driver, monkeypatch):
    """Zeros and copies, in outputs and in scratch memory that no launch before them may use."""
    make, kept = replay._maker, []

    def kept_maker(*how):
        return lambda: kept.append(make(*how)()) or kept[-1]  # the test reads scratch memory afterwards

    monkeypatch.setattr(replay, "_maker", kept_maker)

    def run(call, x):
        before = x.new_empty(300)
        call.launch(kernel, HOPPER.forward, (1,), (before,), {})
        zeros, copy, last = x.new_zeros(8), x[4:].clone(), x.new_empty(2)
        outputs = x.new_zeros(6), x[:4].clone()
        call.launch(kernel, HOPPER.forward, (1,), (zeros, copy, last), {})
        return outputs

    def kernel():
        pass

    kernel.arg_names = ()
    x = torch.arange(16.0)
    call._call(*SIZES).launch(kernel, HOPPER.forward, (1,), (x,), {})
    call._call(*SIZES).launch(kernel, HOPPER.forward, (1,), (x, x, x), {})
    again = Replay(recorded(run, x), x, kinds.cuda.functions(), native.functions().repeat)
    for y in (x, x + 100):
        zeros, copy = again(y)
        assert torch.equal(zeros, torch.zeros(6))
        assert torch.equal(copy, y[:4])
        (*_, [(_, at_before)], _), (*_, [(_, at_zeros), (_, at_copy), (_, at_last)], _) = driver.launched[-2:]
        assert at_last == at_before
        assert all(not at_before <= x < at_before + 1200 for x in (at_zeros, at_copy))
        assert list((ctypes.c_float * 8).from_address(at_zeros)) == [0.0] * 8
        assert list((ctypes.c_float * 12).from_address(at_copy)) == y[4:].tolist()


@pytest.mark.parametrize(
    "run",
    [
        lambda call, x: [x.new_empty(4).add_(1)],
        lambda call, x: [x],
        lambda call, x: [x.new_empty(4, 4).t()],
        lambda call, x: [x.new_empty(8)[:4]],
        lambda call, x: [x[::2].clone()],
        lambda call, x: [x.new_empty(16).clone()],
    ],
    ids=["arithmetic", "an input", "transposed", "a part", "a copy with gaps", "a copy of no input"],
)
def test_what_cannot_be_repeated_is_not_recorded(run):
    with pytest.raises(UnrecordableError) as refused:
        recorded(run, torch.zeros(16))
    assert not refused.value.for_now


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_ctas", 2), ("launch_cooperative_grid", True), ("global_scratch_size", 8), ("profile_scratch_size", 8)],
)
def test_kernels_that_need_more_than_parameters_are_not_recorded(name, value, monkeypatch):
    tensors, _, _ = inputs_of(1, 100, 1, 64, 64, True, False, None)
    settings = 0.125, False, passes.KEEP_NOTHING, None, None
    passes.forward(*tensors, *settings)
    monkeypatch.setattr(FakeLauncher, "special", {name: value})
    passes.forward(*tensors, *settings)
    assert kinds.Passes().forward(settings, *forward_of(tensors)) is None


def test_a_pass_that_cannot_be_repeated_is_not_tried_again(monkeypatch):
    tried, refusals = [], [UnrecordableError(for_now=True), UnrecordableError()]

    def refuse(*_):
        tried.append(1)
        raise refusals[len(tried) - 1]

    monkeypatch.setattr(kinds, "record", refuse)
    tensors, _, _ = inputs_of(1, 100, 1, 64, 64, True, False, None)
    known = kinds.Passes()
    for _ in range(4):
        assert known.forward((0.125, False, passes.KEEP_NOTHING, None, None), *forward_of(tensors)) is None
    assert len(tried) == 2


def test_too_many_launches_are_not_recorded(monkeypatch):
    tensors, _, _ = inputs_of(1, 100, 1, 64, 64, True, False, None)
    settings = 0.125, False, passes.KEEP_NOTHING, None, None
    passes.forward(*tensors, *settings)
    monkeypatch.setattr(recording, "_MOST_LAUNCHES", 2)
    assert kinds.Passes().forward(settings, *forward_of(tensors)) is None


@pytest.mark.parametrize("seed", range(5))
def test_scratch_memory_needed_at_once_does_not_overlap(seed):
    choose = random.Random(seed)
    buffers = []
    for _ in range(30):
        first = choose.randrange(20)
        buffers.append(_Buffer(choose.randrange(1, 5000), first, choose.randrange(first + 1, 22)))
    size = _pack(buffers)
    for x in buffers:
        assert x.offset % 256 == 0
        assert x.offset + x.bytes <= size
        for y in buffers:
            together = x is not y and x.first < y.end and y.first < x.end
            assert not together or x.offset + x.bytes <= y.offset or y.offset + y.bytes <= x.offset
    assert size < sum(x.bytes for x in buffers)  # some memory is used again


def test_memory_is_packed_by_time():
    assert _pack([_Buffer(1000, 0, 1), _Buffer(1000, 1, 2)]) == 1000
    assert _pack([_Buffer(1000, 0, 2), _Buffer(1000, 1, 2)]) == 2024
    assert _pack([]) == 0


SHAPES = [
    (32, 4096, 16, 64, 64), (32, 2048, 4, 128, 256), (8, 2048, 4, 256, 512), (1, 32768, 4, 128, 256),
    (4, 4096, 64, 128, 128), (1, 4096, 2, 512, 512),
]  # fmt: skip


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "not gated"])
@pytest.mark.parametrize("keep", [passes.KEEP_STATES, passes.KEEP_CHECKPOINTS], ids=["states", "checkpoints"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backwards_on_hopper_do_nothing_that_cannot_be_repeated(shape, keep, gated):
    B, T, H, K, V = shape
    plan = hopper_plan(K, V, torch.bfloat16)
    this = version_of(Call(B, T, H, K, V, B, False, gated, 1.0, torch.bfloat16, plan), recording._Recorder)
    q, k, v, do = (torch.empty(B, T, H, D, dtype=torch.bfloat16, device="meta") for D in (K, K, V, V))
    g = torch.empty(B, T, H, K, device="meta") if gated else None
    kept = torch.empty(this.kept_shape(keep == passes.KEEP_STATES), device="meta")
    inputs, flags = Inputs(q, k, v, g, None), flag_buffer(this, q)
    with recording._Allocations(this):
        passes.launch_backward(this, inputs, do, None, kept, flags, False, True, keep)
    assert this.notes
