"""The hardware and versions of a run. No host names, no user names, no paths.

    python -m glabench.devices.environment DEVICE

prints them as JSON. The suite runs this in a process of its own, because the parent process must not import torch or
hold memory on a GPU.
"""

import hashlib
import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from glabench import __version__
from glabench.apart import ask_module, tell_mistake
from glabench.devices.choice import count_gpus, select_device
from glabench.devices.nvml import Nvml, bare_uuid, open_nvml
from glabench.errors import ExitCode, GlabenchError, UsageError

_PACKAGES = (
    *("torch", "triton", "numpy", "pandas", "flash-attn", "flash-attn-4", "mamba-ssm", "causal-conv1d", "fla-core"),
    *("nvidia-cudnn-cu13", "cuda-bench", "tilelang", "flash-qla", "flash-kda"),
)
_ID_DIGITS = 12


def probe(device_text: str = "auto") -> dict[str, Any]:
    """The environment, including the chosen device, collected in a fresh process.

    Raises UsageError for a wrong or missing device, GlabenchError if torch cannot be used.
    """
    try:
        found: dict[str, Any] = ask_module(__name__, device_text)
    except UsageError:
        raise
    except GlabenchError as problem:
        hint = "; install it with: pip install torch" if "No module named 'torch'" in str(problem) else ""
        raise GlabenchError(f"torch does not work here: {problem}{hint}") from None
    return found


def collect(device_text: str = "auto") -> dict[str, Any]:
    """The environment of this process, after selecting the device. Imports torch. Raises UsageError."""
    import torch

    device = select_device(device_text)
    gpus = count_gpus()
    nvml = open_nvml() if gpus else None
    return {
        "glabench": __version__,
        "python": platform.python_version(),
        "os": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpu_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "device": device.kind,
        "gpus": gpus,
        "gpu": _describe_gpu(nvml) if gpus else None,
        "busy": _describe_use(nvml) if nvml is not None else None,
        "packages": {package: package_version(package) for package in _PACKAGES},
    }


def _describe_gpu(nvml: Nvml | None) -> dict[str, Any]:
    """Torch's current GPU. Its `id` is a hash, which identifies the GPU but does not reveal its UUID."""
    import torch

    properties = torch.cuda.get_device_properties()
    uuid = bare_uuid(properties)
    return {
        "name": properties.name,
        "index": torch.cuda.current_device(),
        "id": None if uuid is None else hashlib.sha256(uuid.encode()).hexdigest()[:_ID_DIGITS],
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_mib": properties.total_memory // 2**20,
        "l2_mib": properties.L2_cache_size / 2**20,
        "cuda": torch.version.cuda,
        "driver": nvml.driver() if nvml is not None else None,
        **(nvml.settings() if nvml is not None else {}),
    }


def _describe_use(nvml: Nvml) -> dict[str, Any]:
    """How busy the GPU is before the run."""
    return {
        "other_processes": nvml.processes(computes=False).others,
        "utilization_pct": nvml.utilization_pct(),
    }


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)


def package_version(package: str) -> str | None:
    """The version of an installed package; None if it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def main(device_text: str) -> int:
    """Prints the environment, or what is wrong with the device. Returns the exit code."""
    try:
        print(json.dumps(collect(device_text)))
    except UsageError as problem:
        return tell_mistake(problem)
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
