"""Token by token, for decoding and short inputs: `fused_recurrent_gla`, with the arguments of fla's function."""

import torch

from gla_kernels.chunk import autocast, chunk, chunk_gla
from gla_kernels.limits import MAX_RECURRENT_TOKENS
from gla_kernels.operators import recurrent
from gla_kernels.operators.checks import check_inputs, check_tensors
from gla_kernels.operators.kinds import kind_of, passes_of, remember
from gla_kernels.operators.passes import KEEP_NOTHING, keeps
from gla_kernels.operators.plain import is_plain, refuse_tangents

_compiling = torch.compiler.is_compiling


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
        gv: gates of values, as of `chunk_gla`, whose kernels then compute the call; None for none.
        reverse: recurrence from the last token to the first; not supported.
        initial_state: the state before the first token of each sequence, [N, H, K, V], or [N, H, V, K] if
            `state_v_first`, in float32, bfloat16 or float16; zero if None.
        output_final_state: whether to return the states after the last tokens.
        inplace_final_state: write the states after the last tokens to `initial_state`, in its dtype, and return it.

    Returns:
        o, [B, T, H, V] in v's dtype, and the final states, in float32 unless in place, or None.

    Raises:
        ValueError: as `chunk_gla`; and for reverse, or a state in place that is missing, not contiguous or needs a
            gradient.
    """
    return token_by_token(
        q, k, v, gk, gv, scale, initial_state, output_final_state, reverse, state_v_first, cu_seqlens,
        inplace_final_state,
    )  # fmt: skip


def token_by_token(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gk: torch.Tensor | None,
    gv: torch.Tensor | None,
    scale: float | None,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    reverse: bool,
    state_v_first: bool,
    cu_seqlens: torch.Tensor | None,
    inplace_final_state: bool,
    per_head: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`fused_recurrent_gla` and its kin: gk is [B, T, H, K], [B, T, H] if `per_head`, or None without gates."""
    named = "g" if per_head else "gk"  # what the caller calls it
    if reverse:
        raise ValueError("reverse: got True; it needs False (only recurrences from the first token on are supported)")
    kind = None
    if gv is None and not _compiling():
        kind = kind_of(q, k, v, gk, scale, initial_state, output_final_state, cu_seqlens, True)
    if kind is not None:
        kind = (*kind, "token by token", per_head, state_v_first, inplace_final_state)
        if (found := passes_of(kind)) is not None:
            settings = (q.shape[-1] ** -0.5 if scale is None else scale, output_final_state, KEEP_NOTHING, None, None)
            made = found.forward(settings, q, k, v, gk, cu_seqlens, initial_state)
            if made is not None:
                return made[0], initial_state if inplace_final_state else made[1]
    check_tensors(
        q=q, k=k, v=v, optional={named: gk, "gv": gv, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    )  # fmt: skip
    trains = keeps(q, k, v, gk, initial_state, True, gv) != KEEP_NOTHING
    if inplace_final_state and (initial_state is None or not initial_state.is_contiguous() or trains):
        raise ValueError(
            "inplace_final_state: got True; it needs a contiguous initial_state, and tensors without gradients"
        )
    sequences = 1 if cu_seqlens is None else max(cu_seqlens.numel() - 1, 1)
    final: torch.Tensor | None
    # The chunk functions also refuse what has no four dimensions, and know what to do without tokens.
    if trains or gv is not None or q.dim() != 4 or not q.numel() or q.shape[1] > MAX_RECURRENT_TOKENS * sequences:
        output_final_state = output_final_state or inplace_final_state
        if gv is None:
            o, final = chunk(
                q, k, v, gk, scale, initial_state, output_final_state, state_v_first, cu_seqlens, True, None, False,
                False, per_head,
            )  # fmt: skip
        else:
            check_inputs(q, k, v, gk, scale, initial_state, cu_seqlens, None, state_v_first=state_v_first, gates="gk")
            o, final = chunk_gla(
                q, k, v, gk, scale, initial_state, output_final_state, state_v_first, cu_seqlens, gv=gv
            )  # fmt: skip
        if not inplace_final_state or initial_state is None or final is None:
            return o, final
        return o, initial_state.copy_(final)
    if any(x is not None and not x.is_contiguous() for x in (initial_state, cu_seqlens)):
        kind = None  # tensors are copied first, which is not repeated
    q, k, v = autocast(q, k, v)
    check_inputs(
        q, k, v, gk, scale, initial_state, cu_seqlens, None, state_v_first=state_v_first, gates=named, per_head=per_head
    )
    refuse_tangents(q, k, v, gk, initial_state)
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    plain = is_plain(q, k, v, gk, initial_state, cu_seqlens)
    if inplace_final_state and initial_state is not None:
        in_place = recurrent.run_recurrent_in_place if plain else recurrent.recurrent_in_place
        o, final = in_place(q, k, v, gk, initial_state, cu_seqlens, scale, state_v_first), initial_state
    else:
        run = recurrent.run_recurrent if plain else recurrent.recurrent
        initial_state = None if initial_state is None else initial_state.contiguous()
        o, final = run(q, k, v, gk, initial_state, cu_seqlens, scale, output_final_state, state_v_first)
        final = final if output_final_state else None
    if kind is not None:
        remember(kind, recurrent.repeatable(inplace_final_state, state_v_first))
    return o, final
