"""Kinds of eager calls, and the recorded passes of each.

A kind is all that checks and decisions read: shapes, strides, dtypes, devices and options, but no values of tensors. So
a call of a kind that has succeeded before needs no checks, and its passes can be repeated (see `replay.py`). Its second
call is recorded: the kernels have been compiled and launched by then, and a shape that occurs once costs nothing. The
backwards of a kind of call have kinds of their own.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from gla_kernels.launching import cuda, native
from gla_kernels.launching.buffers import Inputs, readable
from gla_kernels.launching.call import Call, make_call
from gla_kernels.launching.recording import UnrecordableError, record
from gla_kernels.launching.replay import Replay
from gla_kernels.operators import passes
from gla_kernels.operators.plain import is_unwatched

Kind = tuple[object, ...]
_Run = Callable[..., Sequence[torch.Tensor | None]]

# Kinds that are remembered.
_KINDS = 512
# Attempts to record a pass, whose launches have to have been seen, at aligned addresses.
_ATTEMPTS = 3


class Pass:
    """A pass that is recorded when it is first repeated; it may turn out that it cannot be.

    `run(call, settings, *tensors)` makes its launches and returns its outputs.
    """

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._attempts = 0
        self._replay: Replay | None = None

    def __call__(self, settings: tuple[Any, ...], *tensors: torch.Tensor | None) -> Any:
        """Repeats the pass: its outputs, or None if it cannot be repeated."""
        if self._replay is None:
            self._record(settings, tensors)
        return None if self._replay is None else self._replay(*tensors)

    def _record(self, settings: tuple[Any, ...], tensors: Sequence[Any]) -> None:
        functions, helpers = cuda.functions(), native.functions()
        if functions is None or helpers is None or self._attempts >= _ATTEMPTS:
            return
        self._attempts += 1
        q, _, v, g, cu_seqlens = tensors[:5]
        scale, *_, chunk_size, plan = settings
        call = make_call(q, v, g, cu_seqlens, scale, chunk_size, plan)
        try:
            recording = record(call, q.get_device(), tensors, lambda call, *like: self._run(call, settings, *like))
        except UnrecordableError as error:
            if not error.for_now:
                self._attempts = _ATTEMPTS
            return
        self._replay = Replay(recording, q, functions, helpers.repeat)


def run_forward(
    call: Call, settings: tuple[Any, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None, initial_state: torch.Tensor | None,
) -> passes.Outputs:  # fmt: skip
    """The forward of a call of the chunk functions."""
    _, output_final_state, keep, _, _ = settings
    inputs = Inputs.of(call, q, k, v, g, cu_seqlens)
    return passes.launch_forward(call, inputs, initial_state, output_final_state, keep)


def _run_backward(
    call: Call, settings: tuple[Any, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None, kept: torch.Tensor, flags: torch.Tensor, do: torch.Tensor,
    dfinal: torch.Tensor | None,
) -> Sequence[torch.Tensor | None]:  # fmt: skip
    _, needs_dinitial, needs_dg, keep, _, _ = settings
    after = None if dfinal is None else dfinal.contiguous()
    inputs = Inputs.of(call, q, k, v, g, cu_seqlens)
    do, kept, flags = readable(call, do), kept.contiguous(), flags.contiguous()
    return passes.launch_backward(call, inputs, do, after, kept, flags, needs_dinitial, needs_dg, keep)


class Passes:
    """The passes of one kind of call: its forward, and a backward for each kind of output gradients.

    Called with settings and tensors, which are the arguments of `forward` and `_run_backward`.
    """

    def __init__(self, forward: _Run = run_forward) -> None:
        self.forward = Pass(forward)
        self._backwards: dict[tuple[object, ...], Pass] = {}

    def backward(self, settings: tuple[Any, ...], *tensors: torch.Tensor | None) -> Any:
        """Repeats a backward: dq, dk, dv, and dg and the gradient of the initial states or None; None if it cannot."""
        # Of saved tensors too: hooks may have changed them.
        described = _describe(*tensors)
        if described is None:
            return None
        _, needs_dinitial, needs_dg, *_ = settings
        kind = described, needs_dinitial, needs_dg
        found = self._backwards.get(kind)
        if found is not None:
            return found(settings, *tensors)
        # The next one: the kernels of this one may not have been launched yet.
        if len(self._backwards) < _KINDS:
            self._backwards[kind] = Pass(_run_backward)
        return None


def _describe(*tensors: Any) -> bytes | None:
    """Shapes, strides, dtypes and devices of tensors or None; None if one is not plain, or no tensor."""
    helpers = native.functions()
    return None if helpers is None else helpers.describe(*tensors)


_passes_by_kind: dict[Kind, Passes] = {}


def kind_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, scale: float | None,
    initial_state: torch.Tensor | None, output_final_state: bool, cu_seqlens: torch.Tensor | None, materialize: bool,
) -> Kind | None:  # fmt: skip
    """The kind of an eager call on plain tensors; None for other calls. The arguments need not have been checked."""
    # First, because a mode would see what describing tensors calls, and what it raises would be lost.
    if not is_unwatched():
        return None
    tensors = _describe(q, k, v, g, initial_state, cu_seqlens)
    if tensors is None or torch.is_autocast_enabled(q.device.type):
        return None
    if scale is not None and type(scale) is not float:
        return None
    return passes.keeps(q, k, v, g, initial_state, materialize), bool(output_final_state), scale, tensors


def keep_of(kind: Kind) -> int:
    """What a forward of this kind keeps; see `passes.keeps`."""
    return cast("int", kind[0])


def passes_of(kind: Kind) -> Passes | None:
    """The passes of calls of this kind; None if none has succeeded yet."""
    return _passes_by_kind.get(kind)


def launches_on_its_inputs(
    q: torch.Tensor, g: torch.Tensor | None, initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None
) -> bool:
    """Whether a call gives its tensors to the operator as they are: no dtype or layout changed."""
    whole = all(x is None or x.is_contiguous() for x in (initial_state, cu_seqlens))
    cast = initial_state is not None and initial_state.dtype != torch.float32
    return whole and not cast and q.dtype != torch.float16 and (g is None or g.dtype != torch.float16)


def remember(kind: Kind, forward: _Run = run_forward) -> None:
    """Notes that a call of this kind, which launches on its inputs, has succeeded. `forward` makes its launches."""
    if len(_passes_by_kind) >= _KINDS:
        _passes_by_kind.clear()
    _passes_by_kind.setdefault(kind, Passes(forward))
