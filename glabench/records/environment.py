"""Hardware and versions that a run was made with. No host names, no user names, no paths.

Run as a program it prints the environment as JSON: the suite asks a short-lived process, so that its own process
never imports torch and never holds memory on the GPU.
"""

import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from typing import Any

from glabench import __version__
from glabench.errors import GlabenchError
from glabench.records.nvml import Nvml, open_nvml

_PACKAGES = ("torch", "triton", "numpy", "pandas", "flash-attn", "mamba-ssm", "causal-conv1d", "fla-core")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str | None:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123
            return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), None)
    except OSError:
        return platform.processor() or None


def _gpu(nvml: Nvml | None) -> dict[str, Any] | None:
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_mib": properties.total_memory // 2**20,
        "l2_mib": properties.L2_cache_size / 2**20,
        "cuda": torch.version.cuda,
        "driver": nvml.driver() if nvml is not None else None,
        **(nvml.settings() if nvml is not None else {}),
    }


def _busy(nvml: Nvml) -> dict[str, Any]:
    """Who uses the GPU before the run."""
    return {
        "other_processes": nvml.processes(computes=False).others,
        "utilization_pct": nvml.utilization_pct(),
    }


def collect() -> dict[str, Any]:
    """The environment of this process. Imports torch."""
    import torch

    nvml = open_nvml() if torch.cuda.is_available() else None
    return {
        "glabench": __version__,
        "python": platform.python_version(),
        "os": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpu_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpu": _gpu(nvml),
        "busy": _busy(nvml) if nvml is not None else None,
        "packages": {package: _version(package) for package in _PACKAGES},
    }


def probe() -> dict[str, Any]:
    """The environment as a fresh process sees it. Raises GlabenchError if torch cannot be used at all."""
    command = [sys.executable, "-m", "glabench.records.environment"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise GlabenchError(f"torch does not work here: {last}; install it with: pip install torch")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    print(json.dumps(collect()))
