"""Passes that are recorded and repeated, without a GPU: kernels and the driver only note what is asked of them."""

import ctypes
import itertools
import random
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from gla_kernels import call, checks, chunk_gla, cuda, kinds, passes, recording, replay
from gla_kernels.launch import HOPPER, hopper_plan, triton_plan
from gla_kernels.recording import UnrecordableError, _Buffer, _pack
from gla_kernels.replay import Replay
from torch.utils._python_dispatch import TorchDispatchMode

C_TYPES = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


def kind_of_argument(x):
    """As Triton names the types of parameters."""
    if isinstance(x, torch.Tensor):
        return "*tensor"
    return "constexpr" if x is None or x == 1 else "fp32" if isinstance(x, float) else "i32"


class FakeLauncher:
    """Notes launches: grid, function, warps, early start, and the parameters that are not constants."""

    special: ClassVar[dict[str, object]] = {}

    def __init__(self, driver, log, kernel, constants, options):
        self._driver = driver
        self.kernel, self._log = SimpleNamespace(pre_run_hooks=[], name=kernel.__name__), log
        self.constants = list(constants.values())
        self._metadata = {
            "num_warps": options["num_warps"], "shared": 100, "launch_pdl": options.get("launch_pdl", False),
            "num_ctas": 1, "launch_cooperative_grid": False, "global_scratch_size": 0, "profile_scratch_size": 0,
        }  # fmt: skip
        self._seen = {}

    def __call__(self, programs, arguments):
        names = [kind_of_argument(x) for x in arguments]
        signature = dict(enumerate([*names, *["constexpr"] * len(self.constants)]))
        numbers = tuple([x for x in arguments if not isinstance(x, torch.Tensor)])
        function = 1000 + len(self._driver.parameters)
        self._driver.parameters[function] = [name for name in names if name != "constexpr"]
        self._seen[tuple(names), numbers] = SimpleNamespace(
            metadata=SimpleNamespace(**self._metadata | self.special),
            src=SimpleNamespace(signature=signature),
            function=function,
        )
        values = [x.data_ptr() if name[0] == "*" else x for name, x in zip(names, arguments, strict=True)]
        given = [(name, x) for name, x in zip(names, values, strict=True) if name != "constexpr"]
        grid = [*programs, 1, 1][:3]
        self._log.append((grid, function, self._metadata["num_warps"], self._metadata["launch_pdl"], given))

    @property
    def tensor_count(self):
        return 1000

    def remembered(self, device, arguments, low):
        names = tuple([kind_of_argument(x) for x in arguments])
        return self._seen.get((names, tuple([x for x in arguments if not isinstance(x, torch.Tensor)])))


