"""A record: one cell and its measurements, as one flat line of JSON. A missing value is null, never zero."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from glabench.errors import count_of
from glabench.plain import Amount, Name, Number, Whole, read_as, read_json, read_text
from glabench.records.metrics import significant
from glabench.sweeps.model import Cell

# 1 (not written into records): all ops have heads, key_dim and value_dim. 2: `parameters` names the parameters.
SCHEMA = 2
Status = Literal["ok", "oom", "unsupported", "inaccurate", "suspicious", "timeout", "crashed", "error"]
# Statuses of results that are wrong, or cannot be true.
WRONG: frozenset[Status] = frozenset({"inaccurate", "suspicious"})
FAILED: frozenset[Status] = WRONG | {"oom", "timeout", "crashed", "error"}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The fields of a record besides its cell. Scripts rely on the names: fields may be added, but none is removed."""

    run_id: Name
    status: Status
    # Why there is no time, in one line.
    reason: str | None = None
    # Milliseconds per call: median and percentiles of `samples_ms`.
    time_ms: Amount | None = None
    time_ms_p20: Amount | None = None
    time_ms_p80: Amount | None = None
    # Milliseconds of every sample that counts, in the order in which they were taken.
    samples_ms: tuple[Amount, ...] | None = None
    # Milliseconds of samples that do not count, because the clock was throttled.
    thrown_out_ms: tuple[Amount, ...] | None = None
    # Number of samples that may include launch latency.
    exposed_samples: Whole | None = None
    # Why sampling stopped: precision, time limit, sample limit.
    stop_reason: str | None = None
    # How samples were taken, such as `cold, device events behind a spin`.
    timing: str | None = None
    # Milliseconds for which a call keeps the host busy, on a GPU.
    host_ms: Amount | None = None
    # Seconds of the first call, with compiling, autotuning and allocation unless an earlier cell caused them.
    first_call_s: Number | None = None
    # MiB above the inputs on a GPU: peak of what torch allocated, and of what it reserved from the device for that.
    peak_allocated_mib: Number | None = None
    peak_reserved_mib: Number | None = None
    # MiB by which the pass raised the process's resident memory on a CPU.
    peak_resident_mib: Number | None = None
    # MiB held between forward and backward, output included.
    saved_mib: Number | None = None
    # MiB of the whole worker as the driver counts it, context and caches included.
    process_memory_mib: Number | None = None
    # TFLOP/s (10^12) and GB/s (10^9): the FLOPs and bytes of a perfect pass, divided by `time_ms`.
    tflops: Number | None = None
    gbps: Amount | None = None
    # TFLOP/s and GB/s from what the implementation says that it executes and moves, if it does.
    executed_tflops: Number | None = None
    executed_gbps: Number | None = None
    # Percent of the operations executed that are off the tensor cores.
    scalar_pct: Number | None = None
    # KiB that one sequence needs to go on after its last token: states, or attention's keys and values. In one layer;
    # in all of them, and with what convolutions need, of a model that decodes.
    state_kib: Number | None = None
    # KiB that a model which decodes has allocated for a sequence.
    allocated_state_kib: Number | None = None
    # Milliseconds of the forward over the prefix that leaves a model's states; `time_ms` is that of a step.
    prefill_ms: Amount | None = None
    # Of the layer in which the op's authors use it.
    layer_parameters: int | None = None
    # Milliseconds of a training step that its mixers' kernels take, each timed alone.
    mixer_ms: Amount | None = None
    # MiB that one GPU sends the others in a training step for the mixers, if GPUs share sequences.
    sent_mib: Amount | None = None
    # Of steps of models: percent of the time in which no kernel ran, as the driver counts it up to a second back.
    gpu_idle_pct: Number | None = None
    # Of a model that learns to recall: the share of values that it names in the end, epochs, and seconds of training.
    accuracy: Number | None = None
    epochs_trained: Whole | None = None
    train_s: Amount | None = None
    # Of a model that learned text: bits per byte of files that it has not seen, and what the text is.
    bits_per_byte: Number | None = None
    text: Name | None = None
    # GB/s and TFLOP/s, the device's ceilings: a large copy and a large bf16 product, measured in the same run.
    copy_gbps: Amount | None = None
    product_tflops: Amount | None = None
    # Percent: the larger of gbps / copy_gbps and tflops / product_tflops.
    roofline_pct: Number | None = None
    # Joules per call, whole board, over calls in a row without cache flushes.
    energy_j: Number | None = None
    # Mean milliseconds of those calls. Longer than time_ms at the power limit, or if the device waits for the host.
    energy_call_ms: Number | None = None
    # The device during sampling: median clocks and power, highest temperature, number of other processes that computed
    # on it, every reason that held the clock back (`none` if there was none).
    sm_clock_mhz: Number | None = None
    memory_clock_mhz: Number | None = None
    temperature_c: Number | None = None
    power_w: Number | None = None
    other_processes: Whole | None = None
    throttle: str | None = None
    # Relative error per tensor against `accuracy_reference`; names that end in `_at_size` are at the cell's own size.
    rel_error: Mapping[str, float | None] | None = None
    accuracy_reference: str | None = None
    # Draws the parts that were compared closely at the cell's own size.
    check_seed: Whole | None = None
    # What the backend says about its kernels.
    launch: str | None = None
    # Hash of the measured code (kernels and plugins). After --retry-failed, records of one run may have different ones.
    code: str | None = None
    # UTC, ISO 8601, to the second.
    started_at: str | None = None


@dataclass(frozen=True, kw_only=True)
class Record(Measured):
    """One cell and its measurements."""

    cell: Cell

    def __str__(self) -> str:
        result = self.status if self.time_ms is None else f"{significant(self.time_ms)} ms"
        if self.accuracy is not None:
            result = f"{100 * self.accuracy:.1f} % after {count_of(self.epochs_trained or 0, 'epoch')}"
        if self.bits_per_byte is not None:
            result = f"{self.bits_per_byte:.3f} bits per byte, {result} per step"
        return f"{self.cell}: {result}{f' ({self.reason})' if self.reason else ''}"

    def to_json(self) -> dict[str, Any]:
        """One flat dict with the fields of the cell and the record. NaN and infinities become null."""
        own = {f.name: _plain(getattr(self, f.name)) for f in fields(Measured)}
        return {"schema": SCHEMA, "run_id": own.pop("run_id"), **self.cell.to_json(), **own}

    def to_line(self) -> str:
        """One line of `records.jsonl`, without the newline."""
        return json.dumps(read_text(self.to_json()), allow_nan=False)

    @classmethod
    def from_json(cls, data: Any) -> "Record":
        """The inverse of `to_json`, for every schema; unknown keys are ignored.

        Raises ValueError that names the wrong key.
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
