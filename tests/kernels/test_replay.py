"""Passes that are recorded and repeated, without a GPU: kernels and the driver only note what is asked of them."""

import itertools
import sys
from contextlib import nullcontext

import fake_cuda
import pytest
import torch
from fake_cuda import Keeping, forward_of, inputs_of
from gla_kernels import chunk_gla
from gla_kernels.launching import replay
from gla_kernels.operators import checks, kinds, passes, recurrent

driver, log = fake_cuda.driver, fake_cuda.log
pytestmark = pytest.mark.usefixtures("log")


def same_launches(found, expected):
    """Whether launches are the same but for addresses, each of which stands for another one."""
    assert len(found) == len(expected) > 0
    moved = {}
    for (*launch, parameters, stream), (*launch_, parameters_) in zip(found, expected, strict=True):
        assert launch == launch_
        assert stream == 77
        for (kind, x), (kind_, x_) in zip(parameters, parameters_, strict=True):
            assert kind == kind_
            assert moved.setdefault(x_, x) == x if kind[0] == "*" else x == pytest.approx(x_)
    return moved


def blocks_of(tensors):
    """First and last address of the memory of each tensor."""
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors if isinstance(x, torch.Tensor)
    }
    return [(start, start + size) for start, size in storages.items() if size]


def assert_scratch_does_not_collide(log, moved, kept):
    """Blocks of an ordinary pass that are needed at the same time have places of their own in the replay."""
    used = []
    for start, end in blocks_of(kept):
        uses = [
            (number, x) for number, (*_, given) in enumerate(log)
            for kind, x in given if kind[0] == "*" and start <= x < end
        ]  # fmt: skip
        if uses:
            place = moved[uses[0][1]] - (uses[0][1] - start)
            used.append((min(n for n, _ in uses), max(n for n, _ in uses), place, place + end - start))
    for x, y in itertools.combinations(used, 2):
        apart = x[1] < y[0] or y[1] < x[0]
        assert apart or x[3] <= y[2] or y[3] <= x[2]


def same_outputs(found, expected):
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        assert (x is None) == (y is None)
        assert x is None or (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)


# B, T, H, K, V: heads narrow, in pieces, wide in several ways, and for the portable kernels.
SHAPES = [
    (2, 100, 2, 64, 64), (1, 3000, 2, 64, 64), (2, 500, 4, 128, 128), (2, 500, 64, 128, 128), (1, 4000, 4, 128, 256),
    (2, 700, 4, 256, 512), (2, 300, 3, 384, 64), (2, 300, 4, 60, 60),
]  # fmt: skip

# Gates per, frozen, states, packed. Of gates per head, torch converts those of the portable kernels, and adds up
# gradients in parts (K > 128): such passes cannot be repeated.
KINDS = [
    ("channel", False, True, False), ("channel", False, False, True), ("channel", True, True, False),
    (None, False, True, True), ("head", False, True, True),
]  # fmt: skip


def like_these(tensors):
    """Others of the same kinds."""
    return tuple([None if x is None else x.clone() for x in tensors])


def assert_addresses(driver, log, moved, before, now):
    """The launches' addresses of inputs and outputs are those of the tensors that were given and returned."""
    again = same_launches(driver.launched, log)
    assert again.keys() == moved.keys()
    for x, y in zip(before, now, strict=True):
        assert x is None or again.get(x.data_ptr(), y.data_ptr()) == y.data_ptr()
    driver.launched.clear()


