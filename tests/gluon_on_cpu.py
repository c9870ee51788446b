"""Runs Gluon kernels on a CPU, with torch's bfloat16: a stand-in for the part of Gluon that our kernels use.

A kernel runs as the Python function that it is, a program after another; a tile is a tensor, and one thread stands for
all. What is checked beside the numbers:

- Loads, stores and copies stay within their tensor's memory.
- Asynchronous copies: the target is NaN from the start of a copy until a wait for it, so a missing wait shows, and so
  does a copy that starts while its target is still needed.
- Asynchronous products: an accumulator is NaN until a wait for its product, and operands in shared memory must not
  change before that.
- Shared memory is NaN (or -1, if it holds integers) until it is written.
- A product reads what threads or their copies have written only behind a fence, and what a product has read is written
  again only behind a barrier.
- Programs run in no order, and no two of a launch may store different values in a place of global memory.
- Groups of warps (`warp_specialize`) are ahead of each other in no order, see `partitions.py`.

What is not: layouts, registers, barriers that Triton adds, and memory that it gives to several tiles.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gluon_values import Element, Pointer, tensors_as_in_kernels, value_of
from hazards import Hazards
from partitions import Barrier, Copy, Partition, Turns

# The package's Gluon modules, each after those that it imports.
OURS = tuple(
    f"gla_kernels.hopper.{name}"
    for name in (
        "layouts", "values", "products", "copies", "gates", "head_gates", "gate_sums", "places", "narrow.outputs",
        "narrow.forward", "narrow.states", "narrow.backward", "narrow.head_backward", "narrow.recurrence",
        "wide.tiles", "wide.frames", "wide.walk", "wide.forward", "wide.head_forward", "wide.specialized",
        "wide.recurrence", "wide.readout", "wide.gradients", "wide.backward", "levels", "strong",
    )
)  # fmt: skip
# Kernels that count on the barriers with which Triton converts a row between layouts, as a comment there says.
CONVERTING_SYNCHRONISES = ("gla_backward_hopper",)
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int32": torch.int32, "int64": torch.int64}


@dataclass(frozen=True)
class Shared:
    """A tile in shared memory."""

    data: torch.Tensor
    layout: Any = None

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def numel(self) -> int:
        return self.data.numel()

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def index(self, i: Any) -> Shared:
        assert 0 <= int(i) < self.data.shape[0]
        return Shared(self.data[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, int(start), length))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order))

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> Shared:
        dtype = dtype.dtype if isinstance(dtype, Element) else dtype
        return Shared(self.data.reshape(-1).view(dtype)[: math.prod(shape)].view(shape))

    def load(self, layout: Any) -> Any:
        _now.point()
        return self.data.clone()

    def store(self, x: Any) -> None:
        _now.point()
        assert x.dtype == self.dtype
        assert list(x.shape) == self.shape
        _now.hazards.check_write(self.data)
        self.data.copy_(x)
        _now.hazards.note_write(self.data, _now.part)


@dataclass
class _Product:
    """A product under way: its accumulator, and its shared operands with what they held when it started."""

    out: torch.Tensor
    operands: list[tuple[torch.Tensor, torch.Tensor]]

    def finish(self) -> None:
        for now, then in self.operands:
            # As bits, because NaN is not equal to itself.
            assert torch.equal(now.view(torch.int16), then.view(torch.int16)), "a product's operand has changed"
            _now.hazards.note_read(now, _now.part)
        self.out.copy_(self.out.finished)


@dataclass
class _Program:
    """What a program has under way, and where it runs."""

    number: tuple[int, ...] = (0,)
    grid: tuple[int, ...] = (1,)
    kernel: str = ""
    writers: dict[Any, torch.Tensor] = field(default_factory=dict)  # who wrote each element last, from 1
    part: Partition = field(default_factory=Partition)
    barriers: dict[int, Barrier] = field(default_factory=dict)  # by their address
    hazards: Hazards = field(default_factory=Hazards)
    turns: Turns | None = None  # while it is divided into partitions

    def point(self, until: Callable[[], bool] | None = None) -> None:
        """A point where another group of warps may go ahead."""
        if self.turns is not None:
            self.turns.point(until)


_now = _Program()


def _allocate(dtype: torch.dtype, shape: list[int], layout: Any, value: Any = None) -> Shared:
    data = torch.full(shape, float("nan") if dtype.is_floating_point else -1, dtype=dtype)
    if value is not None:
        data.copy_(value)
        _now.hazards.note_write(data, _now.part)
    return Shared(data, layout)


def _copy(tile: Shared, pointer: Pointer, mask: Any) -> None:
    _now.point()
    hazards, writer = _now.hazards, _now.part
    hazards.check_write(tile.data)
    tile.data.fill_(float("nan"))

    def make() -> None:
        tile.data.copy_(pointer.load(mask, 0))
        hazards.note_write(tile.data, writer)

    writer.copies[-1].append(Copy(make))


def _arrive_after_copies(place: Shared, increment_count: bool) -> None:
    assert not increment_count
    _now.part.arrive_after_copies(_barrier(place))


def _barrier(place: Shared) -> Barrier:
    return _now.barriers[place.data.data_ptr()]


def _init_barrier(place: Shared, count: int) -> None:
    _now.barriers[place.data.data_ptr()] = Barrier(count)


def _arrive(place: Shared, count: int) -> None:
    _barrier(place).arrive(count)
    _now.point()


def _wait_at_barrier(place: Shared, parity: Any) -> None:
    barrier = _barrier(place)
    _now.point(lambda: barrier.has_ended(int(parity)))


def _warp_specialize(parts: list[tuple[Any, tuple[Any, ...]]], warps: list[int], _: list[int]) -> None:
    """Runs the functions in partitions of their own; the first has the warps of the program."""
    program, before = _now, _now.part
    partitions = [Partition(count) for count in (before.warps, *warps)]

    def enter(partition: Partition) -> None:
        program.part = partition

    program.turns = Turns(partitions, enter, program.number[0])
    program.turns.run([functools.partial(function, *arguments) for function, arguments in parts])
    program.part, program.turns = before, None


def _operand(x: Any) -> torch.Tensor:
    return x.data if isinstance(x, Shared) else x


def _multiply(a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False) -> torch.Tensor:
    assert is_async
    assert a.dtype == b.dtype == torch.bfloat16
    product = _operand(a).float() @ _operand(b).float()
    Kernel.flops[_now.kernel] += 2 * product.numel() * a.shape[1]
    if use_acc:
        product = product + (acc.finished if acc.finished is not None else acc)
    assert list(product.shape) == list(acc.shape)
    out = torch.full_like(product, float("nan"))
    out.finished = product
    shared = [x.data for x in (a, b) if isinstance(x, Shared)]
    for x in shared:
        _now.hazards.check_read(x, _now.part)
    held = [(x, x.clone()) for x in shared]
    _now.part.products.append(_Product(out, held))
    return out


def _wait_products(left: int, deps: list[Any]) -> Any:
    _now.point()
    products = _now.part.products
    done = max(len(products) - left, 0)
    for product in products[:done]:
        product.finish()
        product.out.finished = None
    del products[:done]
    return deps[0] if len(deps) == 1 else deps


def _assembly(text: str, _: str, args: list[Any], dtype: Any, **__: Any) -> Any:
    if text.startswith("mov.b32"):
        return value_of(args[0])
    if text.startswith("shl.b32"):
        return value_of(args[0]).to(dtype)
    if "selp" in text:
        return _where(args[1] == 0, args[0], 0.0)
    assert text.startswith("mul.wide.s32")
    return value_of(args[0]).to(dtype) * args[1]


def _store(pointer: Pointer, value: Any, mask: Any = None, eviction_policy: str = "") -> None:
    at, there = pointer.places(mask)
    value = torch.as_tensor(value, dtype=pointer.memory.dtype).expand(at.shape)
    if there is not None:
        at, value = at[there], value[there]
    _note_writer(pointer.memory, at, value)
    pointer.memory[at] = value


def _note_writer(memory: torch.Tensor, at: torch.Tensor, value: torch.Tensor) -> None:
    key, me = (memory.data_ptr(), memory.dtype), _now.number[0] + 1
    if key not in _now.writers:
        _now.writers[key] = torch.zeros(len(memory), dtype=torch.int32)
    before = _now.writers[key][at]
    others = (before != 0) & (before != me)
    if others.any():
        same = torch.equal(memory[at][others].view(torch.uint8), value[others].view(torch.uint8))
        assert same, "two programs have stored different values in a place"
    _now.writers[key][at] = me


def _add_to_memory(pointer: Pointer, value: Any, sem: str, scope: str) -> Any:
    before = pointer.load(None, None).clone()
    pointer.memory[int(pointer.offset)] = before + value
    return before


def _convert_layout(x: torch.Tensor, _: Any) -> torch.Tensor:
    if _now.kernel in CONVERTING_SYNCHRONISES and x.dim() == 1:
        _now.hazards.barrier(_now.part)
    return x


def _where(mask: Any, x: Any, y: Any) -> Any:
    if isinstance(x, Pointer):
        return x if bool(mask) else y
    mask, x, y = (value_of(each) for each in (mask, x, y))
    return torch.where(mask, x, y.to(x.dtype)) if x.dim() >= y.dim() else torch.where(mask, x.to(y.dtype), y)


def _reduce_or(x: torch.Tensor, axis: int) -> torch.Tensor:
    return torch.as_tensor(np.bitwise_or.reduce(x.numpy(), axis=axis))


def _scan(x: torch.Tensor, axis: int, combine: Callable[[Any, Any], Any]) -> torch.Tensor:
    return torch.stack(list(accumulate(x.unbind(axis), combine)), axis)


def _extreme(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    return lambda x, y, propagate_nan=None: function(value_of(x), value_of(y))


def _language() -> ModuleType:
    gl = ModuleType("triton.experimental.gluon.language")
    layouts = ("NVMMADistributedLayout", "DotOperandLayout", "BlockedLayout", "SliceLayout", "SwizzledSharedLayout")
    names: dict[str, Any] = dict.fromkeys(layouts, lambda *_: None) | _DTYPES
    names |= {
        "NVMMASharedLayout": SimpleNamespace(get_default_for=lambda *_: None),
        "constexpr": lambda x: x,
        "static_range": range,
        "program_id": lambda axis: value_of(_now.number[axis]),
        "num_programs": lambda axis: value_of(_now.grid[axis]),
        "num_warps": lambda: _now.part.warps,
        "arange": lambda start, end, _=None: torch.arange(start, end, dtype=torch.int32),
        "zeros": lambda shape, dtype, _=None: torch.zeros(shape, dtype=dtype),
        "full": lambda shape, x, dtype, _=None: torch.full(list(shape), x, dtype=dtype),
        "load": lambda pointer, mask=None, other=None, cache_modifier="": pointer.load(mask, other),
        "atomic_add": _add_to_memory,
        "store": _store,
        "where": _where,
        "maximum": _extreme(torch.maximum),
        "minimum": _extreme(torch.minimum),
        "sum": lambda x, axis: x.sum(axis),
        "max": lambda x, axis: x.amax(axis),
        "min": lambda x, axis: x.amin(axis),
        "reduce_or": _reduce_or,
        "associative_scan": _scan,
        "exp2": lambda x: torch.exp2(value_of(x)),
        "cdiv": lambda x, y: (x + y - 1) // y,
        "convert_layout": _convert_layout,
        "allocate_shared_memory": _allocate,
        "inline_asm_elementwise": _assembly,
        "multiple_of": lambda x, _: x,
        "static_assert": _assert,
        "thread_barrier": lambda: _now.hazards.barrier(_now.part),
        "warp_specialize": _warp_specialize,
    }
    vars(gl).update(names)
    return gl


def _assert(holds: bool) -> None:
    assert holds


class Kernel:
    """A Gluon function: called by another one, or launched as `kernel[programs](*arguments, **constants)`."""

    launches = 0  # of all kernels
    flops: ClassVar[Counter[str]] = Counter()  # of their products, by name

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.__name__ = function, function.__name__
        self.arg_names = list(inspect.signature(function).parameters)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.function(*args, **named)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int = 4, **named: Any) -> None:
            global _now
            Kernel.launches += 1
            constants = {name: x for name, x in named.items() if name in self.arg_names}
            arguments = [_argument(x) for x in args]
            numbers = list(range(int(grid[0])))
            random.Random(0).shuffle(numbers)
            writers: dict[Any, torch.Tensor] = {}
            with tensors_as_in_kernels():
                for number in numbers:
                    _now = _Program((number,), tuple(grid), self.__name__, writers, Partition(num_warps))
                    self.function(*arguments, **constants)
                    _now.part.assert_idle()

        return launch


def _argument(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return Pointer.to(x)
    return value_of(x) if isinstance(x, int) else x


def _jit(function: Callable[..., Any] | None = None, **_: Any) -> Any:
    return Kernel if function is None else Kernel(function)


@functools.cache
def _modules() -> dict[str, ModuleType]:
    """The package's Gluon modules, imported anew so that they run on the CPU."""
    gl = _language()
    gluon = ModuleType("triton.experimental.gluon")
    vars(gluon).update(jit=_jit, constexpr_function=lambda x: x, language=gl)
    hopper = ModuleType("triton.experimental.gluon.language.nvidia.hopper")
    copies = SimpleNamespace(
        async_copy_global_to_shared=_copy,
        commit_group=lambda: _now.part.commit(),
        wait_group=lambda left: _now.part.wait_for_copies(int(left)),
        mbarrier_arrive=_arrive_after_copies,
    )
    barriers = SimpleNamespace(MBarrierLayout=lambda: None, init=_init_barrier, arrive=_arrive, wait=_wait_at_barrier)
    vars(hopper).update(
        async_copy=copies,
        mbarrier=barriers,
        fence_async_shared=lambda: _now.hazards.fence(_now.part),
        warpgroup_mma=_multiply,
        warpgroup_mma_init=lambda x: x,
        warpgroup_mma_wait=_wait_products,
    )
    import triton.experimental
    import triton.language.extra

    waits = SimpleNamespace(gdc_wait=lambda: None, gdc_launch_dependents=lambda: None)
    stand_ins = {module.__name__: module for module in (gluon, gl, hopper)}
    stand_ins["triton.experimental.gluon.language.nvidia"] = ModuleType("nvidia")
    with pytest.MonkeyPatch.context() as patch:
        # Only while the kernels are imported: Triton's own interpreter looks into the real Gluon.
        patch.setattr(triton.experimental, "gluon", gluon, raising=False)
        patch.setattr(triton.language.extra, "cuda", waits, raising=False)
        for name, module in stand_ins.items():
            patch.setitem(sys.modules, name, module)
        for name in OURS:
            sys.modules.pop(name, None)
        return {name: importlib.import_module(name) for name in OURS}


@contextlib.contextmanager
def gluon_on_cpu() -> Iterator[None]:
    """Inside, the package's Gluon modules are those that run on the CPU."""
    before = {name: sys.modules[name] for name in OURS if name in sys.modules}
    sys.modules.update(_modules())
    try:
        yield
    finally:
        for name in OURS:
            del sys.modules[name]
        sys.modules.update(before)
