"""Memory of a process on a CPU: how far a call raises what is resident, as Linux counts it."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
# Written to clear_refs, resets the highest resident size (VmHWM) to the present one (Linux 4.0 and later).
_RESET_PEAK = "5"


def peak_resident_mib(call: Callable[[], object]) -> float | None:
    """MiB by which `call` raises this process' resident memory at its highest, what it returns included.

    None, without a call, if that cannot be read: not on Linux, not glibc, or a sandbox. Call once before, because
    code that is loaded and threads that start are counted too; so is what the call frees and the C library keeps for
    its next allocation (of blocks up to 32 MiB). Linux counts per core: some of its versions are off by up to a MiB
    for each core that the call uses.
    """
    before = _reset_peak()
    if before is None:
        return None
    result = call()
    peak = _read_kib("VmHWM")
    del result  # alive until here: an output counts
    return None if peak is None else max(0, peak - before) / 1024


def _reset_peak() -> int | None:
    """KiB that are resident after free memory was given back; None if the peak cannot be reset to it."""
    gc.collect()
    try:
        # Memory that was freed and kept would hide what the call takes.
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
