"""The machine: choosing a device, its state and ceilings, and the origin of measured code."""

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from glabench.devices import provenance, resident
from glabench.devices.ceilings import copy_bandwidth_gbps, product_tflops
from glabench.devices.choice import Device, parse_device
from glabench.devices.clock import sm_clock
from glabench.devices.environment import collect, main, probe
from glabench.devices.nvml import DeviceState, Nvml, open_nvml
from glabench.devices.provenance import command_line, describe_code, hash_code, hash_package, relevant_variables
from glabench.devices.resident import peak_resident_mib
from glabench.errors import GlabenchError, UsageError
from glabench.plain import read_as
from glabench.records.environment import Ceilings, measured_code

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


def test_a_product_counts_two_flops_per_pair():
    assert product_tflops(run_once(2.0), "cpu", size=16) == pytest.approx(2 * 16**3 / 2.0 / 1e9)


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


# Provenance


def git(folder, *arguments):
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with packages of one module each; the first one stands for the suite."""
    for package in ("glabench", "gla_kernels"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f"# {package}\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    monkeypatch.setattr(provenance, "_SUITE", tmp_path / "glabench")
    return tmp_path


def describe(checkout, plugins=()):
    return describe_code(plugins, checkout / "gla_kernels")


def test_code_is_known_by_its_commit_and_by_hashes_of_its_parts(checkout):
    found = describe(checkout)
    assert found["commit"] == git(checkout, "rev-parse", "HEAD")
    assert found["changed"] is False
    assert found["suite"] == hash_package(checkout / "glabench")
    assert found["kernels"] == hash_code(checkout / "gla_kernels")
    assert str(checkout) not in json.dumps(found)


def test_a_change_shows_in_the_hash_of_its_part_alone(checkout):
    before = describe(checkout)
    (checkout / "gla_kernels/__init__.py").write_text("other = 1\n")
    after = describe(checkout)
    assert after == before | {"changed": True, "kernels": after["kernels"]}
    assert after["kernels"] != before["kernels"]


def test_a_comment_changes_a_file_of_the_kernels_and_not_their_code(checkout):
    before = describe(checkout)
    (checkout / "gla_kernels/__init__.py").write_text("# other\n")
    assert describe(checkout) == before | {"changed": True}


def test_a_hash_of_code_is_never_that_of_a_files_bytes(checkout):
    (checkout / "mine.py").write_text("BACKENDS = [\n")  # does not parse, so its bytes count
    found = describe(checkout, [str(checkout / "mine.py")])
    assert found["kernels"].startswith("tree:")
    assert found["plugins"]["mine.py"].startswith("tree:")
    assert not found["suite"].startswith("tree:")
    old = {"kernels": hash_package(checkout / "gla_kernels"), "plugins": {}}
    assert measured_code(old) != measured_code(describe(checkout))


def test_a_file_that_git_does_not_track_is_no_change(checkout):
    (checkout / "note").write_text("")
    assert describe(checkout)["changed"] is False


def test_a_hook_of_another_repository_does_not_mislead(checkout, monkeypatch, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    git(other, "init", "-q")
    before = describe(checkout)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    assert describe(checkout) == before


def test_a_package_that_was_installed_inside_somebodys_repository_has_no_commit(checkout, monkeypatch):
    installed = checkout / ".venv/glabench"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("# glabench\n")
    monkeypatch.setattr(provenance, "_SUITE", installed)
    found = describe(checkout)
    assert (found["commit"], found["changed"]) == (None, None)
    assert found["suite"] == hash_package(checkout / "glabench")


def test_without_git_there_is_no_commit_and_there_are_hashes(checkout, monkeypatch):
    before = describe(checkout)
    monkeypatch.setenv("PATH", "")
    assert describe(checkout) == before | {"commit": None, "changed": None}


@pytest.mark.parametrize("hashed", [hash_code, hash_package])
def test_the_hash_of_a_package_tells_names_and_folders_and_passes_over_other_files(tmp_path, hashed):
    hashes = []
    for step in ("a/x.py", "b/x.py", "b/y/x.py"):
        folder = tmp_path / str(len(hashes))
        (folder / step).parent.mkdir(parents=True)
        (folder / step).write_text("1")
        hashes.append(hashed(folder))
        (folder / "x.pyc").write_text("compiled")
        assert hashed(folder) == hashes[-1]
        (folder / "x.c").write_text("int x;")
        assert hashed(folder) != hashes[-1]
    assert len(set(hashes)) == 3


def test_the_kernels_are_found_where_they_would_be_imported_from():
    kernels = Path(__file__).parent.parent.parent / "kernels/gla_kernels"
    assert describe_code()["kernels"] == hash_code(kernels)


@pytest.mark.parametrize(
    ("changed", "counts"),
    [("helper.py", True), ("parts/deep.py", True), ("further.py", True), ("other.py", False), ("json.py", False)],
)
def test_files_that_a_plugin_imports_from_its_folder_count_as_its_code(tmp_path, checkout, changed, counts):
    sources = {
        "mine.py": "import json\nimport torch\n\ndef bind():\n    import helper\n",
        "helper.py": "from parts.deep import x\nimport helper, mine\n",
        "parts/__init__.py": "", "parts/deep.py": "import further\nx = 1\n", "further.py": "", "other.py": "",
        "json.py": "",
    }  # fmt: skip
    (tmp_path / "parts").mkdir()
    for name, source in sources.items():
        (tmp_path / name).write_text(source)
    before = describe(checkout, [str(tmp_path / "mine.py")])["plugins"]
    (tmp_path / changed).write_text(sources[changed] + "y = 2\n")
    assert (describe(checkout, [str(tmp_path / "mine.py")])["plugins"] != before) == counts


def test_plugins_are_known_by_name_and_content_not_by_folder(checkout):
    for folder in ("a", "b"):
        (checkout / folder).mkdir()
        (checkout / folder / "mine.py").write_text("BACKENDS = []\n")
    a, b = (describe(checkout, [str(checkout / folder / "mine.py")])["plugins"] for folder in ("a", "b"))
    assert a == b
    assert list(a) == ["mine.py"]
    both = describe(checkout, [str(checkout / folder / "mine.py") for folder in ("a", "b")])["plugins"]
    assert list(both) == ["mine.py"]
    (checkout / "b/mine.py").write_text("BACKENDS = [1]\n")
    assert describe(checkout, [str(checkout / folder / "mine.py") for folder in ("a", "b")])["plugins"] != both


def test_variables_that_change_what_is_measured_are_kept_without_paths_and_serials(monkeypatch):
    for name in list(os.environ):
        monkeypatch.delenv(name)
    values = {
        "CUDA_VISIBLE_DEVICES": "1,GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
        "GLA_AUTOTUNE": "1",
        "HOME": "x",
        "OMP_NUM_THREADS": "2",
        "PYTORCH_CUDA_ALLOC_CONF": "a" * 200,
        "TRITON_CACHE_DIR": "/somewhere/of/mine",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert relevant_variables() == {
        "CUDA_VISIBLE_DEVICES": "1,GPU-(a UUID)",
        "GLA_AUTOTUNE": "1",
        "OMP_NUM_THREADS": "2",
        "PYTORCH_CUDA_ALLOC_CONF": "a" * 100,
        "TRITON_CACHE_DIR": "(a path)",
    }


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["run", "paper-fig2", "--out", "results/x"], "glabench run paper-fig2 --out results/x"),
        (["run", "/home/me/my sweep.toml"], "glabench run 'my sweep.toml'"),
        (["speed", "--plugin=/home/me/a=b.py", "--gate", "a=b"], "glabench speed --plugin=a=b.py --gate a=b"),
        (["report", "/"], "glabench report /"),
        (["run", "a\nb"], "glabench run 'a b'"),
    ],
)
def test_a_command_is_told_as_typed_but_for_the_folders_of_absolute_paths(arguments, line):
    assert command_line(arguments) == line


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
