"""Which launches go straight to a compiled kernel, and with what. Kernels and the driver are fakes."""

import json
import os
import subprocess
import sys

import pytest
import torch
import triton
from gla_kernels.launching import direct
from gla_kernels.launching.call import Call
from gla_kernels.launching.direct import Launcher
from gla_kernels.launching.plans import HOPPER
from triton import knobs


class FakeRun:
    """What a compiled kernel is launched by."""

    def __init__(self, log):
        self.log = log

    def __call__(self, *arguments):
        self.log.append(("direct", arguments))


FakeRun.__module__ = direct._LAUNCHER_MODULE


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self, log):
        self.run = FakeRun(log)


class Kernel:
    """A kernel that notes its launches through the JIT."""

    arg_names = ("x", "y", "scale", "T", "K", "GATED")

    def __init__(self, log):
        self.log, self.pre_run_hooks = log, []

    def __getitem__(self, programs):
        def run(*arguments, **keywords):
            self.log.append(("jit", arguments, keywords))
            return Compiled(self.log)

        return run

    def run(self):
        """In the place of Triton's own."""


class Driver:
    device, stream = 0, 77

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        return self.stream + device


@pytest.fixture
def driver(monkeypatch):
    fake = Driver()
    monkeypatch.setattr(direct.driver, "_active", fake)
    monkeypatch.setattr(direct, "CompiledKernel", Compiled)
    monkeypatch.setattr(direct.JITFunction, "run", Kernel.run)
    return fake


@pytest.fixture
def log(driver):
    return []


@pytest.fixture
def launch(log):
    launcher = Launcher(Kernel(log), {"GATED": True, "K": 64}, {"num_warps": 4})

    def launch(*arguments, programs=(3,)):
        launcher(programs, arguments)
        return log[-1][0]

    launch.launcher = launcher
    return launch


def tensor(dtype=torch.float32, offset=0):
    x = torch.zeros(80, dtype=dtype)
    skip = -x.data_ptr() % 16 // x.element_size()
    return x[skip + offset :]


def test_an_equal_launch_goes_straight_to_the_compiled_kernel(launch, log):
    x, y = tensor(), tensor()
    assert launch(x, None, 0.5, 33) == "jit"
    assert log[0][2] == {"GATED": True, "K": 64, "num_warps": 4}
    assert launch(y, None, 0.5, 33, programs=(5, 6)) == "direct"
    head = (5, 6, 1, 77, "function", "metadata", None, None, None)
    # Addresses in place of tensors, and the constants in the order of the kernel's parameters.
    assert log[1][1] == (*head, y.data_ptr(), 0, 0.5, 33, 64, True)


@pytest.mark.parametrize(
    "other",
    [
        (tensor(offset=1), None, 0.5, 33),
        (tensor(torch.float64), None, 0.5, 33),
        (tensor(), tensor(), 0.5, 33),
        (None, None, 0.5, 33),
        (tensor(), None, 0.25, 33),
        (tensor(), None, 0.5, 1),
        (tensor(), None, 0.5, 32),
        (tensor(), None, 0.5, 2**31),
    ],
    ids=["unaligned", "dtype", "present", "absent", "scale", "one", "divisible", "64 bits"],
)
def test_other_arguments_are_left_to_the_jit_once(launch, other):
    assert launch(tensor(), None, 0.5, 33) == "jit"
    assert launch(*other) == "jit"
    assert launch(*other) == "direct"
    assert launch(tensor(), None, 0.5, 33) == "direct"


def test_each_tensor_has_its_own_alignment(launch):
    launch(tensor(), tensor(offset=1), 0.5, 33)
    assert launch(tensor(offset=1), tensor(), 0.5, 33) == "jit"


def test_each_device_has_its_own_compiled_kernel_and_each_launch_takes_the_current_stream(launch, log, driver):
    launch(tensor(), None, 0.5, 33)
    driver.device = 1
    assert launch(tensor(), None, 0.5, 33) == "jit"
    driver.stream = 90
    assert launch(tensor(), None, 0.5, 33) == "direct"
    assert log[-1][1][3] == 91


