"""Measures models that decode: a prefill, steps of one token per sequence in a loop, and the bytes of a sequence."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from glabench.backends import Backend
from glabench.backends.decoding import Decoder, DecodingModel, PlainDecoder
from glabench.backends.graphs import uses_graph
from glabench.devices.nvml import Nvml
from glabench.measure.accuracy import relative_error
from glabench.measure.job import Job
from glabench.measure.loop import settle, with_memory, with_times
from glabench.measure.timer import Between, EagerTimer, median_ms
from glabench.measure.training import small_step
from glabench.ops import Op
from glabench.ops.base import REFERENCE
from glabench.ops.decoding import Decoding
from glabench.records import Record
from glabench.sweeps.model import Cell, Parameters

if TYPE_CHECKING:
    from torch import Tensor

# Steps of the small model that are compared, and the largest relative errors of their logits, by type. Products of
# float32 may run in tf32.
_COMPARED = 4
_BOUNDS = {"fp64": 1e-9, "fp32": 2e-3, "fp16": 2e-2, "bf16": 3e-2}
# The same at the cell's own size, for so many sequences: two paths through many layers round differently, and each
# layer makes rounding larger (right kernels of GLA in bf16: up to 0.087 after 24 layers). A step that left out the last
# MLP or block of 24 layers was off by 0.13 to 0.15.
_AT_SIZE = 2
_COARSE_BOUNDS = {"fp64": 1e-6, "fp32": 1e-2, "fp16": 0.12, "bf16": 0.12}
_PREFILL_CALLS, _PREFILL_SAMPLES = 1, 3
_BATCHES = 8
# No step computes faster than this share of a large product, nor reads faster than this share of a copy, which also
# writes; a step that reads less than this may find much of it in a cache.
_MOST_TFLOPS, _MOST_GBPS, _LEAST_READ = 1.05, 1.25, 2**29


class _Tokens(Between):
    """Gives each sample other tokens behind the prefix, outside of the timing. A sample's steps fit into the room."""

    def __init__(self, op: Decoding, cell: Cell, decoder: Decoder) -> None:
        self._decoder, self._prefix = decoder, int(cell.parameters["prefix"])
        self._tokens = [op.make_indices(replace(cell, seed=cell.seed + n))["tokens"] for n in range(_BATCHES)]
        self._next = 0

    def renew(self, delay: Callable[[bool], object]) -> None:  # noqa: ARG002
        self._decoder.tokens.copy_(self._tokens[self._next % _BATCHES])
        self._decoder.rewind(self._prefix)
        self._next += 1


