# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
# ruff: noqa: E741, SIM102
"""Computes o and states, or in reverse dv and their gradients, for K up to 256: Gluon kernel for wide heads, Hopper.

    forward:  X = Q~, Y = K~, Z = V     O  = P V  + Q~ S~,    S~'  = S~  + K~^T V
    reverse:  X = K~, Y = Q~, Z = dO    dV = P dO + K~ dS~',   dS~ = dS~' + Q~^T dO

with S~ = 2^r S (see `wide/recurrence.py`), and P, Q~, K~ and 2^r from `wide_frames`. A state with all K keys stays in
registers from chunk to chunk: two tensors of 128 keys, half of the registers of two warpgroups. Once per chunk it is
written to shared memory, from where products read it as a right operand. The state and the operands of two chunks leave
3 KiB of shared memory, so P is loaded straight into registers, and o is stored through the state's tile.

With a gate per head, the state is in no frame, and 2^(a_C) takes it, or its gradient, across a chunk (`head_gates.py`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, warpgroup_mma_wait

from gla_kernels.hopper.copies import fetch, load_state, offsets_and_mask, write
from gla_kernels.hopper.layouts import accumulator, copy_layout, left_operand, operand_layout
from gla_kernels.hopper.places import find_piece, first_slot, wait_for_previous_kernel
from gla_kernels.hopper.products import add_product, product
from gla_kernels.hopper.values import opaque, thread_barrier
from gla_kernels.hopper.wide.tiles import WARPS, raise_where_state_not_finite, write_tile, zeros


@gluon.jit
def load_half_gates(ptr, there, K: gl.constexpr, k0: gl.constexpr, BK: gl.constexpr, layout: gl.constexpr):
    """2^r (BK) of a chunk's keys from k0 on; 1 beyond K, and if there is no such chunk."""
    keys = k0 + gl.arange(0, BK, layout)
    return gl.load(ptr + keys, mask=there & (keys < K), other=1.0)


@gluon.jit
def put_quarter(
    states, S_tile, quarter: gl.constexpr, K: gl.constexpr, V: gl.constexpr, layout: gl.constexpr, column
):  # fmt: skip
    """Stores a quarter of the state's keys. Storing all at once would delay other memory accesses."""
    rows: gl.constexpr = S_tile.shape[0] // 2
    key: gl.constexpr = quarter * rows
    write_tile(states + key * V, S_tile.slice(quarter % 2 * rows, rows, 0), V, K - key, V, layout, column)


@gluon.jit
def load_scores(ptr, stride, rows_left, C: gl.constexpr, layout: gl.constexpr):
    """Loads P (C, C) of a chunk as a left operand."""
    offsets, mask = offsets_and_mask(C, C, stride, rows_left, C, layout)
    return gl.load(ptr + offsets, mask=mask, other=0.0)


