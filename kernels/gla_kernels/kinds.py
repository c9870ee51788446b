"""Kinds of eager calls, and what is known of each: its recorded passes.

A kind is all that checks and decisions read: shapes, strides, dtypes, devices and options, but no values of tensors. So
a call of a kind that has succeeded before needs no checks, and its passes can be repeated (see `replay.py`). Its second
call is recorded: the kernels have been compiled and launched by then, and a shape that occurs once costs nothing. The
backwards of a kind of call have kinds of their own.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from gla_kernels import cuda, passes
from gla_kernels.buffers import Inputs, readable
from gla_kernels.call import Call, make_call
from gla_kernels.limits import MAX_KEY_DIM_FLOAT32
from gla_kernels.plain import is_plain
from gla_kernels.recording import UnrecordableError, record
from gla_kernels.replay import Replay

Kind = tuple[object, ...]

# Kinds that are remembered.
_KINDS = 512
# Attempts to record a pass, whose launches have to have been seen, at aligned addresses. Should be 3; 0 records none,
# until a GPU has run tests/gpu with it.
_ATTEMPTS = 3


class _Pass:
    """A pass that is recorded when it is first repeated; it may turn out that it cannot be."""

    def __init__(self) -> None:
        self._attempts = 0
        self._replay: Replay | None = None

    def repeat(
        self, run: Callable[..., Sequence[torch.Tensor | None]], tensors: Sequence[torch.Tensor | None],
        settings: tuple[Any, ...],
    ) -> tuple[torch.Tensor | None, ...] | None:  # fmt: skip
        """Outputs of `run(call, settings, *tensors)`, or None."""
        if self._replay is None:
            self._record(run, tensors, settings)
        return None if self._replay is None else self._replay(tensors)

    def _record(
        self, run: Callable[..., Sequence[torch.Tensor | None]], tensors: Sequence[Any], settings: tuple[Any, ...]
    ) -> None:
        functions = cuda.functions()
        if functions is None or self._attempts >= _ATTEMPTS:
            return
        self._attempts += 1
        q, _, v, g, cu_seqlens = tensors[:5]
        scale, _, _, chunk_size, plan = settings
        call = make_call(q, v, g, cu_seqlens, scale, chunk_size, plan)
        try:
            recording = record(call, q.get_device(), tensors, lambda call, *like: run(call, settings, *like))
        except UnrecordableError as error:
            if not error.for_now:
                self._attempts = _ATTEMPTS
            return
        self._replay = Replay(recording, q, functions)


class Passes:
    """The passes of one kind of call: its forward, and a backward for each kind of output gradients."""

    def __init__(self) -> None:
        self._forward = _Pass()
        self._backwards: dict[Kind, _Pass] = {}

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None,
        initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None, settings: tuple[Any, ...],
    ) -> passes.Outputs | None:  # fmt: skip
        """Repeats a forward: its outputs as `passes.forward` returns them, or None. `settings`: its other arguments."""
        made = self._forward.repeat(_run_forward, (q, k, v, g, cu_seqlens, initial_state), settings)
        return cast("passes.Outputs | None", made)

    def backward(
        self, saved: tuple[torch.Tensor | None, ...], settings: tuple[Any, ...], do: torch.Tensor,
        dfinal: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...] | None:  # fmt: skip
        """Repeats a backward: dq, dk, dv, dg and the gradient of the initial states, or None.

        `saved`, `settings`: what the forward of `eager.py` has left.
        """
        tensors = (*saved, do, dfinal)
        # Of saved tensors too: hooks may have changed them.
        kind = tuple([None if x is None else (x.dtype, x.shape, x.stride(), x.get_device()) for x in tensors])
        known = self._backwards.get(kind)
        if known is not None:
            return known.repeat(_run_backward, tensors, settings)
        # The next one: the kernels of this one may not have been launched yet.
        if len(self._backwards) < _KINDS:
            self._backwards[kind] = _Pass()
        return None


def _run_forward(
    call: Call, settings: tuple[Any, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None, initial_state: torch.Tensor | None,
) -> passes.Outputs:  # fmt: skip
    _, output_final_state, keep, _, _ = settings
    inputs = Inputs.of(call, q, k, v, g, cu_seqlens)
    return passes.launch_forward(call, inputs, initial_state, output_final_state, keep)


def _run_backward(
    call: Call, settings: tuple[Any, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None, kept: torch.Tensor, flags: torch.Tensor, do: torch.Tensor,
    dfinal: torch.Tensor | None,
) -> Sequence[torch.Tensor | None]:  # fmt: skip
    _, has_initial, keep, _, _ = settings
    after = None if dfinal is None else dfinal.contiguous()
    inputs = Inputs.of(call, q, k, v, g, cu_seqlens)
    return passes.launch_backward(call, inputs, readable(call, do), after, kept, flags, has_initial, keep)


_known: dict[Kind, Passes] = {}


def kind_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, scale: float | None,
    initial_state: torch.Tensor | None, output_final_state: bool, cu_seqlens: torch.Tensor | None, materialize: bool,
) -> Kind | None:  # fmt: skip
    """The kind of a call whose tensors are plain and need no change of dtype or layout; None for other calls.

    The arguments need not have been checked.
    """
    if not is_plain(q, k, v, g, initial_state, cu_seqlens) or torch.is_autocast_enabled(q.device.type):
        return None
    if scale is not None and type(scale) is not float:
        return None
    # What a call changes before it launches: K in pieces, gates and states copied.
    dtype, shape = q.dtype, q.shape
    if dtype != torch.bfloat16 and (dtype != torch.float32 or len(shape) != 4 or shape[-1] > MAX_KEY_DIM_FLOAT32):
        return None
    kind: Kind = (
        passes.keeps(q, k, v, g, initial_state, materialize), bool(output_final_state), scale,
        dtype, shape, q.stride(), q.get_device(),
        k.dtype, k.shape, k.stride(), k.get_device(),
        v.dtype, v.shape, v.stride(), v.get_device(),
    )  # fmt: skip
    for x in (g, initial_state, cu_seqlens):
        kind += (None,) if x is None else (x.dtype, x.shape, x.stride(), x.get_device())
    changed = (g is not None and g.dtype == torch.float16) or not (_is_whole(initial_state) and _is_whole(cu_seqlens))
    return None if changed else kind


def _is_whole(x: torch.Tensor | None) -> bool:
    return x is None or x.is_contiguous()


def keep_of(kind: Kind) -> int:
    """What a forward of this kind keeps; see `passes.keeps`."""
    return cast("int", kind[0])


def known(kind: Kind) -> Passes | None:
    """What is known of calls of this kind; None if none has succeeded yet."""
    return _known.get(kind)


def note(kind: Kind) -> None:
    """Notes that a call of this kind has succeeded."""
    if len(_known) >= _KINDS:
        _known.clear()
    _known.setdefault(kind, Passes())
