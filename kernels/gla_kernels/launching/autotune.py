"""Autotuning: times the candidate launch plans of a call and stores the fastest on disk.

The file is a JSON object with one entry per kind of call: the fastest plan, and the time of each that was tried. It is
`plans.json` in the folder that GLA_KERNELS_CACHE names, or else in `gla_kernels` of the user's cache folder.
"""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton

from gla_kernels.launching.device import gpu_of
from gla_kernels.launching.plans import LaunchPlan, operands, plan, plan_text, triton_plan
from gla_kernels.limits import fitting_chunks


@dataclass(frozen=True)
class CallKind:
    """The calls that share a tuned plan. `T` and `programs` (sequences times heads) are rounded up to powers of two."""

    K: int
    V: int
    dtype: torch.dtype
    gated: bool
    T: int
    programs: int
    materialize: bool
    backward: bool

    def key(self, device: torch.device) -> str:
        """The entry's name in the file. Includes the GPU and Triton's version, because times depend on them."""
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        rounded = [1 << (number - 1).bit_length() for number in (self.T, self.programs)]
        return ", ".join(
            [
                where,
                f"triton {triton.__version__}",
                str(self.dtype).removeprefix("torch."),
                f"K={self.K} V={self.V}",
                "gate" if self.gated else "no gate",
                f"T<={rounded[0]} sequences*heads<={rounded[1]}",
                "states kept" if self.materialize else "states recomputed",
                "forward + backward" if self.backward else "forward",
            ]
        )


def plans_path() -> Path:
    """The file in which tuned plans are stored."""
    own = os.environ.get("GLA_KERNELS_CACHE")
    if own:
        return Path(own) / "plans.json"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gla_kernels" / "plans.json"


def candidates(K: int, V: int, dtype: torch.dtype, device: torch.device, gated: bool = True) -> tuple[LaunchPlan, ...]:
    """The table's plan first, then portable Triton plans of every chunk size that fits, with 4 and 8 warps."""
    found = [plan(K, V, dtype, None, device, gated)]
    gpu = gpu_of(device)
    for chunk in fitting_chunks(K, operands(dtype).dtype.itemsize, gpu.shared_bytes, gpu.tensor_memory):
        row = triton_plan(K, V, dtype, chunk, gated, gpu.shared_bytes)
        for warps in (4, 8):
            found.append(replace(row, backward=replace(row.backward, warps=warps)))
    return tuple(dict.fromkeys(found))


def _read(path: Path) -> dict[str, Any]:
    """The stored plans; empty if there is no file, or if it is not a JSON object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _write(path: Path, key: str, entry: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_read(path) | {key: entry}, indent=1, sort_keys=True)
    # Replace the file in one step: another process may be reading it.
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_text(text + "\n", encoding="utf-8")
    beside.replace(path)


def median_ms(run: Callable[[], object]) -> float:
    """The median time of `run` in milliseconds, measured by `triton.testing`."""
    return float(triton.testing.do_bench(run, warmup=10, rep=50, return_mode="median"))


# Plans in use by this process, so that it reads the file once per kind, and its plans never change in between.
_CHOSEN: dict[tuple[Path, CallKind, torch.device], str] = {}


def kept_plan(kind: CallKind, device: torch.device) -> str | None:
    """The plan that this process uses for such a call, or else the one in the file, or None."""
    place = (plans_path(), kind, device)
    if place not in _CHOSEN:
        entry = _read(place[0]).get(kind.key(device))
        found = entry.get("plan") if isinstance(entry, dict) else None
        # A plan stored by another version of the kernels may no longer be a candidate.
        choices = candidates(kind.K, kind.V, kind.dtype, device, kind.gated)
        if found not in {plan_text(choice) for choice in choices}:
            return None
        _CHOSEN[place] = found
    return _CHOSEN[place]


def tuned_plan(kind: CallKind, device: torch.device, run: Callable[[str], object]) -> str:
    """Times the candidates for such a call, stores the fastest and returns it.

    `run` runs the call with a plan. A plan that does not fit this GPU is skipped.
    """
    times: dict[str, float] = {}
    for choice in candidates(kind.K, kind.V, kind.dtype, device, kind.gated):
        text = plan_text(choice)
        try:
            run(text)
            times[text] = median_ms(lambda text=text: run(text))  # type: ignore[misc]
        except (triton.runtime.errors.OutOfResources, torch.cuda.OutOfMemoryError):
            continue
    best = min(times, key=times.__getitem__)
    _CHOSEN[plans_path(), kind, device] = best
    with suppress(OSError):  # if the folder cannot be written to, the next process tunes again
        _write(plans_path(), kind.key(device), {"plan": best, "ms": times})
    return best
