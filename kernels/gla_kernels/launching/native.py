"""Functions in C for what an eager call does for every tensor and launch (`native.c`): some 10 us less of Python.

They read tensors by DLPack's C functions, which torch's tensor type offers. Triton builds and caches the module, as it
does with launchers of its own: where it cannot, no launch works either.
"""

from collections.abc import Callable
from functools import lru_cache
from importlib.resources import files
from threading import Lock
from typing import Any, NamedTuple

import torch

_NAME = "gla_kernels_native"
_building = Lock()


class Native(NamedTuple):
    """The functions of `native.c`."""

    describe: Callable[..., bytes | None]
    """Shapes, strides, dtypes and devices of tensors or None; None if one has to be seen by more than autograd."""
    repeat: Callable[..., Any]
    """Repeats a pass: address of a `replay.Plan`, functions that allocate, a stream, tensors or None.

    Returns the outputs, None if nothing was queued, or the driver's error code.
    """


@lru_cache(1)
def functions() -> Native | None:
    """The functions, or None if they cannot be had on this machine."""
    with _building:  # of two threads, one would replace the other's module
        return _build()


@lru_cache(1)
def _build() -> Native | None:
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    try:
        from triton.runtime.build import compile_module_from_src

        module = compile_module_from_src(files("gla_kernels.launching").joinpath("native.c").read_text(), _NAME)
        known = module.use(capsule, torch.Tensor, torch.nn.Parameter)
    except Exception:  # of a compiler that is not there, of another Triton or torch: calls are slower, and right
        return None
    return Native(module.describe, module.repeat) if known else None
