"""Makes Triton's interpreter faster, with the same results.

- Before a launch, it replaces the functions of triton.language by its own. It does so again whenever a kernel calls a
  device function, which took more than a quarter of a test's time; here once per launch and module. The replaced
  functions first looked who calls them; ours do not.
- Every operation makes tensors and their types anew, each of which looks its shape through, item by item, and so does
  the operation with those of its operands. Here that is done once per shape, and once per two.
- It computes every sum, difference and product of integers a second time, in 64 bits, to see whether it overflows, and
  then says so in debug mode alone, which it does not have.
- It converts between float32 and bfloat16 bit by bit. As both have the same exponents, a shift does the same (and,
  other than the interpreter, is right for subnormal numbers).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
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

    def patch_attribute(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic
        scope.set_attr(obj, name, lambda *args, _semantic=None, **named: function(*args, _semantic=semantic, **named))

    of_scalar = cache(np_dtype_of)

    def quick_np_dtype_of(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        return np_dtype_of(scalar) if isinstance(scalar, tl.pointer_type) else of_scalar(scalar)

    interpreter._patch_lang = patch_for_launch
    interpreter._patch_attr = patch_attribute
    interpreter._get_np_dtype = quick_np_dtype_of
    interpreter.InterpretedFunction.__call__ = call
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda self, one, other, operation: None
    _look_at_shapes_once()
    _shift_between_bfloat16_and_float32()


def _look_at_shapes_once() -> None:
    make_type, equal, broadcast = core.block_type.__init__, core.dtype.__eq__, TritonSemantic.broadcast_impl_value
    types: dict[tuple[int, ...], tuple[Any, str]] = {}  # one of every shape, and the shape in words
    shapes: dict[tuple[int, ...], Any] = {(): (core.tuple([]), core.constexpr(1))}  # as a tensor has it, and elements
    commons: dict[tuple[int, int], tuple[list[int] | None, bool, bool]] = {}

    def quick_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple([x.value if isinstance(x, core.constexpr) else x for x in shape])
        if key in types:
            known, text = types[key]
            self.element_ty, self.shape, self.numel = element_ty, known.shape, known.numel
            self.name = f"<{text}, {element_ty}>"
            return
        make_type(self, element_ty, shape)
        types[key] = self, str(self.shape)
        shapes[key] = core.tuple([core.constexpr(x) for x in key]), core.constexpr(self.numel)

    def quick_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[tuple(type.shape.values) if type.is_block() else ()]

    def common(one: Any, other: Any) -> tuple[list[int] | None, bool, bool]:
        """The shape of an operation's result, None if Triton has to look at it; and whether each operand lacks it."""
        sizes = [list(x.type.shape.values) if x.type.is_block() else [] for x in (one, other)]
        if not all(sizes):
            shape = sizes[0] or sizes[1]
        elif len(sizes[0]) == len(sizes[1]) and all(a == b or 1 in (a, b) for a, b in zip(*sizes, strict=True)):
            shape = [max(pair) for pair in zip(*sizes, strict=True)]
        else:
            return None, False, False
        return shape, sizes[0] != shape, sizes[1] != shape

    def quick_broadcast(self: Any, one: Any, other: Any) -> Any:
        if one.shape is other.shape:
            return one, other
        key = id(one.shape), id(other.shape)  # of `shapes`, which keeps them
        if key not in commons:
            commons[key] = common(one, other)
        shape, of_one, of_other = commons[key]
        if shape is None:
            return broadcast(self, one, other)
        expand = self.builder.create_broadcast
        return (
            core.tensor(expand(one.handle, shape), core.block_type(one.dtype, shape)) if of_one else one,
            core.tensor(expand(other.handle, shape), core.block_type(other.dtype, shape)) if of_other else other,
        )

    core.block_type.__init__ = quick_block_type
    core.tensor.__init__ = quick_tensor
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    TritonSemantic.broadcast_impl_value = quick_broadcast


def _shift_between_bfloat16_and_float32() -> None:
    convert = interpreter._convert_float

    def quick_convert(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if source == tl.bfloat16 and target == tl.float32:
            return data.view(np.uint16).astype(np.uint32) << 16
        if source == tl.float32 and target == tl.bfloat16 and rounding is None:
            return (data.view(np.uint32) >> 16).astype(np.uint16)
        return convert(data, source, target, rounding)

    interpreter._convert_float = quick_convert
