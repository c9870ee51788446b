"""Resident memory of this process, as Linux counts it: by how much a call raises it."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
# Writing this to clear_refs resets the highest resident size (VmHWM) to the present one (Linux 4.0 and later).
_RESET_PEAK = "5"


def peak_resident_mib(call: Callable[[], object]) -> float | None:
    """MiB by which `call` raises this process's resident memory at its peak, its result included.

    Returns None without calling if this cannot be measured: outside of Linux, without glibc, or in a sandbox. Run the
    call once before, because loaded code and started threads are counted, too. So are freed blocks that the C library
    keeps. Linux counts per core; some versions are off by up to a MiB for each core in use.
    """
    before = _reset_peak()
    if before is None:
        return None
    result = call()
    peak = _read_kib("VmHWM")
    del result  # kept until here, so that the output counts
    return None if peak is None else max(0, peak - before) / 1024


def _reset_peak() -> int | None:
    """KiB resident after returning free memory to the system; None if the peak cannot be reset."""
    gc.collect()
    try:
        # Otherwise the call could reuse freed memory without raising the resident size.
        ctypes.CDLL(None).malloc_trim(0)
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except (OSError, AttributeError):
        return None
    return _read_kib("VmRSS")


def _read_kib(field: str) -> int | None:
    """A size in the kernel's description of this process, such as "VmRSS:   1234 kB"."""
    try:
        lines = _STATUS.read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), None)
    except (OSError, ValueError):
        return None
