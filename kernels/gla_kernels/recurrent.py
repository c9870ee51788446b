# ruff: noqa: ARG001
"""Token by token, for decoding and short inputs: `fused_recurrent_gla`, with the arguments of fla's function."""

from functools import cache
from typing import Any

import torch
from torch import library

from gla_kernels.chunk import chunk_gla, chunk_linear_attn
from gla_kernels.launching.buffers import Inputs
from gla_kernels.launching.call import arranged, make_call
from gla_kernels.launching.direct import launcher
from gla_kernels.launching.plans import Tile
from gla_kernels.limits import MAX_RECURRENT_TOKENS, padded
from gla_kernels.operators.checks import check_inputs
from gla_kernels.operators.passes import KEEP_NOTHING, device_of, keeps
from gla_kernels.operators.plain import is_plain
from gla_kernels.portable.launches import clear_tails

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
    from gla_kernels.portable.recurrence import gla_recurrent_kernel

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
    with device_of(q):
        arguments = Inputs(q, k, v, g, cu_seqlens).arguments
        arguments |= {"o": o, "initial": initial, "final": final, "scale": scale, "T": T, "H": H}
        launch((sequences * H * -(-V // tile.block_v),), arranged(gla_recurrent_kernel, arguments))
        if cu_seqlens is not None:
            clear_tails(make_call(q, v, g, cu_seqlens, scale, None, None), Inputs(q, k, v, g, cu_seqlens), o)
    return o


def _recurrent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, initial: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None, scale: float, output_final_state: bool, state_v_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns o and the final states, which are an empty tensor if not requested."""
    final = _new_state(q, v, cu_seqlens, output_final_state, state_v_first)
    o = _run(q, k, v, g, initial, final if output_final_state else None, cu_seqlens, scale, state_v_first)
    return o, final


def _recurrent_in_place(
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
    _LIBRARY.impl("recurrent", _recurrent, _device)
    _LIBRARY.impl("recurrent_in_place", _recurrent_in_place, _device)
library.register_fake("gla_kernels::recurrent", _fake_recurrent, lib=_LIBRARY)
library.register_fake("gla_kernels::recurrent_in_place", _fake_recurrent_in_place, lib=_LIBRARY)

_operator = torch.ops.gla_kernels.recurrent.default
_operator_in_place = torch.ops.gla_kernels.recurrent_in_place.default


def fused_recurrent_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    inplace_final_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`chunk_gla` token by token, for decoding and short inputs; with the arguments of fla's function of this name.

    If a gradient is needed, or sequences have more than 64 tokens (on average, if packed), the chunk kernels compute
    the same, which is faster.

    Args:
        q, k, v, scale, cu_seqlens: as for `chunk_gla`.
        gk: gates of keys, as g of `chunk_gla`; None for linear attention without gates.
        gv, reverse: gates of values and recurrence from the last token to the first; not supported.
        initial_state: the state before the first token of each sequence, [N, H, K, V], or [N, H, V, K] if
            `state_v_first`, in float32, bfloat16 or float16; zero if None.
        output_final_state: whether to return the states after the last tokens.
        inplace_final_state: write the states after the last tokens to `initial_state`, in its dtype, and return it.

    Returns:
        o, [B, T, H, V] in v's dtype, and the final states, in float32 unless in place, or None.

    Raises:
        ValueError: as `chunk_gla`; and for gv, reverse, or a state in place that is missing, not contiguous or needs a
            gradient.
    """
    if gv is not None:
        raise ValueError("gv: got a tensor; it needs None (gates of values are not supported)")
    if reverse:
        raise ValueError("reverse: got True; it needs False (only recurrences from the first token on are supported)")
    trains = keeps(q, k, v, gk, initial_state, True) != KEEP_NOTHING
    if inplace_final_state and (initial_state is None or not initial_state.is_contiguous() or trains):
        raise ValueError(
            "inplace_final_state: got True; it needs a contiguous initial_state, and tensors without gradients"
        )
    sequences = 1 if cu_seqlens is None else max(cu_seqlens.numel() - 1, 1)
    if trains or q.dim() != 4 or q.shape[1] > MAX_RECURRENT_TOKENS * sequences:
        chunked: Any = chunk_linear_attn if gk is None else chunk_gla
        gates = () if gk is None else (gk,)
        o, final = chunked(
            q, k, v, *gates, scale, initial_state, output_final_state or inplace_final_state, state_v_first, cu_seqlens
        )
        if not inplace_final_state or initial_state is None:
            return o, final
        return o, initial_state.copy_(final)
    check_inputs(q, k, v, gk, scale, initial_state, cu_seqlens, None, state_v_first=state_v_first, gates="gk")
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    plain = is_plain(q, k, v, gk, initial_state, cu_seqlens)
    if inplace_final_state and initial_state is not None:
        in_place = _recurrent_in_place if plain else _operator_in_place
        return in_place(q, k, v, gk, initial_state, cu_seqlens, scale, state_v_first), initial_state
    run = _recurrent if plain else _operator
    initial_state = None if initial_state is None else initial_state.contiguous()
    o, final = run(q, k, v, gk, initial_state, cu_seqlens, scale, output_final_state, state_v_first)
    return o, final if output_final_state else None
