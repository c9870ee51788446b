"""Counters of the hardware: Nsight Compute's table, what is asked of it, and what is said if there are none."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from glabench.errors import GlabenchError, UsageError
from glabench.measure.workload import Steps
from glabench.profiling import counters, worker
from glabench.profiling.counters import METRICS, find_program, read_counters, with_counters
from glabench.profiling.request import Request
from glabench.records.profile import COUNTERS, STALL, Host, Kernel, Profile, main_stall
from glabench.report.profiles import profile_table
from glabench.sweeps.model import Cell, Parameters

CELL = Cell("gla-triton", "gla", "fwd", 1, 64, "bf16", Parameters({"heads": 1, "key_dim": 16, "value_dim": 16}), "cuda")
KERNELS = (
    Kernel("forward", 1, 0.1, 0.1, grid=(64, 2, 1)),
    Kernel("forward", 1, 0.2, 0.2, grid=(8, 1, 1)),
    Kernel("backward", 2, 0.2, 0.2, grid=(8, 1, 1)),
)
PROFILE = Profile(10, 0.5, 0.5, KERNELS, Host(0.1, 3, 0.05, 0.02), True)
HEAD = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device",'
    '"CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)
DRAM, BYTES = "dram__throughput.avg.pct_of_peak_sustained_elapsed", "dram__bytes.sum"
WAIT, BARRIER = (f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio" for name in ("wait", "barrier"))


def row(kernel, grid, metric, value):
    return (
        f'"0","7","python3","127.0.0.1","{kernel}","1","7","(128, 1, 1)","{grid}","0","9.0","","{metric}","","{value}"'
    )


TABLE = [
    "==PROF== Connected to process 7",
    HEAD,
    row("void forward<int>(float *, int)", "(64, 2, 1)", DRAM, "81.5"),
    row("void forward<int>(float *, int)", "(64, 2, 1)", BYTES, "1,234,567"),
    row("backward", "(8, 1, 1)", DRAM, "40"),
    row("backward", "(8, 1, 1)", DRAM, "60"),
    row("backward", "(8, 1, 1)", BYTES, "n/a"),
    row("backward", "(8, 1, 1)", "sm__something", "3"),
    "==PROF== Disconnected",
]


def test_counters_are_means_by_kernel_and_grid():
    assert read_counters(TABLE) == {
        ("forward", (64, 2, 1)): {"dram_pct": 81.5, "dram_bytes": 1234567.0},
        ("backward", (8, 1, 1)): {"dram_pct": 50.0},
    }


def test_the_main_stall_is_what_warps_wait_for_the_longest():
    assert (
        main_stall({"dram_pct": 80.0, "stall_wait": 1.0, "stall_barrier": 3.0, "stall_selected": 9.0})
        == "barrier (75%)"
    )
    assert main_stall({"stall_long_scoreboard": 2.0, "stall_wait": None}) == "long scoreboard (100%)"
    assert main_stall({"dram_pct": 80.0, "stall_wait": 0.0}) is None


def test_the_table_of_kernels_shows_what_was_counted():
    counted = replace(
        KERNELS[0], counters={"dram_pct": 81.5, "l2_hit_pct": 40.0, "tensor_pct": 3.25, "stall_wait": 2.0}
    )
    head, rows = profile_table(replace(PROFILE, kernels=(counted, *KERNELS[1:])))
    assert list(head[-5:]) == ["DRAM, %", "L2, %", "L2 hits, %", "tensor cores, %", "warps wait for"]
    assert list(rows[0][-5:]) == ["81.5", "-", "40", "3.25", "wait (100%)"]
    assert list(rows[1][-5:]) == ["-"] * 5
    assert profile_table(PROFILE)[0][-1] == "of the roof"


def test_every_counter_has_a_place():
    assert {name for name in METRICS if not name.startswith(STALL)} == {*COUNTERS, "dram_bytes"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ncu", "--device", "cpu"], "--ncu: counters are a GPU's; leave it out"),
        (["--ncu", "--rev", "HEAD..HEAD"], "--ncu: counts no revisions; leave out --rev"),
    ],
)
def test_where_there_are_no_counters_the_command_says_so(run, words, said):
    code, _, error = run("profile", "linear-torch", *words)
    assert code == 2
    assert said in error


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """A stand-in for Nsight Compute: `knows` some counters, and writes a `table`, or what it `says`."""
    program = SimpleNamespace(knows=[DRAM, BYTES, WAIT], table=TABLE, says="", commands=[])

    def run(command, **options):
        program.commands.append(command)
        if "--query-metrics" in command:
            names = [metric.split(".")[0] for metric in program.knows]
            return SimpleNamespace(
                stdout="\n".join(f"{name}  # of something" for name in names), stderr="", returncode=0
            )
        raise AssertionError(command)

    class Started(SimpleNamespace):
        """Writes the log at once."""

        def __init__(self, command, **options):
            program.commands.append(command)
            Path(command[command.index("--log-file") + 1]).write_text("\n".join(program.table))
            super().__init__(pid=0, returncode=9 if program.says else 0)

        def communicate(self, timeout):
            return "", program.says

        def __enter__(self):
            return self

        def __exit__(self, *problem):
            pass

    monkeypatch.setattr(counters.subprocess, "run", run)
    monkeypatch.setattr(counters.subprocess, "Popen", Started)
    monkeypatch.setattr(counters.shutil, "which", lambda name: f"/bin/{name}")
    return program


def test_kernels_get_the_counters_of_their_name_and_grid(ncu):
    found = with_counters(PROFILE, Request(CELL, "cuda:0"), {}, 60)
    assert [kernel.counters for kernel in found.kernels] == [
        {"dram_pct": 81.5, "dram_bytes": 1234567.0}, None, {"dram_pct": 50.0}
    ]  # fmt: skip
    assert replace(found, kernels=KERNELS) == PROFILE


def test_launches_that_it_does_not_tell_apart_have_no_counters(ncu):
    first, second = (replace(KERNELS[0], registers=number, added_ms=0.15) for number in (16, 64))
    twins = replace(PROFILE, kernels=(first, second, KERNELS[2]))
    found = with_counters(twins, Request(CELL, "cuda:0"), {}, 60)
    assert [kernel.counters for kernel in found.kernels] == [None, None, {"dram_pct": 50.0}]


def test_counters_that_no_run_can_keep_are_an_error(ncu):
    ncu.table = [*TABLE[:2], row("backward", "(8, 1, 1)", DRAM, "5000")]
    with pytest.raises(GlabenchError, match=r"gla-triton .*: its counters cannot be kept: .*dram_pct: 5000 %"):
        with_counters(PROFILE, Request(CELL, "cuda:0"), {}, 60)


def test_only_counters_that_the_gpu_has_are_asked_for_and_clocks_are_left_alone(ncu):
    with_counters(PROFILE, Request(CELL, "cuda:0"), {}, 60)
    command = ncu.commands[-1]
    assert command[command.index("--metrics") + 1].split(",") == [DRAM, BYTES, WAIT]
    assert command[command.index("--clock-control") + 1] == "none"
    assert Request.from_json(json.loads(command[-1])).counted


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"table": [], "says": "==ERROR== ERR_NVGPUCTRPERM - no permission"}, "NVreg_RestrictProfilingToAdminUsers=0"),
        ({"table": ["==ERROR== ERR_NVGPUCTRPERM"]}, "the capability CAP_SYS_ADMIN"),
        ({"table": [], "says": "\nthe target died"}, r"counted nothing \(exit code 9\): the target died"),
        ({"table": TABLE[:2]}, r"counted nothing \(exit code 0\)"),
        ({"knows": ["sm__other"]}, "knows no counter of this GPU"),
    ],
)
def test_counters_that_cannot_be_had_are_an_error(ncu, changes, said):
    vars(ncu).update(changes)
    with pytest.raises(GlabenchError, match=said):
        with_counters(PROFILE, Request(CELL, "cuda:0"), {}, 60)


SLOW_NCU = """#!/bin/sh
[ $1 = --query-metrics ] && echo dram__bytes && exit
sleep 60 & echo $! > {folder}/pid
wait
"""


def is_running(number):
    """Whether a process is there and is more than a name that nobody has asked about."""
    try:
        return "Z" not in Path(f"/proc/{number}/stat").read_text().split()[2]
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_takes_too_long_is_ended_with_all_that_it_started(tmp_path, monkeypatch):
    program = tmp_path / "ncu"
    program.write_text(SLOW_NCU.format(folder=tmp_path))
    program.chmod(0o755)
    monkeypatch.setattr(counters.shutil, "which", lambda name: str(program))
    with pytest.raises(GlabenchError, match="no counters within 1 s"):
        with_counters(PROFILE, Request(CELL, "cuda:0"), {}, 1)
    started, end = int((tmp_path / "pid").read_text()), time.monotonic() + 10
    while is_running(started) and time.monotonic() < end:
        time.sleep(0.02)
    assert not is_running(started)


def test_without_nsight_compute_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(counters.shutil, "which", lambda name: None)
    with pytest.raises(UsageError, match=r"--ncu: Nsight Compute \(ncu\) is not in PATH; install it"):
        find_program()


def test_one_call_runs_between_the_marks(monkeypatch):
    seen = []
    marks = SimpleNamespace(start=lambda: seen.append("start"), stop=lambda: seen.append("stop"))
    monkeypatch.setitem(sys.modules, "torch.cuda.profiler", marks)
    monkeypatch.setattr("torch.cuda.profiler", marks)
    worker.run_counted(Steps(lambda: seen.append("prepare"), lambda: seen.append("call"), None), "cpu")
    assert seen[-4:] == ["prepare", "start", "call", "stop"]
    assert seen.count("call") == 6
