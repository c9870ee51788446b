"""Repeats a recorded pass: it allocates, fills in addresses, and launches, with as little Python as possible.

In a training loop each Python object that a call touches costs more than a test of speed shows: autograd runs backwards
in a thread of its own, and every time the objects have to come out of another core's caches. A replay touches some
tens of them, where the code that decides and launches touches hundreds.
"""

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import or_
from threading import Lock

import torch

from gla_kernels import cuda
from gla_kernels.direct import is_watched, switches
from gla_kernels.recording import NUMBERS, Launch, Place, Recording

# Not in a torch without CUDA, where nothing is replayed.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", int)


class Replay:
    """Repeats a recording on the device of `like`. Threads may share it."""

    def __init__(self, recording: Recording, like: torch.Tensor, functions: cuda.Functions) -> None:
        outputs, device = [x for x in recording.outputs if x is not None], like.device
        self._device = like.get_device()
        self._functions = functions
        self._launches = recording.launches  # which keep their kernels loaded
        self._kernels = list({id(launch.kernel): launch.kernel for launch in recording.launches}.values())
        self._switches = switches()
        numbers = iter(range(len(outputs)))
        self._order = [None if x is None else next(numbers) for x in recording.outputs]
        self._new = [partial(torch.empty, x.shape, dtype=x.dtype, device=device) for x in outputs]
        if recording.scratch_bytes:
            self._new.append(partial(torch.empty, recording.scratch_bytes, dtype=torch.uint8, device=device))
        # A cell of 8 bytes for each address, in the order in which a call finds them, then for each number; the last is
        # 0, for Triton's scratch memory, which these kernels do not use.
        bases = recording.inputs + len(self._new)
        places = [x for launch in recording.launches for _, x in launch.parameters if isinstance(x, Place)]
        places += [place for place, _ in recording.zeros]
        places += [place for *both, _ in recording.copies for place in both]
        self._moved = list(dict.fromkeys(place for place in places if place.offset))
        cells = {Place(base): base for base in range(bases)}
        cells |= {place: bases + number for number, place in enumerate(self._moved)}
        self._zeros = [(cells[place], words) for place, words in recording.zeros]
        self._copies = [(cells[place], cells[original], size) for place, original, size in recording.copies]
        self._pack = struct.Struct(f"{len(cells)}Q").pack_into
        constants = sum(not isinstance(x, Place) for launch in recording.launches for _, x in launch.parameters)
        self._cells = (ctypes.c_uint64 * (len(cells) + constants + 1))()
        self._stream = 0
        self._used = len(cells)
        self._parameters = [self._cells_of(launch, cells) for launch in recording.launches]
        self._configs = [_config(launch) for launch in recording.launches]
        self._steps = [
            (launch.compiled.function, ctypes.addressof(config), ctypes.addressof(parameters))
            for launch, config, parameters in zip(self._launches, self._configs, self._parameters, strict=True)
        ]
        self._lock = Lock()

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

    def __call__(self, inputs: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...] | None:
        """Repeats the pass with other tensors of the same kinds, and returns its outputs; None if it cannot."""
        if _current_device() != self._device or is_watched() or switches() != self._switches:
            return None
        for kernel in self._kernels:
            if kernel.pre_run_hooks:
                return None
        addresses = [x.data_ptr() for x in inputs if x is not None]
        if reduce(or_, addresses, 0) & 15:
            return None
        try:
            new = [make() for make in self._new]
        except torch.OutOfMemoryError:
            return None  # smaller blocks, one after the other, may still fit
        addresses += [x.data_ptr() for x in new]
        addresses += [addresses[base] + offset for base, offset in self._moved]
        # Another thread that is launching still needs its addresses in the cells.
        if not self._lock.acquire(False):
            return None
        try:
            started = self._launch(addresses, _current_stream(self._device))
        finally:
            self._lock.release()
        return tuple([None if number is None else new[number] for number in self._order]) if started else None

    def _launch(self, addresses: list[int], stream: int) -> bool:
        """Whether anything was launched. Nothing is, for example, in a thread that has not used the device yet."""
        launch, fill, copy, name_of = self._functions
        self._pack(self._cells, 0, *addresses)
        if stream != self._stream:
            for config in self._configs:
                config.stream = stream
            self._stream = stream
        code, done = 0, 0
        for cell, words in self._zeros:
            code = code or fill(addresses[cell], 0, words, stream)
            done += not code
        for cell, original, size in self._copies:
            code = code or copy(addresses[cell], addresses[original], size, stream)
            done += not code
        for function, settings, parameters in self._steps:
            code = code or launch(settings, function, parameters, None)
            done += not code
        if code and done:
            raise RuntimeError(f"CUDA error {code} ({name_of(code)}) while launching gla_kernels")
        return not code


def _config(launch: Launch) -> cuda.LaunchConfig:
    metadata = launch.compiled.metadata
    config = cuda.LaunchConfig(
        grid=launch.programs, block=(32 * metadata.num_warps, 1, 1), shared_bytes=metadata.shared
    )
    if metadata.launch_pdl:
        config.attributes, config.attribute_count = ctypes.addressof(cuda.EARLY), 1
    return config
