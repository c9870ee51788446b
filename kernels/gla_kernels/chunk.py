"""Chunkwise GLA and linear attention on Triton kernels, with gradients: the package's main face."""

from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from gla_kernels.backward import gla_backward_kernel
from gla_kernels.checks import check_inputs
from gla_kernels.forward import gla_forward_kernel
from gla_kernels.launch import LaunchPlan, Operands, Tile, exact_tile, operands, plan
from gla_kernels.limits import padded

_TL_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@dataclass(frozen=True)
class Call:
    """Everything about a call but its tensors."""

    B: int
    T: int
    H: int
    K: int
    V: int
    gated: bool
    scale: float
    plan: LaunchPlan
    operands: Operands

    @property
    def heads(self) -> int:
        return self.B * self.H

    @property
    def chunks(self) -> int:
        return triton.cdiv(self.T, self.plan.chunk_size)

    @property
    def segment_chunks(self) -> int:
        """Chunks between checkpoints when states are not materialized.

        A checkpoint is float32 and kept; the states of one segment are recomputed into scratch of the operands'
        type. The sum of both is least near segments of sqrt(2 * chunks) chunks.
        """
        return max(1, isqrt(2 * self.chunks))

    def constants(self, tile: Tile, exact: bool) -> dict[str, Any]:
        """The kernels' common compile-time arguments."""
        BK, C = padded(self.K), self.plan.chunk_size
        return {
            "K": self.K,
            "V": self.V,
            "BK": BK,
            "BV": tile.block_v,
            "C": C,
            "DOT": _TL_DTYPE[self.operands.dtype],
            "PRECISION": self.operands.precision,
            "GATED": self.gated,
            "EXACT": exact,
            "MASKED": self.T % C != 0 or self.K != BK or self.V % tile.block_v != 0,
            "STAGES": tile.stages,
            "num_warps": tile.warps,
        }

    def kernels(self, tile: Tile) -> list[tuple[Tile, bool]]:
        """The launches of a pass: the plain kernel, then the exact one for the sequences whose flag is up."""
        return [(tile, False), (exact_tile(tile), True)] if self.gated else [(tile, False)]


def _run_forward(
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    flags: torch.Tensor,
    *,
    begin: int,
    end: int,
    o: torch.Tensor | None = None,
    initial: torch.Tensor | None = None,
    final: torch.Tensor | None = None,
    states: torch.Tensor | None = None,
    checkpoints: torch.Tensor | None = None,
) -> None:
    """Runs the forward kernels over tokens begin..end; an output that is None is not computed."""
    for tile, exact in call.kernels(call.plan.forward):
        gla_forward_kernel[(call.heads * triton.cdiv(call.V, tile.block_v),)](
            q, k, v, g, o, initial, final, states, checkpoints, flags,
            call.scale, begin, end, call.T, call.H, call.heads,
            triton.cdiv(end - begin, call.plan.chunk_size), call.segment_chunks,
            HAS_INITIAL=initial is not None, STORE_O=o is not None, STORE_FINAL=final is not None,
            STORE_STATES=states is not None, STORE_CHECKPOINTS=checkpoints is not None,
            **call.constants(tile, exact),
        )  # fmt: skip


