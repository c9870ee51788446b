"""A profile of a call: what every kernel takes, and the host. A line of JSON per cell in a run's `profiles.jsonl`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from glabench.plain import Amount, Count, Name, Natural, NotNegative, read_as, read_json, read_text
from glabench.sweeps.model import Cell

# Counters, and how tables show them: a share of a peak, or of all accesses, in percent.
COUNTERS: Mapping[str, str] = {
    "dram_pct": "DRAM, %", "l2_pct": "L2, %", "l2_hit_pct": "L2 hits, %", "tensor_pct": "tensor cores, %"
}  # fmt: skip
STALL, _ISSUING = "stall_", "selected"
# The share of a call's busy time that makes a kernel its only one.
_SOLE = 0.95
# By how much a busy time may be beyond the span, as a factor: a sum of medians may be a little.
_ROUNDED = 1.01
# By what share a GPU's busy time, a median too, may differ from the sum of what kernels add; a CPU's is such a sum.
_APART, _APART_ON_CPU = 0.05, 0.01
# Per second, far beyond any device; percent, beyond which none counts: L2's hits may be a little more than 100.
_MOST_FLOPS, _MOST_BYTES, _MOST_PERCENT = 1e17, 1e15, 1000.0


@dataclass(frozen=True)
class Work:
    """What a kernel does in a call at the least: bytes that it reads and writes, and floating-point operations."""

    bytes: Natural | None = None
    flops: Natural | None = None


@dataclass(frozen=True)
class Kernel:
    """What one kernel takes in a call: all its launches with the same grid and needs. On a CPU, a torch operator.

    `added_ms`: how much longer the device is busy for it, beyond what began before it: a kernel may begin early and
    wait. All together are `Profile.busy_ms`. `gap_ms`: how long the device was idle before it. `registers` are a
    thread's, `shared_bytes` a program's.
    `programs`: how many a multiprocessor holds, and `limit` what allows no more. `counters`: those of the hardware, by
    the names of `COUNTERS` and, for why warps wait, by names that begin with `STALL`.
    """

    name: Name
    calls: Count
    ms: NotNegative
    added_ms: NotNegative
    gap_ms: NotNegative = 0.0
    grid: tuple[Count, ...] | None = None
    threads: Count | None = None
    registers: Natural | None = None
    shared_bytes: Natural | None = None
    bytes: Natural | None = None
    flops: Natural | None = None
    programs: Natural | None = None
    limit: Name | None = None
    counters: Mapping[Name, NotNegative | None] | None = None


def main_stall(counters: Mapping[str, float | None]) -> str | None:
    """Why a kernel's warps wait, most of all, with its share of all waiting; None if that was not counted."""
    waits = {
        name.removeprefix(STALL): value
        for name, value in counters.items()
        if name.startswith(STALL) and name != STALL + _ISSUING and value
    }
    if not waits:
        return None
    name = max(waits, key=lambda each: waits[each])
    return f"{name.replace('_', ' ')} ({waits[name] / sum(waits.values()):.0%})"


@dataclass(frozen=True)
class Part:
    """A variant of a forward that does one part of its work alone, from its first kernel's start to its last one's end.

    `bytes` and `flops`: what it moves and executes, if known.
    """

    name: Name
    ms: Amount
    bytes: Natural | None = None
    flops: Natural | None = None


@dataclass(frozen=True)
class Host:
    """What the host does during a call, in milliseconds; profiling makes it longer.

    `launch_ms`: in the driver and CUDA's runtime; `operators_ms`: in torch's operators besides; `autograd_ms`: in
    torch's engine for backwards and their functions besides, None if it counts as operators'; the rest is Python's.
    """

    call_ms: NotNegative
    launches: Natural
    launch_ms: NotNegative
    operators_ms: NotNegative
    autograd_ms: NotNegative | None = None

    @property
    def rest_ms(self) -> float:
        """What none of these takes."""
        return max(0.0, self.call_ms - self.launch_ms - self.operators_ms - (self.autograd_ms or 0.0))


