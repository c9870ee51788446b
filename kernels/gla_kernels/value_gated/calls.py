"""`chunk_gla` with gates of values: arguments as torch's users give them."""

import torch

from gla_kernels.chunk import Materialize, autocast, of_no_tokens, state_kept
from gla_kernels.operators.checks import DTYPES, check_inputs, check_tensors, check_values
from gla_kernels.operators.passes import KEEP_NOTHING, keeps
from gla_kernels.operators.plain import refuse_tangents
from gla_kernels.value_gated.operators import forward


def _check_gates_of_values(gv: torch.Tensor, v: torch.Tensor) -> None:
    if not isinstance(gv, torch.Tensor):
        raise ValueError(f"gv: got {type(gv).__name__}; it needs a tensor of v's shape {tuple(v.shape)}, or None")
    if gv.shape != v.shape:
        raise ValueError(f"gv: got shape {tuple(gv.shape)}; it needs v's shape {tuple(v.shape)}")
    if gv.dtype not in DTYPES:
        raise ValueError(f"gv: got {gv.dtype}; it needs float32 (best), bfloat16 or float16")
    if gv.device != v.device:
        raise ValueError(f"gv: got device {gv.device}; it needs v's device {v.device}")


def chunk_value_gated(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, gv: torch.Tensor, scale: float | None,
    initial_state: torch.Tensor | None, output_final_state: bool, state_v_first: bool,
    cu_seqlens: torch.Tensor | None, materialize: Materialize, chunk_size: int | None, check: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """`S_t = (exp(g_t)^T exp(gv_t)) * S_{t-1} + k_t^T v_t` (version 3 of the paper, equations 12 to 17).

    Arguments as of `chunk_gla`; g may be None. All chunks have 32 tokens, and what is kept is all states or nothing.
    """
    keeps_states = state_kept(materialize)
    check_tensors(q=q, k=k, v=v, optional={"g": g, "initial_state": initial_state, "cu_seqlens": cu_seqlens})
    q, k, v = autocast(q, k, v)
    check_inputs(q, k, v, g, scale, initial_state, cu_seqlens, None, state_v_first=state_v_first)
    _check_gates_of_values(gv, v)
    if chunk_size is not None:
        raise ValueError(f"chunk_size: got {chunk_size} beside gv; it needs None")
    refuse_tangents(q, k, v, g, gv, initial_state)
    if check and q.numel():
        check_values(g, q.shape[1], cu_seqlens)
        check_values(gv, q.shape[1], cu_seqlens, "gv")
    initial = None
    if initial_state is not None:
        initial = (initial_state.mT if state_v_first else initial_state).float().contiguous()
    if q.shape[0] == 0 or q.shape[1] == 0:
        o, final = of_no_tokens(q, k, v + gv.to(v.dtype) * 0, g, initial, output_final_state, cu_seqlens)
    else:
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        keep = keeps_states and keeps(q, k, v, g, initial, True, gv) != KEEP_NOTHING
        marks = None if cu_seqlens is None else cu_seqlens.contiguous()
        o, final, _ = forward(q, k, v, g, gv, initial, marks, scale, keep)
    if final is None or not output_final_state:
        return o, None
    return o, final.mT.contiguous() if state_v_first else final
