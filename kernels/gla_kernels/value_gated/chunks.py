# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
"""What a chunk reads from its state, from the state's gradient and from its own pairs of tokens; gates on both sides.

Keys and values are alike. Of two sides, "own" is the one whose columns a result has, and "other" is summed over. On
each, a token is `late` (it receives: q or dO) and `early` (it sends: k or v). With a_i the sums of a chunk's own gates
up to token i, a_C their total, e those of the other side, and all exponents at most 0,

    pairs_ij   = sum_other late_i early_j 2^(e_i - e_j)                                    for j <= i
    late'_i    = 2^(a_i) sum_other 2^(e_i) late_i S         + sum_j pairs_ij 2^(a_i - a_j) early_j
    early'_j   = 2^(a_C - a_j) sum_other 2^(e_C - e_j) early_j dS' + sum_i pairs_ij 2^(a_i - a_j) late_i
    gates'_t   = what passes the gate: 2^(a_C + e_C) sum_other S dS'
                 + sum_{i >= t} late_i late'_i (from the state) + sum_{j < t} early_j early'_j (to the state)
                 + the pairs with j < t <= i

    own    other   pairs                   late'   early'   gates'
    V      K       scores P                o       dv       dgv
    K      V       their gradient dP       dq      dk       dg

so one kernel computes all of them. Where a chunk's gates sum to little, 2^(a_i - a_j) is 2^(a_i - a_C / 2) times
2^(a_C / 2 - a_j), and pairs are one product of operands so scaled; otherwise they are those of `portable/tree.py`.
A side without gates has no factors: its pairs are a product of the columns as they are, and it has no gates'.
"""

import triton
import triton.language as tl

from gla_kernels.portable.sums import sequence_of
from gla_kernels.portable.tiles import first_slot, load_tile, locate, plain_gates, select_sum, store_tile, zero_state
from gla_kernels.portable.tree import at_level, pair_tile

# The least total gate of a chunk's column, in log2, and the largest values, alone and times pairs, for which pairs take
# one product: 2 to that total is still a normal float32, and 2 to minus half of it, times such values, is finite.
FRAME_LIMIT = tl.constexpr(-120.0)
FRAME_VALUES = tl.constexpr(2.0**60)


@triton.jit
def load_state(ptr, own, other, D: tl.constexpr, E: tl.constexpr, KEYS: tl.constexpr):
    """A tile [other, own] of a state [K, V], whose keys are the own columns if KEYS."""
    inside = (other[:, None] < E) & (own[None, :] < D)
    at = own[None, :] * E + other[:, None] if KEYS else other[:, None] * D + own[None, :]
    return tl.load(ptr + at, mask=inside, other=0.0)


@triton.jit
def mild_gates(total):
    """Whether the totals of columns' gates leave a frame's factors finite. A NaN is not mild."""
    return tl.min(tl.where(total >= FRAME_LIMIT, 1, 0)) == 1


@triton.jit
def largest(late, early):
    """The largest magnitude in two tiles."""
    return tl.maximum(tl.max(tl.abs(late)), tl.max(tl.abs(early)))


