"""Makes Triton's interpreter faster, with the same results: it looks all of triton.language through at every call.

Before a launch, it replaces the functions of triton.language by its own. It does so again whenever a kernel calls a
device function, which took more than a quarter of a test's time; here once per launch and module.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def make_quick() -> None:
    """Works for all launches from now on."""
    patch, np_dtype_of = interpreter._patch_lang, interpreter._get_np_dtype
    replaced: set[int] = set()  # modules in this launch, by their globals

    def patch_for_launch(fn: Callable[..., Any]) -> Any:
        replaced.clear()
        replaced.add(id(fn.__globals__))
        return patch(fn)

    def call(self: Any, *args: Any, **named: Any) -> Any:
        if id(self.fn.__globals__) not in replaced:
            replaced.add(id(self.fn.__globals__))
            patch(self.fn)
        fn = self.rewrite()
        try:
            return fn(*args, **named)
        except Exception as problem:
            raise interpreter.InterpreterError(repr(problem)) from problem

    of_scalar = cache(np_dtype_of)

    def quick_np_dtype_of(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        return np_dtype_of(scalar) if isinstance(scalar, tl.pointer_type) else of_scalar(scalar)

    interpreter._patch_lang = patch_for_launch
    interpreter._get_np_dtype = quick_np_dtype_of
    interpreter.InterpretedFunction.__call__ = call
