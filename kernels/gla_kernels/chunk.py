"""Chunkwise GLA and linear attention on Triton kernels, with gradients: the package's entry points."""

from typing import Literal

import torch
from torch.utils.checkpoint import checkpoint

from gla_kernels.operators import eager
from gla_kernels.operators.checks import check_inputs, check_tensors, check_values
from gla_kernels.operators.kinds import keep_of, kind_of, launches_on_its_inputs, passes_of, remember
from gla_kernels.operators.passes import KEEP_NOTHING, keeps
from gla_kernels.operators.plain import refuse_tangents
from gla_kernels.tuning import autotuning, plan_for

# What a forward keeps for the backward; True is "states", and False is "checkpoints".
Materialize = bool | Literal["states", "checkpoints", "nothing"]

_compiling = torch.compiler.is_compiling


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """q, k and v in autocast's dtype if autocast is on; gates and states stay float32."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple([x.to(dtype) for x in tensors])


def state_kept(materialize: Materialize) -> bool:
    """Whether all states are kept. Raises ValueError."""
    if materialize is True or materialize is False:
        return materialize
    if materialize not in ("states", "checkpoints", "nothing"):
        raise ValueError(
            f"materialize: got {materialize!r}; it needs 'states', 'checkpoints', 'nothing', True or False"
        )
    return materialize == "states"


def chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    scale: float | None,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
    cu_seqlens: torch.Tensor | None,
    materialize: Materialize,
    chunk_size: int | None,
    check: bool,
    autotune: bool,
    per_head: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`chunk_gla` and its kin: g is [B, T, H, K], [B, T, H] if `per_head`, or None without gates."""
    if materialize is not True and materialize is not False:
        states = state_kept(materialize)
        check_tensors(q=q, k=k, v=v, optional={"g": g, "initial_state": initial_state})
        if materialize == "nothing" and keeps(q, k, v, g, initial_state, False) != KEEP_NOTHING:
            return _keeping_nothing(
                q, k, v, g, scale, initial_state, output_final_state, state_v_first, cu_seqlens, chunk_size, check,
                autotune, per_head,
            )  # fmt: skip
        materialize = states
    if state_v_first and (initial_state is not None or output_final_state):
        q, k, v = autocast(q, k, v)
        check_inputs(
            q, k, v, g, scale, initial_state, cu_seqlens, chunk_size, state_v_first=True, per_head=per_head
        )  # fmt: skip
        o, final = chunk(
            q, k, v, g, scale, None if initial_state is None else initial_state.mT, output_final_state, False,
            cu_seqlens, materialize, chunk_size, check, autotune, per_head,
        )  # fmt: skip
        return o, None if final is None else final.mT.contiguous()
    kind, tunes = None, chunk_size is None and (autotune or autotuning()) and not per_head and not _compiling()
    if chunk_size is None and not check and not tunes and not _compiling():
        kind = kind_of(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, materialize)
        if per_head and kind is not None:
            kind = (*kind, "gates per head")
    if kind is not None and (found := passes_of(kind)) is not None:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return eager.chunk(
            q, k, v, g, initial_state, cu_seqlens, scale, output_final_state, keep_of(kind), None, None, found
        )  # fmt: skip
    check_tensors(q=q, k=k, v=v, optional={"g": g, "initial_state": initial_state, "cu_seqlens": cu_seqlens})
    q, k, v = autocast(q, k, v)
    check_inputs(q, k, v, g, scale, initial_state, cu_seqlens, chunk_size, per_head=per_head)
    refuse_tangents(q, k, v, g, initial_state)
    if kind is not None and not launches_on_its_inputs(q, g, initial_state, cu_seqlens):
        kind = None
    if check and q.numel():
        check_values(g, q.shape[1], cu_seqlens)
    K = q.shape[-1]
    scale = K**-0.5 if scale is None else float(scale)
    keep = keeps(q, k, v, g, initial_state, materialize)
    if g is not None and g.dtype == torch.float16:  # which no kernel reads
        g = g.float()
    initial_state = None if initial_state is None else initial_state.float().contiguous()
    if q.shape[0] == 0 or q.shape[1] == 0:
        return of_no_tokens(q, k, v, g, initial_state, output_final_state, cu_seqlens)
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    tuned = None
    if tunes:
        tuned = plan_for(q, k, v, g, cu_seqlens, keep, materialize)
    outputs = eager.chunk(q, k, v, g, initial_state, cu_seqlens, scale, output_final_state, keep, chunk_size, tuned)
    if kind is not None:
        remember(kind)
    return outputs


