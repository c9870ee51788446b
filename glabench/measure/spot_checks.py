"""Spot checks: the inputs change between samples, and results of timed calls are compared with the reference.

So a result that was computed once and kept, a call that does less after the first one, work that ends after the call,
and output that is never written are found.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import TYPE_CHECKING, Any

from glabench.measure.at_size import Drawn, Results, check_everything, describe, draw_parts
from glabench.measure.memory import free_memory_bytes
from glabench.measure.workload import Workload
from glabench.ops import Op
from glabench.sweeps.model import Cell

if TYPE_CHECKING:
    from torch import Tensor

_PARTS = 3
# Of n results so far, about this many times the logarithm of n are looked at.
_LOOKS = 4
# A second set of inputs is made if this many times its size is free.
_ROOM = 4


class SpotChecks:
    """The spot checks of one cell; `seed` draws which inputs a call gets, and which parts of which results count."""

    def __init__(self, op: Op, cell: Cell, workload: Workload, bound: float, seed: int) -> None:
        self._op, self._cell, self._workload, self._bound = op, cell, workload, bound
        self._draw = Random(seed)
        self._calls = 0
        self._live = 0
        self._is_last = False
        self.problem: str | None = None
        self._sets = self._make_sets()
        self._drawn = [self._expect(values) for values in self._sets]

    def _make_sets(self) -> list[Mapping[str, Tensor]]:
        """The inputs as they are, and if there is room, other ones."""
        first = {name: x.detach().clone() for name, x in self._workload.inputs.items()}
        free = free_memory_bytes(self._cell.device)
        size = sum(x.numel() * x.element_size() for x in first.values())
        return [first] if free is not None and free < _ROOM * size else [first, self._op.make_inputs(self._cell, 1)]

    def _expect(self, inputs: Mapping[str, Tensor]) -> Drawn:
        grad_output = self._workload.grad_output if self._cell.has_backward else None
        regions = draw_parts(self._op, self._cell, self._draw, _PARTS)
        return Drawn.of(self._op, self._cell, inputs, grad_output, regions)

    def renew(self) -> bool:
        """Sometimes gives the live inputs the values of another set."""
        import torch

        chosen = self._draw.randrange(len(self._sets))
        if chosen == self._live:
            return False
        with torch.no_grad():
            for name, x in self._workload.inputs.items():
                x.copy_(self._sets[chosen][name])
        self._live = chosen
        return True

    def expect_last(self) -> None:
        """Makes the next result count in all its parts."""
        self._is_last = True

    def look(self, result: Any) -> None:
        """Compares some results; then fills the result with NaN, so that it cannot be returned again."""
        self._calls += 1
        if self.problem is None and (self._is_last or self._draw.random() < _LOOKS / (_LOOKS + self._calls)):
            self.problem = self._find_problem(self._results(result))
        self._poison(result)

    def _results(self, result: Any) -> Results:
        tensors = list(result) if isinstance(result, tuple) else [result]
        output = None if self._cell.pass_ == "bwd" else tensors.pop(0)
        gradients = dict(zip(self._workload.inputs, tensors, strict=True)) if tensors else {}
        return Results(self._workload.inputs, self._workload.grad_output, output, gradients)

    def _find_problem(self, results: Results) -> str | None:
        import torch

        for name, x in self._sets[self._live].items():
            if not torch.equal(x, results.inputs[name]):
                return f"a call changed its input {name}"
        found = self._drawn[self._live].compare(self._op, results, self._bound)
        if self._is_last:
            found |= check_everything(self._op, self._cell, results)
        return describe(found, "a timed call's result is wrong, relative error")

    def _poison(self, result: Any) -> None:
        """Fills a result with NaN, but not the memory of inputs, which an identity may return."""
        import torch

        inputs = {x.untyped_storage().data_ptr() for x in (*self._workload.inputs.values(), self._workload.grad_output)}
        with torch.no_grad():
            for x in result if isinstance(result, tuple) else (result,):
                if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in inputs:
                    x.detach().fill_(torch.nan)