@triton.jit(do_not_specialize=["T", "H", "N"])
def value_gated_chunks(
    late,  # [B, T, H, D], any strides of B, T and H, like the next five; unused if FORWARD
    early,  # [B, T, H, D]
    gates,  # [B, T, H, D], natural log, <= 0; unused without OWN_GATED
    other_late,  # [B, T, H, E]
    other_early,  # [B, T, H, E]
    other_gates,  # [B, T, H, E]; unused without OTHER_GATED
    states,  # [slots, H, K, V] in DOT: the state before each chunk
    dstates,  # [slots, H, K, V] in DOT: the gradient of the state after each chunk; unused if FORWARD
    late_out,  # [B, T, H, D], contiguous like the others: o, or dq if KEYS; not written otherwise
    early_out,  # [B, T, H, D]: dv or dk; not written if FORWARD
    gates_out,  # [B, T, H, D]: dgv or dg; not written if FORWARD or without OWN_GATED
    strong,  # [programs] int32: whether a program's chunk needs the tree; written if FRAMED, otherwise read
    cu_seqlens,  # [N + 1] int32 or int64: boundaries of packed sequences
    late_scale,  # of late: q has one
    other_scale,  # of other_late
    late_b, late_t, late_h, early_b, early_t, early_h, gates_b, gates_t, gates_h,
    other_late_b, other_late_t, other_late_h, other_early_b, other_early_t, other_early_h,
    other_gates_b, other_gates_t, other_gates_h,
    T,
    H,
    N,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    C: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    VARLEN: tl.constexpr,
    KEYS: tl.constexpr,  # own columns are keys
    OWN_GATED: tl.constexpr,
    OTHER_GATED: tl.constexpr,
    FORWARD: tl.constexpr,
    FRAMED: tl.constexpr,  # pairs in one product, right where gates are mild; otherwise by the tree, where they are not
):  # fmt: skip
    """A program handles BD own columns of one chunk and head."""
    blocks: tl.constexpr = (D + BD - 1) // BD
    pid = tl.program_id(0)
    own = pid % blocks * BD + tl.arange(0, BD)
    h = pid // blocks % H
    slot = pid // blocks // H
    n = sequence_of(cu_seqlens, slot, N, C) if VARLEN else slot // ((T + C - 1) // C)
    b, begin, length = locate(cu_seqlens, n, T, VARLEN)
    offset = (slot - first_slot(n, begin, length, C, VARLEN)) * C
    rows_left = length - offset
    if rows_left <= 0:
        return
    b = b.to(tl.int64) if not VARLEN else b
    t = (begin + offset).to(tl.int64)
    wide = h.to(tl.int64)
    other_late += b * other_late_b + t * other_late_t + wide * other_late_h
    other_early += b * other_early_b + t * other_early_t + wide * other_early_h
    if OTHER_GATED:
        other_gates += b * other_gates_b + t * other_gates_t + wide * other_gates_h
    state_at = (slot.to(tl.int64) * H + h) * D * E
    out = ((b * T + t) * H + h) * D
    steps = tl.arange(0, C)
    up_to_me = steps[:, None] >= steps[None, :]
    before_me = steps[:, None] > steps[None, :]
    after_me = steps[:, None] < steps[None, :]
    diagonal = steps[:, None] == steps[None, :]

    if FRAMED:
        framed = late_scale == late_scale
    elif tl.load(strong + pid) == 0:
        return
    pairs = zero_state(late_scale, C, C)
    received = zero_state(late_scale, C, BD)  # from the state
    if not FORWARD:
        sent = zero_state(late_scale, C, BD)  # to the state
        passed = tl.zeros([BD], dtype=tl.float32)  # from state to state
    for column in tl.range(0, E, BE):
        other = column + tl.arange(0, BE)
        ol = load_tile(other_late, steps, other, other_late_t, rows_left, E).to(tl.float32) * other_scale
        oe = load_tile(other_early, steps, other, other_early_t, rows_left, E).to(tl.float32)
        if OTHER_GATED:
            og = plain_gates(load_tile(other_gates, steps, other, other_gates_t, rows_left, E))
        pairs += tl.where(diagonal, tl.sum(ol * oe, axis=1)[:, None], 0.0)
        from_start, to_end = ol, oe  # decayed from the chunk's start, and to its end
        if OTHER_GATED:
            total = tl.sum(og, axis=0)
            late_factor = tl.exp2(select_sum(up_to_me, og, 2, DOT))
            early_factor = tl.exp2(select_sum(after_me, og, 2, DOT))
            from_start *= late_factor
            to_end *= early_factor
        if not OTHER_GATED:
            product = tl.dot(ol.to(DOT), tl.trans(oe.to(DOT)), input_precision=PRECISION)
            pairs += tl.where(before_me, product, 0.0)
        elif FRAMED:
            framed &= mild_gates(total) & (largest(ol, oe) <= FRAME_VALUES)
            # Factors first: a value times its decay alone may be too small for a float32.
            lift = tl.exp2(tl.minimum(-0.5 * total, -0.5 * FRAME_LIMIT))[None, :]
            product = tl.dot(
                (ol * (late_factor * lift)).to(DOT), tl.trans((oe * (early_factor * lift)).to(DOT)),
                input_precision=PRECISION,
            )  # fmt: skip
            pairs += tl.where(before_me, product, 0.0)
        else:
            size = 1
            while size < C:
                tile, _, _ = pair_tile(ol, oe, og, steps, size, DOT)
                product = tl.dot(tile, tl.trans(tile), input_precision=PRECISION)
                pairs += tl.where(before_me & at_level(steps, size), product, 0.0)
                size *= 2
        S = load_state(states + state_at, own, other, D, E, KEYS)
        received = tl.dot(from_start.to(DOT), S, received, input_precision=PRECISION)
        if not FORWARD:
            dS = load_state(dstates + state_at, own, other, D, E, KEYS)
            sent = tl.dot(to_end.to(DOT), dS, sent, input_precision=PRECISION)
            if OWN_GATED:
                both = S.to(tl.float32) * dS.to(tl.float32)
                passed += tl.sum(both * tl.exp2(total)[:, None] if OTHER_GATED else both, axis=0)

    if OWN_GATED:
        step_gates = plain_gates(
            load_tile(gates + b * gates_b + t * gates_t + wide * gates_h, steps, own, gates_t, rows_left, D)
        )
    be = load_tile(early + b * early_b + t * early_t + wide * early_h, steps, own, early_t, rows_left, D).to(tl.float32)
    if FORWARD:
        bl = tl.zeros([C, BD], dtype=tl.float32)
    else:
        bl = load_tile(late + b * late_b + t * late_t + wide * late_h, steps, own, late_t, rows_left, D).to(tl.float32)
        bl *= late_scale
    if OWN_GATED:
        own_total = tl.sum(step_gates, axis=0)
        late_factor = tl.exp2(select_sum(up_to_me, step_gates, 2, DOT))
        early_factor = tl.exp2(select_sum(after_me, step_gates, 2, DOT))
        received *= late_factor
        if not FORWARD:
            sent *= early_factor
            from_state = bl * received
            balance = be * sent
    same = tl.sum(tl.where(diagonal, pairs, 0.0).to(DOT).to(tl.float32), axis=1)[:, None]
    received += same * be
    if not FORWARD:
        sent += same * bl
    pairs = tl.where(before_me, pairs, 0.0).to(DOT)
    if FRAMED:
        if OWN_GATED:
            most = largest(bl, be)
            most = tl.maximum(most, most * tl.max(tl.abs(pairs.to(tl.float32))))
            framed &= mild_gates(own_total) & (most <= FRAME_VALUES)
            lift = tl.exp2(tl.minimum(-0.5 * own_total, -0.5 * FRAME_LIMIT))[None, :]
            late_factor *= lift
            early_factor *= lift
        tl.store(strong + pid, tl.where(framed, 0, 1))
    if FRAMED or not OWN_GATED:
        sender = (be * early_factor).to(DOT) if OWN_GATED else be.to(DOT)
        product = tl.dot(pairs, sender, input_precision=PRECISION)
        received += product * late_factor if OWN_GATED else product
        if not FORWARD:
            receiver = (bl * late_factor).to(DOT) if OWN_GATED else bl.to(DOT)
            product_t = tl.dot(tl.trans(pairs), receiver, input_precision=PRECISION)
            sent += product_t * early_factor if OWN_GATED else product_t
            if OWN_GATED:
                balance -= receiver.to(tl.float32) * product
                balance += sender.to(tl.float32) * product_t
    else:
        mirrored = pairs if FORWARD else (pairs.to(tl.float32) + tl.trans(pairs).to(tl.float32)).to(DOT)
        size = 1
        while size < C:
            tile, factor, is_late = pair_tile(bl, be, step_gates, steps, size, DOT)
            chosen = tl.where(at_level(steps, size), mirrored, 0.0).to(DOT)
            product = tl.dot(chosen, tile, input_precision=PRECISION)
            if not FORWARD:
                change = tile.to(tl.float32) * product
                balance += tl.where(is_late, -change, change)
                sent += tl.where(is_late, 0.0, product * factor)
            received += tl.where(is_late, product * factor, 0.0)
            size *= 2
    stride = H * D
    if FORWARD or KEYS:
        store_tile(late_out + out, received * late_scale, steps, own, stride, rows_left, D)
    if not FORWARD:
        store_tile(early_out + out, sent, steps, own, stride, rows_left, D)
        if OWN_GATED:
            sums = select_sum(steps[:, None] <= steps[None, :], from_state, 2, DOT)
            sums += select_sum(before_me, balance, 2, DOT)
            passed *= tl.exp2(own_total)
            store_tile(gates_out + out, sums + passed[None, :], steps, own, stride, rows_left, D)
