"""Trains a small model on rows of keys and values, and measures how many values it then names."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from glabench.backends import Backend
from glabench.backends.recall import Learner, PlainLearner
from glabench.measure.job import Job
from glabench.measure.untrained import compared
from glabench.ops import Op
from glabench.ops.recall import Recall
from glabench.records import Record
from glabench.sweeps.model import Cell

if TYPE_CHECKING:
    from torch import Tensor

    from glabench.models import LanguageModel
    from glabench.ops.mqar import Rows

# As Arora et al. train: AdamW with this decay, a cosine from epoch to epoch, no warm-up; rows come in one order.
_DECAY, _ENOUGH, _TEST_ROWS = 0.1, 0.99, 3000


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
        import torch

        cell = record.cell
        pairs, vocabulary, count, epochs = cell.sizes("pairs", "vocabulary", "rows", "epochs")
        rows = _rows(cell, count, pairs, vocabulary, 0)
        unseen = _rows(cell, min(count, _TEST_ROWS), pairs, vocabulary, 1)
        model = self._backend.build(cell)
        rate = float(cell.parameters["rate"])
        optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=_DECAY, fused=cell.device == "cuda")
        course: list[float] = []
        start = time.perf_counter()
        for epoch in range(epochs):
            for group in optimizer.param_groups:
                group["lr"] = rate * (1 + math.cos(math.pi * epoch / epochs)) / 2
            for first in range(0, count, cell.batch):
                optimizer.zero_grad(set_to_none=True)
                _loss(self._backend, model, cell, rows, slice(first, first + cell.batch)).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            course.append(_accuracy(self._backend, model, cell, unseen))
            if course[-1] >= _ENOUGH:
                break
        seconds = time.perf_counter() - start
        return replace(record, accuracy=course[-1], epochs_trained=len(course), train_s=seconds)


def _rows(cell: Cell, count: int, pairs: int, vocabulary: int, stream: int) -> Rows:
    import torch

    from glabench.ops.mqar import Rows, make_rows

    generator = torch.Generator().manual_seed(2 * cell.seed + stream)
    return Rows(*(x.to(cell.device) for x in make_rows(count, cell.seqlen, pairs, vocabulary, generator)))


def _logits(backend: Learner, model: LanguageModel, cell: Cell, rows: Rows, some: slice) -> Tensor:
    with backend.autocast(cell):
        logits: Tensor = model(rows.tokens[some], rows.places[some])
    from glabench.models.parts import widened

    return widened(logits)


def _loss(backend: Learner, model: LanguageModel, cell: Cell, rows: Rows, some: slice) -> Tensor:
    import torch.nn.functional as F

    return F.cross_entropy(_logits(backend, model, cell, rows, some).flatten(0, 1), rows.values[some].flatten())


def _accuracy(backend: Learner, model: LanguageModel, cell: Cell, rows: Rows) -> float:
    """The share of values that the model names."""
    import torch

    right = 0
    with torch.no_grad():
        for first in range(0, len(rows.tokens), cell.batch):
            some = slice(first, first + cell.batch)
            right += int((_logits(backend, model, cell, rows, some).argmax(-1) == rows.values[some]).sum())
    return right / rows.values.numel()
