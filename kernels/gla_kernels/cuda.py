"""What a replay calls of the CUDA driver, through ctypes: the structures of cuda.h, launches, fills, copies."""

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

_PROGRAMMATIC_STREAM_SERIALIZATION = 6


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute, of which only a value that is a flag is used."""

    _fields_ = [("id", ctypes.c_uint64), ("flag", ctypes.c_int), ("others", ctypes.c_char * 60)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    ]


# CUDA's programmatic dependent launch: the kernel may start before the previous one has ended.
EARLY = LaunchAttribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, flag=1)


class Functions(NamedTuple):
    """Functions of the driver. All but the last return CUDA's error code, 0 for success."""

    launch: Callable[[int, int, int, None], int]
    """cuLaunchKernelEx: addresses of a LaunchConfig, a function and an array of the parameters' addresses; None."""
    fill: Callable[[int, int, int, int], int]
    """cuMemsetD32Async: address, value, number of 32-bit words, stream."""
    copy: Callable[[int, int, int, int], int]
    """cuMemcpyDtoDAsync: addresses of the copy and of the original, bytes, stream."""
    name_of: Callable[[int], str]
    """The name of an error code."""


@lru_cache(1)
def functions() -> Functions | None:
    """The driver's functions, or None if there is no driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    launch, fill, copy = library.cuLaunchKernelEx, library.cuMemsetD32Async, library.cuMemcpyDtoDAsync_v2
    launch.argtypes = [ctypes.c_void_p] * 4
    fill.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p]
    copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]

    def name_of(code: int) -> str:
        name = ctypes.c_char_p()
        library.cuGetErrorName(code, ctypes.byref(name))
        return (name.value or b"unknown").decode()

    return Functions(launch, fill, copy, name_of)
