# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
"""Stores the state before every chunk or, in reverse, its gradient after it, with gates of keys and of values.

With a_i the sums of a chunk's gates of keys up to token i, b_i those of values (in log2) and a_C, b_C their totals,

    S'  = 2^(a_C + b_C) S   + (2^(a_C - a) K)^T (2^(b_C - b) V)
    dS  = 2^(a_C + b_C) dS' + (2^a scale Q)^T (2^b dO)

where a scales rows of a state and b columns. No exponent is above 0, so all gates are right, strong ones too.
"""

import triton
import triton.language as tl

from gla_kernels.portable.tiles import first_slot, load_tile, locate, plain_gates, select_sum, store_tile


@triton.jit(do_not_specialize=["T", "H"])
def value_gated_states(
    x,  # [B, T, H, K]: k, or q in reverse; any strides of B, T and H, like the next three
    y,  # [B, T, H, V]: v, or do in reverse
    g,  # [B, T, H, K]: gates of keys, natural log, <= 0; unused without KEYS_GATED
    gv,  # [B, T, H, V]: gates of values
    initial,  # [N, H, K, V] float32: the states before the first chunk; in reverse their gradient after the last one
    end,  # [N, H, K, V] float32: the states after the last chunk; in reverse their gradient before the first one
    states,  # [slots (`first_slot`), H, K, V] in DOT
    cu_seqlens,  # [N + 1] int32 or int64: boundaries of packed sequences
    scale,  # of x
    x_b, x_t, x_h, y_b, y_t, y_h, g_b, g_t, g_h, gv_b, gv_t, gv_h,
    T,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    VARLEN: tl.constexpr,
    KEYS_GATED: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """A program handles BK key and BV value columns of one sequence and head."""
    blocks_k: tl.constexpr = (K + BK - 1) // BK
    blocks_v: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    vcols = pid % blocks_v * BV + tl.arange(0, BV)
    kcols = pid // blocks_v % blocks_k * BK + tl.arange(0, BK)
    nh = pid // (blocks_v * blocks_k)
    n = nh // H
    h = nh % H
    b, begin, length = locate(cu_seqlens, n, T, VARLEN)
    chunks = (length + C - 1) // C
    start = chunks - 1 if REVERSE else 0
    b = b.to(tl.int64) if not VARLEN else b
    t = (begin + start * C).to(tl.int64)
    x += b * x_b + t * x_t + h.to(tl.int64) * x_h
    y += b * y_b + t * y_t + h.to(tl.int64) * y_h
    if KEYS_GATED:
        g += b * g_b + t * g_t + h.to(tl.int64) * g_h
    gv += b * gv_b + t * gv_t + h.to(tl.int64) * gv_h
    slot = first_slot(n, begin, length, C, VARLEN) + start
    states += (slot.to(tl.int64) * H + h) * K * V
    steps = tl.arange(0, C)
    counted = steps[:, None] >= steps[None, :] if REVERSE else steps[:, None] < steps[None, :]
    step: tl.constexpr = -1 if REVERSE else 1
    at = nh.to(tl.int64) * K * V
    S = load_tile(initial + at, kcols, vcols, V, K, V).to(tl.float32)
    for i in tl.range(0, chunks):
        rows_left = length - (start + step * i) * C
        if KEYS_GATED:
            gates_k = plain_gates(load_tile(g, steps, kcols, g_t, rows_left, K))
        gates_v = plain_gates(load_tile(gv, steps, vcols, gv_t, rows_left, V))
        bx = load_tile(x, steps, kcols, x_t, rows_left, K).to(tl.float32) * scale
        by = load_tile(y, steps, vcols, y_t, rows_left, V).to(tl.float32)
        if KEYS_GATED:
            bx *= tl.exp2(select_sum(counted, gates_k, 2, DOT))
        bx = bx.to(DOT)
        by = (by * tl.exp2(select_sum(counted, gates_v, 2, DOT))).to(DOT)
        store_tile(states, S, kcols, vcols, V, K, V)
        decays = tl.exp2(tl.sum(gates_v, axis=0))[None, :]
        S *= tl.exp2(tl.sum(gates_k, axis=0))[:, None] * decays if KEYS_GATED else decays
        S = tl.dot(tl.trans(bx), by, S, input_precision=PRECISION)
        x += step * C * x_t
        y += step * C * y_t
        if KEYS_GATED:
            g += step * C * g_t
        gv += step * C * gv_t
        states += step * H * K * V
    store_tile(end + at, S, kcols, vcols, V, K, V)
