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
    fetch_rows,
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
    raise_where,
    split,
    start_gate_frame,
    thread_barrier,
    triangle,
    wide_product,
)


@gluon.jit
def fetch_chunk(
    q_tile, k_tile, v_tile, g_tile, q, k, v, g, b, t, h,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h,
    rows_left, K: gl.constexpr, V: gl.constexpr, WITH_Q: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Starts the copies of a chunk's inputs, from token t of batch row b and head h on."""
    if WITH_Q:
        fetch_rows(q_tile, q, b, t, h, q_b, q_t, q_h, rows_left, K, 16)
    fetch_rows(k_tile, k, b, t, h, k_b, k_t, k_h, rows_left, K, 16)
    fetch_rows(v_tile, v, b, t, h, v_b, v_t, v_h, rows_left, V, 16)
    if GATED:
        fetch_rows(g_tile, g, b, t, h, g_b, g_t, g_h, rows_left, K, 32)
    async_copy.commit_group()


@gluon.jit
def next_chunk(row, i, chunks, programs):
    """What a program does after chunk i of a row: the next chunk, or the first of its next row."""
    ends = i + 1 >= chunks
    return gl.where(ends, row + programs, row), gl.where(ends, 0, i + 1)


@gluon.jit(do_not_specialize=["T", "H", "first", "count", "every", "rows"])
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
    rows,  # sequences times heads
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
    """A program does chunks first .. first + count of a row, which is a sequence and head, and of every so many-th on.

    Copies run ahead of the work, also where a row begins. Packed sequences, whose lengths differ, have a program a
    row: whichever ends first makes room for the next.
    """
    copy_v: gl.constexpr = copy_layout(BV, 16)
    copy_g: gl.constexpr = copy_layout(BK, 32)
    state_layout: gl.constexpr = accumulator(BV)
    key_layout: gl.constexpr = gl.SliceLayout(1, state_layout)
    programs = gl.num_programs(0)
    # The row and the chunk of it whose copies start next.
    ahead = gl.program_id(0)
    ahead_i = ahead * 0
    _, begin, length = locate(cu, ahead // H, T, VARLEN)
    chunks = gl.minimum(gl.cdiv(length, C) - first, count)

    # Two programs share a multiprocessor. Without gates there is room for loads two chunks ahead, and a third
    # program would only leave the last round of programs short.
    buffers: gl.constexpr = 2 if GATED else 3
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [buffers, C, BK], operand_layout(C, BK))
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [buffers, C, BV], operand_layout(C, BV))
    q_tiles = gl.allocate_shared_memory(gl.bfloat16, [buffers, C, BK], operand_layout(C, BK)) if STORE_O else k_tiles
    g_tiles = gl.allocate_shared_memory(gl.float32, [buffers, C, BK], gate_layout()) if GATED else k_tiles
    if GATED:
        # Not one of two: between writes to one place the compiler puts barriers.
        high_tile = gl.allocate_shared_memory(gl.bfloat16, [C, BK], operand_layout(C, BK))
        low_tile = gl.allocate_shared_memory(gl.bfloat16, [C, BK], operand_layout(C, BK))
        ones = make_ones()
    S_tile = gl.allocate_shared_memory(gl.bfloat16, [BK, BV], operand_layout(BK, BV))

    for slot in gl.static_range(buffers - 1):
        fetch_chunk(
            q_tiles.index(slot), k_tiles.index(slot), v_tiles.index(slot), g_tiles.index(slot), q, k, v, g,
            0 if VARLEN else ahead // H, begin + (first + ahead_i) * C, ahead % H,
            q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h,
            gl.where(ahead < rows, length - (first + ahead_i) * C, 0), K, V, STORE_O, GATED,
        )  # fmt: skip
        ahead, ahead_i = next_chunk(ahead, ahead_i, chunks, programs)
    now = 0
    for row in range(gl.program_id(0), rows, programs):
        n = row // H
        h = row % H
        b = n * 0 if VARLEN else n
        if STORE_O and GATED:
            gl.store(flags + row, 0)
        if STORE_STATES:
            chunk_slot = n * count if FROM_CHECKPOINT else first_slot(n, begin, length, C, VARLEN)
        # Of a packed sequence that ends before `first`, the last one: it is read, if only to be thrown away.
        last_checkpoint = gl.maximum((length + every * C - 1) // (every * C) - 1, 0)
        checkpoint = first_slot(n, begin, length, every * C, VARLEN) + gl.minimum(first // every, last_checkpoint)
        leave = gl.full([BK], 1.0, gl.float32, key_layout)  # 2^r of the chunk before: takes its state out of its frame
        if HAS_INITIAL:
            at = checkpoint if FROM_CHECKPOINT else n
            S = load_state(initial + (at.to(gl.int64) * H + h) * K * V, K, V, state_layout, BK, BV)
        else:
            S = gl.zeros([BK, BV], gl.float32, state_layout)
        widest = gl.zeros([BK], gl.float32, key_layout)
        suspect = gl.zeros([C], gl.float32, gl.SliceLayout(1, accumulator(BV)))
        for i in range(chunks):
            async_copy.wait_group(buffers - 2)
            thread_barrier()
            later = (now + buffers - 1) % buffers
            fetch_chunk(
                q_tiles.index(later), k_tiles.index(later), v_tiles.index(later), g_tiles.index(later), q, k, v, g,
                0 if VARLEN else ahead // H, begin + (first + ahead_i) * C, ahead % H,
                q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h,
                gl.where(ahead < rows, length - (first + ahead_i) * C, 0), K, V, STORE_O, GATED,
            )  # fmt: skip
            ahead, ahead_i = next_chunk(ahead, ahead_i, chunks, programs)

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
                put(states + wide_product((chunk_slot + i) * H + h, K * V), S_tile.load(copy_v), V, K, V, copy_v)
            if STORE_O:
                O, S = warpgroup_mma_wait(0, deps=[O, S])
                suspect += gl.sum(O, axis=1) * 0.0
                t = begin + (first + i) * C
                there = o + wide_product((b * T + t) * H + h, V)
                put(there, gl.convert_layout(O.to(gl.bfloat16), copy_v), H * V, begin + length - t, V, copy_v)
            else:
                S = warpgroup_mma_wait(0, deps=[S])
            now = (now + 1) % buffers
        S *= leave[:, None]
        if STORE_FINAL:
            put(final + (n.to(gl.int64) * H + h) * K * V, S, V, K, V, state_layout)
        if STORE_O and GATED:
            # Infinity times 0 is NaN, which no sum loses and no comparison holds for.
            nothing = suspect + gl.sum(S * 0.0, axis=1)
            raise_where(flags + row, ((nothing != 0.0) | (widest > SPAN_LIMIT)) & (chunks > 0))
    async_copy.wait_group(0)