@dataclass(frozen=True)
class Profile:
    """Medians over some calls. `span_ms`: from the first start to the last end, of which `busy_ms` some kernel runs.

    `parts`: what parts of the work take alone. Together they may be longer, as each reads and writes tensors anew.
    """

    calls: Count
    span_ms: Amount
    busy_ms: NotNegative
    kernels: tuple[Kernel, ...]
    host: Host
    on_device: bool
    parts: tuple[Part, ...] = ()

    def by_name(self) -> dict[str, float]:
        """`added_ms` by name, of all grids of a kernel together."""
        found: dict[str, float] = {}
        for kernel in self.kernels:
            found[kernel.name] = found.get(kernel.name, 0.0) + kernel.added_ms
        return found

    @property
    def sole_kernel(self) -> str | None:
        """The kernel that does nearly all of the call's work, if one does."""
        times = self.by_name()
        name = max(times, key=lambda each: times[each], default=None)
        return name if self.on_device and name is not None and times[name] >= _SOLE * self.busy_ms else None

    def with_work(self, known: Mapping[str, Work]) -> Profile:
        """The same with the work of kernels, by their names; not of those that run with several grids or needs."""
        variants = Counter(kernel.name for kernel in self.kernels)
        kernels = (
            replace(kernel, bytes=work.bytes, flops=work.flops)
            if variants[kernel.name] == 1 and (work := known.get(kernel.name)) is not None
            else kernel
            for kernel in self.kernels
        )
        return replace(self, kernels=tuple(kernels))

    def to_json(self) -> dict[str, Any]:
        """The fields as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Profile:
        """The inverse of `to_json`. Raises ValueError that names a wrong key."""
        found = read_as(cls, data)
        check_profile(found)
        return found


def check_profile(found: Profile) -> None:
    """Raises ValueError, which names the key, for values that no call can have."""
    if found.busy_ms > _ROUNDED * found.span_ms:
        raise ValueError(f"busy_ms: {found.busy_ms:g} is more than span_ms, {found.span_ms:g}")
    if found.on_device and not found.kernels:
        raise ValueError("kernels: there are none, but a call on a GPU runs one at least")
    added, apart = sum(kernel.added_ms for kernel in found.kernels), _APART
    if not found.on_device:  # operators of several threads may take longer together than the call
        added, apart = min(added, found.span_ms), _APART_ON_CPU
    if abs(added - found.busy_ms) > apart * found.busy_ms:
        raise ValueError(
            f"kernels: together they add {added:g} ms, but busy_ms is {found.busy_ms:g} (allowed: {apart:.0%} apart); "
            "some are missing, or their times varied too much; profile again"
        )
    for place, kernel in enumerate(found.kernels):
        where = f"kernels[{place}]."
        check_rates(kernel, where)
        for name in COUNTERS:
            if (value := (kernel.counters or {}).get(name)) is not None and value > _MOST_PERCENT:
                raise ValueError(f"{where}counters.{name}: {value:g} % (allowed: 0 to {_MOST_PERCENT:g})")
    for place, part in enumerate(found.parts):
        check_rates(part, f"parts[{place}].")


def check_rates(found: Kernel | Part, where: str = "") -> None:
    """Raises ValueError, which names the key after `where`, if no device does so much work in so little time."""
    for key, amount, most, unit in (
        ("flops", found.flops, _MOST_FLOPS, "FLOP/s"), ("bytes", found.bytes, _MOST_BYTES, "B/s")
    ):  # fmt: skip
        if amount is not None and found.ms > 0 and amount * 1e3 > most * found.ms:
            raise ValueError(
                f"{where}{key}: {amount} in {found.ms:g} ms is beyond any device (allowed: {most:g} {unit})"
            )


def profile_line(cell: Cell, profile: Profile) -> str:
    """One line of `profiles.jsonl`, without the newline."""
    data = {"cell": cell.to_json(), "profile": profile.to_json()}
    return json.dumps(read_text(data), allow_nan=False)


def read_profile(line: str | bytes) -> tuple[Cell, Profile]:
    """The inverse of `profile_line`. Raises ValueError for anything that is not a profile of a cell."""
    data = read_text(read_json(line))
    if not isinstance(data, Mapping) or not {"cell", "profile"} <= data.keys():
        raise ValueError("it needs the keys cell and profile")
    return Cell.from_json(data["cell"]), Profile.from_json(data["profile"])
