"""Launches and CUDA's driver as fakes that note what is asked of them, fixtures that put them in place, and inputs.

A test module takes the fixtures by name: `driver, log = fake_cuda.driver, fake_cuda.log`.
"""

import ctypes
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from gla_kernels.launching import call, cuda, recording, replay
from gla_kernels.launching.plans import hopper_plan, triton_plan
from gla_kernels.operators import kinds, passes
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


_POINTER, _SIZE = ctypes.c_uint64, ctypes.c_size_t
_SIGNATURES = {
    "launch": (_POINTER, _POINTER, _POINTER, _POINTER),
    "fill": (_POINTER, ctypes.c_uint, _SIZE, _POINTER),
    "copy": (_POINTER, _POINTER, _SIZE, _POINTER),
}


class FakeDriver:
    """CUDA's functions on the CPU's memory. `parameters`: the types of each function's."""

    def __init__(self):
        self.launched, self.parameters, self.on_launch = [], {}, lambda: None
        self.asked, self.codes = 0, {}  # error codes by the number of the call
        self._callbacks = {
            name: ctypes.CFUNCTYPE(ctypes.c_int, *types)(getattr(self, name)) for name, types in _SIGNATURES.items()
        }

    def functions(self):
        """Their addresses, for C."""
        addresses = (ctypes.cast(self._callbacks[name], ctypes.c_void_p).value for name in _SIGNATURES)
        return cuda.Functions(*addresses, lambda code: f"CUDA_ERROR_{code}")

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


def inputs_of(B, T, H, K, V, gated, states, lengths, dtype=torch.bfloat16, per_head=False):
    """Tensors of a forward, and of a backward's output gradients. `per_head`: gates, if any, are [B, T, H]."""
    N = len(lengths) if lengths else B
    q, k = (torch.ones(B, T, H, K, dtype=dtype) for _ in range(2))
    v, do = (torch.ones(B, T, H, V, dtype=dtype) for _ in range(2))
    g = torch.zeros(B, T, H, *([] if per_head else [K])) if gated else None
    initial, dfinal = (torch.ones(N, H, K, V) if states else None for _ in range(2))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0) if lengths else None
    return (q, k, v, g, initial, cu_seqlens), do, dfinal


def forward_of(tensors):
    """The tensors of `inputs_of` in the order of a pass: states last."""
    q, k, v, g, initial, cu_seqlens = tensors
    return q, k, v, g, cu_seqlens, initial


@pytest.fixture
def driver():
    return FakeDriver()


@pytest.fixture
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
    monkeypatch.setattr(kinds.cuda, "functions", driver.functions)
    monkeypatch.setattr(kinds, "_passes_by_kind", {})
    monkeypatch.setattr(replay, "_current_device", lambda: -1)
    monkeypatch.setattr(replay, "_current_stream", lambda device: 77)
    return notes
