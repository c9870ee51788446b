# ruff: noqa: ARG001
"""The recurrence token by token as PyTorch operators: one returns the final states, one updates states in place."""

from functools import cache

import torch
from torch import library

from gla_kernels.launching.buffers import Inputs
from gla_kernels.launching.call import arranged, make_call
from gla_kernels.launching.direct import launcher
from gla_kernels.launching.plans import Tile
from gla_kernels.limits import padded
from gla_kernels.operators.passes import device_of
from gla_kernels.portable.launches import clear_tails
from gla_kernels.portable.recurrence import gla_recurrent_kernel

# Elements of the state per program: 16 registers of each of 128 threads. Few, so that decoding fills a GPU.
_STATE_ELEMENTS = 2048


@cache
def recurrent_tile(K: int, V: int) -> Tile:
    """The kernel's tile: all key columns, and some value columns."""
    return Tile(padded(K), min(padded(V), max(8, _STATE_ELEMENTS // padded(K))), 4, 1)


def _run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, initial: torch.Tensor | None,
    final: torch.Tensor | None, cu_seqlens: torch.Tensor | None, scale: float, state_v_first: bool,
) -> torch.Tensor:  # fmt: skip
    """Launches the kernel: returns o, and fills `final`, which may be `initial`, if it is not None."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    g = g if g is None or g.stride(-1) == 1 else g.contiguous()
    (B, T, H, K), V = q.shape, v.shape[-1]
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    tile = recurrent_tile(K, V)
    constants = {
        "K": K, "V": V, "BK": tile.block_k, "BV": tile.block_v,
        "GATED": g is not None, "VARLEN": cu_seqlens is not None, "HAS_INITIAL": initial is not None,
        "STORE_FINAL": final is not None, "V_FIRST": state_v_first,
    }  # fmt: skip
    launch = launcher(gla_recurrent_kernel, tuple(constants.items()), tuple(tile.options.items()))
    inputs = Inputs(q, k, v, g, cu_seqlens)
    with device_of(q):
        arguments = inputs.arguments | {"o": o, "initial": initial, "final": final, "scale": scale, "T": T, "H": H}
        launch((sequences * H * -(-V // tile.block_v),), arranged(gla_recurrent_kernel, arguments))
        if cu_seqlens is not None:
            clear_tails(make_call(q, v, g, cu_seqlens, scale, None, None), inputs, o)
    return o


def run_recurrent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, initial: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None, scale: float, output_final_state: bool, state_v_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns o and the final states, which are an empty tensor if not requested."""
    final = _new_state(q, v, cu_seqlens, output_final_state, state_v_first)
    o = _run(q, k, v, g, initial, final if output_final_state else None, cu_seqlens, scale, state_v_first)
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
