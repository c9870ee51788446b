# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
# ruff: noqa: SIM102
"""Computes the state before every chunk, or in reverse its gradient: Gluon kernel for wide heads on Hopper, and a scan.

    forward:  X = K~, Y = V    S~ = 2^r S is kept before every chunk,    S~'  = S~  + K~^T V
    reverse:  X = Q~, Y = dO   dS~' = 2^r dS' is kept after every chunk,  dS~ = dS~' + Q~^T dO

in the chunk's frame (`narrow/forward.py`). A factor 2^r takes the state into this frame, and another out of it. Other
kernels read the stored states and handle each chunk independently.

With PARK, the state of a chunk is parked in the memory of that chunk's dq, dk and dg until such a kernel has read it.
At K = BK = 128 this memory has just room for 256 value columns: keys 0 to C in dq (columns from 128 on in dk), the
other keys in dg.

A sequence cut into pieces has at least one program per piece. First every piece runs from a state of zero and gives its
local state and total decay; then a scan computes the states at the borders of the pieces; then every piece runs again
from its own state.

With a gate per head, which needs no frame (`head_gates.py`), S and dS' themselves are kept:

    S' = 2^(a_C) S + K^T 2^(a_C - a) V,    dS = 2^(a_C) dS' + Q^T 2^a dO
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, warpgroup_mma_wait

from gla_kernels.hopper.copies import fetch, load_state, write
from gla_kernels.hopper.gates import fetch_gates, frame_factor, make_words
from gla_kernels.hopper.head_gates import chunk_gate, decay_to_end, fetch_sums, make_sums, row_sums, sums_in
from gla_kernels.hopper.layouts import accumulator, copy_layout, gate_layout, operand_layout
from gla_kernels.hopper.places import find_piece, first_slot, wait_for_previous_kernel
from gla_kernels.hopper.products import add_product
from gla_kernels.hopper.values import negative, thread_barrier, to_float32, wide_product
from gla_kernels.hopper.wide.tiles import (
    WARPS,
    cumulative_tile,
    excess_row,
    gate_halves,
    keep_excess,
    make_ones_columns,
    raise_where_state_not_finite,
    start_centred_gates,
    start_total_gate,
    write_tile,
    zeros,
)


@gluon.jit(do_not_specialize=["T", "H", "N", "base", "stride", "piece_chunks"])
def wide_recurrence(
    x,  # [B, T, H, K] bfloat16: k, or q in reverse; any strides of B, T and H
    y,  # [B, T, H, V]: v, or do in reverse
    g,  # [B, T, H, K] float32 or bfloat16, natural log, <= 0; if HEAD_GATED [B, H, T], float32 sums of gates
    initial,  # [pieces, H, K, V] float32: the state before each piece of this launch; in reverse its gradient after it
    end,  # [pieces, H, K, V] float32: the state after each; in reverse its gradient before it
    decays,  # [pieces, H, K] float32: total gate of each, in log2
    excesses,  # [chunks of all launches, H, K] float32: for the kernels that read the states; see `hopper/gates.py`
    states,  # [slots, H, K, V] bfloat16, one per chunk; of this launch's pieces only if SCRATCH; unused if PARK
    dq,  # [B, T, H, K] bfloat16, contiguous, like dk; holds parked states if PARK
    dk,  # [B, T, H, K]
    parked,  # [B, T, H, 2 K]: the memory of dg as bfloat16; holds parked states if PARK
    raised,  # [N, H] int32: set to 1 if a state is not finite
    cu_seqlens,  # [N + 1] int32 or int64: boundaries of packed sequences
    scale,
    x_b, x_t, x_h, y_b, y_t, y_h, g_b, g_t, g_h,
    initial_p,  # elements from one piece's state in `initial` to the next piece's
    end_p,  # the same for `end`
    T,
    H,
    N,
    base,  # the first of this launch's pieces
    stride,  # from one piece of this launch to the next
    piece_chunks,
    K: gl.constexpr,
    V: gl.constexpr,
    BK: gl.constexpr,
    BV: gl.constexpr,
    C: gl.constexpr,
    STAGES: gl.constexpr,  # chunks in shared memory at once
    GATED: gl.constexpr,
    HEAD_GATED: gl.constexpr,
    VARLEN: gl.constexpr,
    REVERSE: gl.constexpr,
    HAS_INITIAL: gl.constexpr,
    STORE_END: gl.constexpr,
    STORE_DECAYS: gl.constexpr,
    STORE_EXCESS: gl.constexpr,
    STORE_STATES: gl.constexpr,
    SCRATCH: gl.constexpr,
    PARK: gl.constexpr,
    CHECK: gl.constexpr,
):  # fmt: skip
    """A program handles one piece and head, and a tile of BK key and BV value columns of the state."""
    # With a tile of 256 value columns there is room for the gates of one chunk only.
    g_buffers: gl.constexpr = STAGES if BV <= 128 else 1
    blocks_k: gl.constexpr = (K + BK - 1) // BK
    blocks_v: gl.constexpr = (V + BV - 1) // BV
    copy_k: gl.constexpr = copy_layout(BK, 16, WARPS)
    copy_v: gl.constexpr = copy_layout(BV, 16, WARPS)
    state_layout: gl.constexpr = accumulator(BV, BK, WARPS)
    key_tile: gl.constexpr = accumulator(BK, C, WARPS)
    key_layout: gl.constexpr = gl.SliceLayout(1, state_layout)
    wait_for_previous_kernel(STORE_STATES or PARK)  # if it stores no states, `scan_pieces` comes next: small programs
    pid = gl.program_id(0)
    k0 = pid // blocks_v % blocks_k * BK
    v0 = pid % blocks_v * BV
    rest = pid // blocks_v // blocks_k
    h = rest % H
    piece = rest // H
    slot = base + piece * stride
    n, i, b, begin, length = find_piece(cu_seqlens, slot, N, T, piece_chunks * C, VARLEN)
    first_chunk = i * piece_chunks
    chunks = gl.maximum(gl.minimum(gl.cdiv(length, C) - first_chunk, piece_chunks), 0)
    start = first_chunk + chunks - 1 if REVERSE else first_chunk
    rows_left = gl.minimum(length - start * C, gl.minimum(chunks, 1) * C)
    t = (begin + start * C).to(gl.int64)
    b = b.to(gl.int64) if not VARLEN else 0
    x += b * x_b + t * x_t + h.to(gl.int64) * x_h + k0
    y += b * y_b + t * y_t + h.to(gl.int64) * y_h + v0
    if GATED:
        g += b * g_b + t * g_t + h.to(gl.int64) * g_h + k0
    if HEAD_GATED:
        sums = make_sums(STAGES, C)
        sums_at = sums_in(g, n * 0 if VARLEN else n, t, h, T, H)
    tile_at = (h * K + k0) * V + v0
    if STORE_EXCESS:
        chunk_head = (first_slot(n, begin, length, C, VARLEN) + start) * H + h
    if PARK:
        gl.static_assert((K == BK) & (K == 2 * C) & (V <= 2 * K) & (BV % BK == 0))
        token = ((b * T + t) * H + h).to(gl.int32)
    elif STORE_STATES:
        chunk_slot = piece * piece_chunks if SCRATCH else first_slot(n, begin, length, C, VARLEN) + first_chunk
        chunk_slot += start - first_chunk
        states += ((chunk_slot.to(gl.int64) * H + h) * K + k0) * V + v0

    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, BK], operand_layout(C, BK))
    y_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, BV], operand_layout(C, BV))
    S_tile = gl.allocate_shared_memory(gl.bfloat16, [BK, BV], operand_layout(BK, BV))
    if GATED:
        g_tiles = gl.allocate_shared_memory(gl.float32, [g_buffers, C, BK], gate_layout())
        ones = make_ones_columns(C)
        cumulative = cumulative_tile(C)
        words = make_words()
    if HAS_INITIAL:
        S = load_state(initial + piece.to(gl.int64) * initial_p + tile_at, K - k0, V, state_layout, BK, BV, v0)
    else:
        S = zeros(BK, BV, scale)
    # 2^r of the previous chunk, which takes its state out of its frame.
    previous_factor = gl.full([BK], 1.0, gl.float32, key_layout)
    decay = gl.zeros([BK], gl.float32, key_layout)

    step = -C if REVERSE else C
    for ahead in gl.static_range(STAGES - 1):
        if ahead > 0:
            chunk = start - ahead if REVERSE else start + ahead
            rows_left = gl.where(ahead < chunks, gl.minimum(length - chunk * C, C), 0)
            x += step * x_t
            y += step * y_t
            if GATED:
                g += step * g_t
            if HEAD_GATED:
                sums_at += step
        fetch(x_tiles.index(ahead), x, x_t, rows_left, K, copy_k, k0)
        fetch(y_tiles.index(ahead), y, y_t, rows_left, V, copy_v, v0)
        if GATED and ahead < g_buffers:
            fetch_gates(g_tiles.index(ahead), g, g_t, rows_left, K, k0)
        if HEAD_GATED:
            fetch_sums(sums.index(ahead), sums_at, rows_left)
        async_copy.commit_group()
    for j in range(chunks):
        buffer = j % STAGES
        next_j = j + STAGES - 1
        next_buffer = next_j % STAGES
        async_copy.wait_group(STAGES - 2)
        thread_barrier()
        # The next chunks are copied while this one is processed.
        next_chunk = start - next_j if REVERSE else start + next_j
        next_rows = gl.where(next_j < chunks, gl.minimum(length - next_chunk * C, C), 0)
        x += step * x_t
        y += step * y_t
        fetch(x_tiles.index(next_buffer), x, x_t, next_rows, K, copy_k, k0)
        fetch(y_tiles.index(next_buffer), y, y_t, next_rows, V, copy_v, v0)
        if GATED:
            g += step * g_t
            if g_buffers > 1:
                fetch_gates(g_tiles.index(next_buffer), g, g_t, next_rows, K, k0)
        if HEAD_GATED:
            sums_at += step
            fetch_sums(sums.index(next_buffer), sums_at, next_rows)
        async_copy.commit_group()

        x_tile = x_tiles.index(buffer)
        y_tile = y_tiles.index(buffer)
        if GATED:
            bx = x_tile.load(key_tile)
            halves, large = gate_halves(g_tiles.index(buffer % g_buffers), g, words, C, BK)
            G = start_centred_gates(halves, cumulative, C, BK)
            total = start_total_gate(halves, ones, BK)
            G, total = warpgroup_mma_wait(0, deps=[G, total])
            last = gl.convert_layout(gl.max(total, axis=1), key_layout)
            decay += last
            factor = frame_factor(last)
            S *= (previous_factor * factor)[:, None]
            previous_factor = factor
            if large:
                if STORE_EXCESS:
                    if v0 == 0:
                        keep_excess(excesses, chunk_head, last, k0, K)
                G += (0.5 if REVERSE else -0.5) * excess_row(last, C, BK)
            factor = gl.exp2(G if REVERSE else negative(G))
            if STORE_EXCESS:
                chunk_head += -H if REVERSE else H
        if GATED:
            bx = to_float32(bx)
            if REVERSE:
                bx *= scale
            x_tile.store((bx * factor).to(gl.bfloat16))
        elif HEAD_GATED or REVERSE:
            # A factor of rows: of the narrower operand.
            narrower = y_tile if BV < BK else x_tile
            tile: gl.constexpr = accumulator(min(BK, BV), C, WARPS)
            if HEAD_GATED:
                total = chunk_gate(sums.index(buffer))
                decay += total
                a = row_sums(sums.index(buffer), tile)
                factor = gl.exp2(a)[:, None] * scale if REVERSE else decay_to_end(a, total)
            else:
                factor = scale
            narrower.store((to_float32(narrower.load(tile)) * factor).to(gl.bfloat16))
        if STORE_STATES or PARK:
            S_tile.store(S.to(gl.bfloat16))
        if HEAD_GATED:
            S *= gl.exp2(total)
        fence_async_shared()
        thread_barrier()
        if GATED and g_buffers == 1:
            fetch_gates(g_tiles.index(0), g, g_t, next_rows, K, k0)
            async_copy.commit_group()
        S = add_product(x_tile.permute((1, 0)), y_tile, S)
        if PARK:
            for part in gl.static_range(BV // BK):
                column = v0 + part * BK
                columns = S_tile.slice(part * BK, BK, 1)
                lower = gl.where(column == 0, dq, dk) + wide_product(token, K)
                upper = parked + wide_product(token, 2 * K) + column
                write_tile(lower, columns.slice(0, C, 0), H * K, C, V, copy_k, column)
                write_tile(upper, columns.slice(C, C, 0), H * 2 * K, C, V, copy_k, column)
            token += (-C if REVERSE else C) * H
        elif STORE_STATES:
            write(states, S_tile.load(copy_v), V, K - k0, V, copy_v, v0)
            states += (-H if REVERSE else H) * K * V
        S = warpgroup_mma_wait(0, deps=[S])
    async_copy.wait_group(0)
    S *= previous_factor[:, None]
    if STORE_END:
        write(end + piece.to(gl.int64) * end_p + tile_at, S, V, K - k0, V, state_layout, v0)
    if STORE_DECAYS:
        if v0 == 0:
            keys = gl.arange(0, BK, key_layout)
            gl.store(decays + (piece.to(gl.int64) * H + h) * K + k0 + keys, decay, keys < K - k0)
    if CHECK:
        raise_where_state_not_finite(raised + n * H + h, S * 0.0, chunks)