@pytest.mark.parametrize("keep", [passes.KEEP_STATES, passes.KEEP_CHECKPOINTS])
@pytest.mark.parametrize(
    ("shape", "gates", "frozen", "states", "packed"),
    [(shape, *kind) for shape in SHAPES for kind in KINDS if kind[0] != "head" or shape[3] in (64, 128)],
    ids=str,
)
def test_a_replay_launches_what_the_pass_has_launched(shape, gates, frozen, states, packed, keep, driver, log):
    T = shape[1]
    gated, lengths = gates is not None, [T // 2, 1, T - T // 2 - 1] if packed else None
    tensors, do, dfinal = inputs_of(
        1 if packed else shape[0], *shape[1:], gated, states, lengths, per_head=gates == "head"
    )
    q, k, v, g, _, cu_seqlens = tensors
    known, settings = kinds.Passes(), (0.125, states, keep, None, None)
    assert known.forward(settings, *forward_of(tensors)) is None  # nothing has been launched yet
    with Keeping() as all_tensors:
        outputs = passes.forward(*tensors, *settings)
    again = known.forward(settings, *forward_of(tensors))
    if shape[3] == 384 and gates == "channel" and states and keep == passes.KEEP_CHECKPOINTS:
        assert again is None  # torch copies states between launches
        return
    same_outputs(again, outputs)
    moved = same_launches(driver.launched, log)
    assert_scratch_does_not_collide(log, moved, [*tensors, *all_tensors.kept])
    assert_addresses(driver, log, moved, (*tensors, *outputs), (*tensors, *again))
    others = like_these(tensors)
    assert_addresses(driver, log, moved, (*tensors, *outputs), (*others, *known.forward(settings, *forward_of(others))))
    driver.launched.clear()

    saved = (q, k, v, g, cu_seqlens, *outputs[2:])
    log.clear()
    settings = 0.125, states, gated and not frozen, keep, None, None
    with Keeping() as all_tensors:
        gradients = passes.backward(q, k, v, g, cu_seqlens, do, dfinal, *outputs[2:], *settings)
    assert known.backward(settings, *saved, do, dfinal) is None  # the first of its kind may not have been launched
    again = known.backward(settings, *saved, do, dfinal)
    same_outputs(again, gradients)
    moved = same_launches(driver.launched, log)
    given = (*saved, do, dfinal)
    assert_scratch_does_not_collide(log, moved, [*given, *all_tensors.kept])
    assert_addresses(driver, log, moved, (*given, *gradients), (*given, *again))
    *saved, do, dfinal = like_these(given)
    again = known.backward(settings, *saved, do, dfinal)
    assert_addresses(driver, log, moved, (*given, *gradients), (*saved, do, dfinal, *again))


def test_inputs_may_be_slices_of_one_projection(driver, log):
    both = torch.ones(1, 100, 2, 192, dtype=torch.bfloat16)
    q, k, v = both.split(64, -1)
    tensors, settings = (q, k, v, torch.zeros(1, 100, 2, 64), None, None), (0.125, False, 0, None, None)
    passes.forward(*tensors, *settings)
    assert kinds.Passes().forward(settings, *forward_of(tensors)) is not None
    same_launches(driver.launched, log)


def test_a_chain_from_the_entry_point_is_repeated(driver, monkeypatch):
    """As users call it, forward and backward."""
    monkeypatch.setattr(checks, "interpreting", lambda: True)
    (q, k, v, g, _, _), do, _ = inputs_of(1, 100, 2, 64, 64, True, False, None)
    leaves = [x.requires_grad_() for x in (q, k, v, g)]
    launches = []
    for _ in range(4):
        driver.launched.clear()
        torch.autograd.grad(chunk_gla(*leaves)[0], leaves, do)
        launches.append(len(driver.launched))
    assert launches == [0, 3, 6, 6]


def test_hooks_on_saved_tensors_may_change_their_dtype(driver, monkeypatch):
    """Which makes the backward one of another kind."""
    monkeypatch.setattr(checks, "interpreting", lambda: True)
    (q, k, v, g, _, _), do, _ = inputs_of(1, 100, 2, 64, 64, True, False, None)
    leaves = [x.requires_grad_() for x in (q, k, v, g)]
    for _ in range(3):
        torch.autograd.grad(chunk_gla(*leaves)[0], leaves, do)
    driver.launched.clear()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x.bfloat16() if x is g else x, lambda x: x)
    with hooks:
        torch.autograd.grad(chunk_gla(*leaves)[0], leaves, do)
    assert len(driver.launched) == 3  # the forward's


@pytest.fixture
def step(driver, monkeypatch):
    """The forward and backward of a chain whose passes are repeated."""
    monkeypatch.setattr(checks, "interpreting", lambda: True)
    (q, k, v, g, _, _), do, _ = inputs_of(1, 100, 2, 64, 64, True, False, None)
    leaves = [x.requires_grad_() for x in (q, k, v, g)]

    def forward():
        return chunk_gla(*leaves)[0]

    def backward(o, **options):
        return torch.autograd.grad(o, leaves, do, **options)

    for _ in range(4):
        backward(forward())
    assert len(driver.launched) == 15
    driver.launched.clear()
    return forward, backward


def test_gradients_that_shall_be_differentiated_again_refuse_it(step, driver):
    forward, backward = step
    grads = backward(forward(), create_graph=True)
    assert len(driver.launched) == 3  # the forward's
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        grads[0].float().sum().backward()


def test_a_mode_sees_the_backward_of_a_repeated_forward(step, driver):
    forward, backward = step
    o = forward()
    with Keeping() as seen:
        backward(o)
    assert len(driver.launched) == 3
    assert seen.kept


@pytest.fixture
def repeat():
    """Repeats a forward; None if it did not."""
    tensors, _, _ = inputs_of(1, 100, 2, 64, 64, True, False, None)
    known, settings = kinds.Passes(), (0.125, False, passes.KEEP_NOTHING, None, None)
    passes.forward(*tensors, *settings)

    def repeat(*others):
        return known.forward(settings, *forward_of((*others, *tensors[len(others) :])))

    repeat.known = known
    assert repeat() is not None
    return repeat


def unaligned(x):
    return torch.ones(x.numel() + 64, dtype=x.dtype)[1:][: x.numel()].view(x.shape)


