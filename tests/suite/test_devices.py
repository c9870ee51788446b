"""The machine: choosing a device, its state and ceilings, and the origin of measured code."""

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from glabench.devices import resident
from glabench.devices.ceilings import (
    copy_bandwidth_gbps,
    fp32_product_tflops,
    l2_copy_gbps,
    product_tflops,
    read_bandwidth_gbps,
)
from glabench.devices.choice import Device, parse_device
from glabench.devices.clock import sm_clock
from glabench.devices.environment import collect, main, probe
from glabench.devices.moving import BLOCK, PIECE, copy_to_and_fro, read_pieces
from glabench.devices.nvml import DeviceState, Nvml, open_nvml
from glabench.devices.resident import peak_resident_mib
from glabench.errors import GlabenchError, UsageError
from glabench.plain import read_as
from glabench.records.environment import Ceilings

# Choosing a device


@pytest.mark.parametrize(
    ("text", "gpus", "device"),
    [
        ("auto", 0, "cpu"),
        ("auto", 2, "cuda:0"),
        ("cpu", 2, "cpu"),
        ("cuda", 1, "cuda:0"),
        ("cuda:1", 2, "cuda:1"),
        ("cuda:10", 11, "cuda:10"),
    ],
)
def test_a_device_is_chosen_by_its_text(text, gpus, device):
    chosen = parse_device(text, gpus)
    assert str(chosen) == device
    assert parse_device(str(chosen), gpus) == chosen


def test_a_device_tells_its_kind_from_its_number():
    assert parse_device("cuda:1", 2) == Device("cuda", 1)
    assert parse_device("cpu", 2) == Device("cpu", None)


@pytest.mark.parametrize(
    ("text", "gpus", "message"),
    [
        ("cuda:3", 2, "'cuda:3' does not exist: torch sees 2 GPUs (allowed here: auto, cpu, cuda, cuda:0, cuda:1)"),
        ("cuda:1", 1, "'cuda:1' does not exist: torch sees 1 GPU (allowed here: auto, cpu, cuda, cuda:0)"),
        ("cuda", 0, "'cuda' does not exist: torch sees no GPU (allowed here: auto, cpu)"),
        ("gpu", 1, "'gpu' is not a device (allowed: auto, cpu, cuda, cuda:N)"),
        ("cuda1", 2, "'cuda1' is not a device (allowed: auto, cpu, cuda, cuda:N); did you mean 'cuda:1'?"),
        ("cuda:01", 2, "'cuda:01' is not a device (allowed: auto, cpu, cuda, cuda:N); did you mean 'cuda:1'?"),
        ("cuda:-1", 2, "'cuda:-1' is not a device (allowed: auto, cpu, cuda, cuda:N); did you mean 'cuda:1'?"),
        ("", 1, "'' is not a device (allowed: auto, cpu, cuda, cuda:N)"),
    ],
)
def test_a_wrong_device_is_refused_with_what_is_allowed(text, gpus, message):
    with pytest.raises(UsageError) as problem:
        parse_device(text, gpus)
    assert str(problem.value) == f"--device: {message}"


# A made-up machine with GPUs