@pytest.mark.parametrize(
    ("where", "name", "value"), [("runtime", "debug", True), ("compilation", "instrumentation_mode", "consan")]
)
def test_tritons_knobs_are_part_of_what_has_to_be_equal(launch, monkeypatch, where, name, value):
    launch(tensor(), None, 0.5, 33)
    monkeypatch.setattr(getattr(knobs, where), name, value)
    assert launch(tensor(), None, 0.5, 33) == "jit"
    assert launch(tensor(), None, 0.5, 33) == "direct"


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_while_a_launch_is_watched_it_goes_through_the_jit(launch, monkeypatch, name):
    launch(tensor(), None, 0.5, 33)
    chain = getattr(knobs.runtime, name)

    def hook(metadata):
        pass

    chain.add(hook)
    assert launch(tensor(), None, 0.5, 33) == "jit"
    chain.remove(hook)
    assert launch(tensor(), None, 0.5, 33) == "direct"
    monkeypatch.setattr(knobs.runtime, name, hook)
    assert launch(tensor(), None, 0.5, 33) == "jit"
    monkeypatch.setattr(knobs.runtime, name, None)
    assert launch(tensor(), None, 0.5, 33) == "direct"


def test_hooks_of_the_kernel_or_of_the_compilers_stages_are_honoured(launch, monkeypatch):
    launch(tensor(), None, 0.5, 33)
    launch.launcher.kernel.pre_run_hooks.append(print)
    assert launch(tensor(), None, 0.5, 33) == "jit"
    launch.launcher.kernel.pre_run_hooks.clear()
    assert launch(tensor(), None, 0.5, 33) == "direct"
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", lambda: ("", ""))
    assert launch(tensor(), None, 0.5, 33) == "jit"


def test_an_unknown_version_of_triton_launches_for_itself(driver, log, monkeypatch):
    monkeypatch.setattr(triton, "__version__", "9.0.0")
    launcher = Launcher(Kernel(log), {"K": 64, "GATED": True}, {})
    for _ in range(2):
        launcher((1,), (tensor(), None, 0.5, 33))
    assert [kind for kind, *_ in log] == ["jit", "jit"]


@pytest.mark.parametrize("arguments", [(tensor(), 0.5, None, 33), (tensor(), None, 0.5), (tensor(), None, True, 33)])
def test_arguments_of_another_form_go_through_the_jit(launch, arguments):
    assert launch(*arguments) == "jit"
    assert launch(*arguments) == "jit"


def test_other_backends_and_kernels_that_are_not_compiled_go_through_the_jit(launch, monkeypatch):
    monkeypatch.setattr(direct, "_LAUNCHER_MODULE", "triton.backends.amd.driver")
    assert launch(tensor(), None, 0.5, 33) == "jit"
    assert launch(tensor(), None, 0.5, 33) == "jit"


def test_what_is_remembered_is_bounded(launch, monkeypatch):
    monkeypatch.setattr(direct, "_LAUNCHES", 3)
    for T in range(20):
        launch(tensor(), None, 0.5, T)
        assert len(launch.launcher._remembered) <= 3


def test_calls_of_other_sizes_share_launchers_and_switches_tell_them_apart(driver, log):
    kernel = Kernel(log)
    for T in (64, 128):
        call = Call(1, T, 1, 64, 64, 1, False, True, 1.0, torch.bfloat16, HOPPER)
        call.launch(kernel, HOPPER.forward, (1,), (tensor(), None, 0.5, 33), {"GATED": True})
    call.launch(kernel, HOPPER.forward, (1,), (tensor(), None, 0.5, 33), {"GATED": False})
    call.launch(kernel, HOPPER.forward, (1,), (tensor(), None, 0.5, 33), {"GATED": False}, early=False)
    assert [kind for kind, *_ in log] == ["jit", "direct", "jit", "jit"]