@pytest.mark.parametrize("what", ["address", "device", "watched", "switches", "hook", "launching", "driver"])
def test_a_replay_leaves_alone_what_differs(what, repeat, driver, monkeypatch):
    others = []
    if what == "address":
        others = [unaligned(torch.ones(1, 100, 2, 64, dtype=torch.bfloat16))]
        assert others[0].data_ptr() % 16
    elif what == "device":
        monkeypatch.setattr(replay, "_current_device", lambda: 1)
    elif what == "watched":
        monkeypatch.setattr(replay, "is_watched", lambda: True)
    elif what == "switches":
        monkeypatch.setattr(replay, "switches", lambda: ("debug",))
    elif what == "hook":
        repeat.known.forward._replay._kernels[0].pre_run_hooks.append(print)
    elif what == "launching":
        repeat.known.forward._replay._plan.busy = 1
    else:
        driver.codes = {driver.asked + 1: 201}  # as in a thread that has not used the device yet
    driver.launched.clear()
    assert repeat(*others) is None
    assert driver.launched == []


@pytest.mark.parametrize("code", [0, 201, 700])
def test_a_replay_keeps_no_memory(code, repeat, driver):
    """What it allocates is freed with its outputs; scratch memory and what an error leaves behind at once."""
    made, kept = repeat.known.forward._replay, []

    def keeping(new):
        def make():
            kept.append(new())
            return kept[-1]

        return make

    made._new = tuple([keeping(new) for new in made._new])
    if code:
        driver.codes = {driver.asked + (1 if code == 201 else 2): code}
    with pytest.raises(RuntimeError) if code == 700 else nullcontext():
        assert (repeat() is None) == (code == 201)
    new = sys.getrefcount(torch.zeros(1)) + 1  # in the list
    assert len(kept) == len(made._new)
    # The loop's variable is one more.
    assert all(sys.getrefcount(x) == new + 1 for x in kept)


def test_too_little_memory_in_one_piece_is_left_to_the_pass(repeat, driver, monkeypatch):
    def full():
        raise torch.OutOfMemoryError

    made = repeat.known.forward._replay
    made._new = (full, *made._new[1:])
    driver.launched.clear()
    assert repeat() is None
    assert driver.launched == []


def test_a_replay_in_another_thread_meanwhile_does_not_change_addresses(repeat, driver):
    """Launches let other Python threads run."""
    found = []
    driver.on_launch = lambda: found.append(repeat())
    assert repeat() is not None
    assert found == [None] * 3


@pytest.mark.parametrize("number", [2, 3, 4])
def test_an_error_of_the_driver_in_the_middle_is_raised_by_name(number, repeat, driver):
    """A fill and three launches."""
    driver.codes = {driver.asked + number: 700}
    asked = driver.asked
    with pytest.raises(RuntimeError, match=r"CUDA_ERROR_700"):
        repeat()
    assert driver.asked == asked + number
    assert repeat() is not None


def test_launches_go_to_the_current_stream(repeat, driver, monkeypatch):
    streams = []
    for stream in (5, 5, 6):
        monkeypatch.setattr(replay, "_current_stream", lambda device, stream=stream: stream)
        driver.launched.clear()
        repeat()
        streams.append({launch[-1] for launch in driver.launched})
    assert streams == [{5}, {5}, {6}]


@pytest.mark.parametrize("packed", [True, False])
def test_a_short_call_is_one_launch_and_is_replayed(packed, driver, log):
    tensors, _, _ = inputs_of(1 if packed else 3, 8, 4, 128, 256, True, True, [3, 1, 4] if packed else None)
    known, settings = kinds.Passes(), (0.125, True, passes.KEEP_NOTHING, None, None)
    outputs = passes.forward(*tensors, *settings)
    assert len(log) == 1 + packed  # and the one that clears what is behind the last sequence
    again = known.forward(settings, *forward_of(tensors))
    same_outputs(again, outputs)
    moved = same_launches(driver.launched, log)
    assert_addresses(driver, log, moved, (*tensors, *outputs), (*tensors, *again))


@pytest.mark.parametrize("state_v_first", [True, False])
def test_a_state_in_place_is_replayed_in_place(state_v_first, driver, log):
    (q, k, v, g, state, _), _, _ = inputs_of(2, 1, 4, 128, 128, True, True, None)
    state = state.to(torch.bfloat16)
    settings = (0.125, False, passes.KEEP_NOTHING, None, None)
    o = recurrent.run_recurrent_in_place(q, k, v, g, state, None, 0.125, state_v_first)
    repeated = kinds.Passes(recurrent.repeatable(True, state_v_first)).forward
    other = state.clone()
    o_again, final = repeated(settings, q, k, v, g, None, other)
    assert final is None
    moved = same_launches(driver.launched, log)
    assert moved[o.data_ptr()] == o_again.data_ptr()
    assert moved[state.data_ptr()] == other.data_ptr()  # the state before the first token, and the one after the last