class Library:
    """The parts of pynvml that are used, with a made-up device."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self, **answers):
        self._answers = answers

    def __getattr__(self, name):
        if name not in self._answers:
            raise AttributeError(name)

        def call(*arguments):
            answer = self._answers[name]
            if isinstance(answer, Exception):
                raise answer
            return answer(*arguments) if callable(answer) else answer

        return call


def nvml(**answers):
    return Nvml(Library(**answers), None)


@pytest.fixture
def gpus(monkeypatch):
    """Gives torch GPUs with these UUIDs, and NVML handles (by UUID with prefix) and answers."""
    import torch

    current = [0]

    def attach(*uuids, handles=None, **answers):
        def find(uuid):
            if uuid not in handles:
                raise Library.NVMLError("not found")
            return handles[uuid]

        def properties(device=None):
            index = current[0] if device is None else device
            memory = {"total_memory": 2**37, "L2_cache_size": 50 * 2**20, "multi_processor_count": 132}
            return SimpleNamespace(name=f"GPU {index}", uuid=uuids[index], major=9, minor=0, **memory)

        handles = {f"GPU-{uuid}": uuid for uuid in uuids} if handles is None else handles
        answers = {"nvmlSystemGetDriverVersion": "580.1", **answers}
        library = Library(nvmlInit=None, nvmlDeviceGetHandleByUUID=find, **answers)
        monkeypatch.setitem(sys.modules, "pynvml", library)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
        monkeypatch.setattr(torch.cuda, "set_device", lambda index: current.__setitem__(0, index))
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)

    return attach


# NVML


def test_what_the_driver_does_not_tell_is_null_and_the_rest_is_read():
    gpu = nvml(
        nvmlDeviceGetClockInfo=1980,
        nvmlDeviceGetTemperature=Library.NVMLError("not supported"),
        nvmlDeviceGetPowerUsage=123400,
        nvmlDeviceGetCurrentClocksThrottleReasons=0x4 | 0x1,
    )
    assert gpu.state() == DeviceState(1980.0, 1980.0, None, 123.4, frozenset({"power cap"}))
    assert gpu.energy_j() is None
    assert gpu.processes().others is None
    assert gpu.settings() == {"ecc": None, "mig": None, "max_sm_clock_mhz": None, "power_limit_w": None}


@pytest.mark.parametrize(
    ("pids", "computes", "others"),
    [
        (["own"], True, 0),
        (["own", 4], True, 1),
        (["own", 4], False, 1),
        ([77], True, 0),
        ([77, 78], True, 1),
        ([77], False, 1),
        ([], False, 0),
    ],
)
def test_other_processes_are_counted_whether_or_not_numbers_are_those_of_a_container(pids, computes, others):
    found = [SimpleNamespace(pid=os.getpid() if pid == "own" else pid, usedGpuMemory=2**30) for pid in pids]
    processes = nvml(nvmlDeviceGetComputeRunningProcesses=found).processes(computes)
    assert processes.others == others
    assert processes.own_memory_mib == (1024 if "own" in pids else None)


def test_a_driver_that_does_not_even_show_this_process_tells_nothing_of_others():
    processes = nvml(nvmlDeviceGetComputeRunningProcesses=[]).processes(computes=True)
    assert (processes.own_memory_mib, processes.others) == (None, None)


def test_nvml_reads_the_gpu_that_is_torchs_current_one(gpus):
    import torch

    gpus("aaaa", "bbbb", nvmlDeviceGetPowerUsage=lambda handle: {"aaaa": 1000, "bbbb": 2000}[handle])
    assert open_nvml().state().power_w == 1.0
    torch.cuda.set_device(1)
    assert open_nvml().state().power_w == 2.0


@pytest.mark.parametrize("uuid", ["cccc", "MIG-cccc"])
def test_a_part_of_a_gpu_is_found_by_its_own_uuid(gpus, uuid):
    gpus(uuid, handles={"MIG-cccc": "part"}, nvmlDeviceIsMigDeviceHandle=lambda handle: int(handle == "part"))
    assert open_nvml().settings()["mig"] is True


def test_a_gpu_that_nvml_does_not_know_has_no_readings(gpus):
    gpus("aaaa", handles={})
    assert open_nvml() is None
    gpus(None)
    assert open_nvml() is None


def test_without_the_package_there_is_no_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_nvml() is None


def test_without_a_gpu_there_is_no_clock():
    import torch

    if torch.version.cuda is None:
        assert sm_clock() is None


# Ceilings


def run_once(milliseconds):
    def median_ms(call):
        call()
        return milliseconds

    return median_ms


def test_a_copy_counts_what_it_reads_and_writes():
    assert copy_bandwidth_gbps(run_once(2.0), "cpu", buffer_bytes=4000) == pytest.approx(2 * 4000 / 2.0 / 1e6)


def test_a_read_counts_what_it_reads_of_half_of_the_free_memory():
    free = 2 * 4 * 3 * PIECE + 1
    assert read_bandwidth_gbps(run_once(2.0), free, "cpu") == pytest.approx(4 * 3 * PIECE / 2.0 / 1e6)


def test_a_read_reads_every_number_once():
    numbers = torch.randint(-(2**31), 2**31, (2, PIECE), dtype=torch.int32)
    found = torch.zeros(2, dtype=torch.int32)
    read_pieces(numbers, found)
    assert found.tolist() == np.bitwise_xor.reduce(numbers.numpy(), axis=1).tolist()


def test_a_copy_within_the_cache_counts_both_ways_of_all_rounds():
    l2_bytes = 8 * 2 * 4 * BLOCK  # a quarter of it has two blocks for either buffer
    assert l2_copy_gbps(run_once(2.0), l2_bytes, "cpu") == pytest.approx(2 * 2 * 100 * 2 * BLOCK * 4 / 2.0 / 1e6)


def test_a_copy_to_and_fro_writes_the_whole_target():
    source = torch.randint(-(2**31), 2**31, (2 * BLOCK,), dtype=torch.int32)
    kept, target = source.clone(), torch.zeros_like(source)
    copy_to_and_fro(source, target, 2)
    assert torch.equal(source, kept)
    assert torch.equal(target, kept)


@pytest.mark.parametrize("product", [product_tflops, fp32_product_tflops])
def test_a_product_counts_two_flops_per_pair(product):
    assert product(run_once(2.0), "cpu", size=16) == pytest.approx(2 * 16**3 / 2.0 / 1e9)


def test_without_room_a_ceiling_is_unknown(monkeypatch):
    import torch

    def fail(*arguments, **options):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch, "randint", fail)
    monkeypatch.setattr(torch, "randn", fail)
    assert copy_bandwidth_gbps(run_once(1.0)) is product_tflops(run_once(1.0)) is None


def test_ceilings_are_read_back_from_json_and_refused_if_impossible():
    assert read_as(Ceilings, {"copy_gbps": 4000.0}) == Ceilings(4000.0)
    with pytest.raises(ValueError, match="copy_gbps"):
        read_as(Ceilings, {"copy_gbps": 0.0})


# The environment


def test_the_environment_is_that_of_the_chosen_gpu_without_its_serial(gpus):
    uuids = ("aaaa-1", "bbbb-2")
    gpus(*uuids)
    first, second = collect("auto"), collect("cuda:1")
    assert [e["gpu"]["index"] for e in (first, second)] == [0, 1]
    assert [e["gpu"]["name"] for e in (first, second)] == ["GPU 0", "GPU 1"]
    assert (second["device"], second["gpus"], second["gpu"]["driver"]) == ("cuda", 2, "580.1")
    ids = {e["gpu"]["id"] for e in (first, second)}
    assert len(ids) == 2
    assert all(len(each) == 12 and int(each, 16) >= 0 for each in ids)
    assert not any(uuid in json.dumps([first, second]) for uuid in uuids)


def test_the_gpu_is_described_in_a_run_on_the_cpu_too(gpus):
    gpus("aaaa")
    found = collect("cpu")
    assert (found["device"], found["gpus"], found["gpu"]["name"]) == ("cpu", 1, "GPU 0")


def test_a_process_that_is_asked_for_a_wrong_device_says_so_as_data(gpus, capsys):
    gpus("aaaa", "bbbb")
    assert main("cuda:3") == 2
    assert "torch sees 2 GPUs" in json.loads(capsys.readouterr().out)["error"]


def test_a_fresh_process_tells_the_environment():
    found = probe("cpu")
    assert found["device"] == "cpu"
    assert found["packages"]["torch"]
    keys = {"glabench", "python", "os", "cpu", "cpu_cores", "torch_threads", "device", "gpus", "gpu", "busy"}
    assert set(found) == keys | {"packages"}
    assert (found["gpu"] is None) == (found["gpus"] == 0)


def answering(code, stdout="", stderr=""):
    return lambda command, **options: subprocess.CompletedProcess(command, code, stdout.encode(), stderr.encode())


def test_a_wrong_device_is_refused_as_the_process_words_it(monkeypatch):
    monkeypatch.setattr(subprocess, "run", answering(2, '{"error": "--device: no"}'))
    with pytest.raises(UsageError, match=r"^--device: no$"):
        probe("gpu")


@pytest.mark.parametrize(
    ("last", "hint"),
    [("ModuleNotFoundError: No module named 'torch'", "; install it with: pip install torch"), ("a driver", "")],
)
def test_a_torch_that_does_not_work_is_one_line_with_a_hint_if_it_is_missing(monkeypatch, last, hint):
    monkeypatch.setattr(subprocess, "run", answering(1, "", f"Traceback\n  more\n{last}\n"))
    with pytest.raises(GlabenchError) as problem:
        probe()
    assert str(problem.value) == f"torch does not work here: {last}{hint}"


def test_choosing_and_describing_need_no_torch():
    modules = ["", ".choice", ".environment", ".nvml", ".ceilings", ".provenance", ".resident"]
    code = "import sys\n" + "".join(f"import glabench.devices{module}\n" for module in modules)
    code += "print([name for name in ('torch', 'triton', 'pynvml', 'numpy') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# Memory on a CPU

needs_proc = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")


@needs_proc
def test_a_call_is_charged_the_memory_that_it_takes_whether_or_not_it_returns_it():
    import torch

    def allocate():
        return torch.ones(64 * 2**18)

    for call in (allocate, lambda: allocate().sum()):
        call()
        assert peak_resident_mib(call) == pytest.approx(64, abs=3)


@needs_proc
def test_memory_that_was_freed_before_hides_nothing():
    import torch

    def allocate():
        return [torch.ones(2**12) for _ in range(2**12)]  # 16 KiB each, from the heap, which keeps freed memory

    peak_resident_mib(allocate)
    kept = allocate()
    del kept
    assert 61 <= peak_resident_mib(allocate) <= 70


@needs_proc
def test_the_peak_counts_and_not_what_is_left():
    def touched(mib):
        # Straight from the system: in a process that has freed much, the C library may keep what it is given back.
        memory = mmap.mmap(-1, mib * 2**20)
        memory[:: mmap.PAGESIZE] = bytes(mib * 2**20 // mmap.PAGESIZE)
        return memory

    def call():
        touched(64).close()
        return touched(16)

    assert peak_resident_mib(call) == pytest.approx(64, abs=3)


def test_where_the_system_does_not_tell_memory_is_unknown(monkeypatch, tmp_path):
    called = []
    for file in ("_STATUS", "_CLEAR_REFS"):
        monkeypatch.setattr(resident, file, tmp_path / "missing" / "file")
        assert peak_resident_mib(lambda: called.append(1)) is None
    assert called == []