class _ChunkGLA(torch.autograd.Function):
    """Forward and backward of the chunkwise form; see `chunk_gla`."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor | None,
        initial_state: torch.Tensor | None,
        call: Call,
        materialize: bool,
        needs_grad: bool,
        output_final_state: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        o = torch.empty_like(v)
        final = None
        if output_final_state:
            final = q.new_empty((call.B, call.H, call.K, call.V), dtype=torch.float32)
        flags = torch.zeros(call.heads if call.gated else 1, dtype=torch.int32, device=q.device)
        states = checkpoints = None
        if needs_grad and materialize:
            states = q.new_empty((call.heads, call.chunks, call.K, call.V), dtype=call.operands.dtype)
        elif needs_grad:
            segments = triton.cdiv(call.chunks, call.segment_chunks)
            checkpoints = q.new_empty((segments, call.heads, call.K, call.V), dtype=torch.float32)
        _run_forward(
            call, q, k, v, g, flags, begin=0, end=call.T, o=o, initial=initial_state, final=final,
            states=states, checkpoints=checkpoints,
        )  # fmt: skip
        ctx.call = call
        ctx.save_for_backward(q, k, v, g, flags, states, checkpoints)
        ctx.has_initial = initial_state is not None
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        do, dfinal = grads
        call: Call = ctx.call
        q, k, v, g, flags, states, checkpoints = ctx.saved_tensors
        C = call.plan.chunk_size
        do = torch.zeros_like(v) if do is None else do.contiguous()
        parts = triton.cdiv(call.V, call.plan.backward.block_v)

        def part_buffer(x: torch.Tensor) -> torch.Tensor:
            """Where the blocks of value columns put their shares of a gradient that sums over V."""
            return torch.empty_like(x) if parts == 1 else x.new_empty((parts, *x.shape), dtype=torch.float32)

        dq, dk, dv = part_buffer(q), part_buffer(k), torch.empty_like(v)
        dg = part_buffer(g) if g is not None else None
        dstate = None if dfinal is None else dfinal.contiguous()
        if states is not None:
            pieces = [(0, call.T, states)]
        else:
            length = call.segment_chunks * C
            scratch = q.new_empty((call.heads, call.segment_chunks, call.K, call.V), dtype=call.operands.dtype)
            pieces = [(begin, min(begin + length, call.T), scratch) for begin in range(0, call.T, length)]
        for index in reversed(range(len(pieces))):
            begin, end, piece_states = pieces[index]
            if checkpoints is not None:
                _run_forward(
                    call, q, k, v, g, flags, begin=begin, end=end, initial=checkpoints[index], states=piece_states
                )  # fmt: skip
            dbefore = None
            if begin > 0 or ctx.has_initial:
                dbefore = q.new_empty((call.B, call.H, call.K, call.V), dtype=torch.float32)
            for tile, exact in call.kernels(call.plan.backward):
                gla_backward_kernel[(call.heads * parts,)](
                    q, k, v, g, do, piece_states, flags, dstate, dq, dk, dv, dg, dbefore,
                    call.scale, begin, end, call.T, call.H, call.heads, triton.cdiv(end - begin, C),
                    HAS_DFINAL=dstate is not None, STORE_DINITIAL=dbefore is not None,
                    **call.constants(tile, exact),
                )  # fmt: skip
            dstate = dbefore
        if parts > 1:
            dq, dk = dq.sum(0).to(q.dtype), dk.sum(0).to(k.dtype)
            dg = None if g is None or dg is None else dg.sum(0).to(g.dtype)
        return dq, dk, dv, dg, dstate if ctx.has_initial else None, None, None, None, None


def _chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    scale: float | None,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    materialize: bool,
    chunk_size: int | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    check_inputs(q, k, v, g, scale, initial_state, chunk_size)
    B, T, H, K = q.shape
    V = v.shape[-1]
    call = Call(
        B, T, H, K, V,
        gated=g is not None,
        scale=K**-0.5 if scale is None else float(scale),
        plan=plan(K, V, q.dtype, chunk_size),
        operands=operands(q.dtype),
    )  # fmt: skip
    tensors = [x if x is None else x.contiguous() for x in (q, k, v, g, initial_state)]
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    # Triton launches on the current device, which need not be the tensors'; autograd sees to it in the backward.
    with torch.cuda.device_of(q):
        o, final = _ChunkGLA.apply(*tensors, call, materialize, needs_grad, output_final_state)
    return o, final


def chunk_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    *,
    materialize: bool = True,
    chunk_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated linear attention: `S_t = diag(exp g_t) S_{t-1} + k_t^T v_t`, `o_t = scale * q_t S_t`.

    Args:
        q, k: queries and keys, [B, T, H, K], bfloat16, float16 or float32; any T >= 1, K <= 256.
        v: values, [B, T, H, V], q's dtype; V <= 256.
        g: gates, [B, T, H, K], natural logarithm, <= 0, any dtype of the above (float32 is best). 0, very negative
            values and -inf (a reset) are all right.
        scale: factor on q; K ** -0.5 if None.
        initial_state: the state before the first token, [B, H, K, V] float32; zero if None.
        output_final_state: whether to return the state after the last token.
        materialize: keep the state before every chunk for the backward pass (paper, Alg. 3 and 4). Without it only
            a state every sqrt(2 T / C) chunks is kept and the others are recomputed (Alg. 5 and 6's trade: less
            memory, more work); the gradients are the same bits.
        chunk_size: rows of a chunk, 16, 32, 64 or 128, as far as shared memory allows; chosen by shape if None.

    Returns:
        o, [B, T, H, V] in v's dtype, and the final state, [B, H, K, V] float32, or None.
        Both are differentiable, once, with respect to q, k, v, g and initial_state. A NaN or infinity in an input
        stays in its sequence and head, but may show from the first token of its chunk on.

    Raises:
        ValueError: a shape, dtype, device or chunk size that is not allowed; the message names the argument.
    """
    if g is None:
        raise ValueError("g: got None; it needs a gate of q's shape (without a gate: chunk_linear_attn)")
    return _chunk(q, k, v, g, scale, initial_state, output_final_state, materialize, chunk_size)


def chunk_linear_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    *,
    materialize: bool = True,
    chunk_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Linear attention without a gate: `S_t = S_{t-1} + k_t^T v_t`, `o_t = scale * q_t S_t`; see `chunk_gla`."""
    return _chunk(q, k, v, None, scale, initial_state, output_final_state, materialize, chunk_size)
