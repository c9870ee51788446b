# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
# ruff: noqa: E741, SIM102
"""Forward kernel for wide heads on Hopper, in Gluon, K up to 128, gates per channel: as `narrow/forward.py`.

    O = Q~ S~ + tril(Q~ K~^T) V,       S~' = S~ + K~^T V

Two warpgroups divide every accumulator of 64 rows by columns, so left operands must be in shared memory. One program
fills a multiprocessor, so no other program runs while it waits. How it keeps busy depends on its value columns.

Up to 128, it works on two chunks at a time: while the products of one run, q, k and g of the next are brought into its
frame.

With 256, every q, k and g is read and brought into its frame once, not twice. But a state of 128 x 256 fills half of
the registers of two warpgroups, which leaves no room for a second chunk. The state is a pair of tensors of 128 columns,
which are read out one after the other through one tile of shared memory. Registers are so short that values are
recomputed wherever possible (`opaque`) and tiles are stored in parts. Spills go to L2, because shared memory leaves the
L1 cache 28 KiB.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, warpgroup_mma_wait

from gla_kernels.hopper.copies import fetch_rows, load_state, write
from gla_kernels.hopper.gates import fetch_gate_rows, frame_factor, make_words
from gla_kernels.hopper.layouts import accumulator, copy_layout, gate_layout, operand_layout
from gla_kernels.hopper.places import find_piece, first_slot, mark_strong, wait_for_previous_kernel
from gla_kernels.hopper.products import add_product, masked, product, triangle
from gla_kernels.hopper.values import opaque, readdressed, thread_barrier, wide_product
from gla_kernels.hopper.wide.tiles import (
    WARPS,
    chunk_head_of,
    cumulative_tile,
    gate_halves,
    make_ones_columns,
    raise_where_not_finite,
    raise_where_state_not_finite,
    start_centred_gates,
    start_total_gate,
    store_frame,
    write_tile,
    zeros,
)


@gluon.jit
def start_frame(g_tile, g, words, cumulative, ones, C: gl.constexpr, BK: gl.constexpr):
    """Starts a chunk's a - a_last / 2 (C, BK) and a_last (BK, 8), four products; and whether it has a large gate."""
    halves, large = gate_halves(g_tile, g, words, C, BK)
    return start_centred_gates(halves, cumulative, C, BK), start_total_gate(halves, ones, BK), large


