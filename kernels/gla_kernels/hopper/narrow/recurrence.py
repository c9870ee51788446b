# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
"""Computes the state that every piece of a sequence adds: Gluon kernel for Hopper, K and V up to 64.

With the names of `narrow/forward.py` and `narrow/backward.py`, for every chunk

    S <- 2^r (2^r S + K~^T V),        or in reverse        dS' <- 2^r (2^r dS' + Q~^T dO)

from 0 on; scale is a factor at the end. `portable/scan.py` adds what comes from the pieces before (in reverse after).
This takes the time of half a forward more, but few heads of a long sequence then fill the GPU.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, warpgroup_mma_wait

from gla_kernels.hopper.copies import fetch_rows, write
from gla_kernels.hopper.gates import (
    chunk_total,
    excess,
    fetch_gate_rows,
    frame_factor,
    has_large,
    load_gates,
    make_ones,
    make_words,
    start_gate_frame,
)
from gla_kernels.hopper.head_gates import chunk_gate, decay_to_end, fetch_sums, make_sums, row_sums, sums_in
from gla_kernels.hopper.layouts import accumulator, gate_layout, operand_layout
from gla_kernels.hopper.places import find_piece, wait_for_previous_kernel
from gla_kernels.hopper.products import add_product
from gla_kernels.hopper.values import negative, thread_barrier, to_float32


@gluon.jit(do_not_specialize=["T", "H", "N", "piece_chunks"])
def gla_recurrence_hopper(
    x,  # [B, T, H, K] bfloat16, any strides of B, T and H: k, or q in reverse
    y,  # [B, T, H, V]: v, or do in reverse
    g,  # [B, T, H, K] float32 or bfloat16, natural log, <= 0; if HEAD_GATED [B, H, T], float32 sums of gates
    end,  # [pieces, H, K, V] float32: the state after each piece if it starts from 0; in reverse before it
    decays,  # [pieces, H, K] float32: total gate of each piece, in log2
    cu_seqlens,  # [N + 1] int32 or int64: boundaries of packed sequences
    scale,
    x_b, x_t, x_h, y_b, y_t, y_h, g_b, g_t, g_h,
    T,
    H,
    N,
    piece_chunks,
    K: gl.constexpr,
    V: gl.constexpr,
    BK: gl.constexpr,
    BV: gl.constexpr,
    C: gl.constexpr,
    GATED: gl.constexpr,
    HEAD_GATED: gl.constexpr,
    VARLEN: gl.constexpr,
    REVERSE: gl.constexpr,
):  # fmt: skip
    """A program handles one piece and head."""
    # Chunks in shared memory at once: so many that two programs fit a multiprocessor, and not three, because programs
    # that start while the kernel before ends would come to lie in threes (see `recurrence_stages`).
    BUFFERS: gl.constexpr = 3 if GATED else 6
    state_layout: gl.constexpr = accumulator(BV)
    key_tile: gl.constexpr = accumulator(BK)
    key_layout: gl.constexpr = gl.SliceLayout(1, state_layout)
    wait_for_previous_kernel(False)  # `scan_pieces` comes next: small programs
    pid = gl.program_id(0)
    h = pid % H
    n, i, b, begin, length = find_piece(cu_seqlens, pid // H, N, T, piece_chunks * C, VARLEN)
    first_chunk = i * piece_chunks
    chunks = gl.maximum(gl.minimum(gl.cdiv(length, C) - first_chunk, piece_chunks), 0)
    chunk = first_chunk + chunks - 1 if REVERSE else first_chunk
    b = n * 0 if VARLEN else b

    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, C, BK], operand_layout(C, BK))
    y_tiles = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, C, BV], operand_layout(C, BV))
    if GATED:
        g_tiles = gl.allocate_shared_memory(gl.float32, [BUFFERS, C, BK], gate_layout())
        high_tile = gl.allocate_shared_memory(gl.bfloat16, [C, BK], operand_layout(C, BK))
        low_tile = gl.allocate_shared_memory(gl.bfloat16, [C, BK], operand_layout(C, BK))
        ones = make_ones()
        words = make_words()
    if HEAD_GATED:
        g_tiles = make_sums(BUFFERS, C)
    S = gl.zeros([BK, BV], gl.float32, state_layout)
    # 2^r of the previous chunk, which takes its state out of its frame.
    previous_factor = gl.full([BK], 1.0, gl.float32, key_layout)
    decay = gl.zeros([BK], gl.float32, key_layout)

    for ahead in gl.static_range(BUFFERS - 1):
        t = begin + chunk * C
        rows_left = gl.where(ahead < chunks, gl.minimum(length - chunk * C, C), 0)
        fetch_rows(x_tiles.index(ahead), x, b, t, h, x_b, x_t, x_h, rows_left, K, 16)
        fetch_rows(y_tiles.index(ahead), y, b, t, h, y_b, y_t, y_h, rows_left, V, 16)
        if GATED:
            fetch_gate_rows(g_tiles.index(ahead), g, b, t, h, g_b, g_t, g_h, rows_left, K)
        if HEAD_GATED:
            fetch_sums(g_tiles.index(ahead), sums_in(g, b, t, h, T, H), rows_left)
        async_copy.commit_group()
        chunk += -1 if REVERSE else 1
    for j in range(chunks):
        buffer = j % BUFFERS
        next_buffer = (j + BUFFERS - 1) % BUFFERS
        async_copy.wait_group(BUFFERS - 2)
        thread_barrier()
        x_tile = x_tiles.index(buffer)
        bx = x_tile.load(key_tile)
        if GATED:
            high, low = load_gates(g_tiles.index(buffer), g, words)
            high_tile.store(high)
            low_tile.store(low)
            fence_async_shared()
            thread_barrier()
            G, total = start_gate_frame(high_tile, low_tile, ones, C, BK)
        t += -C if REVERSE else C
        rows_left = gl.where(j + BUFFERS - 1 < chunks, gl.minimum(length - chunk * C, C), 0)
        fetch_rows(x_tiles.index(next_buffer), x, b, t, h, x_b, x_t, x_h, rows_left, K, 16)
        fetch_rows(y_tiles.index(next_buffer), y, b, t, h, y_b, y_t, y_h, rows_left, V, 16)
        if GATED:
            fetch_gate_rows(g_tiles.index(next_buffer), g, b, t, h, g_b, g_t, g_h, rows_left, K)
        if HEAD_GATED:
            fetch_sums(g_tiles.index(next_buffer), sums_in(g, b, t, h, T, H), rows_left)
        chunk += -1 if REVERSE else 1
        async_copy.commit_group()
        bx = to_float32(bx)
        if GATED:
            large = has_large(words)
            G, total = warpgroup_mma_wait(0, deps=[G, total])
            last = chunk_total(total, BV)
            decay += last
            factor = frame_factor(last)
            S *= (previous_factor * factor)[:, None]
            previous_factor = factor
            if large:
                beyond = gl.convert_layout(excess(last), gl.SliceLayout(0, key_tile))[None, :]
                G += (0.5 if REVERSE else -0.5) * beyond
            bx *= gl.exp2(G if REVERSE else negative(G))
        if HEAD_GATED:
            sums = g_tiles.index(buffer)
            total = chunk_gate(sums)
            decay += total
            S *= gl.exp2(total)
            a = row_sums(sums, key_tile)
            bx *= gl.exp2(a)[:, None] if REVERSE else decay_to_end(a, total)
        if GATED or HEAD_GATED:
            x_tile.store(bx.to(gl.bfloat16))
        fence_async_shared()
        thread_barrier()
        S = add_product(x_tile.permute((1, 0)), y_tiles.index(buffer), S)
        S = warpgroup_mma_wait(0, deps=[S])
    async_copy.wait_group(0)
    S *= previous_factor[:, None] * scale if REVERSE else previous_factor[:, None]
    write(end + pid.to(gl.int64) * K * V, S, V, K, V, state_layout)
    if GATED or HEAD_GATED:
        keys = gl.arange(0, BK, key_layout)
        gl.store(decays + pid.to(gl.int64) * K + keys, decay, keys < K)
