"""What a pass allocates and launches, written down once per kind of call, so that it can be repeated without Python.

The pass runs with tensors on the meta device, which stand for those of later calls. What can be repeated is memory that
is allocated, set to 0, copied from an input or seen through views, and launches of kernels that have been launched
before. A pass that does anything else is not recorded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gla_kernels.launching.buffers import on_meta
from gla_kernels.launching.call import Call, named, version_of
from gla_kernels.launching.direct import Launcher, launcher
from gla_kernels.launching.plans import Tile

# The most launches of a pass that is recorded. With more, the device takes longer than the host anyway.
_MOST_LAUNCHES = 48
# Of buffers in scratch memory, in bytes.
_ALIGNMENT = 256
# How `struct` packs numbers of Triton's types.
NUMBERS = {"i32": "i", "i64": "q", "fp32": "f"}

_aten = torch.ops.aten
_ALLOCATE = {_aten.empty.memory_format, _aten.empty_like.default, _aten.new_empty.default}
_ZEROS = {_aten.new_zeros.default}
_VIEWS = {
    _aten.as_strided.default, _aten.expand.default, _aten.select.int, _aten.slice.Tensor, _aten.view.default,
    _aten.view.dtype, _aten.unbind.int, _aten.unsqueeze.default, _aten.detach.default, _aten.alias.default,
}  # fmt: skip


class Place(NamedTuple):
    """An address: of an input, an output or the scratch memory (in this order, absent ones left out), and an offset."""

    base: int
    offset: int = 0


class Launch(NamedTuple):
    """One launch: what `Launcher.remembered` returns for it, its programs, and all parameters of the kernel."""

    kernel: Any
    compiled: Any
    programs: tuple[int, int, int]
    # Triton's type of each parameter, and a place if it is an address, else its value.
    parameters: tuple[tuple[str, Place | float], ...]


class Output(NamedTuple):
    """An output to allocate."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Recording:
    """What a pass allocates and launches."""

    inputs: int  # that are not None
    outputs: tuple[Output | None, ...]
    scratch_bytes: int
    zeros: tuple[tuple[Place, int], ...]  # and numbers of 32-bit words; set before the first launch
    copies: tuple[tuple[Place, Place, int], ...]  # copy, original, bytes; made before the first launch
    launches: tuple[Launch, ...]


class UnrecordableError(Exception):
    """The pass cannot be repeated. `for_now`: because a kernel has not been launched with such arguments yet."""

    def __init__(self, for_now: bool = False) -> None:
        super().__init__()
        self.for_now = for_now


@dataclass
class _Buffer:
    """Memory that a pass allocates; launches from number `first` to before `end` may use it."""

    bytes: int
    first: int
    end: int = 0
    offset: int = 0
    zero: bool = False
    original: torch.Tensor | None = None  # of a copy


@dataclass(frozen=True)
class _Recorder(Call):
    """A call whose launches are noted, not made."""

    notes: list[tuple[Launcher, tuple[int, ...], tuple[Any, ...]]] = field(
        default_factory=list, hash=False, compare=False
    )

    def launch(
        self, kernel: Any, tile: Tile, programs: tuple[int, ...], arguments: tuple[Any, ...], switches: dict[str, Any],
        *, early: bool = True,
    ) -> None:  # fmt: skip
        if len(self.notes) == _MOST_LAUNCHES:
            raise UnrecordableError
        constants = named(kernel, self.constants(tile) | switches)
        found = launcher(kernel, tuple(constants.items()), tuple(self.options(tile, early).items()))
        self.notes.append((found, programs, arguments))


