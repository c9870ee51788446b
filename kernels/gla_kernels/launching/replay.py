"""Repeats a recorded pass: it allocates, fills in addresses, and launches, with as little Python as possible.

In a training loop each Python object that a call touches costs more than a test of speed shows, because much else has
been in the caches since. A replay touches some tens of them, where the code that decides and launches touches hundreds.
"""

import ctypes
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from gla_kernels.launching import cuda
from gla_kernels.launching.direct import is_watched, switches
from gla_kernels.launching.recording import NUMBERS, Launch, Place, Recording

# Not in a torch without CUDA, where nothing is replayed.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", int)


class Plan(ctypes.Structure):
    """What `native.c` goes through, with the same fields."""

    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in ("inputs", "made", "moved", "fills", "copies", "steps", "outputs", "busy")
        ),
        *((name, ctypes.c_void_p) for name in ("cells", "moves", "fill", "copy", "step", "output")),
        *((name, ctypes.c_void_p) for name in ("launch", "set", "move")),
    ]


class Replay:
    """Repeats a recording on the device of `like`. Threads may share it."""

    def __init__(
        self, recording: Recording, like: torch.Tensor, functions: cuda.Functions, repeat: Callable[..., Any]
    ) -> None:
        outputs, device = [x for x in recording.outputs if x is not None], like.device
        self._device = like.get_device()
        self._name_of, self._repeat = functions.name_of, repeat
        self._launches = recording.launches  # which keep their kernels loaded
        self._kernels = list({id(launch.kernel): launch.kernel for launch in recording.launches}.values())
        self._switches = switches()
        new = [_maker(x.shape, x.dtype, device) for x in outputs]
        if recording.scratch_bytes:
            new.append(_maker((recording.scratch_bytes,), torch.uint8, device))
        self._new = tuple(new)
        # A cell of 8 bytes for each address, in the order in which a call finds them, then for each number; the last is
        # 0, for Triton's scratch memory, which these kernels do not use.
        bases = recording.inputs + len(new)
        places = [x for launch in recording.launches for _, x in launch.parameters if isinstance(x, Place)]
        places += [place for place, _ in recording.zeros]
        places += [place for *both, _ in recording.copies for place in both]
        moved = list(dict.fromkeys(place for place in places if place.offset))
        cells = {Place(base): base for base in range(bases)}
        cells |= {place: bases + number for number, place in enumerate(moved)}
        constants = sum(not isinstance(x, Place) for launch in recording.launches for _, x in launch.parameters)
        self._cells = (ctypes.c_uint64 * (len(cells) + constants + 1))()
        self._used = len(cells)
        self._parameters = [self._cells_of(launch, cells) for launch in recording.launches]
        self._configs = [_config(launch) for launch in recording.launches]
        numbers = iter(range(len(outputs)))
        self._arrays = [
            _array(moved),
            _array((cells[place], words) for place, words in recording.zeros),
            _array((cells[place], cells[original], size) for place, original, size in recording.copies),
            _array(
                (ctypes.addressof(config), launch.compiled.function, ctypes.addressof(parameters))
                for launch, config, parameters in zip(self._launches, self._configs, self._parameters, strict=True)
            ),
            _array((-1 if x is None else next(numbers),) for x in recording.outputs),
        ]
        self._plan = Plan(
            recording.inputs, len(new), len(moved), len(recording.zeros), len(recording.copies),
            len(recording.launches), len(recording.outputs), 0, ctypes.addressof(self._cells),
            *map(ctypes.addressof, self._arrays), functions.launch, functions.fill, functions.copy,
        )  # fmt: skip
        self._address = ctypes.addressof(self._plan)

    def _cells_of(self, launch: Launch, cells: dict[Place, int]) -> "ctypes.Array[ctypes.c_void_p]":
        """The addresses of a launch's parameters, whose numbers are written now."""
        start, used = ctypes.addressof(self._cells), []
        for kind, x in launch.parameters:
            if isinstance(x, Place):
                used.append(cells[x])
            else:
                struct.pack_into(NUMBERS[kind], self._cells, 8 * self._used, x)
                used.append(self._used)
                self._used += 1
        used += [len(self._cells) - 1] * 2
        return (ctypes.c_void_p * len(used))(*[start + 8 * cell for cell in used])

    def __call__(self, *inputs: torch.Tensor | None) -> tuple[torch.Tensor | None, ...] | None:
        """Repeats the pass with other tensors of the same kinds, and returns its outputs; None if it cannot."""
        if _current_device() != self._device or is_watched() or switches() != self._switches:
            return None
        for kernel in self._kernels:
            if kernel.pre_run_hooks:
                return None
        stream = _current_stream(self._device)
        made: tuple[torch.Tensor | None, ...] | int | None = self._repeat(self._address, self._new, stream, *inputs)
        if isinstance(made, int):
            raise RuntimeError(f"CUDA error {made} ({self._name_of(made)}) while launching gla_kernels")
        return made


def _maker(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[], torch.Tensor]:
    """A function that allocates a contiguous tensor."""
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    # `torch.empty` takes a microsecond more to understand its arguments.
    return partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)


def _array(rows: Iterable[Sequence[int]]) -> "ctypes.Array[ctypes.c_int64]":
    """Rows of numbers, one after the other."""
    numbers = [x for row in rows for x in row]
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _config(launch: Launch) -> cuda.LaunchConfig:
    metadata = launch.compiled.metadata
    config = cuda.LaunchConfig(
        grid=launch.programs, block=(32 * metadata.num_warps, 1, 1), shared_bytes=metadata.shared
    )
    if metadata.launch_pdl:
        config.attributes, config.attribute_count = ctypes.addressof(cuda.EARLY), 1
    return config
