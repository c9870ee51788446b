"""The accuracy of a cell at its own size: all tokens of its output and gradients, compared with the op's reference.

An op's parts (a sequence and head, say) do not influence each other, so any of them can be computed alone. A few, drawn
at random, are compared with the reference in float64 at the dtype's bound; all of them in float32 at a coarse bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import TYPE_CHECKING

from glabench.measure.memory import free_memory_bytes
from glabench.measure.usual import ROW_NAMES, Usual, row_of
from glabench.measure.workload import Workload
from glabench.ops import Op
from glabench.ops.base import Spec, as_tuple
from glabench.sweeps.model import Cell

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Relative errors that all parts may have, in any dtype: wrong results are far beyond, tf32 products far within.
COARSE = 5e-2
# A row may have this many times the error of its whole part; see `_find_worst` for what it is relative to.
ROWS = 10.0
DRAWN = 4
# Errors are relative to at least this share of the usual part, and to numbers of at least these sizes: of T tokens,
# 2 / T. Inputs are about 1; the gradients of the first few tokens of attention are small differences of such numbers.
_LEAST_SHARE, _LEAST, _LEAST_BY_TOKENS = 0.3, 1e-4, 2.0
# Those of rows, to this share of the same row of the usual part. Of 60,000 heads whose second token's dq was computed
# as FlashAttention-2 does, in bf16, the largest error was 0.027 of the usual norm.
_LEAST_SHARE_OF_ROW = 0.5
# Without gates a row of outputs grows with its number, so the first of many may be missing within `ROWS`. So the error
# of a row of so many numbers may also be this share of its own norm, or of this share of the root mean square of rows.
_LEAST_WIDTH, _LARGEST_SHARE_OF_OWN_ROW, _LEAST_OF_ALL_ROWS = 8, 0.5, 0.01
# Numbers that are compared at once; torch holds a byte for each.
_COMPARED = 2**28
# Bytes for the reference: on a CPU at most, and if it is not known how much is free.
_CPU_MEMORY, _UNKNOWN_MEMORY = 2**30, 2**28

# Ranges of the independent dimensions: first index and number of indices.
Region = dict[str, tuple[int, int]]
# A region of the results, by the names of their errors.
Parts = dict[str, "Tensor"]


@dataclass(frozen=True)
class Worst:
    """The largest relative error of a tensor in some parts, over its bound; `place` says of which part and row."""

    error: float
    bound: float
    place: str

    def __str__(self) -> str:
        return f"{self.error:.1e} in {self.place or 'all of it'} (allowed {self.bound:.0e})"

    @property
    def excess(self) -> float:
        """The error as a multiple of its bound."""
        return self.error / self.bound


@dataclass(frozen=True)
class Results:
    """What a call had (inputs, gradients of its outputs) and what it gave (outputs, gradients of inputs), by name."""

    inputs: Mapping[str, Tensor]
    grad_outputs: Mapping[str, Tensor]
    # Empty for a backward alone.
    outputs: Mapping[str, Tensor]
    # Empty if there was no backward.
    gradients: Mapping[str, Tensor]

    @classmethod
    def of(cls, workload: Workload, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Results:
        """The results of a workload's call, in the order in which it returned them; either may be empty."""
        named_outputs = dict(zip(workload.grad_outputs, outputs, strict=True)) if outputs else {}
        named = dict(zip(workload.differentiable, gradients, strict=True)) if gradients else {}
        inputs, grad_outputs = workload.own_inputs, workload.own_grad_outputs
        return cls(inputs or workload.inputs, grad_outputs or workload.grad_outputs, named_outputs, named)

    @property
    def by_error(self) -> dict[str, Tensor]:
        """What the call gave, by the names of its errors: `o`, `dq`, ..."""
        return {**self.outputs, **{f"d{name}": x for name, x in self.gradients.items()}}


def find_changed(results: Results, pristine: Results) -> list[str]:
    """The names of inputs, and of outputs' gradients, that are not what they were."""
    pairs = [(name, x, pristine.inputs[name]) for name, x in results.inputs.items()]
    pairs += [(f"the gradient of {name}", x, pristine.grad_outputs[name]) for name, x in results.grad_outputs.items()]
    return [name for name, now, before in pairs if not _is_equal(now, before)]