class DecodeMeter:
    """Measures steps of decoding. They are timed back to back by the host's clock, as a generating loop makes them."""

    def __init__(self, op: Op, backend: Backend, job: Job, nvml: Nvml | None = None) -> None:
        if not isinstance(op, Decoding) or not isinstance(backend, DecodingModel):
            raise TypeError(f"{backend.name}: its work is decode, so it has to be a DecodingModel of the op decode")
        self._op, self._backend, self._job, self._nvml = op, backend, job, nvml

    def measure(self, cell: Cell) -> Record:
        """The record of a cell that the backend supports. Whatever the backend raises goes through."""
        record = self._job.begin(cell)
        record = self._compared(record)
        if record.status == "ok":
            record = self._timed(record)
        return self._with_rates(record) if record.status == "ok" else record

    def _compared(self, record: Record) -> Record:
        """With the errors of a small model's logits; inaccurate if one is too large."""
        import torch

        cell = small_step(self._op, record.cell)
        (prefix,) = cell.sizes("prefix")
        rows = self._op.make_rows(cell, _COMPARED)
        decoder = self._backend.decoder({"tokens": rows[:, :1].clone()}, cell)
        self._capture(decoder, cell)
        found = [decoder.prefill(rows[:, :prefix])]
        for place in range(prefix, prefix + _COMPARED):
            decoder.tokens.copy_(rows[:, place : place + 1])
            found.append(decoder.step().clone())
        exact = PlainDecoder(self._backend)  # by a class of the suite, because a plugin's may override anything
        of_reference = replace(cell, parameters=Parameters({**cell.parameters, "kernel": REFERENCE}))
        with torch.no_grad():
            expected = exact.build(of_reference).double()(rows)[:, prefix - 1 :]
        errors = {
            "prefill": relative_error(found[0], expected[:, 0]),
            "steps": relative_error(torch.stack(found[1:], 1), expected[:, 1:]),
        }
        record = replace(record, rel_error=errors, accuracy_reference=self._op.reference_name)
        return _judged(record, errors, _BOUNDS[cell.dtype], f"against {self._op.reference_name}")

    def _capture(self, decoder: Decoder, cell: Cell) -> None:
        if uses_graph(cell):
            decoder.capture()

    def _timed(self, record: Record) -> Record:
        cell = record.cell
        (prefix,) = cell.sizes("prefix")
        inputs, timer = self._op.make_indices(cell), EagerTimer(cell.device)
        decoder = self._backend.decoder({"tokens": inputs["tokens"].clone()}, cell)
        start = time.perf_counter()
        self._capture(decoder, cell)
        decoder.prefill(inputs["before"])
        first = decoder.step().clone()
        timer.synchronize()
        record = replace(record, first_call_s=time.perf_counter() - start)
        record = self._compared_at_size(record, decoder, inputs, first)
        if record.status != "ok":
            return record
        states = decoder.states
        record = replace(
            record,
            state_kib=states.needed_bytes(prefix) / 1024,
            allocated_state_kib=states.allocated_bytes / 1024,
            launch=self._backend.launch(inputs, cell),
            prefill_ms=median_ms(timer, lambda: decoder.prefill(inputs["before"]), _PREFILL_CALLS, _PREFILL_SAMPLES),
        )

        def rewound() -> Tensor:
            decoder.rewind(prefix)
            return decoder.step()

        settle(rewound, timer.synchronize)
        record = with_memory(record, rewound)
        tokens = _Tokens(self._op, cell, decoder)
        record = with_times(record, decoder.step, tokens, timer, self._job.settings, self._nvml, rewound)
        if uses_graph(cell):
            record = replace(record, timing=f"steps from a CUDA graph, {timer.name}")
        # Of other tokens, so that no step remembers what its logits have to be.
        others = self._op.make_indices(replace(cell, seed=cell.seed + _BATCHES))
        decoder.tokens.copy_(others["tokens"])
        decoder.prefill(others["before"])
        error = _error_at_once(decoder, others, decoder.step())
        against = "after the timing, against all tokens at once"
        return _judged(record, {"steps": error}, _COARSE_BOUNDS[cell.dtype], against)

    def _compared_at_size(
        self, record: Record, decoder: Decoder, inputs: Mapping[str, Tensor], first: Tensor
    ) -> Record:
        """With the error of a first step's logits against those of all tokens at once, by the same model."""
        errors = {"steps_at_size": _error_at_once(decoder, inputs, first)}
        record = replace(record, rel_error={**(record.rel_error or {}), **errors})
        return _judged(record, errors, _COARSE_BOUNDS[record.cell.dtype], "against all tokens at once")

    def _with_rates(self, record: Record) -> Record:
        """With what a step computes and moves per second; suspicious if that cannot be."""
        counts, ceilings = PlainDecoder(self._backend).executes(record.cell), self._job.ceilings
        assert record.time_ms is not None
        tflops, gbps = counts.flops / record.time_ms / 1e9, counts.bytes / record.time_ms / 1e6
        product, copy = ceilings.product_tflops, ceilings.copy_gbps
        reason = None
        if product is not None and tflops > _MOST_TFLOPS * product:
            reason = f"{tflops:.3g} TFLOP/s, but a large product reaches {product:.3g} TFLOP/s"
        if copy is not None and counts.bytes > _LEAST_READ and gbps > _MOST_GBPS * copy:
            reason = f"{gbps:.0f} GB/s, but a copy reaches {copy:.0f} GB/s"
        if reason is not None:
            return replace(record, status="suspicious", reason=reason, time_ms=None, samples_ms=None)
        is_known = product is not None and copy is not None
        roof = 100 * max(tflops / product, gbps / copy) if is_known else None  # type: ignore[operator]
        return replace(record, tflops=tflops, gbps=gbps, copy_gbps=copy, product_tflops=product, roofline_pct=roof)


def _error_at_once(decoder: Decoder, inputs: Mapping[str, Tensor], logits: Tensor) -> float:
    """The error of the logits after a step for some sequences, against those of all their tokens at once."""
    import torch

    prefix = inputs["before"].shape[1]
    some = sorted({0, len(logits) - 1})[:_AT_SIZE]
    rows = torch.cat((inputs["before"][some], inputs["tokens"][some]), 1)
    with torch.no_grad():
        at_once = decoder.model(rows, torch.full((len(some), 1), prefix, device=rows.device))[:, 0]
    return relative_error(logits[some], at_once)


def _judged(record: Record, errors: Mapping[str, float], bound: float, against: str) -> Record:
    """Inaccurate, without times, if an error is beyond the bound or no number."""
    wrong = ", ".join(f"{name} {error:.1e}" for name, error in errors.items() if not error <= bound)
    if not wrong:
        return record
    reason = f"relative error of the logits beyond {bound:.2g} {against}: {wrong}"
    return replace(record, status="inaccurate", reason=reason, time_ms=None, samples_ms=None, prefill_ms=None)