def _keeping_nothing(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, scale: float | None,
    initial_state: torch.Tensor | None, output_final_state: bool, state_v_first: bool, cu_seqlens: torch.Tensor | None,
    *options: bool | int | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """`chunk` with a backward that runs it again, from checkpoints."""

    # Tensors are arguments, so that autograd sees if one has been changed before it is used again.
    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, initial: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        others = (scale, initial, output_final_state, state_v_first, cu_seqlens, False, *options)
        return chunk(q, k, v, g, *others)  # type: ignore[arg-type]

    found: tuple[torch.Tensor, torch.Tensor | None] = checkpoint(
        run, q, k, v, g, initial_state, cu_seqlens, use_reentrant=False, preserve_rng_state=False
    )
    return found


def of_no_tokens(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, initial_state: torch.Tensor | None,
    output_final_state: bool, cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """A call with B = 0 or T = 0, differentiable as any other: o is empty, and states stay as they are."""
    nothing = sum((x.sum() for x in (q, k, v, g) if x is not None), torch.zeros((), device=q.device))
    final = None
    if output_final_state:
        sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        shape = (sequences, q.shape[2], q.shape[3], v.shape[3])
        final = (q.new_zeros(shape, dtype=torch.float32) if initial_state is None else initial_state) + nothing.float()
    return v + nothing.to(v.dtype), final


def chunk_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,  # noqa: ARG001
    *,
    gv: torch.Tensor | None = None,
    materialize: Materialize = True,
    chunk_size: int | None = None,
    check: bool = False,
    autotune: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated linear attention: `S_t = diag(exp g_t) S_{t-1} + k_t^T v_t`, `o_t = scale * q_t S_t`.

    The arguments before the star are those of fla's function of this name, in its order.

    Args:
        q, k: queries and keys, [B, T, H, K], bfloat16, float16 or float32; any B and T, K <= 512. Batch, time and
            head may have any strides.
        v: values, [B, T, H, V], q's dtype; V <= 1024.
        g: gates, [B, T, H, K], natural logarithm, <= 0, in any of the dtypes above (float32 is best). 0, very negative
            values and -inf (a reset) are valid. A gate below -23.5 acts as -23.5: 6e-11 of the state is left.
        scale: factor on q; K ** -0.5 if None.
        initial_state: the state before the first token of each of N sequences, [N, H, K, V], float32 (best), bfloat16
            or float16; zero if None. N is B, or the number of packed sequences.
        output_final_state: whether to return the states after the last tokens.
        state_v_first: states are [N, H, V, K], those given and those returned; they are copied.
        cu_seqlens: boundaries of packed sequences, [N + 1], int32 or int64, on q's device: B is 1, and sequence n is
            tokens cu_seqlens[n] to cu_seqlens[n + 1]. A sequence may be empty. Tokens behind the last one are ignored:
            there o and all gradients are 0.
        cu_seqlens_cpu: a copy of cu_seqlens in the CPU's memory, which is not needed here.
        gv: gates of values, [B, T, H, V], as g; g may then be None. Columns of the state decay by them, as rows do by
            g: `S_t = diag(exp g_t) S_{t-1} diag(exp gv_t) + k_t^T v_t` (version 3 of the paper, eq. 12). Such calls run
            portable kernels of their own, which keep all states for the backward, or nothing for "checkpoints" too.
        materialize: what the forward keeps for the backward. "states" (or True): the state before every chunk, as the
            paper's Alg. 3 and 4 keep them, but written while o is computed, not before. "checkpoints" (or False): a
            state every 8 chunks or more, from which the others are recomputed. "nothing": all is recomputed from the
            inputs, as in the paper's Alg. 5 and 6, but in the backward, which runs the forward once more; no input may
            change in place until then, and transforms of functorch do not work. Less memory is more work; the gradients
            are the same up to float32 rounding.
        chunk_size: tokens per chunk: 16, 32, 64 or 128, if memory on chip allows it; chosen by shape if None.
        check: also check the values of g and cu_seqlens, which waits for the GPU.
        autotune: on the first call of its kind, time all candidate launch plans and store the fastest on disk
            (`autotune.plans_path`), which takes about a minute. GLA_AUTOTUNE=1 in the environment does this for every
            call. No effect if chunk_size is given or torch.compile traces the call. If false, a table has the plan.

    Returns:
        o, [B, T, H, V] in v's dtype, and the final states, [N, H, K, V] float32, or None.
        Both are differentiable, but only once, with respect to q, k, v, g, gv and initial_state. A NaN or infinity in
        an input stays in its sequence and head, but may appear from the first token of its chunk on.

    Under autocast, q, k and v are cast to its dtype.

    Raises:
        ValueError: a shape, dtype, device or chunk size that is not allowed, or a value under `check`; the message
            names the argument.
    """
    if gv is not None:
        from gla_kernels.value_gated.calls import chunk_value_gated

        return chunk_value_gated(
            q, k, v, g, gv, scale, initial_state, output_final_state, state_v_first, cu_seqlens, materialize,
            chunk_size, check,
        )  # fmt: skip
    if g is None:
        raise ValueError("g: got None; it needs a gate of q's shape (without a gate, use chunk_linear_attn)")
    return chunk(
        q, k, v, g, scale, initial_state, output_final_state, state_v_first, cu_seqlens, materialize, chunk_size, check,
        autotune,
    )  # fmt: skip


fused_chunk_gla = chunk_gla  # a name of fla's, which its layer may call


def chunk_linear_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,  # noqa: ARG001
    *,
    materialize: Materialize = True,
    chunk_size: int | None = None,
    check: bool = False,
    autotune: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Linear attention without a gate: `S_t = S_{t-1} + k_t^T v_t`, `o_t = scale * q_t S_t`; see `chunk_gla`."""
    return chunk(
        q, k, v, None, scale, initial_state, output_final_state, state_v_first, cu_seqlens, materialize, chunk_size,
        check, autotune,
    )  # fmt: skip
