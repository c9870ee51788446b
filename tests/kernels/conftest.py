"""Fixtures: passes whose kernels are not compiled, and whose replays go to a driver that is a fake."""

import pytest
from fake_cuda import FakeDriver, FakeLauncher
from gla_kernels import call, cuda, kinds, passes, recording, replay
from gla_kernels.launch import hopper_plan, triton_plan


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
    functions = cuda.Functions(driver.launch, driver.fill, driver.copy, lambda code: f"CUDA_ERROR_{code}")
    monkeypatch.setattr(kinds.cuda, "functions", lambda: functions)
    monkeypatch.setattr(kinds, "_ATTEMPTS", 3)
    monkeypatch.setattr(kinds, "_known", {})
    monkeypatch.setattr(replay, "_current_device", lambda: -1)
    monkeypatch.setattr(replay, "_current_stream", lambda device: 77)
    return notes
