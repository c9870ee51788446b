"""Compiles the kernels of a first call in parallel; one by one takes 1.3 to 1.5 times as long.

Before launching, `passes.py` asks `unrehearsed()`. If true, it runs the same launch code once inside `rehearsing()`,
with tensors on the meta device: kernels are compiled, none runs. A first forward also compiles the kernels of its
backward.
A kernel that this misses is compiled when it is launched, as Triton does by default.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

import torch
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from gla_kernels.hopper.narrow import launches as narrow
from gla_kernels.hopper.wide import pieces as wide_pieces
from gla_kernels.launching.call import Call, named, version_of
from gla_kernels.launching.plans import Tile
from gla_kernels.operators.checks import interpreting

# Kernels that are compiled at once: most calls have few more.
_COMPILERS = 9
# The kinds of forward and backward passes that this process has compiled.
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
    """Whether this pass is the first of its kind: same head dims, dtype and plan, and same `kind`."""
    key_of_call = (unrehearsed, *kind)
    if key_of_call in call.decisions:
        return False
    call.decisions[key_of_call] = True
    # What the sizes decide: how sequences are cut, and which kernels that takes.
    forms = {"wide": wide_pieces.form, "hopper": narrow.form}
    form = forms[call.plan.family](call) if call.plan.family in forms else ()
    key = (
        call.K,
        call.V,
        call.dtype,
        call.gated,
        call.head_gated,
        call.bfloat16_gates,
        call.varlen,
        call.plan,
        form,
        *kind,
    )
    if key in _rehearsed or interpreting() or _asynchronous() is None:
        return False
    _rehearsed.add(key)
    return True


@cache
def _asynchronous() -> Any:
    """Triton's private module that compiles kernels in other threads; None in a version without it."""
    try:
        return import_module("triton.runtime._async_compile")
    except ImportError:
        return None


@contextmanager
def rehearsing(call: Call, device: torch.device) -> Iterator[Call]:
    """Yields a version of `call` that compiles kernels instead of launching them; finally waits for the compilers."""
    rehearsal = version_of(call, _Rehearsal)

    def build(kernel: Any) -> Any:
        """Compiles the kernel's launcher, which is written in C, and leaves it in Triton's cache."""
        compiled = kernel.result() if hasattr(kernel, "result") else kernel
        driver.active.launcher_cls(compiled.src, compiled.metadata)
        return compiled

    # The caller may be in such a mode too, and a mode that ends with an error is not switched off.
    asynchronous = _asynchronous()
    active_mode = asynchronous.active_mode
    outer = active_mode.get()
    active_mode.set(None)
    try:
        with ThreadPoolExecutor(min(_COMPILERS, os.cpu_count() or 1)) as pool:
            with asynchronous.AsyncCompileMode(pool):
                yield rehearsal
            compiled = list(pool.map(build, {id(kernel): kernel for kernel in rehearsal.compiling}.values()))
        # Not in parallel: all launchers have the same module name, and if Python imports two of them at once that it
        # has imported before, it may give one the contents of the other. So those that `build` imports are not used.
        with torch.cuda.device(device):
            for kernel in compiled:
                # If a kernel does not fit this GPU, its launch reports that, if it is launched at all.
                with suppress(OutOfResources):
                    _ = kernel.run
    finally:
        active_mode.set(outer)
