# ruff: noqa: ARG001
"""The recurrence token by token as PyTorch operators: one returns the final states, one updates states in place."""

from collections.abc import Callable
from typing import Any

import torch
from torch import library

from gla_kernels.launching.buffers import Inputs, gates_by_kind, rows, settled
from gla_kernels.launching.call import Call, make_call
from gla_kernels.operators.passes import device_of
from gla_kernels.portable.launches import run_recurrence


def _launch(
    call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None,
    initial: torch.Tensor | None, final: torch.Tensor | None, cu_seqlens: torch.Tensor | None, state_v_first: bool,
) -> torch.Tensor:  # fmt: skip
    """Launches the kernel: returns o, and fills `final`, which may be `initial`, if it is not None."""
    q, k, v = rows(q), rows(k), rows(v)
    per_channel, per_head = gates_by_kind(call, g)
    gates = None if per_channel is None else rows(per_channel)
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    run_recurrence(call, Inputs(q, k, v, gates, cu_seqlens, per_head), o, initial, final, state_v_first)
    return o


def repeatable(in_place: bool, state_v_first: bool) -> Callable[..., tuple[torch.Tensor | None, ...]]:
    """The forward of such calls as `kinds.py` repeats it: o and, if asked for and not in place, the final states."""

    def run(
        call: Call, settings: tuple[Any, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        g: torch.Tensor | None, cu_seqlens: torch.Tensor | None, initial: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
        wanted = settings[1] and not in_place
        final = _new_state(q, v, cu_seqlens, True, state_v_first) if wanted else None
        filled = initial if in_place else final
        return _launch(call, q, k, v, g, initial, filled, cu_seqlens, state_v_first), final

    return run


def _run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, initial: torch.Tensor | None,
    final: torch.Tensor | None, cu_seqlens: torch.Tensor | None, scale: float, state_v_first: bool,
) -> torch.Tensor:  # fmt: skip
    with device_of(q):
        call = make_call(q, v, g, cu_seqlens, scale, None, None)
        return _launch(call, q, k, v, g, initial, final, cu_seqlens, state_v_first)


def run_recurrent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, initial: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None, scale: float, output_final_state: bool, state_v_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns o and the final states, which are an empty tensor if not requested."""
    final = _new_state(q, v, cu_seqlens, output_final_state, state_v_first)
    wanted = final if output_final_state else None
    o = _run(q, k, v, g, settled(initial), wanted, settled(cu_seqlens), scale, state_v_first)
    return o, final


def run_recurrent_in_place(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, state: torch.Tensor,
    cu_seqlens: torch.Tensor | None, scale: float, state_v_first: bool,
) -> torch.Tensor:  # fmt: skip
    """Returns o; `state` holds the states before the first token and then those after the last one."""
    return _run(q, k, v, g, state, state, cu_seqlens, scale, state_v_first)


def _new_state(
    q: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None, wanted: bool, state_v_first: bool
) -> torch.Tensor:
    if not wanted:
        return q.new_empty(0, dtype=torch.float32)
    (B, _, H, K), V = q.shape, v.shape[-1]
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return q.new_empty((sequences, H, *((V, K) if state_v_first else (K, V))), dtype=torch.float32)


def _fake_recurrent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, initial: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None, scale: float, output_final_state: bool, state_v_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return v.new_empty(v.shape), _new_state(q, v, cu_seqlens, output_final_state, state_v_first)


def _fake_recurrent_in_place(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, state: torch.Tensor,
    cu_seqlens: torch.Tensor | None, scale: float, state_v_first: bool,
) -> torch.Tensor:  # fmt: skip
    return v.new_empty(v.shape)


_LIBRARY = library.Library("gla_kernels", "FRAGMENT")
_LIBRARY.define(
    "recurrent(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? initial, Tensor? cu_seqlens, float scale,"
    " bool output_final_state, bool state_v_first) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "recurrent_in_place(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor(a!) state, Tensor? cu_seqlens, float scale,"
    " bool state_v_first) -> Tensor"
)
for _device in ("CPU", "CUDA"):  # on a CPU: Triton's interpreter
    _LIBRARY.impl("recurrent", run_recurrent, _device)
    _LIBRARY.impl("recurrent_in_place", run_recurrent_in_place, _device)
library.register_fake("gla_kernels::recurrent", _fake_recurrent, lib=_LIBRARY)
library.register_fake("gla_kernels::recurrent_in_place", _fake_recurrent_in_place, lib=_LIBRARY)

recurrent = torch.ops.gla_kernels.recurrent.default
recurrent_in_place = torch.ops.gla_kernels.recurrent_in_place.default
