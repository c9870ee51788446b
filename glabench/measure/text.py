"""Trains a small model on a text, and measures how well it then predicts other files, and how fast it learned."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from glabench.backends import Backend
from glabench.backends.text import PlainReader, Reader
from glabench.measure.accuracy import relative_error
from glabench.measure.cell import with_samples
from glabench.measure.job import Job
from glabench.measure.memory import MIB
from glabench.measure.sampling import Samples
from glabench.measure.timer import Sample
from glabench.measure.training import small_step
from glabench.measure.untrained import compared
from glabench.ops import Op
from glabench.ops.base import REFERENCE
from glabench.ops.text import Text
from glabench.records import Record
from glabench.sweeps.model import Cell, Parameters

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from glabench.models import LanguageModel
    from glabench.ops.corpus import Corpus

# AdamW as GLA was trained with (final paper, section 5.2): a warm-up over this share of the steps, then a cosine to
# this share of the highest rate.
_BETAS, _DECAY, _MOST_NORM = (0.9, 0.95), 0.01, 1.0
_WARM_UP, _LEAST_RATE = 0.1, 0.1
# Steps between two looks at the clock, and rows of the held-out files that are predicted, at most.
_BLOCK, _TESTED_ROWS = 25, 512
# The largest relative errors of the trained model's logits, by type. Six kinds of gates had up to 3.3e-3 in bf16.
_TRAINED_BOUNDS = {"fp64": 1e-6, "fp32": 2e-3, "fp16": 1e-2, "bf16": 2e-2}


class TextMeter:
    """Trains models for a number of steps on the same text in the same order, then tests them on other files."""

    def __init__(self, op: Op, backend: Backend, job: Job) -> None:
        if not isinstance(op, Text) or not isinstance(backend, Reader):
            raise TypeError(f"{backend.name}: its work is text, so it has to be a Reader of the op text")
        self._op, self._backend, self._job = op, backend, job

    def measure(self, cell: Cell) -> Record:
        """The record of a cell that the backend supports. Whatever the backend raises goes through."""
        record = self._job.begin(cell)
        try:
            corpus = _corpus_for(cell)
        except ValueError as problem:
            return replace(record, status="unsupported", reason=str(problem))
        small, plain = small_step(self._op, cell), PlainReader(self._backend)
        record = compared(record, self._op, self._backend, plain, small)
        return self._trained(record, corpus) if record.status == "ok" else record

    def _trained(self, record: Record, corpus: Corpus) -> Record:
        import torch

        cell = record.cell
        on_gpu = cell.device == "cuda"
        model = self._backend.build(cell)
        rate, (steps,) = float(cell.parameters["rate"]), cell.sizes("steps")
        optimizer = _optimizer_of(model, cell)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        samples: list[Sample] = []
        begin = start = time.perf_counter()
        for step, rows in enumerate(_batches(corpus, cell)):
            for group in optimizer.param_groups:
                group["lr"] = rate * _share_of_rate(step, steps)
            _learn(self._backend, model, optimizer, cell, rows)
            if (step + 1) % _BLOCK == 0 or step + 1 == steps:
                if on_gpu:
                    torch.cuda.synchronize()
                now = time.perf_counter()
                samples.append(Sample(1e3 * (now - start) / (step % _BLOCK + 1)))
                start = now
        seconds = time.perf_counter() - begin
        peak = torch.cuda.max_memory_allocated() / MIB if on_gpu else None
        kept = samples[1:] or samples  # the first ones compile
        timing = f"{_BLOCK} steps of training, by the host's clock"
        record = with_samples(record, Samples(tuple(kept), (), "all steps"), timing)
        bits = self._tested(model, corpus, cell)
        if not math.isfinite(bits):
            return replace(record, status="inaccurate", reason=f"the loss is {bits} after {steps} steps", time_ms=None)
        error = self._trained_error(model, corpus, cell)
        record = replace(record, rel_error={**(record.rel_error or {}), "trained": error})
        if not error <= _TRAINED_BOUNDS[cell.dtype]:
            bound, reference = _TRAINED_BOUNDS[cell.dtype], self._op.reference_name
            reason = f"relative error of the trained model beyond {bound:.0e} against {reference}: {error:.1e}"
            return replace(record, status="inaccurate", reason=reason, time_ms=None, samples_ms=None)
        return replace(record, bits_per_byte=bits, text=corpus.name, train_s=seconds, peak_allocated_mib=peak)

    def _trained_error(self, model: LanguageModel, corpus: Corpus, cell: Cell) -> float:
        """The error of its logits for the first and the last row of a batch, against the same weights in float64."""
        import torch

        tokens = _held_out_rows(corpus, cell)[: cell.batch, :-1]
        some = sorted({0, len(tokens) - 1})
        exact = replace(cell, dtype="fp64", parameters=Parameters({**cell.parameters, "kernel": REFERENCE}))
        reference = PlainReader(self._backend).build(exact)
        reference.load_state_dict(model.state_dict())
        with torch.no_grad(), self._backend.autocast(cell):
            logits = model(tokens)
        with torch.no_grad():
            return relative_error(logits[some], reference(tokens[some]))

    def _tested(self, model: LanguageModel, corpus: Corpus, cell: Cell) -> float:
        """Bits per byte of the held-out files, in rows of as many bytes as it has learned from."""
        import torch

        rows = _held_out_rows(corpus, cell)
        parts = [rows[first : first + cell.batch] for first in range(0, len(rows), cell.batch)]
        with torch.no_grad():
            return sum(float(_bits(self._backend, model, cell, some)) * len(some) for some in parts) / len(rows)


def ready_step(op: Text, backend: Reader, cell: Cell) -> tuple[Mapping[str, Tensor], Callable[[], None]]:
    """A step of training on one batch at the highest rate, and the batch: bytes drawn at random."""
    model, inputs = backend.build(cell), op.make_indices(replace(cell, seqlen=cell.seqlen + 1))
    optimizer = _optimizer_of(model, cell)
    return inputs, lambda: _learn(backend, model, optimizer, cell, inputs["tokens"])


def _optimizer_of(model: LanguageModel, cell: Cell) -> Optimizer:
    import torch

    rate, on_gpu = float(cell.parameters["rate"]), cell.device == "cuda"
    return torch.optim.AdamW(model.parameters(), rate, _BETAS, weight_decay=_DECAY, fused=on_gpu)


def _learn(backend: Reader, model: LanguageModel, optimizer: Optimizer, cell: Cell, rows: Tensor) -> None:
    """A step of training on rows [B, T + 1]."""
    import torch

    optimizer.zero_grad(set_to_none=True)
    _bits(backend, model, cell, rows).backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), _MOST_NORM)
    optimizer.step()


def _corpus_for(cell: Cell) -> Corpus:
    """The text. Raises ValueError if there is none, or if a part of it is too short for a row."""
    from glabench.ops.corpus import python_source

    corpus = python_source()
    most = min(len(corpus.learned), len(corpus.held_out)) - 1
    if cell.seqlen > most:
        raise ValueError(f"rows of {cell.seqlen} bytes are longer than the held-out files, {most} bytes; use --seqlen")
    return corpus


def _share_of_rate(step: int, steps: int) -> float:
    """The rate of a step, of the highest: it rises in a line, then falls as a cosine."""
    rising = max(1, round(_WARM_UP * steps))
    if step < rising:
        return (step + 1) / rising
    falling = (step - rising) / max(1, steps - rising)
    return _LEAST_RATE + (1 - _LEAST_RATE) * (1 + math.cos(math.pi * falling)) / 2


def _batches(corpus: Corpus, cell: Cell) -> Iterator[Tensor]:
    """Rows of bytes [B, T + 1] from places that the seed draws, a batch per step; the same for every model."""
    import torch

    text, (steps,) = _on_device(corpus.learned, cell), cell.sizes("steps")
    generator = torch.Generator().manual_seed(cell.seed)
    places = torch.randint(len(text) - cell.seqlen, (steps, cell.batch, 1), generator=generator).to(cell.device)
    within = torch.arange(cell.seqlen + 1, device=cell.device)
    for own in places:
        yield text[own + within].long()


def _held_out_rows(corpus: Corpus, cell: Cell) -> Tensor:
    """Rows of bytes [N, T + 1], one behind the other."""
    text, length = _on_device(corpus.held_out, cell), cell.seqlen + 1
    return text[: len(text) // length * length].view(-1, length)[:_TESTED_ROWS].long()


def _on_device(text: bytes, cell: Cell) -> Tensor:
    import torch

    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(cell.device)


def _bits(backend: Reader, model: LanguageModel, cell: Cell, rows: Tensor) -> Tensor:
    """The mean bits of every byte of rows but their first ones."""
    with backend.autocast(cell):
        loss: Tensor = model.loss(rows[:, :-1], rows[:, 1:])
    return loss / math.log(2)
