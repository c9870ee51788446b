"""Spot checks: the inputs change before every sample, and results of timed calls are compared with the reference.

So a result that was computed once and kept, a call that does less after the first one, work that ends after the call,
and output that is never written are found.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import SystemRandom
from typing import TYPE_CHECKING, Any

from glabench.measure.at_size import (
    Parts,
    Results,
    check_drawn,
    check_everything,
    describe,
    draw_parts,
    find_changed,
    take,
    unshared_specs,
    usual_of,
    worst_of,
)
from glabench.measure.contexts import signs_of_contexts
from glabench.measure.kept import Kept, Reservoir
from glabench.measure.outcome import own_check
from glabench.measure.timer import Between, Delay, Step, nothing
from glabench.measure.usual import Usual
from glabench.measure.workload import Workload, entered_contexts
from glabench.ops import Op
from glabench.ops.base import as_tuple
from glabench.sweeps.model import Cell

if TYPE_CHECKING:
    from torch import Tensor

# Of n results so far, about this many times the logarithm of n are looked at, but so many that it takes this share of
# the time at most, on average.
_LOOKS = 3
_LEAST_LIKELY = 0.02
_LARGEST_SHARE = 0.2
# How many parts are compared closely each time.
_PARTS = 3
# Of the samples that were kept, at least so many are compared, and more while this takes no larger share of the time
# that sampling took.
_LEAST_KEPT = 3
_SHARE_FOR_KEPT = 0.1
# By how many rows (of the last dimension) an input is shifted at most: few, so that what is read is always about the
# same memory.
_MOST_ROWS = 4096
_LEFT_BEHIND = "the backend left a mode of torch, or a callback for frames, behind when its call ended"
_DOES_NOT_FIT = "a timed call's result does not fit the inputs that it had, relative error"


@dataclass(frozen=True)
class Kinds:
    """Functions that raise TypeError for results of the wrong kind, shape or dtype."""

    check_outputs: Callable[[object], None]
    check_gradients: Callable[[Sequence[object]], None]


class WrongResultError(Exception):
    """The result of a timed call is wrong; the message says how, in one line."""


class SpotChecks(Between):
    """The spot checks of one cell. Each sample gets new inputs, from a seed that nobody can know before."""

    def __init__(
        self, op: Op, cell: Cell, workload: Workload, bound: float, kinds: Kinds, goes_back: bool = False
    ) -> None:
        self._op, self._cell, self._workload, self._bound = op, cell, workload, bound
        self._kinds = kinds
        # Whether a backward follows a result that is looked at, because the pass itself has none.
        self._goes_back = goes_back
        self._indices = op.make_indices(cell)
        self._specs = unshared_specs(op, cell)
        self.signs = signs_of_contexts()
        # How many tensors of a timed result are outputs; the others are gradients.
        self._outputs = 0 if cell.pass_ == "bwd" else len(workload.grad_outputs)
        self._draw = SystemRandom()
        self._reservoir = Reservoir(self._draw)
        self._began_at: float | None = None
        self._sampled_s: float | None = None
        # What is usual of a result that was compared in all its parts.
        self._usual: Mapping[str, Usual] | None = None
        self._samples = self._looks = 0
        self._looked_s = self._looked_before_s = 0.0
        # Whether the next result is looked at for certain, and in all its parts.
        self._is_expected = self._expects_everything = self._will_look = False
        self._shifted: dict[str, Tensor] = {}
        self._wrong_kind: str | None = None
        # The contexts of torch that the backend was in while inputs were written.
        self._entered: str | None = None
        self.renew(nothing)
        self.renew_gradients()

    @property
    def looked(self) -> bool:
        """Whether the last result was looked at."""
        return self._will_look

    def begin(self) -> None:
        """Ends the warm-up, whose results are not looked at."""
        self._began_at, self._looked_before_s = time.monotonic(), self._looked_s

    def end(self) -> None:
        """Ends sampling: no further results are kept."""
        assert self._began_at is not None
        self._sampled_s = time.monotonic() - self._began_at

    @own_check()
    def verify(self) -> None:
        """Compares parts of samples that were kept, after a result was compared in all its parts.

        Raises WrongResultError for a result that is wrong.
        """
        start, most = time.monotonic(), _SHARE_FOR_KEPT * (self._sampled_s or 0.0)
        self._draw.shuffle(self._reservoir.kept)
        for number, one in enumerate(self._reservoir.kept):
            is_early = time.monotonic() - start < most
            if number >= _LEAST_KEPT and not is_early:
                break
            if problem := self._problem_of(one, with_shared=number == 0 or is_early):
                raise WrongResultError(problem)
        self._reservoir.kept.clear()

    def _problem_of(self, one: Kept, with_shared: bool) -> str | None:
        """What is wrong with a sample that was kept. Its inputs are gone on return, before the next one's are made."""
        inputs, grad_outputs = self._make(one.seed)
        first = one.parts[0]
        named = {name: x for name, x in first.items() if name in self._op.outputs(self._cell)}
        gradients = {name[1:]: x for name, x in first.items() if name not in named}
        results = Results(inputs, grad_outputs, named, gradients)
        found = [check_drawn(self._op, self._cell, results, self._bound, one.regions, one.parts, self._usual)]
        if one.shared and with_shared:
            shared = {name[1:]: x for name, x in one.shared.items()}
            found.append(check_everything(self._op, self._cell, Results(inputs, grad_outputs, {}, shared)))
        return describe(worst_of(found), _DOES_NOT_FIT)

    def expect(self, everything: bool = False) -> None:
        """Makes the result after the next `renew` be looked at, perhaps in all its parts."""
        self._is_expected, self._expects_everything = True, everything

    @own_check()
    def renew(self, delay: Delay) -> None:
        """Gives the live inputs new values.

        Decides whether the next result is looked at; if so, no work may read the inputs before it is its turn. All else
        is the same for every result, so that a call cannot tell whether its own will be looked at.
        """
        self._entered = self._entered or entered_contexts()
        # So many that nobody can have all results ready, or try them.
        self._seed = 1 + secrets.randbits(62)
        self._will_look = self._draws_next() or self._is_expected
        self._with_everything = self._expects_everything
        self._is_expected = self._expects_everything = False
        self._shifted = {}
        self._regions = draw_parts(self._op, self._cell, self._draw, _PARTS)
        delay(self._will_look)
        for name, value in self._op.make_values(self._cell, self._seed).items():
            self._workload.own_inputs[name].copy_(value)

    @own_check()
    def renew_gradients(self) -> None:
        """Gives the gradients of the outputs new values."""
        self._entered = self._entered or entered_contexts()
        if self._cell.has_backward:
            for name, value in self._op.make_grad_outputs(self._cell, self._seed).items():
                self._workload.own_grad_outputs[name].copy_(value)

    @own_check()
    def shifts(self, count: int) -> tuple[list[Step], list[Step]]:
        """Steps that write an input, the same values each time; and steps that write others each time.

        The values are those of the sample, by some rows further on. Which input it is, is drawn.
        """
        import torch

        rows = {name: x.numel() // x.shape[-1] for name, x in self._workload.differentiable.items()}
        name = self._draw.choice([each for each, number in rows.items() if 2 * number >= max(rows.values())])
        live, most = self._workload.own_inputs[name], min(_MOST_ROWS, rows[name])
        values, width = live.flatten(), live.shape[-1]
        values = torch.cat([values, values[: most * width]])

        def write(offset: int) -> None:
            self._shifted[name] = values[offset : offset + live.numel()].view(live.shape)
            live.copy_(self._shifted[name])

        offsets = [self._draw.randrange(most) * width for _ in range(count)]
        return [partial(write, offsets[0])] * count, [partial(write, offset) for offset in offsets]

    def _draws_next(self) -> bool:
        """Whether chance has the next result looked at.

        It does not depend on which ones were before, so that nobody can know that the next ones will not be.
        """
        if self._began_at is None:
            return False
        likely = max(_LEAST_LIKELY, _LOOKS / (_LOOKS + self._samples + 1))
        if self._samples and self._looks:
            looked_s = self._looked_s - self._looked_before_s
            sample_s = (time.monotonic() - self._began_at - looked_s) / self._samples
            likely = min(likely, _LARGEST_SHARE * sample_s * self._looks / max(self._looked_s, 1e-9))
        self._samples += 1
        return self._draw.random() < likely

    def _make(self, seed: int) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """The inputs, and the gradients of the outputs, that belong to a sample's seed."""
        inputs = self._op.make_values(self._cell, seed) | self._indices | self._shifted
        if not self._cell.has_backward and not self._goes_back:
            return inputs, self._workload.own_grad_outputs
        # Those of a forward are not renewed.
        return inputs, self._op.make_grad_outputs(self._cell, seed if self._cell.has_backward else 0)

    @own_check()
    def keep(self, result: Any, left: tuple[object, ...] = ()) -> None:
        """Copies the parts that will be looked at, or may be compared when sampling is over."""
        # Before anything of torch runs.
        self._entered = self._entered or entered_contexts() or (_LEFT_BEHIND if any(left) else None)
        is_sampling = self._began_at is not None and self._sampled_s is None
        if not self._will_look and not is_sampling:
            return
        count = self._outputs
        try:
            if self._cell.has_backward:
                self._kinds.check_gradients(result[count:])
            if count:
                outputs = result if not self._cell.has_backward else result[0] if count == 1 else result[:count]
                self._kinds.check_outputs(outputs)
        except TypeError as problem:
            # Not raised before the call has ended.
            self._wrong_kind = f"in a timed call, {problem}"
            return
        results = self._results(result)
        self._parts = take(results, self._specs, self._regions)
        if is_sampling:
            shared = {name: x.detach().clone() for name, x in results.by_error.items() if name not in self._specs}
            self._reservoir.offer(Kept(self._seed, self._regions, self._parts, shared))

    @own_check()
    def look(self, result: Any) -> None:
        """Compares some results; then fills the result with NaN, so that it cannot be returned again.

        Raises WrongResultError for a result that is wrong, because no further sample could make it right.
        """
        if problem := self._entered or self._wrong_kind:
            raise WrongResultError(problem)
        if self._will_look:
            start, self._backward_s = time.monotonic(), 0.0
            if problem := self._find_problem(result):
                raise WrongResultError(problem)
            # Without the backend's own backward, which could be slow on purpose, so that there are fewer looks.
            self._looked_s += time.monotonic() - start - self._backward_s
            self._looks += 1
        self._poison(result)

    def _results(self, result: Any) -> Results:
        tensors = as_tuple(result)
        return Results.of(self._workload, tensors[: self._outputs], tensors[self._outputs :])

    def _find_problem(self, result: Any) -> str | None:
        if disorder := self._workload.disorder:
            return disorder
        if self._goes_back:
            return self._compare(*self._with_gradients(result))
        return self._compare(self._results(result), self._parts)

    def _with_gradients(self, result: Any) -> tuple[Results, list[Parts]]:
        """The results of a forward of training and of a backward after it, and the parts that are looked at."""
        outputs = as_tuple(result)
        if self._with_everything:  # as they were before a backward
            outputs = tuple([x.detach().clone() for x in outputs])
        start = time.monotonic()
        gradients = self._workload.gradients(result)
        self._backward_s = time.monotonic() - start
        try:
            self._kinds.check_gradients(gradients)
        except TypeError as problem:
            raise WrongResultError(f"after a timed call, {problem}") from None
        results = Results.of(self._workload, outputs, gradients)
        more = take(replace(results, outputs={}), self._specs, self._regions)
        return results, [kept | found for kept, found in zip(self._parts, more, strict=True)]

    def _compare(self, results: Results, parts: list[Parts]) -> str | None:
        inputs, grad_outputs = self._make(self._seed)
        pristine = replace(results, inputs=inputs, grad_outputs=grad_outputs)
        if changed := find_changed(results, pristine):
            return f"a call changed its input: {', '.join(changed)}"
        found = [check_drawn(self._op, self._cell, pristine, self._bound, self._regions, parts)]
        if self._with_everything:
            found.append(check_everything(self._op, self._cell, pristine))
            self._usual = usual_of(self._op, self._cell, pristine)
        return describe(worst_of(found), _DOES_NOT_FIT)

    def _poison(self, result: Any) -> None:
        """Fills a result with NaN, but not the memory of inputs, which an identity may return."""
        import torch

        given = (*self._workload.own_inputs.values(), *self._workload.own_grad_outputs.values())
        inputs = {x.untyped_storage().data_ptr() for x in given}
        with torch.no_grad():
            for x in as_tuple(result):
                if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in inputs:
                    x.detach().fill_(torch.nan)
