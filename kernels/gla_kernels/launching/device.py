"""What decisions about launches read of a GPU: its vendor, architecture, multiprocessors and memory on chip."""

import os
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch

from gla_kernels.limits import SHARED_BYTES

# Shared memory of a program on a GPU whose driver does not tell: the least of those that we compile for (AMD's CDNA).
_LEAST_SHARED_BYTES = 64 * 1024


@dataclass(frozen=True)
class Gpu:
    """A GPU's size: multiprocessors, and bytes of shared memory that a program may have. The defaults are an H100's.

    `tensor_memory`: its products add up in a memory of their own, as on sm_100.
    """

    multiprocessors: int = 132
    shared_bytes: int = SHARED_BYTES
    tensor_memory: bool = False


@cache
def _gpu(index: int | None) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    shared = getattr(properties, "shared_memory_per_block_optin", 0) or _LEAST_SHARED_BYTES
    return Gpu(properties.multi_processor_count, shared, torch.version.hip is None and properties.major == 10)


def gpu_of(device: torch.device | None) -> Gpu:
    """The size of a CUDA device; of an H100 for any other device, and if there is none."""
    return _gpu(device.index) if device is not None and device.type == "cuda" else Gpu()


@cache
def hopper_device(index: int | None) -> bool:
    """Whether CUDA device `index` (None: the current one) runs the Gluon kernels.

    It does on sm_90 with a Triton that has Gluon for it, unless GLA_KERNELS=triton in the environment. (AMD's GPUs have
    capabilities too, and an MI300's is 9.4.)
    """
    if os.environ.get("GLA_KERNELS") == "triton" or torch.version.hip is not None or not _has_gluon():
        return False
    return torch.cuda.get_device_capability(index) == (9, 0)


def _has_gluon() -> bool:
    try:
        return find_spec("triton.experimental.gluon.language.nvidia.hopper") is not None
    except ModuleNotFoundError:  # one of its parents is missing
        return False


@cache
def prime_below(number: int) -> int:
    """The largest prime below `number`, at least 2; 1 if there is none."""
    candidates = (n for n in range(number - 1, 1, -1) if all(n % divisor for divisor in range(2, int(n**0.5) + 1)))
    return next(candidates, 1)