class FakeDriver:
    """CUDA's functions on the CPU's memory. `parameters`: the types of each function's."""

    def __init__(self):
        self.launched, self.parameters, self.on_launch = [], {}, lambda: None
        self.asked, self.codes = 0, {}  # error codes by the number of the call

    def _code(self):
        self.asked += 1
        return self.codes.get(self.asked, 0)

    def launch(self, config, function, parameters, extra):
        self.on_launch()
        if code := self._code():
            return code
        settings = cuda.LaunchConfig.from_address(config)
        kinds_ = self.parameters[function]
        cells = (ctypes.c_void_p * (len(kinds_) + 2)).from_address(parameters)
        values = [
            (kind, C_TYPES.get(kind, ctypes.c_uint64).from_address(cell).value)
            for kind, cell in zip(kinds_, cells, strict=False)
        ]
        assert [ctypes.c_uint64.from_address(cell).value for cell in cells[-2:]] == [0, 0]
        assert settings.shared_bytes == 100
        assert list(settings.block)[1:] == [1, 1]
        early = settings.attribute_count == 1
        if early:
            attribute = cuda.LaunchAttribute.from_address(settings.attributes)
            assert (attribute.id, attribute.flag) == (6, 1)  # programmatic stream serialization in cuda.h
        self.launched.append((list(settings.grid), function, settings.block[0] // 32, early, values, settings.stream))
        return 0

    def fill(self, address, value, words, stream):
        assert stream == replay._current_stream(-1)
        if code := self._code():
            return code
        ctypes.memset(address, value, 4 * words)
        return 0

    def copy(self, address, original, size, stream):
        assert stream == replay._current_stream(-1)
        if code := self._code():
            return code
        ctypes.memmove(address, original, size)
        return 0


class Keeping(TorchDispatchMode):
    """Keeps all tensors, so that no two have the same address."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        self.kept.append(found)
        return found


@pytest.fixture
def driver():
    return FakeDriver()


@pytest.fixture(autouse=True)
def log(driver, monkeypatch):
    """What passes launch themselves."""
    notes, launchers = [], {}

    def launcher(kernel, constants, options):
        key = (kernel.__name__, constants, options)
        if key not in launchers:
            launchers[key] = FakeLauncher(driver, notes, kernel, dict(constants), dict(options))
        return launchers[key]

    def plan(K, V, dtype, chunk_size=None, device=None, gated=True):
        return hopper_plan(K, V, dtype, chunk_size) or triton_plan(K, V, dtype, chunk_size, gated)

    monkeypatch.setattr(call, "launcher", launcher)
    monkeypatch.setattr(recording, "launcher", launcher)
    monkeypatch.setattr(call, "plan", plan)
    monkeypatch.setattr(call, "_remembered_call", call._call)  # calls of other tests have other launchers
    monkeypatch.setattr(passes, "unrehearsed", lambda *kind: False)
    functions = cuda.Functions(driver.launch, driver.fill, driver.copy, lambda code: f"CUDA_ERROR_{code}")
    monkeypatch.setattr(kinds.cuda, "functions", lambda: functions)
    monkeypatch.setattr(kinds, "_ATTEMPTS", 3)
    monkeypatch.setattr(kinds, "_known", {})
    monkeypatch.setattr(replay, "_current_device", lambda: -1)
    monkeypatch.setattr(replay, "_current_stream", lambda device: 77)
    return notes


def inputs_of(B, T, H, K, V, gated, states, lengths, dtype=torch.bfloat16):
    """Tensors of a forward, and of a backward's output gradients."""
    N = len(lengths) if lengths else B
    q, k = (torch.ones(B, T, H, K, dtype=dtype) for _ in range(2))
    v, do = (torch.ones(B, T, H, V, dtype=dtype) for _ in range(2))
    g = torch.zeros(B, T, H, K) if gated else None
    initial, dfinal = (torch.ones(N, H, K, V) if states else None for _ in range(2))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0) if lengths else None
    return (q, k, v, g, initial, cu_seqlens), do, dfinal


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
@pytest.mark.parametrize(("gated", "states", "packed"), [(True, True, False), (True, False, True), (False, True, True)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_replay_launches_what_the_pass_has_launched(shape, gated, states, packed, keep, driver, log):
    T = shape[1]
    tensors, do, dfinal = inputs_of(
        1 if packed else shape[0], *shape[1:], gated, states, [T // 2, 1, T - T // 2 - 1] if packed else None
    )
    q, k, v, g, _, cu_seqlens = tensors
    known, settings = kinds.Passes(), (0.125, states, keep, None, None)
    assert known.forward(*tensors, settings) is None  # nothing has been launched yet
    with Keeping() as all_tensors:
        outputs = passes.forward(*tensors, *settings)
    again = known.forward(*tensors, settings)
    if shape[3] == 384 and gated and states and keep == passes.KEEP_CHECKPOINTS:
        assert again is None  # torch copies states between launches
        return
    same_outputs(again, outputs)
    assert not again[-1].any()  # flags
    moved = same_launches(driver.launched, log)
    assert_scratch_does_not_collide(log, moved, [*tensors, *all_tensors.kept])
    assert_addresses(driver, log, moved, (*tensors, *outputs), (*tensors, *again))
    others = like_these(tensors)
    assert_addresses(driver, log, moved, (*tensors, *outputs), (*others, *known.forward(*others, settings)))
    driver.launched.clear()

    saved = (q, k, v, g, cu_seqlens, *outputs[2:])
    log.clear()
    with Keeping() as all_tensors:
        gradients = passes.backward(q, k, v, g, cu_seqlens, do, dfinal, *outputs[2:], *settings)
    assert known.backward(saved, settings, do, dfinal) is None  # the first of its kind may not have been launched
    again = known.backward(saved, settings, do, dfinal)
    same_outputs(again, gradients)
    moved = same_launches(driver.launched, log)
    given = (*saved, do, dfinal)
    assert_scratch_does_not_collide(log, moved, [*given, *all_tensors.kept])
    assert_addresses(driver, log, moved, (*given, *gradients), (*given, *again))
    *saved, do, dfinal = like_these(given)
    again = known.backward(tuple(saved), settings, do, dfinal)
    assert_addresses(driver, log, moved, (*given, *gradients), (*saved, do, dfinal, *again))


def test_inputs_may_be_slices_of_one_projection(driver, log):
    both = torch.ones(1, 100, 2, 192, dtype=torch.bfloat16)
    q, k, v = both.split(64, -1)
    tensors, settings = (q, k, v, torch.zeros(1, 100, 2, 64), None, None), (0.125, False, 0, None, None)
    passes.forward(*tensors, *settings)
    assert kinds.Passes().forward(*tensors, settings) is not None
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
def repeat():
    """Repeats a forward; None if it did not."""
    tensors, _, _ = inputs_of(1, 100, 2, 64, 64, True, False, None)
    known, settings = kinds.Passes(), (0.125, False, passes.KEEP_NOTHING, None, None)
    passes.forward(*tensors, *settings)

    def repeat(*others):
        return known.forward(*others, *tensors[len(others) :], settings)

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
        repeat.known._forward._replay._kernels[0].pre_run_hooks.append(print)
    elif what == "launching":
        repeat.known._forward._replay._lock.acquire()
    else:
        driver.codes = {driver.asked + 1: 201}  # as in a thread that has not used the device yet
    driver.launched.clear()
    assert repeat(*others) is None
    assert driver.launched == []


def test_too_little_memory_in_one_piece_is_left_to_the_pass(repeat, driver, monkeypatch):
    def full():
        raise torch.OutOfMemoryError

    repeat.known._forward._replay._new[0] = full
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


def test_partial_sums_are_not_repeated():
    """The portable backward of several blocks of value columns ends with sums by torch."""
    tensors, do, _ = inputs_of(1, 100, 1, 60, 200, True, False, None)
    settings = 0.125, False, passes.KEEP_STATES, None, None
    outputs = passes.forward(*tensors, *settings)
    q, k, v, g, _, cu_seqlens = tensors
    passes.backward(q, k, v, g, cu_seqlens, do, None, *outputs[2:], *settings)
    known = kinds.Passes()
    assert known.forward(*tensors, settings) is not None
    assert [known.backward((q, k, v, g, None, *outputs[2:]), settings, do, None) for _ in range(3)] == [None] * 3


SIZES = (1, 64, 1, 64, 64, None, torch.float32, 1.0, torch.bfloat16, None, None, None)


def recorded(run, *inputs):
    return recording.record(call._call(*SIZES), -1, inputs, run)


def test_values_before_the_first_launch_are_repeated(driver):
    """Zeros and copies, in outputs and in scratch memory that no launch before them may use."""

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
    again = Replay(recorded(run, x), x, kinds.cuda.functions())
    for y in (x, x + 100):
        zeros, copy = again((y,))
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
    assert kinds.Passes().forward(*tensors, settings) is None


def test_a_pass_that_cannot_be_repeated_is_not_tried_again(monkeypatch):
    tried, refusals = [], [UnrecordableError(for_now=True), UnrecordableError()]

    def refuse(*_):
        tried.append(1)
        raise refusals[len(tried) - 1]

    monkeypatch.setattr(kinds, "record", refuse)
    tensors, _, _ = inputs_of(1, 100, 1, 64, 64, True, False, None)
    known = kinds.Passes()
    for _ in range(4):
        assert known.forward(*tensors, (0.125, False, passes.KEEP_NOTHING, None, None)) is None
    assert len(tried) == 2


def test_too_many_launches_are_not_recorded(monkeypatch):
    tensors, _, _ = inputs_of(1, 100, 1, 64, 64, True, False, None)
    settings = 0.125, False, passes.KEEP_NOTHING, None, None
    passes.forward(*tensors, *settings)
    monkeypatch.setattr(recording, "_MOST_LAUNCHES", 2)
    assert kinds.Passes().forward(*tensors, settings) is None


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


def plain_inputs(**changes):
    tensors, _, _ = inputs_of(1, 20, 1, 16, 16, True, True, None)
    names = ("q", "k", "v", "g", "initial_state", "cu_seqlens")
    options = {"scale": None, "output_final_state": True, "materialize": True}
    return dict(zip(names, tensors, strict=True)) | options | changes


def test_under_autocast_calls_have_no_kind():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert kinds.kind_of(**plain_inputs()) is None


def test_calls_that_checks_and_decisions_cannot_tell_apart_are_of_one_kind():
    assert kinds.kind_of(**plain_inputs()) == kinds.kind_of(**plain_inputs(q=torch.zeros(1, 20, 1, 16).bfloat16()))


@pytest.mark.parametrize(
    "changes",
    [
        {"q": torch.zeros(1, 21, 1, 16, dtype=torch.bfloat16)},
        {"k": torch.zeros(1, 20, 1, 32, dtype=torch.bfloat16)[..., :16]},
        {"v": torch.zeros(1, 20, 1, 16)},
        {"g": torch.zeros(1, 20, 1, 16, dtype=torch.bfloat16)},
        {"g": None},
        {"initial_state": None},
        {"initial_state": torch.zeros(2, 1, 16, 16)},
        {"cu_seqlens": torch.tensor([0, 20])},
        {"scale": 0.5},
        {"output_final_state": False},
        {"q": torch.zeros(1, 20, 1, 16, dtype=torch.bfloat16, requires_grad=True)},
        {"k": torch.zeros(1, 20, 1, 16, dtype=torch.bfloat16, device="cpu").requires_grad_(), "materialize": False},
    ],
    ids=str,
)
def test_whatever_is_checked_or_decides_makes_another_kind(changes):
    assert kinds.kind_of(**plain_inputs(**changes)) not in (None, kinds.kind_of(**plain_inputs()))


@pytest.mark.parametrize(
    "changes",
    [
        {"scale": 1},
        {"scale": torch.tensor(1.0)},
        {"g": torch.zeros(1, 20, 1, 16, dtype=torch.float16)},
        {"initial_state": torch.zeros(1, 1, 16, 32)[..., :16]},
        {"cu_seqlens": torch.tensor([0, 1, 20, 1])[::2]},
        {"q": torch.zeros(1, 20, 1, 512)},
        {"q": torch.zeros(3)},
        {"q": "not a tensor"},
    ],
    ids=str,
)
def test_calls_that_have_to_be_changed_or_refused_have_no_kind(changes):
    assert kinds.kind_of(**plain_inputs(**changes)) is None


def test_kinds_are_known_once_a_call_has_succeeded_and_bounded(monkeypatch):
    monkeypatch.setattr(kinds, "_KINDS", 2)
    for name in ("a", "b", "c"):
        assert kinds.known((name,)) is None
        kinds.note((name,))
        assert kinds.known((name,)) is kinds.known((name,)) is not None
    assert len(kinds._known) == 1


def test_a_refused_call_is_refused_again():
    wrong = dict.fromkeys(("q", "k", "v", "g"), torch.zeros(1, 20, 1, 16, dtype=torch.bfloat16))
    wrong["k"] = torch.zeros(1, 20, 2, 16, dtype=torch.bfloat16)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^k: "):
            chunk_gla(**wrong)
