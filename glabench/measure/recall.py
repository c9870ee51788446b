"""Trains a small model on rows of keys and values, and measures how many values it then names."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from glabench.backends import Backend
from glabench.backends.graphs import replayed, uses_graph
from glabench.backends.recall import Learner, PlainLearner
from glabench.measure.job import Job
from glabench.measure.untrained import compared
from glabench.ops import Op
from glabench.ops.base import REFERENCE
from glabench.ops.recall import Recall
from glabench.records import Record
from glabench.sweeps.model import Cell

if TYPE_CHECKING:
    from torch import Tensor

    from glabench.models import LanguageModel
    from glabench.ops.mqar import Rows

# As Arora et al. train: AdamW with this decay, a cosine from epoch to epoch, no warm-up; rows come in one order.
_DECAY, _ENOUGH, _TEST_ROWS = 0.1, 0.99, 3000
# Steps before one is captured in a CUDA graph: they compile, autotune and make the optimizer's moments.
_STEPS_BEFORE_CAPTURE = 3


class RecallMeter:
    """Trains models until they name 99 % of the values of rows that they have not seen, or for all epochs."""

    def __init__(self, op: Op, backend: Backend, job: Job) -> None:
        if not isinstance(op, Recall) or not isinstance(backend, Learner):
            raise TypeError(f"{backend.name}: its work is recall, so it has to be a Learner of the op recall")
        self._op, self._backend, self._job = op, backend, job

    def measure(self, cell: Cell) -> Record:
        """The record of a cell that the backend supports. Whatever the backend raises goes through."""
        record = self._job.begin(cell)
        record = compared(record, self._op, self._backend, PlainLearner(self._backend), cell)
        return self._trained(record) if record.status == "ok" else record

    def _trained(self, record: Record) -> Record:
        cell = record.cell
        pairs, vocabulary, count, epochs = cell.sizes("pairs", "vocabulary", "rows", "epochs")
        rows = _rows(cell, count, pairs, vocabulary, 0)
        unseen = _rows(cell, min(count, _TEST_ROWS), pairs, vocabulary, 1)
        model = self._backend.build(cell)
        lessons, rate = Lessons(self._backend, model, cell), float(cell.parameters["rate"])
        course: list[float] = []
        start = time.perf_counter()
        for epoch in range(epochs):
            lessons.set_rate(rate * (1 + math.cos(math.pi * epoch / epochs)) / 2)
            for first in range(0, count, cell.batch):
                lessons.learn(_some(rows, first, cell.batch))
            course.append(_accuracy(self._backend, model, cell, unseen))
            if course[-1] >= _ENOUGH:
                break
        seconds = time.perf_counter() - start
        if not all(bool(weight.isfinite().all()) for weight in model.parameters()):
            reason = f"the weights are not finite after {len(course)} epochs; take a smaller learning rate (--rate)"
            return replace(record, status="inaccurate", reason=reason)
        return replace(record, accuracy=course[-1], epochs_trained=len(course), train_s=seconds)


class Lessons:
    """Steps of a model on rows. With CUDA graphs, those on whole batches are replayed but for the first ones.

    Two small layers take longer to launch than to compute.
    """

    def __init__(self, backend: Learner, model: LanguageModel, cell: Cell) -> None:
        import torch

        self._backend, self._model, self._cell = backend, model, cell
        on_gpu = cell.device == "cuda"
        # A graph reads the rate where it is.
        self._rate = torch.zeros((), device=cell.device)
        self._optimizer = torch.optim.AdamW(
            model.parameters(), self._rate if on_gpu else 0.0, weight_decay=_DECAY, fused=on_gpu, capturable=on_gpu
        )
        # Of a reference, which may go token by token, a graph would be huge.
        self._is_replayed = uses_graph(cell) and backend.kernel_of(cell) != REFERENCE
        self._left = _STEPS_BEFORE_CAPTURE
        self._rows: Rows | None = None

    def set_rate(self, rate: float) -> None:
        """The learning rate of further steps."""
        if self._cell.device == "cuda":
            self._rate.fill_(rate)
            return
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    def learn(self, rows: Rows) -> None:
        """A step. Raises RuntimeError if it should be captured and cannot be."""
        if not self._is_replayed or len(rows.tokens) < self._cell.batch:
            self._step(rows)
        elif self._left:
            self._apart(rows)
            self._left -= 1
        else:
            self._replay(rows)

    def _step(self, rows: Rows) -> None:
        import torch.nn.functional as F

        self._optimizer.zero_grad(set_to_none=True)
        logits = _logits(self._backend, self._model, self._cell, rows)
        F.cross_entropy(logits.flatten(0, 1), rows.values.flatten()).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def _apart(self, rows: Rows) -> None:
        """On another stream than the default, as it will be captured: a backward runs where its forward did."""
        import torch

        stream, own = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(own)
        with torch.cuda.stream(stream):
            self._step(rows)
        own.wait_stream(stream)

    def _replay(self, rows: Rows) -> None:
        from glabench.ops.mqar import Rows

        if self._rows is None:
            own = self._rows = Rows(*(x.clone() for x in rows))
            self._run = replayed(lambda: self._step(own))
        for x, given in zip(self._rows, rows, strict=True):
            x.copy_(given)
        self._run()


def _rows(cell: Cell, count: int, pairs: int, vocabulary: int, stream: int) -> Rows:
    import torch

    from glabench.ops.mqar import Rows, make_rows

    generator = torch.Generator().manual_seed(2 * cell.seed + stream)
    return Rows(*(x.to(cell.device) for x in make_rows(count, cell.seqlen, pairs, vocabulary, generator)))


def _some(rows: Rows, first: int, count: int) -> Rows:
    from glabench.ops.mqar import Rows

    return Rows(*(x[first : first + count] for x in rows))


def _logits(backend: Learner, model: LanguageModel, cell: Cell, rows: Rows) -> Tensor:
    from glabench.models.parts import widened

    with backend.autocast(cell):
        logits: Tensor = model(rows.tokens, rows.places)
    return widened(logits)


def _accuracy(backend: Learner, model: LanguageModel, cell: Cell, rows: Rows) -> float:
    """The share of values that the model names."""
    import torch

    right = 0
    with torch.no_grad():
        for first in range(0, len(rows.tokens), cell.batch):
            some = _some(rows, first, cell.batch)
            right += int((_logits(backend, model, cell, some).argmax(-1) == some.values).sum())
    return right / rows.values.numel()
