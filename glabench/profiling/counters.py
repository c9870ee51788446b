"""Counters of the hardware, by Nsight Compute: what bounds a kernel, beside how long it takes.

Nsight Compute runs every kernel of one call several times, alone, so its times are not a call's and are not taken.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from glabench.errors import GlabenchError, UsageError
from glabench.measure.outcome import one_line
from glabench.profiling.profile import short_name
from glabench.profiling.request import Request
from glabench.records.profile import STALL, Kernel, Profile

# Our names, and Nsight Compute's for them. Which of these a GPU has is asked first, as it differs between generations.
_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
_STALLS = (
    "barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard",
    "math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction", "not_selected", "selected",
    "short_scoreboard", "sleeping", "tex_throttle", "wait", "warpgroup_arrive",
)  # fmt: skip
METRICS: Mapping[str, str] = {
    "dram_pct": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_bytes": "dram__bytes.sum",
    "l2_pct": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_hit_pct": "lts__t_sector_hit_rate.pct",
    "tensor_pct": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    **{STALL + name: _STALL.format(name) for name in _STALLS},
}
_PROGRAM = "ncu"
_QUERY_TIMEOUT_S = 120
# How the driver refuses counters.
_REFUSED = "ERR_NVGPUCTRPERM"

# Kernels by name and grid.
_Key = tuple[str, tuple[int, ...]]


def find_program() -> str:
    """The path of Nsight Compute's command line. Raises UsageError if it is not installed."""
    if (path := shutil.which(_PROGRAM)) is None:
        raise UsageError(
            f"--ncu: Nsight Compute ({_PROGRAM}) is not in PATH; install it from "
            "https://developer.nvidia.com/nsight-compute, or leave out --ncu"
        )
    return path


def with_counters(found: Profile, request: Request, variables: Mapping[str, str], timeout_s: float) -> Profile:
    """The profile with the counters of its kernels. Raises GlabenchError if they cannot be had.

    A kernel that Nsight Compute has not seen with the same name and grid has none. Nor have several kernels with the
    same of both, whose launches it does not tell apart.
    """
    counted = _count(find_program(), request, {**os.environ, **variables}, timeout_s)
    alike = Counter(map(_key, found.kernels))
    own = {key: counters for key, counters in counted.items() if alike[key] == 1}
    known = replace(found, kernels=tuple(_with_counters(kernel, own) for kernel in found.kernels))
    try:  # so that the run can be read again
        return Profile.from_json(known.to_json())
    except ValueError as problem:
        raise GlabenchError(f"{request.cell}: its counters cannot be kept: {problem}") from None


def _key(kernel: Kernel) -> _Key:
    return kernel.name, tuple(kernel.grid or ())


def _with_counters(kernel: Kernel, counted: Mapping[_Key, Mapping[str, float]]) -> Kernel:
    counters = counted.get(_key(kernel))
    return kernel if counters is None else replace(kernel, counters=counters)


def _count(
    program: str, request: Request, environment: Mapping[str, str], timeout_s: float
) -> dict[_Key, dict[str, float]]:
    metrics = _available(program, environment)
    with TemporaryDirectory() as folder:
        log = Path(folder, "counters.csv")
        command = [
            program, "--csv", "--page", "details", "--print-units", "base", "--log-file", str(log),
            # The clocks are the machine's own, as in a timed run, and the cache is empty, as before a sample.
            "--clock-control", "none", "--cache-control", "all",
            "--profile-from-start", "off", "--metrics", ",".join(metrics),
            sys.executable, "-P", "-m", "glabench.profiling.worker",
            json.dumps(replace(request, counted=True).to_json()),
        ]  # fmt: skip
        # Nsight Compute has a group of its own, because it does not end the process that it looks at.
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as process:  # type: ignore[call-overload]
            try:
                said = "".join(process.communicate(timeout=timeout_s))
            except BaseException as problem:  # also an interruption
                os.killpg(process.pid, signal.SIGKILL)
                if isinstance(problem, subprocess.TimeoutExpired):
                    late = f"{request.cell}: no counters within {timeout_s:g} s (--cell-timeout)"
                    raise GlabenchError(late) from None
                raise
        text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    if _REFUSED in text + said:
        raise GlabenchError(
            f"{request.cell}: the driver keeps counters for administrators ({_REFUSED}); ask for the module option "
            "NVreg_RestrictProfilingToAdminUsers=0 of the NVIDIA driver, or for the capability CAP_SYS_ADMIN"
        )
    found = read_counters(text.splitlines())
    if not found:
        lines = [line for line in [*text.splitlines(), *said.splitlines()] if line.strip()]
        why = f": {one_line(lines[-1])}" if lines else ""
        raise GlabenchError(f"{request.cell}: Nsight Compute counted nothing (exit code {process.returncode}){why}")
    return found


def _available(program: str, environment: Mapping[str, str]) -> list[str]:
    """Those of our metrics that the GPU has. Raises GlabenchError if it has none, or if they cannot be asked for."""
    try:
        done = subprocess.run(
            [program, "--query-metrics"], capture_output=True, text=True, env=environment, timeout=_QUERY_TIMEOUT_S,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise GlabenchError("--ncu: Nsight Compute does not say which counters there are") from None
    known = {line.split()[0] for line in done.stdout.splitlines() if line.strip()}
    found = [metric for metric in METRICS.values() if metric.split(".")[0] in known]
    if not found:
        said = (done.stderr + done.stdout).strip().splitlines()
        raise GlabenchError(
            f"--ncu: Nsight Compute knows no counter of this GPU: {one_line((said or ['no message'])[-1])}"
        )
    return found


def read_counters(lines: Iterable[str]) -> dict[_Key, dict[str, float]]:
    """Nsight Compute's table of comma-separated values, a row per launch and metric: means by kernel and grid."""
    rows = csv.DictReader(line for line in lines if line.startswith('"'))
    names = {metric: name for name, metric in METRICS.items()}
    found: dict[_Key, dict[str, list[float]]] = {}
    for row in rows:
        name, value = names.get(row.get("Metric Name", "")), _number(row.get("Metric Value", ""))
        if name is not None and value is not None:
            key = (short_name(row["Kernel Name"]), _grid(row["Grid Size"]))
            found.setdefault(key, {}).setdefault(name, []).append(value)
    return {key: {name: fmean(values) for name, values in own.items()} for key, own in found.items()}


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def _grid(text: str) -> tuple[int, ...]:
    """`(32, 16, 1)` as numbers."""
    return tuple(int(word) for word in text.strip("() ").split(",") if word.strip().isdigit())
