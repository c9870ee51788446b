# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
"""The recurrence token by token, in Triton, for decoding and short inputs: the state stays in registers, in float32.

    S_t = diag(exp g_t) S_{t-1} + k_t^T v_t,    o_t = scale * q_t S_t

Every gate and every value is taken as it is, so there is nothing to repair afterwards. A token costs a pass over the
state's registers; a call of one token is bound by reading the state and writing it.
"""

import triton
import triton.language as tl

from gla_kernels.portable.tiles import LOG2E, locate


@triton.jit(do_not_specialize=["T", "H"])
def gla_recurrent_kernel(
    q,  # [B, T, H, K], any strides of B, T and H
    k,  # [B, T, H, K]
    v,  # [B, T, H, V]
    g,  # [B, T, H, K] or, if HEAD_GATED, [B, T, H] of any strides: natural log, <= 0
    o,  # [B, T, H, V], contiguous
    initial,  # [N, H, K, V] or, if V_FIRST, [N, H, V, K], contiguous: the states before the first token
    final,  # the same: the states after the last token; may be `initial`
    cu_seqlens,  # [N + 1] int32 or int64: boundaries of packed sequences
    scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h,
    T,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GATED: tl.constexpr,  # by a gate per channel
    HEAD_GATED: tl.constexpr,
    VARLEN: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    STORE_FINAL: tl.constexpr,
    V_FIRST: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A program handles BV value columns of one sequence and head. BK is at least K."""
    blocks_v: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    iv = pid % blocks_v
    nh = pid // blocks_v
    n = nh // H
    h = nh % H
    b, begin, length = locate(cu_seqlens, n, T, VARLEN)
    b = b.to(tl.int64) if not VARLEN else b
    t = tl.cast(begin, tl.int64)
    q += b * q_b + t * q_t + h.to(tl.int64) * q_h
    k += b * k_b + t * k_t + h.to(tl.int64) * k_h
    v += b * v_b + t * v_t + h.to(tl.int64) * v_h
    if GATED or HEAD_GATED:
        g += b * g_b + t * g_t + h.to(tl.int64) * g_h
    o += ((b * T + t) * H + h) * V
    kcols = tl.arange(0, BK)
    vcols = iv * BV + tl.arange(0, BV)
    inside = (kcols[:, None] < K) & (vcols[None, :] < V)
    state_at = vcols[None, :] * K + kcols[:, None] if V_FIRST else kcols[:, None] * V + vcols[None, :]
    state_at += nh.to(tl.int64) * K * V
    if HAS_INITIAL:
        S = tl.load(initial + state_at, mask=inside, other=0.0).to(tl.float32)
    else:
        S = tl.zeros([BK, BV], dtype=tl.float32)
    for _ in tl.range(0, length, num_stages=STAGES):
        bq = tl.load(q + kcols, mask=kcols < K, other=0.0).to(tl.float32) * scale
        bk = tl.load(k + kcols, mask=kcols < K, other=0.0).to(tl.float32)
        bv = tl.load(v + vcols, mask=vcols < V, other=0.0).to(tl.float32)
        if GATED:
            S *= tl.exp2(tl.load(g + kcols, mask=kcols < K, other=0.0).to(tl.float32) * LOG2E)[:, None]
            g += g_t
        if HEAD_GATED:
            S *= tl.exp2(tl.load(g).to(tl.float32) * LOG2E)
            g += g_t
        S += bk[:, None] * bv[None, :]
        bo = tl.sum(bq[:, None] * S, axis=0)
        tl.store(o + vcols, bo.to(o.dtype.element_ty), mask=vcols < V)
        q += q_t
        k += k_t
        v += v_t
        o += H * V
    if STORE_FINAL:
        # Other threads of this program have read what is written here, if `final` is `initial`.
        tl.debug_barrier()
        tl.store(final + state_at, S.to(final.dtype.element_ty), mask=inside)