@gluon.jit(do_not_specialize=["T", "H", "N", "base", "stride", "piece_chunks", "checkpoint_chunks"])
def wide_walk(
    x,  # [B, T, H, K] bfloat16, contiguous: Q~, or K~ in reverse
    y,  # [B, T, H, K]: K~, or Q~ in reverse
    z,  # [B, T, H, V] bfloat16: v, or do in reverse; any strides of B, T and H
    scores,  # [B, T, H, C] bfloat16: P
    frame_factors,  # [chunks, H, K] float32: 2^r; if HEAD_GATED [chunks, H], 2^(a_C)
    out,  # [B, T, H, V], contiguous
    initial,  # [pieces, H, K, V] float32: the state before each piece of this launch; in reverse its gradient after it
    end,  # [pieces, H, K, V] float32: the state after each; in reverse its gradient before it
    states,  # [slots, H, K, V] bfloat16, one per chunk; of this launch's pieces only if SCRATCH
    checkpoints,  # [slots, H, K, V] float32: the state before every `checkpoint_chunks`-th chunk
    raised,  # [N, H] int32: set to 1 if a result is not finite
    cu_seqlens,  # [N + 1] int32 or int64: boundaries of packed sequences
    scale,
    z_b, z_t, z_h,
    initial_p,  # elements from one piece's state in `initial` to the next piece's
    end_p,  # the same for `end`
    T,
    H,
    N,
    base,  # the first of this launch's pieces
    stride,  # from one piece of this launch to the next
    piece_chunks,
    checkpoint_chunks,  # chunks between checkpoints
    K: gl.constexpr,
    V: gl.constexpr,
    BK: gl.constexpr,
    BV: gl.constexpr,
    C: gl.constexpr,
    GATED: gl.constexpr,
    HEAD_GATED: gl.constexpr,
    VARLEN: gl.constexpr,
    REVERSE: gl.constexpr,
    HAS_INITIAL: gl.constexpr,
    STORE_END: gl.constexpr,
    STORE_STATES: gl.constexpr,
    STORE_CHECKPOINTS: gl.constexpr,
    SCRATCH: gl.constexpr,
):  # fmt: skip
    """A program handles one piece and head, all BK key columns and BV value columns."""
    W: gl.constexpr = BK // 2
    blocks_v: gl.constexpr = (V + BV - 1) // BV
    copy_k: gl.constexpr = copy_layout(W, 16, WARPS)
    copy_v: gl.constexpr = copy_layout(BV, 16, WARPS)
    state_layout: gl.constexpr = accumulator(BV, W, WARPS)
    key_layout: gl.constexpr = gl.SliceLayout(1, state_layout)
    score_layout: gl.constexpr = left_operand(BV, C, WARPS)
    wait_for_previous_kernel()
    pid = gl.program_id(0)
    v0 = pid % blocks_v * BV
    h = pid // blocks_v % H
    piece = pid // blocks_v // H
    n, i, b, begin, length = find_piece(cu_seqlens, base + piece * stride, N, T, piece_chunks * C, VARLEN)
    first_chunk = i * piece_chunks
    chunks = gl.maximum(gl.minimum(gl.cdiv(length, C) - first_chunk, piece_chunks), 0)
    start = first_chunk + chunks - 1 if REVERSE else first_chunk
    rows_left = gl.minimum(length - start * C, gl.minimum(chunks, 1) * C)
    t = (begin + start * C).to(gl.int64)
    b = b.to(gl.int64) if not VARLEN else 0
    token = (b * T + t) * H + h
    x += token * K
    y += token * K
    z += b * z_b + t * z_t + h.to(gl.int64) * z_h + v0
    scores += token * C
    out += token * V + v0
    tile_at = h * K * V + v0
    chunk_slot = first_slot(n, begin, length, C, VARLEN) + start
    if GATED:
        frame_factors += (chunk_slot.to(gl.int64) * H + h) * K
    if HEAD_GATED:
        frame_factors += chunk_slot.to(gl.int64) * H + h
    if STORE_STATES:
        if SCRATCH:
            chunk_slot = piece * piece_chunks + start - first_chunk
        states += chunk_slot.to(gl.int64) * H * K * V + tile_at
    if STORE_CHECKPOINTS:
        checkpoint_slot = first_slot(n, begin, length, checkpoint_chunks * C, VARLEN).to(gl.int64)
        checkpoints += checkpoint_slot * H * K * V + tile_at

    # Separate allocations for the halves: the compiler puts barriers between writes to one allocation at indices that
    # it cannot know.
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, C, W], operand_layout(C, W))
    x2_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, C, W], operand_layout(C, W))
    y_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, C, W], operand_layout(C, W))
    y2_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, C, W], operand_layout(C, W))
    z_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, C, BV], operand_layout(C, BV))
    S_tile = gl.allocate_shared_memory(gl.bfloat16, [W, BV], operand_layout(W, BV))
    S2_tile = gl.allocate_shared_memory(gl.bfloat16, [W, BV], operand_layout(W, BV))
    out_tile = S_tile.slice(0, C, 0)
    if HAS_INITIAL:
        initial += piece.to(gl.int64) * initial_p + tile_at
        S = load_state(initial, K, V, state_layout, W, BV, v0)
        S2 = load_state(initial + W * V, K - W, V, state_layout, W, BV, v0)
    else:
        S = zeros(W, BV, scale)
        S2 = zeros(W, BV, scale)
    # 2^r of the previous chunk, which takes its state out of its frame.
    previous_factor = gl.full([W], 1.0, gl.float32, key_layout)
    previous_factor2 = gl.full([W], 1.0, gl.float32, key_layout)

    step = -C if REVERSE else C
    fetch(x_tiles.index(0), x, H * K, rows_left, K, copy_k)
    fetch(x2_tiles.index(0), x + W, H * K, rows_left, K, copy_k, W)
    fetch(y_tiles.index(0), y, H * K, rows_left, K, copy_k)
    fetch(y2_tiles.index(0), y + W, H * K, rows_left, K, copy_k, W)
    fetch(z_tiles.index(0), z, z_t, rows_left, V, copy_v, v0)
    async_copy.commit_group()
    if GATED:
        factor = load_half_gates(frame_factors, chunks > 0, K, 0, W, key_layout)
        factor2 = load_half_gates(frame_factors, chunks > 0, K, W, W, key_layout)
    if HEAD_GATED:
        decay = gl.load(frame_factors, mask=chunks > 0, other=1.0)
    P = load_scores(scores, H * C, rows_left, C, score_layout)
    for j in range(chunks):
        buffer = j % 2
        next_buffer = (j + 1) % 2
        if STORE_CHECKPOINTS:
            if j % checkpoint_chunks == 0:
                write(checkpoints, S * previous_factor[:, None], V, K, V, state_layout, v0)
                write(checkpoints + W * V, S2 * previous_factor2[:, None], V, K - W, V, state_layout, v0)
                checkpoints += H * K * V
        async_copy.wait_group(0)
        thread_barrier()
        # The next chunk is copied while this one is processed.
        next_chunk = start - j - 1 if REVERSE else start + j + 1
        next_rows = gl.where(j + 1 < chunks, gl.minimum(length - next_chunk * C, C), 0)
        x += step * H * K
        y += step * H * K
        z += step * z_t
        fetch(x_tiles.index(next_buffer), x, H * K, next_rows, K, copy_k)
        fetch(x2_tiles.index(next_buffer), x + W, H * K, next_rows, K, copy_k, W)
        fetch(y_tiles.index(next_buffer), y, H * K, next_rows, K, copy_k)
        fetch(y2_tiles.index(next_buffer), y + W, H * K, next_rows, K, copy_k, W)
        fetch(z_tiles.index(next_buffer), z, z_t, next_rows, V, copy_v, v0)
        async_copy.commit_group()
        if GATED:
            S *= (previous_factor * factor)[:, None]
            S2 *= (previous_factor2 * factor2)[:, None]
            previous_factor = factor
            previous_factor2 = factor2
        S_tile.store(S.to(gl.bfloat16))
        S2_tile.store(S2.to(gl.bfloat16))
        if HEAD_GATED:
            S *= decay
            S2 *= decay
        fence_async_shared()
        thread_barrier()

        z_tile = z_tiles.index(buffer)
        O = product(x_tiles.index(buffer), S_tile, C, BV, WARPS)
        O = add_product(x2_tiles.index(buffer), S2_tile, O)
        O = add_product(P, z_tile, O)
        S = add_product(y_tiles.index(buffer).permute((1, 0)), z_tile, S)
        S2 = add_product(y2_tiles.index(buffer).permute((1, 0)), z_tile, S2)
        if GATED:
            frame_factors += (-H if REVERSE else H) * K
            factor = load_half_gates(frame_factors, j + 1 < chunks, K, 0, W, key_layout)
            factor2 = load_half_gates(frame_factors, j + 1 < chunks, K, W, W, key_layout)
        if HEAD_GATED:
            frame_factors += -H if REVERSE else H
            decay = gl.load(frame_factors, mask=j + 1 < chunks, other=1.0)
        if STORE_STATES:
            put_quarter(states, S_tile, 0, K, V, copy_v, v0)
        O = warpgroup_mma_wait(2, deps=[O])
        scores += step * H * C
        P = load_scores(scores, H * C, next_rows, C, score_layout)
        thread_barrier()  # no thread reads the state's first quarter any more
        out_tile.store(O.to(gl.bfloat16))
        if STORE_STATES:
            put_quarter(states, S_tile, 1, K, V, copy_v, v0)
        thread_barrier()
        write_tile(out, out_tile, H * V, rows_left, V, copy_v, v0)
        if STORE_STATES:
            put_quarter(states, S2_tile, 2, K, V, copy_v, v0)
        out += opaque(step) * H * V
        rows_left = next_rows
        S, S2 = warpgroup_mma_wait(0, deps=[S, S2])
        if STORE_STATES:
            put_quarter(states, S2_tile, 3, K, V, copy_v, v0)
            states += (-H if REVERSE else H) * K * V
    async_copy.wait_group(0)
    S *= previous_factor[:, None]
    S2 *= previous_factor2[:, None]
    if STORE_END:
        end += piece.to(gl.int64) * end_p + tile_at
        write(end, S, V, K, V, state_layout, v0)
        write(end + W * V, S2, V, K - W, V, state_layout, v0)
    if GATED:
        raise_where_state_not_finite(raised + n * H + h, S * 0.0 + S2 * 0.0, chunks)
