"""What a replay calls of the CUDA driver: functions for launches, fills and copies, and structures of cuda.h."""

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
    """Addresses of functions of the driver, which return CUDA's error code, and the names of these codes."""

    launch: int
    """cuLaunchKernelEx: a LaunchConfig, a function, an array of the parameters' addresses, NULL."""
    fill: int
    """cuMemsetD32Async: address, value, number of 32-bit words, stream."""
    copy: int
    """cuMemcpyDtoDAsync: addresses of the copy and of the original, bytes, stream."""
    name_of: Callable[[int], str]


@lru_cache(1)
def functions() -> Functions | None:
    """The driver's functions, or None if there is no driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None

    def name_of(code: int) -> str:
        name = ctypes.c_char_p()
        library.cuGetErrorName(code, ctypes.byref(name))
        return (name.value or b"unknown").decode()

    names = "cuLaunchKernelEx", "cuMemsetD32Async", "cuMemcpyDtoDAsync_v2"
    launch, fill, copy = (ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names)
    return Functions(launch, fill, copy, name_of)
