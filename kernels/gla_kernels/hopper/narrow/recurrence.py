# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
"""Computes the state that every piece of a sequence adds: Gluon kernel for Hopper, K and V up to 64.

With the names of `narrow/forward.py` and `narrow/backward.py`, for every chunk

    S <- 2^r (2^r S + K~^T V),        or in reverse        dS' <- 2^r (2^r dS' + Q~^T dO)

from 0 on; scale is a factor at the end. With a gate per head (`head_gates.py`), where D is the total gate of the chunks
between this one and the piece's end (in reverse, its beginning):

    S <- S + K^T 2^(D + a_C - a) V,           or in reverse        dS' <- dS' + Q^T 2^(D + a) dO

`portable/scan.py` adds what comes from the pieces before (in reverse after). This takes the time of half a forward
more, but few heads of a long sequence then fill the GPU.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from gla_kernels.hopper.copies import fetch_rows, write
from gla_kernels.hopper.gate_sums import head_sums, keep_head_sums, load_head_gates, share_head_sums
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
from gla_kernels.hopper.head_gates import chunk_gate, fetch_sums, make_sums, row_sums, sums_in
from gla_kernels.hopper.layouts import accumulator, gate_layout, operand_layout
from gla_kernels.hopper.places import find_piece, let_next_kernel_start, wait_for_previous_kernel
from gla_kernels.hopper.products import add_product
from gla_kernels.hopper.values import negative, thread_barrier, to_float32


@gluon.jit
def fetch_chunk(
    x_tile, y_tile, x, y, b, h, chunk, there, begin, length, x_b, x_t, x_h, y_b, y_t, y_h,
    K: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """Starts copying x and y of a sequence's chunk, without closing the group; zeros if it is not `there`.

    Returns the chunk's first token, and how many rows of it to copy.
    """
    C: gl.constexpr = x_tile.shape[0]
    t = begin + chunk * C
    rows_left = gl.where(there, gl.minimum(length - chunk * C, C), 0)
    fetch_rows(x_tile, x, b, t, h, x_b, x_t, x_h, rows_left, K, 16)
    fetch_rows(y_tile, y, b, t, h, y_b, y_t, y_h, rows_left, V, 16)
    return t, rows_left


@gluon.jit(do_not_specialize=["T", "H", "N", "piece_chunks"])
def gla_recurrence_hopper(
    x,  # [B, T, H, K] bfloat16, any strides of B, T and H: k, or q in reverse
    y,  # [B, T, H, V]: v, or do in reverse
    g,  # [B, T, H, K] float32 or bfloat16, natural log, <= 0; if HEAD_GATED [B, H, T], float32 sums of `gates`
    gates,  # [B, T, H] float32, bfloat16 or float16, any strides: natural log, <= 0; read if SUMS > 0
    end,  # [pieces, H, K, V] float32: the state after each piece if it starts from 0; in reverse before it
    decays,  # [pieces, H, K] float32: total gate of each piece, in log2
    cu_seqlens,  # [N + 1] int32 or int64: boundaries of packed sequences
    scale,
    x_b, x_t, x_h, y_b, y_t, y_h, g_b, g_t, g_h, gates_b, gates_t, gates_h,
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
    SUMS: gl.constexpr,
):  # fmt: skip
    """A program handles one piece and head.

    SUMS: 0, or as many chunks as a piece may have, whose sums of gates are then made; see `gate_sums.py`.
    """
    # Chunks in shared memory at once: so many that two programs fit a multiprocessor, and not three, because programs
    # that start while the kernel before ends would come to lie in threes (see `recurrence_stages`).
    BUFFERS: gl.constexpr = 3 if GATED else 6
    # The order of chunks. With a gate per head, the first is the one next to the state at the piece's end (in reverse,
    # its beginning): what lies between a chunk and that state has then been read, and the state itself never decays.
    step: gl.constexpr = -1 if REVERSE != HEAD_GATED else 1
    SUMMED: gl.constexpr = HEAD_GATED and SUMS == 0
    # The kernel before makes the sums of gates, so these are read after it has ended, but x and y at once.
    EARLY: gl.constexpr = SUMMED and not REVERSE
    state_layout: gl.constexpr = accumulator(BV)
    key_tile: gl.constexpr = accumulator(BK)
    key_layout: gl.constexpr = gl.SliceLayout(1, state_layout)
    if not EARLY:
        wait_for_previous_kernel(False)
    pid = gl.program_id(0)
    h = pid % H
    n, i, b, begin, length = find_piece(cu_seqlens, pid // H, N, T, piece_chunks * C, VARLEN)
    first_chunk = i * piece_chunks
    chunks = gl.maximum(gl.minimum(gl.cdiv(length, C) - first_chunk, piece_chunks), 0)
    start = first_chunk if step == 1 else first_chunk + chunks - 1
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
        sums = make_sums(BUFFERS if SUMMED else SUMS, C)
    S = gl.zeros([BK, BV], gl.float32, state_layout)
    if not GATED:
        S = warpgroup_mma_init(S)
    # 2^r of the previous chunk, which takes its state out of its frame.
    previous_factor = gl.full([BK], 1.0, gl.float32, key_layout)
    # Total gate of the chunks so far, of each channel or of the head.
    decay = (chunks * 0).to(gl.float32) if HEAD_GATED else gl.zeros([BK], gl.float32, key_layout)

    if SUMS > 0:
        loaded = load_head_gates(
            gates, b, begin, h, gates_b, gates_t, gates_h, length, start, step, chunks, SUMS, C
        )  # fmt: skip
    for ahead in gl.static_range(BUFFERS - 1):
        t, rows_left = fetch_chunk(
            x_tiles.index(ahead), y_tiles.index(ahead), x, y, b, h, start + step * ahead, ahead < chunks, begin,
            length, x_b, x_t, x_h, y_b, y_t, y_h, K, V,
        )  # fmt: skip
        if GATED:
            fetch_gate_rows(g_tiles.index(ahead), g, b, t, h, g_b, g_t, g_h, rows_left, K)
        if SUMMED and not EARLY:
            fetch_sums(sums.index(ahead), sums_in(g, b, t, h, T, H), rows_left)
        if not EARLY:
            async_copy.commit_group()
    if SUMS > 0:
        summed = head_sums(loaded)
        share_head_sums(sums, summed)
        keep_head_sums(g, summed, b, begin, h, T, H, length, start, step, chunks)
    if EARLY:
        wait_for_previous_kernel(False)
        for ahead in gl.static_range(BUFFERS - 1):
            chunk = start + step * ahead
            rows_left = gl.where(ahead < chunks, gl.minimum(length - chunk * C, C), 0)
            fetch_sums(sums.index(ahead), sums_in(g, b, begin + chunk * C, h, T, H), rows_left)
        for _ in gl.static_range(BUFFERS - 1):  # all copies as the first chunk's group, then the others' empty ones
            async_copy.commit_group()
    for j in range(chunks):
        buffer = j % BUFFERS
        next_j = j + BUFFERS - 1
        next_buffer = next_j % BUFFERS
        async_copy.wait_group(BUFFERS - 2)
        thread_barrier()
        x_tile = x_tiles.index(buffer)
        if GATED:
            bx = x_tile.load(key_tile)
            high, low = load_gates(g_tiles.index(buffer), g, words)
            high_tile.store(high)
            low_tile.store(low)
            fence_async_shared()
            thread_barrier()
            G, total = start_gate_frame(high_tile, low_tile, ones, C, BK)
            t, rows_left = fetch_chunk(
                x_tiles.index(next_buffer), y_tiles.index(next_buffer), x, y, b, h, start + step * next_j,
                next_j < chunks, begin, length, x_b, x_t, x_h, y_b, y_t, y_h, K, V,
            )  # fmt: skip
            fetch_gate_rows(g_tiles.index(next_buffer), g, b, t, h, g_b, g_t, g_h, rows_left, K)
            async_copy.commit_group()
            bx = to_float32(bx)
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
            x_tile.store((bx * gl.exp2(G if REVERSE else negative(G))).to(gl.bfloat16))
        if HEAD_GATED:
            these_sums = sums.index(buffer if SUMMED else j)
            total = chunk_gate(these_sums)
            a = row_sums(these_sums, key_tile)
            within = a if REVERSE else total - a
            x_tile.store((to_float32(x_tile.load(key_tile)) * gl.exp2(within + decay)[:, None]).to(gl.bfloat16))
            decay += total
        if not GATED:
            S = warpgroup_mma_wait(0, deps=[S])  # the chunk before's product, which ran until now
        fence_async_shared()
        thread_barrier()
        S = add_product(x_tile.permute((1, 0)), y_tiles.index(buffer), S)
        if GATED:
            S = warpgroup_mma_wait(0, deps=[S])
        else:
            # Into the tiles of the chunk before.
            t, rows_left = fetch_chunk(
                x_tiles.index(next_buffer), y_tiles.index(next_buffer), x, y, b, h, start + step * next_j,
                next_j < chunks, begin, length, x_b, x_t, x_h, y_b, y_t, y_h, K, V,
            )  # fmt: skip
            if SUMMED:
                fetch_sums(sums.index(next_buffer), sums_in(g, b, t, h, T, H), rows_left)
            async_copy.commit_group()
    async_copy.wait_group(0)
    let_next_kernel_start()
    if GATED:
        S *= previous_factor[:, None]
    else:
        S = warpgroup_mma_wait(0, deps=[S])
    if REVERSE:
        S *= scale
    write(end + pid.to(gl.int64) * K * V, S, V, K, V, state_layout)
    if GATED or HEAD_GATED:
        keys = gl.arange(0, BK, key_layout)
        gl.store(decays + pid.to(gl.int64) * K + keys, decay, keys < K)