class _Allocations(TorchDispatchMode):
    """Notes which tensors a pass allocates, and when; refuses all other work."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self.buffers: dict[int, _Buffer] = {}
        self._alive: list[torch.Tensor] = []  # so that no storage takes the identity of another

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        zero, original = function in _ZEROS, args[0] if function == _aten.clone.default else None
        if zero or original is not None or function in _ALLOCATE:
            self._alive.append(found)
            # What has values at once has them before the first launch.
            first = len(self._recorder.notes) if function in _ALLOCATE else 0
            size = found.untyped_storage().nbytes()
            self.buffers[_identity(found)] = _Buffer(size, first, zero=zero, original=original)
        elif function not in _VIEWS:
            raise UnrecordableError
        return found


def _identity(x: torch.Tensor) -> int:
    return int(x.untyped_storage()._cdata)


# A dispatch mode sets flags of the process, and restores what it has found.
_one_at_a_time = Lock()


def record(
    call: Call, device: int, tensors: Sequence[torch.Tensor | None],
    run: Callable[..., Sequence[torch.Tensor | None]],
) -> Recording:  # fmt: skip
    """Records `run(a version of call, *meta tensors like tensors)`, which returns its outputs.

    Its kernels must have been launched on the device with the same dtypes and numbers, and with inputs at multiples of
    16 bytes. Raises UnrecordableError.
    """
    recorder = version_of(call, _Recorder)
    like = [on_meta(x) for x in tensors]
    with _one_at_a_time, torch.no_grad(), _Allocations(recorder) as allocations:
        outputs = run(recorder, *like)
    return _written_down(recorder, allocations, device, [x for x in like if x is not None], outputs)


def _written_down(
    recorder: _Recorder, allocations: _Allocations, device: int, inputs: list[torch.Tensor],
    outputs: Sequence[torch.Tensor | None],
) -> Recording:  # fmt: skip
    """Raises UnrecordableError."""
    present = [x for x in outputs if x is not None]
    scratch = dict(allocations.buffers)
    places = {_identity(x): Place(base) for base, x in enumerate(inputs)}
    for base, x in enumerate(present, len(inputs)):
        buffer = scratch.pop(_identity(x), None)
        # An output must be a whole buffer of its own.
        if buffer is None or not x.is_contiguous() or buffer.bytes != x.nbytes:
            raise UnrecordableError
        places[_identity(x)] = Place(base)
    for number, (_, _, arguments) in enumerate(recorder.notes):
        for x in arguments:
            if isinstance(x, torch.Tensor) and (buffer := scratch.get(_identity(x))) is not None:
                buffer.end = number + 1
    used = {identity: buffer for identity, buffer in scratch.items() if buffer.end}
    scratch_bytes = _pack(list(used.values()))
    for identity, buffer in used.items():
        places[identity] = Place(len(inputs) + len(present), buffer.offset)
    values = {identity: buffer for identity, buffer in allocations.buffers.items() if identity in places}
    return Recording(
        len(inputs),
        tuple([None if x is None else Output(tuple(x.shape), x.dtype) for x in outputs]),
        scratch_bytes,
        tuple([(places[identity], buffer.bytes // 4) for identity, buffer in values.items() if buffer.zero]),
        tuple([
            (places[identity], _original(buffer, inputs, places), buffer.bytes)
            for identity, buffer in values.items() if buffer.original is not None
        ]),
        tuple([_launch(found, programs, arguments, device, places) for found, programs, arguments in recorder.notes]),
    )  # fmt: skip


def _original(copy: _Buffer, inputs: list[torch.Tensor], places: dict[int, Place]) -> Place:
    """Where a copy comes from. Raises UnrecordableError if not from an input, as it is."""
    x = copy.original
    if x is None or not x.is_contiguous() or x.nbytes != copy.bytes or _identity(x) not in map(_identity, inputs):
        raise UnrecordableError
    return _place(x, places)


def _place(x: torch.Tensor, places: dict[int, Place]) -> Place:
    """Raises UnrecordableError if x is not of this pass."""
    base = places.get(_identity(x))
    if base is None:
        raise UnrecordableError
    return Place(base.base, base.offset + int(x.storage_offset()) * x.element_size())


def _pack(buffers: list[_Buffer]) -> int:
    """Gives buffers offsets at which no two that are needed at once overlap, and returns the bytes of all together."""
    placed: list[_Buffer] = []
    for buffer in sorted(buffers, key=lambda buffer: -buffer.bytes):
        offset = 0
        for other in sorted(placed, key=lambda other: other.offset):
            both = other.first < buffer.end and buffer.first < other.end
            if both and other.offset < offset + buffer.bytes and offset < other.offset + other.bytes:
                offset = -(-(other.offset + other.bytes) // _ALIGNMENT) * _ALIGNMENT
        buffer.offset = offset
        placed.append(buffer)
    return max([buffer.offset + buffer.bytes for buffer in placed], default=0)


def _launch(
    found: Launcher, programs: tuple[int, ...], arguments: tuple[Any, ...], device: int, places: dict[int, Place]
) -> Launch:
    """Raises UnrecordableError."""
    values = [_place(x, places) if isinstance(x, torch.Tensor) else x for x in arguments]
    low = [x.offset % 16 if isinstance(x, Place) else 0 for x in values[: found.tensor_count]]
    compiled = found.remembered(device, arguments, low)
    if compiled is None:
        raise UnrecordableError(for_now=True)
    metadata = compiled.metadata
    special = metadata.num_ctas != 1 or metadata.launch_cooperative_grid
    if special or metadata.global_scratch_size or metadata.profile_scratch_size:
        raise UnrecordableError
    parameters: list[tuple[str, Place | float]] = []
    for kind, value in zip(compiled.src.signature.values(), (*values, *found.constants), strict=True):
        if kind == "constexpr":
            continue
        if kind[0] == "*":
            parameters.append((kind, value) if value is not None else ("i64", 0))
        elif kind in NUMBERS:
            parameters.append((kind, value))
        else:
            raise UnrecordableError
    x, y, z = (*programs, 1, 1)[:3]
    return Launch(found.kernel, compiled, (x, y, z), tuple(parameters))
