"""A first call compiles its kernels and its backward's side by side: one by one they take 1.3 to 1.5 times as long.

Whoever is about to launch asks `unrehearsed`, and if so goes through the launches with tensors on the meta device
inside of `rehearsing`. A kernel that was not foreseen so is compiled when it is launched, as ever.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from triton.runtime._async_compile import AsyncCompileMode, active_mode
from triton.runtime.errors import OutOfResources

from gla_kernels.call import Call, named
from gla_kernels.checks import interpreting
from gla_kernels.launch import Tile

# Compilers at once: most calls have no more kernels.
_COMPILERS = 9
# The kinds of passes that this process has compiled.
_rehearsed: set[tuple[object, ...]] = set()


@dataclass(frozen=True)
class _Rehearsal(Call):
    """A call whose launches only compile their kernels."""

    compiling: list[Any] = field(default_factory=list, hash=False, compare=False)

    def launch(
        self, kernel: Any, tile: Tile, programs: tuple[int, ...], arguments: tuple[Any, ...], switches: dict[str, Any],
        *, early: bool = True,
    ) -> None:  # fmt: skip
        constants = named(kernel, self.constants(tile) | switches)
        self.compiling.append(kernel.warmup(*arguments, grid=programs, **constants, **self.options(tile, early)))


def unrehearsed(call: Call, *kind: object) -> bool:
    """Whether this is the first pass of its kind; `kind` is what besides head dims and plan decides on kernels."""
    key = (call.K, call.V, call.dtype, call.gated, call.varlen, call.plan, *kind)
    if key in _rehearsed or interpreting():
        return False
    _rehearsed.add(key)
    return True


@contextmanager
def rehearsing(call: Call, device: torch.device) -> Iterator[Call]:
    """Gives `call` in a form whose launches, with tensors on the meta device, compile and do not run; then waits."""
    rehearsal = _Rehearsal(**{each.name: getattr(call, each.name) for each in fields(call)})

    def load(kernel: Any) -> None:
        # What does not fit this GPU is for the launch to say, if it ever comes.
        with torch.cuda.device(device), suppress(OutOfResources):
            # Loads the kernel and has a C compiler make its launcher.
            _ = (kernel.result() if hasattr(kernel, "result") else kernel).run

    # The caller may be in such a mode himself; and one that ends by an error stays on.
    outer = active_mode.get()
    active_mode.set(None)
    try:
        with ThreadPoolExecutor(min(_COMPILERS, os.cpu_count() or 1)) as pool:
            with AsyncCompileMode(pool):
                yield rehearsal
            list(pool.map(load, {id(kernel): kernel for kernel in rehearsal.compiling}.values()))
    finally:
        active_mode.set(outer)
