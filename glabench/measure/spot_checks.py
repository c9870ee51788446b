"""Spot checks: the inputs change before every sample, and results of timed calls are compared with the reference.

So a result that was computed once and kept, a call that does less after the first one, work that ends after the call,
and output that is never written are found.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from random import Random
from typing import TYPE_CHECKING, Any

from glabench.measure.at_size import (
    GRAD_OUTPUT,
    Drawn,
    Region,
    Results,
    check_everything,
    describe,
    draw_parts,
    sizes_of,
    worst_of,
)
from glabench.measure.memory import free_memory_bytes
from glabench.measure.workload import Workload
from glabench.ops import Op
from glabench.ops.base import Spec
from glabench.sweeps.model import Cell

if TYPE_CHECKING:
    from torch import Tensor

_PARTS = 3
# Inputs are at most this share smaller than those of a set.
_LARGEST_CHANGE = 0.01
_SETS = 2
# Of n results so far, about this many times the logarithm of n are looked at.
_LOOKS = 4
# Sets are kept in memory if this many times the size of one is free; otherwise they are made anew each time.
_ROOM = 6


class SpotChecks:
    """The spot checks of one cell.

    There are two sets of inputs, whose seeds nobody can know before. Each sample gets one of them, with its parts
    rotated along every independent dimension: parts are independent, so the reference's results only move. Samples
    whose results are not looked at get other values, too.
    """

    def __init__(
        self, op: Op, cell: Cell, workload: Workload, bound: float, seed: int, check_kind: Callable[[object], None]
    ) -> None:
        self._op, self._cell, self._workload, self._bound = op, cell, workload, bound
        self._check_kind = check_kind
        self._has_begun = False
        self._specs = {**op.inputs(cell), GRAD_OUTPUT: op.output(cell)}
        self._sizes = sizes_of(op, cell)
        self._draw = Random(f"spot checks {seed}")
        self._samples = 0
        self._is_last = self._will_look = False
        self.problem: str | None = None
        self._seeds = [secrets.randbits(40) for _ in range(_SETS)]
        self._sets: dict[int, dict[str, Tensor]] = {}
        free, size = free_memory_bytes(cell.device), sum(spec.bytes(cell) for spec in self._specs.values())
        if free is None or free > _ROOM * size:
            self._sets = {number: self._make(number) for number in range(_SETS)}
        regions = [draw_parts(op, cell, self._draw, _PARTS) for _ in range(_SETS)]
        self._drawn = [self._expect(number, regions[number]) for number in range(_SETS)]
        self.renew(lambda: None)

    def _make(self, number: int) -> dict[str, Tensor]:
        """A set of inputs, with the output's gradient."""
        seed = self._seeds[number]
        values = self._op.make_inputs(self._cell, seed)
        if self._cell.has_backward:
            values[GRAD_OUTPUT] = self._op.make_grad_output(self._cell, seed)
        return values

    def _values(self, number: int) -> dict[str, Tensor]:
        return self._sets.get(number) or self._make(number)

    def _expect(self, number: int, regions: list[Region]) -> Drawn:
        values = dict(self._values(number))
        grad_output = values.pop(GRAD_OUTPUT, None)
        return Drawn.of(self._op, self._cell, values, grad_output, regions)

    def begin(self) -> None:
        """Ends the warm-up, whose results are not looked at."""
        self._has_begun = True

    def renew(self, delay: Callable[[], object]) -> None:
        """Gives the live inputs, and the output's gradient, the rotated values of a set.

        Decides whether the next result is looked at. If so, no work may read the inputs before it is its turn; if not,
        they are multiplied by a random number close to 1.
        """
        self._live = self._draw.randrange(_SETS)
        self._shift = {name: self._draw.randrange(size) for name, size in self._sizes.items()}
        self._will_look = self._has_begun and self.problem is None and self._draws_next()
        if self._will_look:
            delay()
        # No two samples have the same inputs, so that no result can be kept by its inputs' values.
        factor = 1.0 if self._will_look else 1.0 - _LARGEST_CHANGE * self._draw.random()
        self._each_live(lambda name, live, value: _copy_rotated(value, live, self._specs[name], self._shift, factor))

    def _draws_next(self) -> bool:
        self._samples += 1
        return self._is_last or self._draw.random() < _LOOKS / (_LOOKS + self._samples)

    def _each_live(self, do: Callable[[str, Tensor, Tensor], None]) -> None:
        live = {**self._workload.inputs, GRAD_OUTPUT: self._workload.grad_output}
        for name, value in self._values(self._live).items():
            # `data` shares the memory but not the version, so that a change cannot be seen without reading the values.
            do(name, live[name].data, value)

    def expect_last(self) -> None:
        """Makes the next result count in all its parts."""
        self._is_last = True

    def keep(self, result: Any) -> None:
        """Copies the parts that will be looked at."""
        if not self._will_look:
            return
        try:
            if self._cell.pass_ != "bwd":
                self._check_kind(result[0] if isinstance(result, tuple) else result)
        except TypeError as problem:
            self.problem = f"in a timed call, {problem}"
            return
        self._expected = self._drawn[self._live].moved(self._shift)
        self._kept_parts = self._expected.take(self._op, self._results(result))

    def look(self, result: Any) -> None:
        """Compares some results; then fills the result with NaN, so that it cannot be returned again."""
        if self._will_look and self.problem is None:
            self.problem = self._find_changed() or self._find_wrong(self._results(result))
        self._poison(result)

    def _results(self, result: Any) -> Results:
        tensors = list(result) if isinstance(result, tuple) else [result]
        output = None if self._cell.pass_ == "bwd" else tensors.pop(0)
        gradients = dict(zip(self._workload.inputs, tensors, strict=True)) if tensors else {}
        return Results(self._workload.inputs, self._workload.grad_output, output, gradients)

    def _find_changed(self) -> str | None:
        """Which input the call changed, in a line; None if none."""
        import torch

        changed: list[str] = []

        def compare(name: str, live: Tensor, value: Tensor) -> None:
            rotated = torch.empty_like(value)
            _copy_rotated(value, rotated, self._specs[name], self._shift, 1.0)
            if not torch.equal(live, rotated):
                changed.append(name)

        self._each_live(compare)
        return f"a call changed its input: {', '.join(changed)}" if changed else None

    def _find_wrong(self, results: Results) -> str | None:
        found = [self._expected.compare(self._op, results, self._bound, self._kept_parts)]
        if self._is_last:
            found.append(check_everything(self._op, self._cell, results))
        return describe(worst_of(found), "a timed call's result does not fit the inputs that it had, relative error")

    def _poison(self, result: Any) -> None:
        """Fills a result with NaN, but not the memory of inputs, which an identity may return."""
        import torch

        inputs = {x.untyped_storage().data_ptr() for x in (*self._workload.inputs.values(), self._workload.grad_output)}
        with torch.no_grad():
            for x in result if isinstance(result, tuple) else (result,):
                if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in inputs:
                    x.detach().fill_(torch.nan)


def _copy_rotated(source: Tensor, target: Tensor, spec: Spec, shift: Mapping[str, int], factor: float) -> None:
    """Copies a tensor times `factor`, with index i of each dimension in `shift` going to index i + shift."""
    import torch

    places = [(source, target)]
    for dim, name in enumerate(spec.dims):
        if step := shift.get(name, 0):
            size = source.shape[dim]
            places = [
                (a.narrow(dim, first, length), b.narrow(dim, (first + step) % size, length))
                for a, b in places
                for first, length in ((0, size - step), (size - step, step))
            ]
    for a, b in places:
        if factor == 1.0:
            b.copy_(a)
        else:
            torch.mul(a, factor, out=b)
