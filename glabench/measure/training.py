"""Measures one step of training a model: its time in a loop, its memory, and how right its losses are."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from glabench.backends import Backend
from glabench.backends.base import refusal
from glabench.backends.models import Model, PlainModel, segments_of
from glabench.devices.nvml import Nvml
from glabench.measure.accuracy import worst_gradient
from glabench.measure.job import Job
from glabench.measure.loop import settle, with_memory, with_times
from glabench.measure.ranks import ALONE, Ranks
from glabench.measure.timer import Between, EagerTimer, median_ms, timer_for
from glabench.measure.workload import prepare, steps_of
from glabench.ops import Op
from glabench.ops.base import REFERENCE
from glabench.ops.training import Training
from glabench.records import Record
from glabench.sweeps.model import GPUS, PARALLEL, SEQUENCE, Cell, Parameters

if TYPE_CHECKING:
    from torch import Tensor

# The small model: as many sequences (or one per GPU) and tokens at most (over three chunks of 64), and steps that are
# compared.
_SMALL_BATCH, _SMALL_TOKENS, _COMPARED = 2, 200, 10
# In segments of more than a chunk, if there are any.
_SMALL_SEGMENTS = 3
# If GPUs share sequences, tokens of each, and channels of a head of attention.
_SMALL_STRETCH, _HEAD_DIM = 100, 64
# Their largest relative error, by type; weights in half precision lose the smallest changes. Losses below this share of
# the first one count as if they were as large.
_LEAST_SHARE = 0.2
_BOUNDS: Mapping[str, float] = {"fp64": 1e-9, "fp32": 1e-4, "fp16": 5e-3, "bf16": 5e-3}
# Seven mixers had 0.8 to 1.7 % so; one whose queries and keys were not trained 4.1.
_PURE_BOUND = 3e-2
# The largest relative error of a parameter's gradient in the first step, by type.
_GRADIENT_BOUNDS: Mapping[str, float] = {"fp64": 1e-6, "fp32": 1e-2, "fp16": 0.1, "bf16": 0.1}
# How far the first loss may be from that of a guess: weights are small, and tokens have nothing to learn. A head whose
# weights have this deviation makes it longer.
_MOST_OFF, _DEVIATION = 0.1, 0.02
# The share of a large product's speed that no step can exceed.
_MOST_MFU = 1.05
_BATCHES = 8
_KERNEL_CALLS, _KERNEL_SAMPLES = 3, 10


class _Batches(Between):
    """Gives each sample other tokens, outside of the timing."""

    def __init__(self, inputs: Mapping[str, Tensor], batches: Sequence[Mapping[str, Tensor]]) -> None:
        self._inputs, self._batches = inputs, batches
        self._next = 0

    def renew(self, delay: Callable[[bool], object]) -> None:  # noqa: ARG002
        for name, x in self._batches[self._next % len(self._batches)].items():
            self._inputs[name].copy_(x)
        self._next += 1


class StepMeter:
    """Measures steps of models. They are timed back to back by the host's clock, as a training loop makes them.

    Of several ranks, each does all of it with its share of every batch; what they decide by is the same in all.
    """

    def __init__(self, op: Op, backend: Backend, job: Job, nvml: Nvml | None = None, ranks: Ranks = ALONE) -> None:
        if not isinstance(op, Training) or not isinstance(backend, Model):
            raise TypeError(f"{backend.name}: its work is training, so it has to be a Model of the op training")
        self._op, self._backend, self._job, self._nvml, self._ranks = op, backend, job, nvml, ranks

    def measure(self, cell: Cell) -> Record:
        """The record of a cell that the backend supports. Whatever the backend raises goes through."""
        record = self._job.begin(cell)
        record = self._compared(record)
        if record.status == "ok":
            record = self._timed(record)
        return self._with_kernels(record) if record.status == "ok" else record

    def _compared(self, record: Record) -> Record:
        """With the errors of a small model's gradients and losses; inaccurate if one is too large."""
        cell = small_step(self._op, record.cell)
        one = {GPUS: None, PARALLEL: None}  # a rank computes what is expected by itself, of the whole batch
        exact = Parameters({**cell.parameters, **one, "kernel": REFERENCE, "weights": "fp32", "compile": None})
        reference = replace(cell, dtype="fp64", parameters=exact)
        plain = PlainModel(self._backend)  # by a class of the suite, because a plugin's may override anything
        is_pure = cell.get("weights") == "pure" and cell.dtype in ("bf16", "fp16")
        bounds = {
            "gradient": _GRADIENT_BOUNDS[cell.dtype],
            "loss": _PURE_BOUND if is_pure else _BOUNDS[cell.dtype],
        }
        worst, gradient = self._gradient_error(cell, plain, reference)
        found, expected = self._losses(self._backend, cell, self._ranks), self._losses(plain, reference, ALONE)
        # The last ones may be nearly zero, and rounding is then a large share of them.
        least = _LEAST_SHARE * expected[0]
        loss = max(
            abs(a - b) / max(b, least) if math.isfinite(a) else math.inf for a, b in zip(found, expected, strict=True)
        )
        errors = {"gradient": self._ranks.most(gradient), "loss": self._ranks.most(loss)}
        record = replace(record, rel_error=errors, accuracy_reference=self._op.reference_name)
        wrong = [f"{name} {x:.1e} (allowed {bounds[name]:.0e})" for name, x in errors.items() if not x <= bounds[name]]
        if not wrong:
            return record
        said = f"{', '.join(wrong)}; the worst gradient is {worst}'s"
        reason = f"relative error against {self._op.reference_name}: {said}"
        return replace(record, status="inaccurate", reason=reason)

    def _gradient_error(self, cell: Cell, plain: Model, reference: Cell) -> tuple[str, float]:
        """The parameter whose gradient in the first step is the most wrong, and its relative error."""

        batch = self._op.make_inputs(cell)
        own, exact = self._backend.gradients(_share(self._ranks, batch, cell), cell), plain.gradients(batch, reference)
        return worst_gradient(own, exact)

    def _losses(self, backend: Model, cell: Cell, ranks: Ranks) -> list[float]:
        """The losses of some steps on the same tokens, which the model soon knows, so that every step shows."""
        step = backend.bind(_share(ranks, self._op.make_inputs(cell), cell), cell)
        return [ranks.mean(float(step())) for _ in range(_COMPARED)]

    def _timed(self, record: Record) -> Record:
        cell, ranks = record.cell, self._ranks
        shares = [_share(ranks, self._op.make_batch(cell, number), cell) for number in range(_BATCHES)]
        inputs = {name: x.clone() for name, x in shares[0].items()}
        timer = EagerTimer(cell.device, ranks)
        step, batches = self._backend.bind(inputs, cell), _Batches(inputs, shares)
        start = time.perf_counter()
        first = ranks.mean(float(step()))
        record = replace(record, first_call_s=time.perf_counter() - start)
        vocabulary, width = cell.sizes("vocabulary", "model_width")
        guess = math.log(vocabulary) + width * _DEVIATION**2 / 2
        allowed = _MOST_OFF * guess + 4 * _DEVIATION * math.sqrt(width / cell.tokens)
        if not abs(first - guess) <= allowed:
            reason = f"the first loss is {first:.3g}; a guess among the tokens has {guess:.3g}"
            return replace(record, status="inaccurate", reason=reason)
        record = replace(record, launch=self._backend.launch(inputs, cell))
        settle(step, timer.synchronize, ranks)
        record = with_memory(record, step, ranks)
        record = with_times(record, step, batches, timer, self._job.settings, self._nvml, ranks=ranks)
        last = ranks.mean(float(step()))
        if not math.isfinite(last):
            return replace(record, status="inaccurate", reason=f"the loss is {last} after some steps")
        return record

    def _with_kernels(self, record: Record) -> Record:
        """With rates, and with the time that the mixers' kernels take alone in a step."""
        plain, ceilings = PlainModel(self._backend), self._job.ceilings
        counts, sent = plain.executes(record.cell), plain.sent_bytes(record.cell)
        assert record.time_ms is not None
        tflops = counts.flops / record.time_ms / 1e9
        of_one = tflops / record.cell.gpus
        if ceilings.product_tflops is not None and of_one > _MOST_MFU * ceilings.product_tflops:
            reason = f"{of_one:.3g} TFLOP/s, but a large product reaches {ceilings.product_tflops:.3g} TFLOP/s"
            return replace(record, status="suspicious", reason=reason, time_ms=None, samples_ms=None)
        return replace(
            record,
            tflops=tflops,
            copy_gbps=ceilings.copy_gbps,
            product_tflops=ceilings.product_tflops,
            mixer_ms=self._mixer_ms(record.cell),
            sent_mib=None if sent is None else sent / 2**20,
        )

    def _mixer_ms(self, cell: Cell) -> float | None:
        """Milliseconds of all mixers' kernels in a step, from the op's own pass; None if the kernel does not run so."""
        registry, config = self._backend.registry, self._backend.config(cell)
        if config.kernel == REFERENCE or cell.get(PARALLEL) == SEQUENCE:
            return None
        kernel, op = registry[config.kernel], registry.op_of(config.kernel)
        known = {each.name: each.default for each in (*op.parameters, *kernel.parameters)}
        own = config.mixer_cell(replace(cell, batch=cell.batch // cell.gpus))
        given = {key: value for key, value in config.options.items() if key in known}
        count = segments_of(cell)
        if count > 1:
            own, given = replace(own, seqlen=cell.seqlen // count), given | {"state": "both"}
        own = replace(own, parameters=Parameters({**known, **own.parameters, **given}))
        if refusal(kernel, op, own) is not None:
            return None
        if cell.device == "cuda":
            import torch

            torch.cuda.empty_cache()
        # The device's time: in a step the host is ahead of it.
        steps, timer = steps_of(prepare(op, kernel, own), own), timer_for(cell.device)
        ms = median_ms(timer, steps.call, _KERNEL_CALLS, _KERNEL_SAMPLES)
        if cell.get("recompute") and steps.forward is not None:
            ms += median_ms(timer, steps.forward, _KERNEL_CALLS, _KERNEL_SAMPLES)
        return config.blocks * count * ms


def _share(ranks: Ranks, batch: Mapping[str, Tensor], cell: Cell) -> dict[str, Tensor]:
    """A rank's rows of a batch, or its stretch of every sequence."""
    return ranks.share(batch, 1 if cell.get(PARALLEL) == SEQUENCE else 0)


def small_step(op: Op, cell: Cell) -> Cell:
    """The cell whose losses are compared with the reference's: the same kind of model, at a small size."""
    fewer = {name: min(size, int(cell.parameters[name])) for name, size in op.small.items()}
    segments = min(segments_of(cell), _SMALL_SEGMENTS)
    rows, parts, tokens = cell.gpus, segments, _SMALL_TOKENS
    if cell.get(PARALLEL) == SEQUENCE:  # stretches of more than a chunk, and a head of attention for each
        rows, parts, tokens = 1, cell.gpus, max(_SMALL_TOKENS, _SMALL_STRETCH * cell.gpus)
        least = max(fewer["model_width"], _HEAD_DIM * cell.gpus)
        fewer["model_width"] = min(least, int(cell.parameters["model_width"]))
    seqlen = min(cell.seqlen, tokens)
    return replace(
        cell, batch=min(cell.batch, max(_SMALL_BATCH, rows)), seqlen=seqlen - seqlen % parts,
        parameters=Parameters({**cell.parameters, **fewer, "segments": segments if segments > 1 else None}),
    )  # fmt: skip
