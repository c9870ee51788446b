# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
"""Sums of a gate per head from the start of each chunk, in log2, of which kernels make decays."""

import triton
import triton.language as tl

from gla_kernels.portable.tiles import first_slot, locate, plain_gates, wait_for_previous_kernel


@triton.jit
def sequence_of(cu_seqlens, slot, N, rows: tl.constexpr):
    """The packed sequence of piece `slot`, with `rows` tokens per piece: the last whose first slot is not beyond it."""
    n = slot * 0
    beyond = n + N
    while beyond - n > 1:
        middle = (n + beyond) // 2
        late = tl.load(cu_seqlens + middle).to(tl.int32) // rows + middle > slot
        beyond = tl.where(late, middle, beyond)
        n = tl.where(late, n, middle)
    return n


@triton.jit(do_not_specialize=["T", "H", "N"])
def head_gate_sums(
    gates,  # [B, T, H] float32, bfloat16 or float16, any strides: natural log, <= 0
    sums,  # [B, H, T] float32 or float64: of the gates of a chunk up to each token, in log2
    cu_seqlens,  # [N + 1] int32 or int64: boundaries of packed sequences
    gates_b, gates_t, gates_h,
    T,
    H,
    N,
    BV: tl.constexpr,  # heads per program
    C: tl.constexpr,
    VARLEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program handles one chunk and BV heads."""
    wait_for_previous_kernel(PDL)
    slot = tl.program_id(0)
    n = sequence_of(cu_seqlens, slot, N, C) if VARLEN else slot // ((T + C - 1) // C)
    b, begin, length = locate(cu_seqlens, n, T, VARLEN)
    offset = (slot - first_slot(n, begin, length, C, VARLEN)) * C
    rows = tl.arange(0, C)
    heads = tl.program_id(1) * BV + tl.arange(0, BV)
    inside = (rows < length - offset)[:, None] & (heads < H)[None, :]
    t = tl.cast(begin + offset, tl.int64) + rows
    row = tl.cast(b, tl.int64)
    there = row * gates_b + t[:, None] * gates_t + heads.to(tl.int64)[None, :] * gates_h
    each = plain_gates(tl.load(gates + there, mask=inside, other=0.0))
    summed = tl.cumsum(each.to(sums.dtype.element_ty), axis=0)
    tl.store(sums + ((row * H + heads)[None, :] * T + t[:, None]), summed, mask=inside)