def _is_equal(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors hold the same; large ones are compared in pieces."""
    import torch

    if x.shape != y.shape or x.numel() <= _COMPARED:
        return torch.equal(x, y)
    pieces, longest = -(-x.numel() // _COMPARED), max(range(x.dim()), key=x.shape.__getitem__)
    return all(map(torch.equal, x.tensor_split(pieces, longest), y.tensor_split(pieces, longest)))


def check_parts(op: Op, cell: Cell, results: Results, bound: float, seed: int) -> dict[str, Worst]:
    """The worst error of the output and of every gradient, by name (`o`, `dq`, ...), in some parts at `bound`.

    The parts are the first, the last and four that `seed` draws. A gradient that several parts share (of Mamba's B and
    C, say) is compared over one whole sequence that `seed` draws. Raises whatever the reference raises.
    """
    import torch

    draw = Random(seed)
    regions = draw_parts(op, cell, draw, DRAWN, with_ends=True)
    found = [check_drawn(op, cell, results, bound, regions, take(results, unshared_specs(op, cell), regions))]
    sizes, specs = sizes_of(op, cell), op.inputs(cell)
    if "batch" in sizes and any(not _missing(op, cell, specs[name]) <= {"batch"} for name in results.gradients):
        sequence = {**_whole(sizes), "batch": (draw.randrange(sizes["batch"]), 1)}
        found.append(_compare(op, cell, results, sequence, torch.float64, bound))
    return worst_of(found)


def check_everything(op: Op, cell: Cell, results: Results) -> dict[str, Worst]:
    """The worst error of every result in all parts, at `COARSE`."""
    import torch

    return _compare(op, cell, results, _whole(sizes_of(op, cell)), torch.float32, COARSE)


def unshared_specs(op: Op, cell: Cell) -> dict[str, Spec]:
    """The specs of the results that parts do not share, by the names of their errors."""
    return {name: spec for name, spec in _specs(op, cell).items() if not _missing(op, cell, spec)}


def take(results: Results, specs: Mapping[str, Spec], regions: Sequence[Region]) -> list[Parts]:
    """Copies of some parts of the results that have one of these specs."""
    named = {name: (x.detach(), specs[name]) for name, x in results.by_error.items() if name in specs}
    return [{name: _cut(x, spec, region).clone() for name, (x, spec) in named.items()} for region in regions]


def usual_of(op: Op, cell: Cell, results: Results) -> dict[str, Usual]:
    """How large the parts of every result usually are."""
    return {name: Usual.of(x, op, spec) for name, (x, spec) in _named(op, cell, results).items()}


def check_drawn(
    op: Op, cell: Cell, results: Results, bound: float, regions: Sequence[Region], taken: Sequence[Parts],
    usual: Mapping[str, Usual] | None = None,
) -> dict[str, Worst]:  # fmt: skip
    """The worst error of every result in some parts, which `take` has copied, against the reference in float64.

    `usual`: how large parts usually are, by default those of the results.
    """
    import torch

    specs, usual = _specs(op, cell), usual or usual_of(op, cell, results)
    at_once = _parts_at_once(op, cell, torch.float64) if _can_join(op, cell) else 1
    groups = [regions[at : at + at_once] for at in range(0, len(regions), at_once)]
    parts = [part for group in groups for part in _differentiate(op, cell, results, group, torch.float64)]
    most = {name: usual[name].at_most([part[name] for part in parts], op, specs[name]) for name in taken[0]}
    return worst_of(
        [
            {name: _find_worst(op, cell, name, x, expected[name], region, bound, most[name])}
            for region, own, expected in zip(regions, taken, parts, strict=True)
            for name, x in own.items()
        ]
    )


def describe(found: Mapping[str, Worst], words: str) -> str | None:
    """One line that names the tensors whose error exceeds its bound; None if there are none."""
    beyond = [f"{name} {worst}" for name, worst in found.items() if worst.excess > 1]
    return f"{words}: {'; '.join(beyond)}" if beyond else None


def _specs(op: Op, cell: Cell) -> dict[str, Spec]:
    """The specs of outputs and gradients, by the names of their errors."""
    return op.outputs(cell) | {f"d{name}": spec for name, spec in op.inputs(cell).items()}


def _named(op: Op, cell: Cell, results: Results) -> dict[str, tuple[Tensor, Spec]]:
    """All results by the names of their errors, with their specs."""
    specs = _specs(op, cell)
    return {name: (x, specs[name]) for name, x in results.by_error.items()}


def draw_parts(op: Op, cell: Cell, draw: Random, count: int, with_ends: bool = False) -> list[Region]:
    """Some parts without repeats; `with_ends` adds the first and the last one."""
    sizes = sizes_of(op, cell)
    total = math.prod(sizes.values())
    ends = [0, total - 1] if with_ends else []
    regions: list[Region] = []
    for number in dict.fromkeys([*ends, *draw.sample(range(total), min(count, total))]):
        region: Region = {}
        for name, size in reversed(list(sizes.items())):
            number, index = divmod(number, size)
            region[name] = (index, 1)
        regions.append({name: region[name] for name in sizes})
    return regions


def worst_of(found: Sequence[Mapping[str, Worst]]) -> dict[str, Worst]:
    """The worst of several errors of every tensor."""
    worst: dict[str, Worst] = {}
    for name, error in (item for errors in found for item in errors.items()):
        if name not in worst or error.excess > worst[name].excess:
            worst[name] = error
    return worst


def sizes_of(op: Op, cell: Cell) -> dict[str, int]:
    """The independent dimensions with their sizes, from the tensors that have them."""
    specs = [*op.inputs(cell).values(), *op.outputs(cell).values()]
    known = {name: size for spec in specs for name, size in zip(spec.dims, spec.shape, strict=True)}
    return {name: known[name] for name in op.independent}


def _whole(sizes: Mapping[str, int]) -> Region:
    return {name: (0, size) for name, size in sizes.items()}


def _missing(op: Op, cell: Cell, spec: Spec) -> set[str]:
    """The independent dimensions that a tensor lacks, so that its gradient is a sum over them."""
    return {name for name, size in sizes_of(op, cell).items() if size > 1} - set(spec.dims)


def _compare(
    op: Op, cell: Cell, results: Results, region: Region, dtype: torch.dtype, bound: float
) -> dict[str, Worst]:
    """The worst error of every tensor in a region, computed block by block.

    Left out are gradients that are sums over parts outside of the region.
    """
    import torch

    sizes, named, usual = sizes_of(op, cell), _named(op, cell, results), usual_of(op, cell, results)
    complete = {
        name: (x, spec)
        for name, (x, spec) in named.items()
        if all(region[dim] == (0, sizes[dim]) for dim in _missing(op, cell, spec))
    }
    worst: dict[str, list[Worst]] = {}
    sums: dict[str, Tensor] = {}
    for block in _split(region, _parts_at_once(op, cell, dtype)):
        (expected,) = _differentiate(op, cell, results, [block], dtype)
        for name, (x, spec) in complete.items():
            if not _missing(op, cell, spec):
                error = _find_worst(op, cell, name, _cut(x, spec, block), expected[name], block, bound, usual[name])
                worst.setdefault(name, []).append(error)
                continue
            if name not in sums:
                sums[name] = torch.zeros_like(_cut(x, spec, region), dtype=dtype)
            inside = {dim: (start - region[dim][0], length) for dim, (start, length) in block.items()}
            _cut(sums[name], spec, inside).add_(expected[name])
    for name, total in sums.items():
        x, spec = named[name]
        worst[name] = [_find_worst(op, cell, name, _cut(x, spec, region), total, region, bound, usual[name])]
    return {name: max(errors, key=lambda error: error.excess) for name, errors in worst.items()}


def _can_join(op: Op, cell: Cell) -> bool:
    """Whether parts can be computed together, because every tensor has the dimension along which they are joined."""
    specs = [spec for spec in (*op.inputs(cell).values(), *op.outputs(cell).values()) if not spec.is_index]
    return bool(op.independent) and all(op.independent[0] in spec.dims for spec in specs)


def _differentiate(op: Op, cell: Cell, results: Results, regions: Sequence[Region], dtype: torch.dtype) -> list[Parts]:
    """The reference's outputs in each region, and its gradients if the results have any, by the names of their errors.

    Several regions must have one size and be joinable (`_can_join`). Together they cost about as much as one, because
    what a single part takes is the time to launch its many small steps.
    """
    import torch

    specs, output_specs, count = op.inputs(cell), op.outputs(cell), len(regions)

    def join(x: Tensor, spec: Spec) -> Tensor:
        if spec.is_index:
            return x
        own = [_cut(x, spec, region).detach().to(dtype) for region in regions]
        return own[0] if count == 1 else torch.cat(own, spec.dims.index(op.independent[0]))

    def part(x: Tensor, spec: Spec) -> Sequence[Tensor]:
        return (x,) if count == 1 else x.chunk(count, spec.dims.index(op.independent[0]))

    inputs = {name: join(x, specs[name]) for name, x in results.inputs.items()}
    leaves = {name: inputs[name].requires_grad_() for name in results.gradients}
    with torch.set_grad_enabled(bool(leaves)):
        outputs = as_tuple(op.reference(inputs))[: len(output_specs)]
    named = dict(zip(output_specs, outputs, strict=True))
    found = {name: part(x.detach(), output_specs[name]) for name, x in named.items()}
    if leaves:
        given = [join(x, output_specs[name]) for name, x in results.grad_outputs.items()]
        gradients = torch.autograd.grad(outputs, list(leaves.values()), given)
        found |= {f"d{name}": part(x, specs[name]) for name, x in zip(leaves, gradients, strict=True)}
    return [{name: x[number] for name, x in found.items()} for number in range(count)]


def _split(region: Region, most: int) -> Iterator[Region]:
    """Blocks of a region, each of at most `most` parts."""
    pieces: dict[str, list[tuple[int, int]]] = {}
    for name in reversed(region):  # the inner dimensions stay whole as long as they fit
        start, length = region[name]
        size = max(1, min(length, most))
        pieces[name] = [(at, min(size, start + length - at)) for at in range(start, start + length, size)]
        most //= size
    for ranges in product(*(pieces[name] for name in region)):
        yield dict(zip(region, ranges, strict=True))


def _parts_at_once(op: Op, cell: Cell, dtype: torch.dtype) -> int:
    """How many parts of the reference fit into the memory that may be used for it."""
    free = free_memory_bytes(cell.device)
    budget = _UNKNOWN_MEMORY if free is None else free // 2
    if cell.device == "cpu":
        budget = min(budget, _CPU_MEMORY)
    return max(1, budget // (op.reference_numbers(cell) * dtype.itemsize))


def _cut(tensor: Tensor, spec: Spec, region: Region) -> Tensor:
    """A view of a tensor's region."""
    for dim, name in enumerate(spec.dims):
        if name in region:
            tensor = tensor.narrow(dim, *region[name])
    return tensor


def least_number(cell: Cell) -> float:
    """The size of numbers below which errors are not relative to them."""
    return max(_LEAST, _LEAST_BY_TOKENS / cell.seqlen)


def _find_worst(
    op: Op, cell: Cell, name: str, found: Tensor, expected: Tensor, region: Region, bound: float, usual: Usual
) -> Worst:
    """The worst part of a tensor: by its own error, or by a `ROWS`th of that of its worst row (token).

    Errors of parts and of rows that are much smaller than usual, in which larger numbers may cancel, are relative to a
    share of the usual part, or of what is usual for that token.
    """
    import torch

    spec = _specs(op, cell)[name]
    inner = [dim for dim, of in enumerate(spec.dims) if of not in op.independent]
    squares, missed = expected.square(), (found.detach().to(expected.dtype) - expected).square()
    size, whole = _sum(squares, inner), _sum(missed, inner)
    least = (_LEAST_SHARE * usual.part) ** 2 + least_number(cell) ** 2 * math.prod(expected.shape[dim] for dim in inner)
    size = size.clamp(min=least)
    errors = [_relative(whole, size)]
    row = row_of(op, spec)
    if row is not None and usual.rows is not None:
        T = expected.shape[spec.dims.index(row)]
        of_row = [dim for dim in inner if spec.dims[dim] != row]
        # If a row is larger than most, its own norm counts, because rounding is relative to that. So does what is usual
        # there: in a few heads the terms of an early token of attention cancel, but not their rounding.
        there = (_LEAST_SHARE_OF_ROW * usual.rows.to(squares.dtype)).square()
        there = there.view([T if of == row else 1 for of in spec.dims])
        own = torch.maximum(_sum(squares, of_row), there)
        row_missed = _sum(missed, of_row)
        errors.append(_relative(row_missed, torch.maximum(own, size / T)) / ROWS)
        if name in op.outputs(cell) and math.prod(expected.shape[dim] for dim in of_row) >= _LEAST_WIDTH:
            own = torch.maximum(own, _LEAST_OF_ALL_ROWS**2 * size / T)
            in_own_row = _relative(row_missed, own) * (bound / _LARGEST_SHARE_OF_OWN_ROW)
            errors[-1] = torch.maximum(errors[-1], in_own_row)
    whole_error, row_errors = errors[0], errors[-1]
    by_row = len(errors) > 1 and bool(row_errors.max() > whole_error.max())
    chosen = row_errors if by_row else whole_error
    place = torch.unravel_index(chosen.argmax(), chosen.shape)
    words = []
    for of, index in zip(spec.dims, place, strict=True):
        if of in region:
            words.append(f"{of} {int(index) + region[of][0]}")
        elif by_row and of == row:
            words.append(f"{ROW_NAMES[of]} {int(index)}")
    return Worst(float(chosen.max()), bound, ", ".join(words))


def _sum(x: Tensor, dims: list[int]) -> Tensor:
    return x.sum(dims, keepdim=True) if dims else x


def _relative(missed: Tensor, size: Tensor) -> Tensor:
    """Roots of quotients of squared norms; infinity for NaN."""
    return (missed / size).sqrt().nan_to_num(nan=math.inf, posinf=math.inf)
