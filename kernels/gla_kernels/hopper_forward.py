"""Forward kernel for Hopper in Gluon: `forward.py`'s plain form with chunks of 64, K and V up to 64, bfloat16.

    Q~ = scale q 2^(G - r),   K~ = k 2^(r - G),   r = G_last / 2
    O  = Q~ S~ + tril(Q~ K~^T) V,       S' = S~ + K~^T V

S~ = 2^r S is the state in the chunk's frame. As r is half of G_last, one factor takes the state into a frame and out
of it, and from one frame to the next by the product of two.

What is left to the exact kernel: a sequence and head with a chunk whose gates span more than SPAN_LIMIT, or with a
result that is not finite.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, warpgroup_mma_wait

from gla_kernels.hopper_tiles import (
    LOG2E,
    SPAN_LIMIT,
    accumulator,
    add_product,
    chunk_total,
    copy_layout,
    fetch,
    first_slot,
    gate_layout,
    left_operand,
    load_state,
    locate,
    make_ones,
    masked_operand,
    operand_layout,
    product,
    put,
    split,
    start_gate_frame,
    thread_barrier,
    triangle,
)


@gluon.jit(do_not_specialize=["T", "H", "first", "count", "every"])
def gla_forward_hopper(
    q,  # [B, T, H, K] bfloat16, any strides of B, T and H
    k,  # [B, T, H, K]
    v,  # [B, T, H, V]
    g,  # [B, T, H, K] float32, natural log, <= 0
    o,  # [B, T, H, V], contiguous
    initial,  # [N, H, K, V] float32: the states before the first chunk; a checkpoint's slots if FROM_CHECKPOINT
    final,  # [N, H, K, V] float32: the states after the last chunk
    states,  # [slots, H, K, V] bfloat16: the state before each chunk, in that chunk's frame
    checkpoints,  # [slots, H, K, V] float32: the same before every `every`-th chunk
    flags,  # [N, H] int32: 1 where the plain form does not hold
    cu,  # [N + 1] int32 or int64: where packed sequences begin and end
    scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h,
    T,
    H,
    first,  # the first chunk of a sequence to do
    count,  # and how many at most
    every,
    K: gl.constexpr,
    V: gl.constexpr,
    BK: gl.constexpr,
    BV: gl.constexpr,
    C: gl.constexpr,
    GATED: gl.constexpr,
    VARLEN: gl.constexpr,
    HAS_INITIAL: gl.constexpr,
    FROM_CHECKPOINT: gl.constexpr,
    STORE_O: gl.constexpr,
    STORE_FINAL: gl.constexpr,
    STORE_STATES: gl.constexpr,
    STORE_CHECKPOINTS: gl.constexpr,
):  # fmt: skip
    """A program does one sequence and head, chunks first .. first + count."""
    copy_k: gl.constexpr = copy_layout(BK, 16)
    copy_v: gl.constexpr = copy_layout(BV, 16)
    copy_g: gl.constexpr = copy_layout(BK, 32)
    state_layout: gl.constexpr = accumulator(BV)
    key_layout: gl.constexpr = gl.SliceLayout(1, state_layout)
    pid = gl.program_id(0)
    n = pid // H
    h = pid % H
    b, begin, length = locate(cu, n, T, VARLEN)
    chunks = gl.minimum(gl.cdiv(length, C) - first, count)
    rows_left = length - first * C
    t = (begin + first * C).to(gl.int64)
    b = b.to(gl.int64) if not VARLEN else 0
    q += b * q_b + t * q_t + h.to(gl.int64) * q_h
    k += b * k_b + t * k_t + h.to(gl.int64) * k_h
    v += b * v_b + t * v_t + h.to(gl.int64) * v_h
    if GATED:
        g += b * g_b + t * g_t + h.to(gl.int64) * g_h
    if STORE_O:
        o += ((b * T + t) * H + h) * V
    if STORE_STATES:
        slot = n * count if FROM_CHECKPOINT else first_slot(n, begin, length, C, VARLEN)
        states += (slot.to(gl.int64) * H + h) * K * V
    # Of a packed sequence that ends before `first`, the last one: it is read, if only to be thrown away.
    last_checkpoint = gl.maximum((length + every * C - 1) // (every * C) - 1, 0)
    checkpoint = first_slot(n, begin, length, every * C, VARLEN) + gl.minimum(first // every, last_checkpoint)

    # Two programs share a multiprocessor. Without gates there is room for loads two chunks ahead, and a third
    # program would only leave the last round of programs short.
    buffers: gl.constexpr = 2 if GATED else 3
    if STORE_O:
        q_tiles = gl.allocate_shared_memory(gl.bfloat16, [buffers, C, BK], operand_layout(C, BK))
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [buffers, C, BK], operand_layout(C, BK))
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [buffers, C, BV], operand_layout(C, BV))
    if GATED:
        g_tiles = gl.allocate_shared_memory(gl.float32, [buffers, C, BK], gate_layout())
        # Not one of two: between writes to one place the compiler puts barriers.
        high_tile = gl.allocate_shared_memory(gl.bfloat16, [C, BK], operand_layout(C, BK))
        low_tile = gl.allocate_shared_memory(gl.bfloat16, [C, BK], operand_layout(C, BK))
        ones = make_ones()
    S_tile = gl.allocate_shared_memory(gl.bfloat16, [BK, BV], operand_layout(BK, BV))

    leave = gl.full([BK], 1.0, gl.float32, key_layout)  # 2^r of the chunk before: takes its state out of its frame
    if HAS_INITIAL:
        at = checkpoint if FROM_CHECKPOINT else n
        S = load_state(initial + (at.to(gl.int64) * H + h) * K * V, K, V, state_layout, BK, BV)
    else:
        S = gl.zeros([BK, BV], gl.float32, state_layout)
    widest = gl.zeros([BK], gl.float32, key_layout)
    suspect = gl.zeros([C], gl.float32, gl.SliceLayout(1, accumulator(BV)))

    for ahead in gl.static_range(buffers - 1):
        rows_there = rows_left - ahead * C
        if STORE_O:
            fetch(q_tiles.index(ahead), q, q_t, rows_there, K, copy_k)
            q += C * q_t
        fetch(k_tiles.index(ahead), k, k_t, rows_there, K, copy_k)
        fetch(v_tiles.index(ahead), v, v_t, rows_there, V, copy_v)
        k += C * k_t
        v += C * v_t
        if GATED:
            fetch(g_tiles.index(ahead), g, g_t, rows_there, K, copy_g)
            g += C * g_t
        async_copy.commit_group()
    for i in range(chunks):
        now = i % buffers
        later = (i + buffers - 1) % buffers
        async_copy.wait_group(buffers - 2)
        thread_barrier()
        # The copies of chunks to come run while this one is worked on.
        rows_there = rows_left - (buffers - 1) * C
        if STORE_O:
            fetch(q_tiles.index(later), q, q_t, rows_there, K, copy_k)
            q += C * q_t
        fetch(k_tiles.index(later), k, k_t, rows_there, K, copy_k)
        fetch(v_tiles.index(later), v, v_t, rows_there, V, copy_v)
        k += C * k_t
        v += C * v_t
        if GATED:
            fetch(g_tiles.index(later), g, g_t, rows_there, K, copy_g)
            g += C * g_t
        async_copy.commit_group()

        k_tile = k_tiles.index(now)
        v_tile = v_tiles.index(now)
        if STORE_CHECKPOINTS:
            if i % every == 0:
                there = checkpoints + ((checkpoint + i // every).to(gl.int64) * H + h) * K * V
                put(there, S * leave[:, None], V, K, V, state_layout)
        bk = k_tile.load(accumulator(BK)).to(gl.float32)
        if STORE_O:
            bq = q_tiles.index(now).load(accumulator(BK)).to(gl.float32) * scale
        if GATED:
            high, low = split(g_tiles.index(now).load(copy_g) * LOG2E)
            high_tile.store(high)
            low_tile.store(low)
            fence_async_shared()
            thread_barrier()
            G, total = start_gate_frame(high_tile, low_tile, ones, C, BK)
            G, total = warpgroup_mma_wait(0, deps=[G, total])
            last = chunk_total(total, BV)
            widest = gl.maximum(widest, -last)
            half = gl.exp2(last * 0.5)
            S *= (leave * half)[:, None]
            leave = half
            bk *= gl.exp2(-G)
            if STORE_O:
                bq *= gl.exp2(G)
        k_tile.store(bk.to(gl.bfloat16))
        S_tile.store(S.to(gl.bfloat16))
        fence_async_shared()
        thread_barrier()
        if STORE_O:
            Q = gl.convert_layout(bq.to(gl.bfloat16), left_operand(BK))
            P = product(Q, k_tile.permute((1, 0)), C, C)
            O = product(Q, S_tile, C, BV)
            S = add_product(k_tile.permute((1, 0)), v_tile, S)
            P = warpgroup_mma_wait(2, deps=[P])
            O = add_product(masked_operand(P, triangle(C, True, True)), v_tile, O)
        else:
            S = add_product(k_tile.permute((1, 0)), v_tile, S)
        if STORE_STATES:
            put(states, S_tile.load(copy_v), V, K, V, copy_v)
            states += H * K * V
        if STORE_O:
            O, S = warpgroup_mma_wait(0, deps=[O, S])
            suspect += gl.sum(O, axis=1) * 0.0
            put(o, gl.convert_layout(O.to(gl.bfloat16), copy_v), H * V, rows_left, V, copy_v)
            o += C * H * V
        else:
            S = warpgroup_mma_wait(0, deps=[S])
        rows_left -= C
    async_copy.wait_group(0)
    S *= leave[:, None]
    if STORE_FINAL:
        put(final + (n.to(gl.int64) * H + h) * K * V, S, V, K, V, state_layout)
    if STORE_O and GATED:
        # Infinity times 0 is NaN, which no sum loses and no comparison holds for.
        finite = (gl.sum(suspect, axis=0) + gl.sum(gl.sum(S * 0.0, axis=1), axis=0)) == 0.0
        plain = finite & (gl.max(widest, axis=0) <= SPAN_LIMIT)
        gl.store(flags + n * H + h, gl.where(plain, 0, 1))
