"""Calls that run the kernels for Hopper on a CPU: Gluon's by `gluon_on_cpu.py`, the others by Triton's interpreter."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from gluon_on_cpu import Kernel, gluon_on_cpu


@contextlib.contextmanager
def on_hopper(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every call runs the kernels for Hopper, and at least one; memory that is not initialised is NaN."""
    from gla_kernels.launching import call, plans
    from gla_kernels.launching.plans import hopper_plan

    patch.setattr(call, "plan", lambda K, V, dtype, chunk, *_: hopper_plan(K, V, dtype, chunk))
    patch.setattr(call, "_remembered_call", call._call)
    patch.setattr(call.Call, "pdl", False)
    # The interpreter takes its time by the program.
    for name in ("SCAN", "SCAN_OF_MANY"):
        patch.setattr(plans, name, replace(getattr(plans, name), block_v=4096))
    interpret_bfloat16(patch)
    torch.use_deterministic_algorithms(True)
    before = Kernel.launches
    try:
        with gluon_on_cpu():
            yield
    finally:
        torch.use_deterministic_algorithms(False)
    assert Kernel.launches > before


def set_multiprocessors(patch: pytest.MonkeyPatch, count: int) -> None:
    """Calls are made for a GPU with so many multiprocessors."""
    from gla_kernels.launching import call
    from gla_kernels.launching.device import Gpu

    patch.setattr(call, "gpu_of", lambda device: Gpu(multiprocessors=count))


def leave_out(patch: pytest.MonkeyPatch, module: Any, line: int) -> None:
    """On this line of its module, a kernel waits for no copies and for no other thread, and has no fence."""

    def unless_there(act: Callable[..., None]) -> Callable[..., None]:
        def maybe(*arguments: Any) -> None:
            if sys._getframe(1).f_lineno != line:
                act(*arguments)

        return maybe

    for name, wait in (("mbarrier", "wait"), ("async_copy", "wait_group")):
        if hasattr(module, name):
            parts = vars(getattr(module, name))
            patch.setattr(module, name, SimpleNamespace(**parts | {wait: unless_there(parts[wait])}))
    for name in ("fence_async_shared", "thread_barrier"):
        patch.setattr(module, name, unless_there(getattr(module, name)))


def interpret_bfloat16(patch: pytest.MonkeyPatch) -> None:
    """Makes Triton's interpreter round to bfloat16 as a GPU does, and multiply such numbers.

    It holds them as integers. Without this it cuts bits off, and multiplies the integers.
    """
    from triton.runtime import interpreter

    convert = interpreter._convert_float
    multiply = interpreter.InterpreterBuilder.create_dot

    def nearest(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, rounding)
        rounded = torch.from_numpy(np.ascontiguousarray(data).view(np.float32)).bfloat16()
        return rounded.view(torch.int16).numpy().view(np.uint16)

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        data = convert(x.data, tl.bfloat16, tl.float32, None).view(np.float32)
        return interpreter.TensorHandle(data.reshape(x.data.shape), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(self, widened(a), widened(b), *rest)

    patch.setattr(interpreter, "_convert_float", nearest)
    patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