@gluon.jit(do_not_specialize=["T", "H", "N", "base", "stride", "piece_chunks", "checkpoint_chunks"])
def wide_forward(
    q,  # [B, T, H, K] bfloat16, any strides of B, T and H
    k,  # [B, T, H, K]
    v,  # [B, T, H, V]
    g,  # [B, T, H, K] float32 or bfloat16, natural log, <= 0
    o,  # [B, T, H, V], contiguous
    initial,  # [pieces, H, K, V] float32: the state before each piece of this launch
    final,  # [pieces, H, K, V] float32: the state after each
    states,  # [slots, H, K, V] bfloat16: the state before each chunk, in that chunk's frame
    checkpoints,  # [slots, H, K, V] float32: the state before every `checkpoint_chunks`-th chunk
    flags,  # [N, H] int32: set to 1 if a result is not finite
    marks,  # [chunks, H] int32, 0: n + 1 if the chunk, of sequence n, has a strong channel
    cu_seqlens,  # [N + 1] int32 or int64: boundaries of packed sequences
    scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h,
    initial_p,  # elements from one piece's state in `initial` to the next piece's
    final_p,  # the same for `final`
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
    VARLEN: gl.constexpr,
    HAS_INITIAL: gl.constexpr,
    STORE_FINAL: gl.constexpr,
    STORE_STATES: gl.constexpr,
    STORE_CHECKPOINTS: gl.constexpr,
):  # fmt: skip
    """A program handles one piece and head, and BV value columns."""
    PAIR: gl.constexpr = BV == 256
    W: gl.constexpr = BV // 2 if PAIR else BV  # columns of one tensor of the state
    blocks_v: gl.constexpr = (V + BV - 1) // BV
    copy_v: gl.constexpr = copy_layout(W, 16, WARPS)
    state_layout: gl.constexpr = accumulator(W, BK, WARPS)
    key_layout: gl.constexpr = gl.SliceLayout(1, state_layout)
    wait_for_previous_kernel()
    pid = gl.program_id(0)
    v0 = pid % blocks_v * BV
    h = pid // blocks_v % H
    piece = pid // blocks_v // H
    n, i, b, begin, length = find_piece(cu_seqlens, base + piece * stride, N, T, piece_chunks * C, VARLEN)
    first_chunk = i * piece_chunks
    chunks = gl.maximum(gl.minimum(gl.cdiv(length, C) - first_chunk, piece_chunks), 0)
    rows_left = length - first_chunk * C
    t = begin + first_chunk * C
    b = n * 0 if VARLEN else b
    if STORE_CHECKPOINTS:
        checkpoint_slot = first_slot(n, begin, length, checkpoint_chunks * C, VARLEN)
    chunk_slot = first_slot(n, begin, length, C, VARLEN) + first_chunk

    q_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, C, BK], operand_layout(C, BK))
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, C, BK], operand_layout(C, BK))
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, C, W], operand_layout(C, W))
    if PAIR:
        v2_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, C, W], operand_layout(C, W))
    S_memory = gl.allocate_shared_memory(gl.bfloat16, [BK, W], operand_layout(BK, W))
    if PAIR:
        O_memory = gl.allocate_shared_memory(gl.bfloat16, [C, W], operand_layout(C, W))
    P_memory = gl.allocate_shared_memory(gl.bfloat16, [C, C], operand_layout(C, C))
    g_tiles = gl.allocate_shared_memory(gl.float32, [1 if PAIR else 2, C, BK], gate_layout())
    ones = make_ones_columns(C)
    cumulative = cumulative_tile(C)
    words = make_words()
    if HAS_INITIAL:
        initial += piece.to(gl.int64) * initial_p + h * K * V + v0
        S = load_state(initial, K, V, state_layout, BK, W, v0)
        if PAIR:
            S2 = load_state(initial + W, K, V, state_layout, BK, W, v0 + W)
    else:
        S = zeros(BK, W, scale)
        if PAIR:
            S2 = zeros(BK, W, scale)
    # 2^r of the previous chunk, which takes its state out of its frame.
    previous_factor = gl.full([BK], 1.0, gl.float32, key_layout)

    if PAIR:
        # One chunk at a time. As functions, these two loops would give other machine code (NOTES, "Registers").
        fetch_rows(q_tiles.index(0), q, b, t, h, q_b, q_t, q_h, rows_left, K, 16)
        fetch_rows(k_tiles.index(0), k, b, t, h, k_b, k_t, k_h, rows_left, K, 16)
        fetch_rows(v_tiles.index(0), v, b, t, h, v_b, v_t, v_h, rows_left, V, 16, v0)
        fetch_rows(v2_tiles.index(0), v, b, t, h, v_b, v_t, v_h, rows_left, V, 16, v0 + W)
        fetch_gate_rows(g_tiles.index(0), g, b, t, h, g_b, g_t, g_h, rows_left, K)
        async_copy.commit_group()
        for j in range(chunks):
            buffer = j % 2
            next_buffer = (j + 1) % 2
            q_tile = q_tiles.index(buffer)
            k_tile = k_tiles.index(buffer)
            S_tile = readdressed(S_memory)
            O_tile = readdressed(O_memory)
            P_tile = readdressed(P_memory)
            g_tile = readdressed(g_tiles.index(0))
            v_tile = v_tiles.index(buffer)
            v2_tile = v2_tiles.index(buffer)
            if STORE_CHECKPOINTS:
                if j % checkpoint_chunks == 0:
                    there = checkpoints + wide_product(checkpoint_slot * H + h, K * V) + v0
                    write(there, S * previous_factor[:, None], V, K, V, state_layout, v0)
                    write(there + W, S2 * previous_factor[:, None], V, K, V, state_layout, v0 + W)
                    checkpoint_slot += 1
            async_copy.wait_group(0)
            thread_barrier()
            # The next chunk is copied while this one is processed.
            fetch_rows(q_tiles.index(next_buffer), q, b, t + C, h, q_b, q_t, q_h, rows_left - C, K, 16)
            fetch_rows(k_tiles.index(next_buffer), k, b, t + C, h, k_b, k_t, k_h, rows_left - C, K, 16)
            fetch_rows(v_tiles.index(next_buffer), v, b, t + C, h, v_b, v_t, v_h, rows_left - C, V, 16, v0)
            fetch_rows(v2_tiles.index(next_buffer), v, b, t + C, h, v_b, v_t, v_h, rows_left - C, V, 16, v0 + W)
            async_copy.commit_group()
            halves, large = gate_halves(g_tile, g, words, C, BK)
            G = start_centred_gates(halves, readdressed(cumulative), C, BK)
            total = start_total_gate(halves, readdressed(ones), BK)
            G, total = warpgroup_mma_wait(0, deps=[G, total])
            last = gl.convert_layout(gl.max(total, axis=1), key_layout)
            factor = frame_factor(last)
            frame_change = previous_factor * factor
            previous_factor = factor
            S *= frame_change[:, None]
            S2 *= frame_change[:, None]
            if large:
                mark_strong(marks + chunk_head_of(cu_seqlens, n, opaque(t), h, opaque(T), H, C, VARLEN), last, n)
            store_frame(q_tile, k_tile, G, last, large, scale, C, BK)
            S_tile.store(S.to(gl.bfloat16))
            fence_async_shared()
            thread_barrier()
            fetch_gate_rows(g_tile, g, b, t + C, h, g_b, g_t, g_h, rows_left - C, K)
            async_copy.commit_group()

            P = product(q_tile, k_tile.permute((1, 0)), C, C, WARPS)
            # Store the second half of the previous chunk's output only now, so that no fence waits for the store.
            token = (b * T + t) * H + h
            before = o + wide_product(token - C * H, V) + v0 + W
            write_tile(before, O_tile, H * V, gl.where(j > 0, rows_left + C, 0), V, copy_v, v0 + W)
            O = product(q_tile, S_tile, C, W, WARPS)
            S = add_product(k_tile.permute((1, 0)), v_tile, S)
            P = warpgroup_mma_wait(2, deps=[P])
            P = masked(P, triangle(C, True, True, WARPS))
            P_tile.store(P.to(gl.bfloat16))
            raise_where_not_finite(flags + n * H + h, P)
            fence_async_shared()
            thread_barrier()
            O = add_product(P_tile, v_tile, O)
            if STORE_STATES:
                state = states + wide_product(chunk_slot * H + h, K * V) + v0
                write_tile(state, S_tile, V, K, V, copy_v, v0)
            O, S = warpgroup_mma_wait(0, deps=[O, S])
            thread_barrier()  # no product reads S_tile any more
            S_tile.store(S2.to(gl.bfloat16))
            O_tile.store(O.to(gl.bfloat16))
            fence_async_shared()
            thread_barrier()
            O2 = product(q_tile, S_tile, C, W, WARPS)
            O2 = add_product(P_tile, v2_tile, O2)
            S2 = add_product(k_tile.permute((1, 0)), v2_tile, S2)
            if STORE_STATES:
                state = states + wide_product(chunk_slot * H + h, K * V) + v0
                write_tile(state + W, S_tile, V, K, V, copy_v, v0 + W)
            write_tile(o + wide_product(token, V) + v0, O_tile, H * V, rows_left, V, copy_v, v0)
            O2, S2 = warpgroup_mma_wait(0, deps=[O2, S2])
            O_tile.store(O2.to(gl.bfloat16))
            if STORE_STATES:
                chunk_slot += 1
            t += C
            rows_left -= C
        async_copy.wait_group(0)
        thread_barrier()
        token = (b * T + t - C) * H + h
        last = o + wide_product(token, V) + v0 + W
        write_tile(last, O_memory, H * V, gl.where(chunks > 0, rows_left + C, 0), V, copy_v, v0 + W)
    else:
        # Two chunks at a time. Before the loop, bring the first one into its frame, and start copying its v and the
        # second one's q, k and g.
        chunk_head = chunk_slot * H + h
        for ahead in gl.static_range(2):
            rows_there = rows_left - ahead * C
            fetch_rows(q_tiles.index(ahead), q, b, t + ahead * C, h, q_b, q_t, q_h, rows_there, K, 16)
            fetch_rows(k_tiles.index(ahead), k, b, t + ahead * C, h, k_b, k_t, k_h, rows_there, K, 16)
            if ahead == 0:
                fetch_gate_rows(g_tiles.index(0), g, b, t, h, g_b, g_t, g_h, rows_left, K)
                async_copy.commit_group()
                fetch_rows(v_tiles.index(0), v, b, t, h, v_b, v_t, v_h, rows_left, V, 16, v0)
                fetch_gate_rows(g_tiles.index(1), g, b, t + C, h, g_b, g_t, g_h, rows_left - C, K)
            async_copy.commit_group()
        async_copy.wait_group(2)
        thread_barrier()
        G, total, large = start_frame(g_tiles.index(0), g, words, cumulative, ones, C, BK)
        G, total = warpgroup_mma_wait(0, deps=[G, total])
        last = gl.convert_layout(gl.max(total, axis=1), key_layout)
        factor = frame_factor(last)
        if large:
            mark_strong(marks + chunk_head, last, n)
        store_frame(q_tiles.index(0), k_tiles.index(0), G, last, large, scale, C, BK)

        for j in range(chunks):
            buffer = j % 2
            next_buffer = (j + 1) % 2
            q_tile = q_tiles.index(buffer)
            k_tile = k_tiles.index(buffer)
            v_tile = v_tiles.index(buffer)
            if STORE_CHECKPOINTS:
                if j % checkpoint_chunks == 0:
                    there = checkpoints + wide_product(checkpoint_slot * H + h, K * V) + v0
                    write(there, S * previous_factor[:, None], V, K, V, state_layout, v0)
                    checkpoint_slot += 1
            async_copy.wait_group(1)  # this chunk's v
            S *= (previous_factor * factor)[:, None]
            previous_factor = factor
            S_memory.store(S.to(gl.bfloat16))
            fence_async_shared()
            thread_barrier()
            P = product(q_tile, k_tile.permute((1, 0)), C, C, WARPS)
            O = product(q_tile, S_memory, C, W, WARPS)
            S = add_product(k_tile.permute((1, 0)), v_tile, S)
            # Meanwhile, the next chunk's gates. Their products queue up behind these.
            G, total, large = start_frame(g_tiles.index(next_buffer), g, words, cumulative, ones, C, BK)
            P = warpgroup_mma_wait(6, deps=[P])
            P = masked(P, triangle(C, True, True, WARPS))
            P_memory.store(P.to(gl.bfloat16))
            raise_where_not_finite(flags + n * H + h, P)
            async_copy.wait_group(0)  # the next chunk's q and k
            fence_async_shared()
            thread_barrier()
            O = add_product(P_memory, v_tile, O)
            # Behind the loads of gates, which would wait for these copies.
            fetch_rows(v_tiles.index(next_buffer), v, b, t + C, h, v_b, v_t, v_h, rows_left - C, V, 16, v0)
            fetch_gate_rows(g_tiles.index(buffer), g, b, t + 2 * C, h, g_b, g_t, g_h, rows_left - 2 * C, K)
            async_copy.commit_group()
            if STORE_STATES:
                state = states + wide_product(chunk_slot * H + h, K * V) + v0
                write(state, S_memory.load(copy_v), V, K, V, copy_v, v0)
                chunk_slot += 1
            G, total = warpgroup_mma_wait(1, deps=[G, total])
            last = gl.convert_layout(gl.max(total, axis=1), key_layout)
            chunk_head += H
            factor = frame_factor(last)
            if large:
                mark_strong(marks + opaque(chunk_head), last, n)  # beyond the last chunk, gates are 0
            store_frame(q_tiles.index(next_buffer), k_tiles.index(next_buffer), G, last, large, scale, C, BK)
            O, S = warpgroup_mma_wait(0, deps=[O, S])
            thread_barrier()  # no product reads any tile of this chunk any more
            fetch_rows(q_tile, q, b, t + 2 * C, h, q_b, q_t, q_h, rows_left - 2 * C, K, 16)
            fetch_rows(k_tile, k, b, t + 2 * C, h, k_b, k_t, k_h, rows_left - 2 * C, K, 16)
            async_copy.commit_group()
            row = o + wide_product((b * T + t) * H + h, V) + v0
            write(row, gl.convert_layout(O.to(gl.bfloat16), copy_v), H * V, rows_left, V, copy_v, v0)
            t += C
            rows_left -= C
        async_copy.wait_group(0)

    S *= previous_factor[:, None]
    if PAIR:
        S2 *= previous_factor[:, None]
    if STORE_FINAL:
        final += piece.to(gl.int64) * final_p + h * K * V + v0
        write(final, S, V, K, V, state_layout, v0)
        if PAIR:
            write(final + W, S2, V, K, V, state_layout, v0 + W)
    zero_or_nan = S * 0.0 + S2 * 0.0 if PAIR else S * 0.0
    raise_where_state_not_finite(flags + n * H + h, zero_or_nan, chunks)
