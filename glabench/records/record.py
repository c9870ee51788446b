"""A record: one cell and what measuring it gave, as one flat line of JSON. Absent is null, never zero."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from glabench.sweeps.fields import Amount, read_fields
from glabench.sweeps.model import Cell

Status = Literal["ok", "oom", "unsupported", "inaccurate", "timeout", "crashed", "error"]
FAILED: frozenset[Status] = frozenset({"oom", "inaccurate", "timeout", "crashed", "error"})


@dataclass(frozen=True)
class Record:
    """Field names are a promise to scripts. Times in milliseconds unless the name says otherwise, memory in MiB.

    `time_ms` is the median of `samples_ms`, which keeps every sample; `stop_reason` says why there are no more of
    them. `first_call_s` is the cell's first call in its worker: compiling, autotuning and allocation, as far as
    earlier cells of the worker and caches on disk have not done them already. `peak_*_mib` is what the pass takes
    above its inputs; `saved_mib` what is held between forward and backward, output included; `process_memory_mib` what
    the driver counts for the worker, its context and caches included. `rel_error` is per tensor, against
    `accuracy_reference`; its `o_at_size` is of the output at the cell's own size. `gbps` and `tflops` are what a
    perfect pass would move and compute over the time it took, `copy_gbps` and `product_tflops` what a large copy and a
    large product reached in the same run, `roofline_pct` the share of the nearer one. `launch` is what the backend says
    of its kernels.

    `thrown_out_ms` are samples during which the clock was throttled; `exposed_samples` counts those that may hold
    launch latency. `sm_clock_mhz` is the median over the samples, `temperature_c` the highest, `throttle` every reason
    that NVML gave, `other_processes` who else computed on the GPU. `energy_j` is the whole board's, a call,
    while calls follow each other without flushes, one every `energy_call_ms`: a hot board, or its host, is slower.
    """

    run_id: str
    cell: Cell
    status: Status
    reason: str | None = None
    time_ms: Amount | None = None
    time_ms_p20: Amount | None = None
    time_ms_p80: Amount | None = None
    samples_ms: tuple[Amount, ...] | None = None
    thrown_out_ms: tuple[Amount, ...] | None = None
    exposed_samples: int | None = None
    stop_reason: str | None = None
    timing: str | None = None
    first_call_s: float | None = None
    peak_allocated_mib: float | None = None
    peak_reserved_mib: float | None = None
    saved_mib: float | None = None
    process_memory_mib: float | None = None
    tflops: float | None = None
    gbps: Amount | None = None
    copy_gbps: Amount | None = None
    product_tflops: Amount | None = None
    roofline_pct: float | None = None
    energy_j: float | None = None
    energy_call_ms: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    other_processes: int | None = None
    throttle: str | None = None
    rel_error: Mapping[str, float | None] | None = None
    accuracy_reference: str | None = None
    launch: str | None = None
    started_at: str | None = None

    def to_json(self) -> dict[str, Any]:
        """One flat dict, the cell's fields among the record's. Numbers that JSON lacks become null."""
        data: dict[str, Any] = {"run_id": self.run_id, **self.cell.to_json()}
        for f in fields(self):
            if f.name not in ("run_id", "cell"):
                data[f.name] = _plain(getattr(self, f.name))
        return data

    def to_line(self) -> str:
        """One line of `records.jsonl`, without the line's end."""
        return json.dumps(self.to_json(), allow_nan=False)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Record":
        """The way back of `to_json`; keys of later versions are passed over. Raises ValueError naming a wrong one."""
        own = read_fields(cls, data, skip=("cell",))
        return cls(cell=Cell.from_json(data), **own)

    @classmethod
    def from_line(cls, line: str | bytes) -> "Record":
        """The way back of `to_line`. Raises ValueError for anything that is not a record."""
        try:
            return cls.from_json(json.loads(line))
        except RecursionError:
            raise ValueError("tables or lists in one another without end") from None


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
