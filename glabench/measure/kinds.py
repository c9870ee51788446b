"""Kinds of work: how the cells of a backend are measured, and how one is made ready to be profiled.

An op computed by a backend is one kind, a step of training a model another; then there are models that learn to recall,
models that learn text, and models that decode.
Sweeps, run folders, records, reports and verdicts are the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from glabench.backends import Backend
from glabench.backends.text import Reader
from glabench.devices.nvml import Nvml
from glabench.errors import UsageError
from glabench.measure.cell import CellMeter
from glabench.measure.decoding import DecodeMeter
from glabench.measure.job import Job
from glabench.measure.memory import take_workspaces
from glabench.measure.ranks import known_ranks
from glabench.measure.recall import RecallMeter
from glabench.measure.text import TextMeter, ready_step
from glabench.measure.timer import timer_for
from glabench.measure.training import StepMeter
from glabench.measure.work import OpWork
from glabench.measure.workload import Steps, prepare, steps_of
from glabench.ops import Op
from glabench.ops.text import Text
from glabench.records import Record
from glabench.sweeps.model import Cell

if TYPE_CHECKING:
    from torch import Tensor


class Meter(Protocol):
    """Measures the cells of one backend."""

    def measure(self, cell: Cell) -> Record:
        """The record of a cell that the backend supports. Whatever the backend raises goes through."""


@dataclass(frozen=True)
class Kind:
    """A kind of work: the meter of an op's backend on a device, and a cell's inputs with the steps of its pass."""

    make_meter: Callable[[Op, Backend, Job, str, Nvml | None], Meter]
    make_ready: Callable[[Op, Backend, Cell], tuple[Mapping[str, Tensor], Steps]]


def _cell_meter(op: Op, backend: Backend, job: Job, device: str, nvml: Nvml | None) -> Meter:
    timer = timer_for(device, job.settings.timing)  # which may choose the stream
    take_workspaces(device)
    return CellMeter(OpWork(op, backend), job, timer, nvml)


def _ready_cell(op: Op, backend: Backend, cell: Cell) -> tuple[Mapping[str, Tensor], Steps]:
    workload = prepare(op, backend, cell)
    return workload.inputs, steps_of(workload, cell)


def _step_meter(op: Op, backend: Backend, job: Job, device: str, nvml: Nvml | None) -> Meter:  # noqa: ARG001
    return StepMeter(op, backend, job, nvml, known_ranks(job.gpus))


def _ready_step(op: Op, backend: Backend, cell: Cell) -> tuple[Mapping[str, Tensor], Steps]:
    if cell.gpus > 1:
        raise UsageError("--gpus: a profile is of one GPU; leave out --gpus, and give --batch what one of them takes")
    inputs = op.make_inputs(cell)
    return inputs, Steps(None, backend.bind(inputs, cell), None)


def _recall_meter(op: Op, backend: Backend, job: Job, device: str, nvml: Nvml | None) -> Meter:  # noqa: ARG001
    return RecallMeter(op, backend, job)


def _text_meter(op: Op, backend: Backend, job: Job, device: str, nvml: Nvml | None) -> Meter:  # noqa: ARG001
    return TextMeter(op, backend, job)


def _ready_text(op: Op, backend: Backend, cell: Cell) -> tuple[Mapping[str, Tensor], Steps]:
    if not isinstance(op, Text) or not isinstance(backend, Reader):
        raise TypeError(f"{backend.name}: its work is text, so it has to be a Reader of the op text")
    inputs, step = ready_step(op, backend, cell)
    return inputs, Steps(None, step, None)


def _decode_meter(op: Op, backend: Backend, job: Job, device: str, nvml: Nvml | None) -> Meter:  # noqa: ARG001
    return DecodeMeter(op, backend, job, nvml)


# By the name that a backend gives as its `work`.
KINDS: Mapping[str, Kind] = {
    "op": Kind(_cell_meter, _ready_cell),
    "training": Kind(_step_meter, _ready_step),
    "recall": Kind(_recall_meter, _ready_step),
    "text": Kind(_text_meter, _ready_text),
    "decode": Kind(_decode_meter, _ready_step),
}