# Triton as it is, with a driver that loads nothing and notes what would be launched: the launches of two forwards.
REAL = """
import json, sys
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import compiler
from triton.runtime import driver

notes = []

class Launch:
    def __init__(self, src, metadata):
        self.pdl, self.kinds = metadata.launch_pdl, list(src.signature.values())

    def __call__(self, x, y, z, stream, function, metadata, note, enter, leave, *arguments):
        through = "direct" if enter is None else "jit"
        addresses = [a.data_ptr() if isinstance(a, torch.Tensor) else a or 0 for a in arguments]
        # What a kernel gets of them: not what it is compiled for.
        given = [str(a) for a, kind in zip(addresses, self.kinds, strict=True) if kind != "constexpr"]
        notes.append((through, [x, y, z, stream, function, metadata, self.pdl, *map(str, addresses)], given))

class Driver:
    class utils:
        load_binary = staticmethod(lambda name, *_: (name, name, 32, 0, 1024))
    launcher_cls = Launch
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 5)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

Launch.__module__ = "triton.backends.nvidia.driver"
driver._active = Driver()
compiler.max_shared_mem = lambda device: 232448

from gla_kernels.launching.buffers import Flags, Inputs, flag_buffer
from gla_kernels.launching.call import Call
from gla_kernels.operators.launches import run_forward
from gla_kernels.launching.plans import HOPPER, triton_plan
from gla_kernels.launching.recording import Place, record

for plan in (HOPPER, triton_plan(64, 64, torch.bfloat16, None)):
    q = torch.zeros(1, 100, 1, 64, dtype=torch.bfloat16)
    g = torch.zeros(1, 100, 1, 64)
    call = Call(1, 100, 1, 64, 64, 1, False, True, 0.125, torch.bfloat16, plan)
    inputs, flags = Inputs.of(call, q, q, q, g, None), Flags.of(call, flag_buffer(call, q))
    states = q.new_empty(call.kept_shape(True))
    initial, final, o = call.new_states(q), call.new_states(q), torch.empty_like(q)
    scratch = q.new_empty(2**20, dtype=torch.float32)
    with patch.object(torch.Tensor, "new_empty", lambda *_, **__: scratch):  # at the same address in every call
        for _ in range(2):
            run_forward(call, inputs, flags, o=o, initial=initial, final=final, states=states)

    def run(call, q, g, buffer, o, initial, final, states):
        inputs, flags = Inputs.of(call, q, q, q, g, None), Flags.of(call, buffer)
        run_forward(call, inputs, flags, o=o, initial=initial, final=final, states=states)
        return []

    tensors = q, g, flags.rows._base, o, initial, final, states
    recorded = record(call, 0, tensors, run).launches
    tensors += (scratch,)
    for launch in recorded:
        metadata = launch.compiled.metadata
        values = [
            x if type(x) is not Place else tensors[x.base].data_ptr() + x.offset for _, x in launch.parameters
        ]
        packed = (metadata.num_warps, metadata.num_ctas, metadata.shared)
        settings = [*launch.programs, 5, launch.compiled.function, packed, metadata.launch_pdl]
        notes.append(("recorded", settings, list(map(str, values))))
json.dump(notes, sys.stdout)
"""


def test_a_direct_launch_passes_what_tritons_own_passes():
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    notes = json.loads(done.stdout)
    kinds = [through for through, *_ in notes]
    assert kinds == (["jit"] * 3 + ["direct"] * 3 + ["recorded"] * 3) * 2
    for first in (0, 9):
        assert notes[first][1][6] == (first == 0)  # only the Gluon kernels begin early
        by_jit, direct_, recorded = (notes[first + i : first + i + 3] for i in (0, 3, 6))
        for (_, one, given), (_, other, _), (_, (*settings, pdl), parameters) in zip(
            by_jit, direct_, recorded, strict=True
        ):
            assert one == other
            assert [*settings, pdl] == one[:7]
            assert parameters == given
