# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
# ruff: noqa: E741, SIM102
"""Forward kernel for Hopper, in Gluon: the plain form of `forward.py` for chunks of 64, K and V up to 64, bfloat16.

    Q~ = scale q 2^(a - r),   K~ = k 2^(b - r),   r = max(a_last, -limit) / 2
    O  = Q~ S~ + tril(Q~ K~^T) V,       S~' = S~ + K~^T V

S~ = 2^r S is the state in the chunk's frame, and 2^r S~' the state after the chunk. The same factor 2^r takes the state
into a frame and out of it, and the product of two factors takes it from one frame to the next.

Chunks with a strong channel are marked, and heads of which a result is not finite are flagged, as in `forward.py`.

With a gate per head, see `head_gates.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, warpgroup_mma_wait

from gla_kernels.hopper.copies import fetch, load_state, write
from gla_kernels.hopper.gate_sums import head_sums, keep_head_sums, load_head_gates, share_head_sums
from gla_kernels.hopper.gates import (
    chunk_total,
    excess,
    fetch_gates,
    frame_factor,
    has_large,
    load_gates,
    make_ones,
    make_words,
    start_gate_frame,
)
from gla_kernels.hopper.head_gates import (
    HEAD_SPAN_LIMIT,
    chunk_gate,
    fetch_sums,
    make_sums,
    row_sums,
    sums_in,
)
from gla_kernels.hopper.layouts import accumulator, copy_layout, gate_layout, left_operand, operand_layout, used_keys
from gla_kernels.hopper.narrow.outputs import start_outputs, start_strong_outputs
from gla_kernels.hopper.places import find_piece, first_slot, locate, mark_strong, raise_where, wait_for_previous_kernel
from gla_kernels.hopper.values import negative, thread_barrier, to_float32, wide_product


@gluon.jit
def row_in(ptr, b, t, h, stride_b, stride_t, stride_h):
    """Pointer to token t of batch row b and head h."""
    return ptr + b.to(gl.int64) * stride_b + t.to(gl.int64) * stride_t + h.to(gl.int64) * stride_h


@gluon.jit
def fetch_ahead(
    q_tile, k_tile, v_tile, g_tile, row, i, rows, length, chunks, first_chunk, programs, start, T, H,
    q_at, k_at, v_at, g_at, q, k, v, g, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, GATED: gl.constexpr, SUMMED: gl.constexpr,
    VARLEN: gl.constexpr,
):  # fmt: skip
    """Starts copying chunk i of a row, to which q_at, k_at, v_at and g_at point.

    If SUMMED, g holds sums of gates (see `head_gates.py`).

    Returns row, chunk and pointers of what follows: the row's next chunk, or the program's next row.
    """
    rows_left = gl.where(row < rows, length - (first_chunk + i) * C, 0)
    fetch(q_tile, q_at, q_t, rows_left, K, copy_layout(q_tile.shape[1], 16))
    fetch(k_tile, k_at, k_t, rows_left, K, copy_layout(k_tile.shape[1], 16))
    fetch(v_tile, v_at, v_t, rows_left, V, copy_layout(v_tile.shape[1], 16))
    if GATED:
        fetch_gates(g_tile, g_at, g_t, rows_left, K)
    if SUMMED:
        fetch_sums(g_tile, g_at, rows_left)
    async_copy.commit_group()
    i += 1
    q_at += C * q_t
    k_at += C * k_t
    v_at += C * v_t
    if GATED:
        g_at += C * g_t
    if SUMMED:
        g_at += C
    if i >= chunks:
        i = row * 0
        row += programs
        b = row * 0 if VARLEN else row // H
        h = row % H
        q_at = row_in(q, b, start, h, q_b, q_t, q_h)
        k_at = row_in(k, b, start, h, k_b, k_t, k_h)
        v_at = row_in(v, b, start, h, v_b, v_t, v_h)
        if GATED:
            g_at = row_in(g, b, start, h, g_b, g_t, g_h)
        if SUMMED:
            g_at = sums_in(g, b, start, h, T, H)
    return row, i, q_at, k_at, v_at, g_at


@gluon.jit(do_not_specialize=["T", "H", "count", "checkpoint_chunks", "rows", "N", "base"])
def gla_forward_hopper(
    q,  # [B, T, H, K] bfloat16, any strides of B, T and H
    k,  # [B, T, H, K]
    v,  # [B, T, H, V]
    g,  # [B, T, H, K] float32 or bfloat16, natural log, <= 0; if HEAD_GATED [B, H, T], float32 sums of `gates`
    gates,  # [B, T, H] float32, bfloat16 or float16, any strides: natural log, <= 0; read if SUMS > 0
    o,  # [B, T, H, V], contiguous
    initial,  # [N or pieces, H, K, V] float32: the states before the first chunk
    final,  # [N, H, K, V] float32: the states after the last chunk; not of pieces
    states,  # [slots, H, K, V] bfloat16: the state before each chunk, if GATED in that chunk's frame
    checkpoints,  # [slots, H, K, V] float32: the state before every `checkpoint_chunks`-th chunk
    flags,  # [N, H] int32: 1 if a result is not finite
    marks,  # [slots, H] int32, 0: n + 1 if the chunk, of sequence n, has a strong channel
    cu_seqlens,  # [N + 1] int32 or int64: boundaries of packed sequences
    scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, gates_b, gates_t, gates_h,
    T,
    H,
    count,  # the most chunks of a sequence, or of a piece
    checkpoint_chunks,
    rows,  # sequences, or pieces, times heads
    N,
    base,  # the first of this launch's pieces
    K: gl.constexpr,
    V: gl.constexpr,
    BK: gl.constexpr,
    BV: gl.constexpr,
    C: gl.constexpr,
    GATED: gl.constexpr,
    HEAD_GATED: gl.constexpr,
    VARLEN: gl.constexpr,
    HAS_INITIAL: gl.constexpr,
    STORE_FINAL: gl.constexpr,
    STORE_STATES: gl.constexpr,
    STORE_CHECKPOINTS: gl.constexpr,
    PIECES: gl.constexpr,
    SUMS: gl.constexpr,
):  # fmt: skip
    """A program handles a row (a sequence and head) and every `programs`-th after it.

    Copies run ahead of the computation, also across the end of a row. All rows of a program are taken to have as many
    chunks as its first, so packed sequences need one program per row.

    PIECES: rows are pieces of `count` chunks (a multiple of `checkpoint_chunks` if checkpoints are kept) and a head,
    with a program each.

    SUMS: 0, or as many chunks as a program may have, whose sums of gates it then makes; see `gate_sums.py`. They are
    kept if states or checkpoints are. Not of PIECES.
    """
    SUMMED: gl.constexpr = HEAD_GATED and SUMS == 0
    KC: gl.constexpr = BK if GATED else used_keys(K)
    copy_v: gl.constexpr = copy_layout(BV, 16)
    state_layout: gl.constexpr = accumulator(BV)
    key_layout: gl.constexpr = gl.SliceLayout(1, state_layout)
    value_tile: gl.constexpr = accumulator(BV, C)
    if not PIECES:
        wait_for_previous_kernel()
    programs = gl.num_programs(0)
    if PIECES:
        n, nth, _, begin, length = find_piece(cu_seqlens, base + gl.program_id(0) // H, N, T, count * C, VARLEN)
        first_chunk = nth * count
    else:
        n = gl.program_id(0) // H
        first_chunk = n * 0
        _, begin, length = locate(cu_seqlens, n, T, VARLEN)
    chunks = gl.minimum(gl.cdiv(length, C) - first_chunk, count)
    start = begin + first_chunk * C

    # A multiprocessor holds two programs. Without gates there is room for loads two chunks ahead; a third program
    # instead would only leave fewer for the last round of programs.
    buffers: gl.constexpr = 2 if GATED else 3
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [buffers, C, BK], operand_layout(C, BK))
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [buffers, C, BV], operand_layout(C, BV))
    q_tiles = gl.allocate_shared_memory(gl.bfloat16, [buffers, C, BK], operand_layout(C, BK))
    g_tiles = gl.allocate_shared_memory(gl.float32, [buffers, C, BK], gate_layout()) if GATED else k_tiles
    if HEAD_GATED:
        g_tiles = make_sums(buffers if SUMMED else SUMS, C)
        decayed_v_tile = gl.allocate_shared_memory(gl.bfloat16, [C, BV], operand_layout(C, BV))
    if GATED:
        # Not one allocation for both: the compiler puts barriers between writes to the same allocation.
        high_tile = gl.allocate_shared_memory(gl.bfloat16, [C, BK], operand_layout(C, BK))
        low_tile = gl.allocate_shared_memory(gl.bfloat16, [C, BK], operand_layout(C, BK))
        ones = make_ones()
        words = make_words()
    S_tile = gl.allocate_shared_memory(gl.bfloat16, [BK, BV], operand_layout(BK, BV))

    # What is fetched next: row, chunk, and input pointers.
    ahead = gl.program_id(0)
    ahead_i = ahead * 0
    b = n * 0 if VARLEN else n
    h = ahead % H
    q_at = row_in(q, b, start, h, q_b, q_t, q_h)
    k_at = row_in(k, b, start, h, k_b, k_t, k_h)
    v_at = row_in(v, b, start, h, v_b, v_t, v_h)
    g_at = row_in(g, b, start, h, g_b, g_t, g_h) if GATED else k_at
    if SUMMED:
        g_at = sums_in(g, b, start, h, T, H)
    if SUMS > 0:
        loaded = load_head_gates(gates, b, begin, h, gates_b, gates_t, gates_h, length, 0, 1, chunks, SUMS, C)
    for slot in gl.static_range(buffers - 1):
        ahead, ahead_i, q_at, k_at, v_at, g_at = fetch_ahead(
            q_tiles.index(slot), k_tiles.index(slot), v_tiles.index(slot), g_tiles.index(slot),
            ahead, ahead_i, rows, length, chunks, first_chunk, programs, start, T, H, q_at, k_at, v_at, g_at,
            q, k, v, g, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, K, V, C, GATED, SUMMED, VARLEN,
        )  # fmt: skip
    if SUMS > 0:
        summed = head_sums(loaded)
        share_head_sums(g_tiles, summed)
        if STORE_STATES or STORE_CHECKPOINTS:
            keep_head_sums(g, summed, b, begin, h, T, H, length, 0, 1, chunks)
    if PIECES:  # the kernel before this one makes `initial`; inputs may be read earlier
        wait_for_previous_kernel()
    buffer = ahead * 0
    for row in range(gl.program_id(0), rows, programs):
        if not PIECES:
            n = row // H
        h = row % H
        b = n * 0 if VARLEN else n
        mark = marks + (first_slot(n, begin, length, C, VARLEN) + first_chunk) * H + h
        o_at = o + ((b.to(gl.int64) * T + start) * H + h) * V
        states_at = states
        if STORE_STATES:
            chunk_slot = first_slot(n, begin, length, C, VARLEN) + first_chunk
            states_at = states + (chunk_slot.to(gl.int64) * H + h) * K * V
        rows_left = length - first_chunk * C
        checkpoint = first_slot(n, begin, length, checkpoint_chunks * C, VARLEN) + first_chunk // checkpoint_chunks
        # 2^r of the last chunk, which takes its state out of its frame.
        previous_factor = gl.full([BK], 1.0, gl.float32, key_layout)
        if HAS_INITIAL:
            S = load_state(initial + wide_product(row, K * V), K, V, state_layout, BK, BV)
        else:
            S = gl.zeros([BK, BV], gl.float32, state_layout)
        suspect = gl.zeros([C], gl.float32, gl.SliceLayout(1, accumulator(BV)))
        for i in range(chunks):
            async_copy.wait_group(buffers - 2)
            thread_barrier()
            next_buffer = (buffer + buffers - 1) % buffers
            g_tile = g_tiles.index(i if SUMS > 0 else buffer)
            k_tile = k_tiles.index(buffer)
            v_tile = v_tiles.index(buffer)
            if HEAD_GATED:  # before copies start, because Triton puts another barrier between copies and these
                bv = v_tile.load(value_tile)
                a = row_sums(g_tile, value_tile)
                total = chunk_gate(g_tile)
            if not GATED:
                ahead, ahead_i, q_at, k_at, v_at, g_at = fetch_ahead(
                    q_tiles.index(next_buffer), k_tiles.index(next_buffer), v_tiles.index(next_buffer),
                    g_tiles.index(next_buffer), ahead, ahead_i, rows, length, chunks, first_chunk, programs, start,
                    T, H, q_at, k_at, v_at, g_at, q, k, v, g, q_b, q_t, q_h,
                    k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, K, V, C, GATED, SUMMED, VARLEN,
                )  # fmt: skip
            if STORE_CHECKPOINTS:
                if i % checkpoint_chunks == 0:
                    there = checkpoints + ((checkpoint + i // checkpoint_chunks).to(gl.int64) * H + h) * K * V
                    write(there, S * previous_factor[:, None] if GATED else S, V, K, V, state_layout)
            # Not as float32 yet, which would take twice the registers until they are brought into the frame.
            if GATED:
                bk = k_tile.load(accumulator(BK))
            q_tile = q_tiles.index(buffer)
            q_part = q_tile.slice(0, KC, 1)
            if GATED:
                bq = q_tile.load(accumulator(BK))
                high, low = load_gates(g_tile, g, words)
                high_tile.store(high)
                low_tile.store(low)
                fence_async_shared()
                thread_barrier()
                G, total = start_gate_frame(high_tile, low_tile, ones, C, BK)
                # Behind the loads of gates, which would wait for every copy that was started before them.
                ahead, ahead_i, q_at, k_at, v_at, g_at = fetch_ahead(
                    q_tiles.index(next_buffer), k_tiles.index(next_buffer), v_tiles.index(next_buffer),
                    g_tiles.index(next_buffer), ahead, ahead_i, rows, length, chunks, first_chunk, programs, start,
                    T, H, q_at, k_at, v_at, g_at, q, k, v, g, q_b, q_t, q_h,
                    k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, K, V, C, GATED, SUMMED, VARLEN,
                )  # fmt: skip
                large = has_large(words)
                G, total = warpgroup_mma_wait(0, deps=[G, total])
                last = chunk_total(total, BV)
                factor = frame_factor(last)
                S *= (previous_factor * factor)[:, None]
                previous_factor = factor
                if large:
                    beyond = gl.convert_layout(excess(last), gl.SliceLayout(0, accumulator(BK)))[None, :]
                    G += 0.5 * beyond
                    k_tile.store((to_float32(bk) * gl.exp2(beyond - G)).to(gl.bfloat16))
                    mark_strong(mark, last, n)
                else:
                    k_tile.store((to_float32(bk) * gl.exp2(negative(G))).to(gl.bfloat16))
                bq = to_float32(bq) * scale * gl.exp2(G)
                mark += H
            S_tile.store(S.to(gl.bfloat16))
            if HEAD_GATED:
                mild = total >= -HEAD_SPAN_LIMIT
                of_values = gl.exp2(gl.where(mild, 0.0, total) - a)[:, None]
                decayed_v_tile.store((to_float32(bv) * of_values).to(gl.bfloat16))
                of_rows = gl.where(mild, gl.exp2(a), 1.0) * scale
                of_state = gl.where(mild, gl.exp2(total), 1.0)
            fence_async_shared()
            thread_barrier()
            if HEAD_GATED:
                if mild:
                    O, next_S = start_outputs(q_part, k_tile, decayed_v_tile, S_tile, S, True)
                else:
                    O, next_S = start_strong_outputs(
                        q_tile, k_tile, v_tile, decayed_v_tile, S_tile, S, g_tile, total, KC
                    )
            else:
                Q = gl.convert_layout(bq.to(gl.bfloat16), left_operand(BK)) if GATED else q_part
                O, next_S = start_outputs(Q, k_tile, v_tile, S_tile, S, False)
            if STORE_STATES:
                write(states_at, S_tile.load(copy_v), V, K, V, copy_v)
                states_at += H * K * V
            if HEAD_GATED:
                O = warpgroup_mma_wait(1, deps=[O]) * of_rows[:, None]
            else:
                O, S = warpgroup_mma_wait(0, deps=[O, next_S])
            if not GATED and not HEAD_GATED:
                O *= scale
            suspect += gl.sum(O, axis=1) * 0.0
            write(o_at, gl.convert_layout(O.to(gl.bfloat16), copy_v), H * V, rows_left, V, copy_v)
            o_at += C * H * V
            rows_left -= C
            buffer = (buffer + 1) % buffers
            if HEAD_GATED:
                S = warpgroup_mma_wait(0, deps=[next_S]) * of_state
        if GATED:
            S *= previous_factor[:, None]
        if STORE_FINAL:
            write(final + (n.to(gl.int64) * H + h) * K * V, S, V, K, V, state_layout)
        if GATED:
            # Infinity times 0 is NaN, which stays NaN in every sum and differs from 0.
            zero_or_nan = suspect + gl.sum(S * 0.0, axis=1)
            raise_where(flags + n * H + h, (zero_or_nan != 0.0) & (chunks > 0))
    async_copy.wait_group(0)
