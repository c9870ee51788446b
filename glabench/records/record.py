"""A record: one cell and what measuring it gave, as one flat line of JSON. Absent is null, never zero."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from glabench.plain import Amount, Number, Whole, read_as, read_json, read_text
from glabench.sweeps.model import Cell

# 1: every op had heads, key_dim and value_dim. 2: `parameters` names the keys that are the cell's parameters.
SCHEMA = 2
Status = Literal["ok", "oom", "unsupported", "inaccurate", "timeout", "crashed", "error"]
FAILED: frozenset[Status] = frozenset({"oom", "inaccurate", "timeout", "crashed", "error"})


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The fields of a record besides its cell. Their names are a promise to scripts: new ones may come, none goes."""

    run_id: str
    status: Status
    # Why there is no time, in one line.
    reason: str | None = None
    # Median of `samples_ms`, and what lies around it.
    time_ms: Amount | None = None
    time_ms_p20: Amount | None = None
    time_ms_p80: Amount | None = None
    samples_ms: tuple[Amount, ...] | None = None
    # Samples during which the clock was throttled; they do not count.
    thrown_out_ms: tuple[Amount, ...] | None = None
    # How many samples may hold launch latency.
    exposed_samples: Whole | None = None
    # Why there are no more samples: precision, time limit, sample limit.
    stop_reason: str | None = None
    # How samples were taken.
    timing: str | None = None
    # Seconds of the first call: compiling, autotuning and allocation, as far as they had not been done before.
    first_call_s: Number | None = None
    # MiB that the pass takes above its inputs: what torch allocated on a GPU, and what it took from the device for it.
    peak_allocated_mib: Number | None = None
    peak_reserved_mib: Number | None = None
    # The same on a CPU, from the process' resident memory.
    peak_resident_mib: Number | None = None
    # MiB held between forward and backward, output included.
    saved_mib: Number | None = None
    # MiB of the whole worker as the driver counts it, context and caches included.
    process_memory_mib: Number | None = None
    # What a perfect pass computes (10^12 a second) and moves (10^9 bytes a second) in the time it took.
    tflops: Number | None = None
    gbps: Amount | None = None
    # What the implementation says that it executes and moves, if it says so.
    executed_tflops: Number | None = None
    executed_gbps: Number | None = None
    # What a large copy and a large bf16 product reached in the same run, and the share of the nearer of the two.
    copy_gbps: Amount | None = None
    product_tflops: Amount | None = None
    roofline_pct: Number | None = None
    # Joules per call, whole board, over calls in a row without flushes; and the mean time of those calls, which is
    # longer than time_ms at the power limit or when the device waits for the host.
    energy_j: Number | None = None
    energy_call_ms: Number | None = None
    # The device while it was sampled: median clocks and power, highest temperature, every reason that held the clock
    # back (`none` if there was none), how many others computed on it.
    sm_clock_mhz: Number | None = None
    memory_clock_mhz: Number | None = None
    temperature_c: Number | None = None
    power_w: Number | None = None
    other_processes: Whole | None = None
    throttle: str | None = None
    # Relative error per tensor against `accuracy_reference`; `o_at_size` is of the output at the cell's own size.
    rel_error: Mapping[str, float | None] | None = None
    accuracy_reference: str | None = None
    # What the backend says of its kernels.
    launch: str | None = None
    # Hash of the measured code (kernels and plugins): records of one run may differ in it after --retry-failed.
    code: str | None = None
    # UTC, to the second.
    started_at: str | None = None


@dataclass(frozen=True, kw_only=True)
class Record(Measured):
    """One cell and what measuring it gave."""

    cell: Cell

    def to_json(self) -> dict[str, Any]:
        """One flat dict, the cell's fields among the record's. Numbers that JSON lacks become null."""
        own = {f.name: _plain(getattr(self, f.name)) for f in fields(Measured)}
        return {"schema": SCHEMA, "run_id": own.pop("run_id"), **self.cell.to_json(), **own}

    def to_line(self) -> str:
        """One line of `records.jsonl`, without the line's end."""
        return json.dumps(read_text(self.to_json()), allow_nan=False)

    @classmethod
    def from_json(cls, data: Any) -> "Record":
        """The inverse of `to_json` for every schema; keys of later ones are passed over.

        Raises ValueError that names a wrong key.
        """
        measured = read_as(Measured, data)
        own = {f.name: getattr(measured, f.name) for f in fields(Measured)}
        return cls(cell=Cell.from_json(data), **own)

    @classmethod
    def from_line(cls, line: str | bytes) -> "Record":
        """The inverse of `to_line`. Raises ValueError for anything that is not a record."""
        return cls.from_json(read_text(read_json(line)))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
