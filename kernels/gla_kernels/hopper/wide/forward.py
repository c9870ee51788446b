# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
# ruff: noqa: E741, SIM102
"""Forward kernel for wide heads on Hopper, in Gluon, K up to 128: the plain form of `narrow/forward.py`.

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

from gla_kernels.hopper.copies import fetch_rows, load_state, put
from gla_kernels.hopper.gates import fetch_gate_rows, frame_factor, make_words
from gla_kernels.hopper.layouts import accumulator, copy_layout, gate_layout, operand_layout
from gla_kernels.hopper.places import begin_behind, find_piece, first_slot, mark_strong
from gla_kernels.hopper.products import add_product, product, triangle
from gla_kernels.hopper.values import anew, opaque, thread_barrier, wide_product
from gla_kernels.hopper.wide.tiles import (
    WARPS,
    cumulative_tile,
    gate_halves,
    make_ones_columns,
    place_of,
    put_tile,
    raise_where_not_finite,
    raise_where_state_not_finite,
    start_centred_gates,
    start_total_gate,
    store_frame,
    store_scaled,
    zeros,
)


@gluon.jit
def start_frame(g_tile, g, words, cumulative, ones, C: gl.constexpr, BK: gl.constexpr):
    """Starts a chunk's a - a_last / 2 (C, BK) and a_last (BK, 8), four products; and whether it has a large gate."""
    halves, large = gate_halves(g_tile, g, words, C, BK)
    return start_centred_gates(halves, cumulative, C, BK), start_total_gate(halves, ones, BK), large


@gluon.jit(do_not_specialize=["T", "H", "N", "base", "stride", "piece_chunks", "every"])
def wide_forward(
    q,  # [B, T, H, K] bfloat16, any strides of B, T and H
    k,  # [B, T, H, K]
    v,  # [B, T, H, V]
    g,  # [B, T, H, K] float32 or bfloat16, natural log, <= 0
    o,  # [B, T, H, V], contiguous
    initial,  # [pieces, H, K, V] float32: the state before each piece of this launch
    final,  # [pieces, H, K, V] float32: the state after each
    states,  # [slots, H, K, V] bfloat16: the state before each chunk, in that chunk's frame
    checkpoints,  # [slots, H, K, V] float32: the state before every `every`-th chunk
    flags,  # [N, H] int32: set to 1 if a result is not finite
    marks,  # [chunks, H] int32, 0: n + 1 if the chunk, of sequence n, has a strong channel
    cu,  # [N + 1] int32 or int64: boundaries of packed sequences
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
    every,  # chunks between checkpoints
    K: gl.constexpr,
    V: gl.constexpr,
    BK: gl.constexpr,
    BV: gl.constexpr,
    C: gl.constexpr,
    GATED: gl.constexpr,
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
    begin_behind()
    pid = gl.program_id(0)
    v0 = pid % blocks_v * BV
    h = pid // blocks_v % H
    piece = pid // blocks_v // H
    n, i, b, begin, length = find_piece(cu, base + piece * stride, N, T, piece_chunks * C, VARLEN)
    first = i * piece_chunks
    chunks = gl.maximum(gl.minimum(gl.cdiv(length, C) - first, piece_chunks), 0)
    rows_left = length - first * C
    t = begin + first * C
    b = n * 0 if VARLEN else b
    if STORE_CHECKPOINTS:
        checkpoint_slot = first_slot(n, begin, length, every * C, VARLEN)
    chunk_slot = first_slot(n, begin, length, C, VARLEN) + first

    q_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, C, BK], operand_layout(C, BK))
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, C, BK], operand_layout(C, BK))
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, C, W], operand_layout(C, W))
    if PAIR:
        v2_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, C, W], operand_layout(C, W))
    S_place = gl.allocate_shared_memory(gl.bfloat16, [BK, W], operand_layout(BK, W))
    if PAIR:
        O_place = gl.allocate_shared_memory(gl.bfloat16, [C, W], operand_layout(C, W))
    P_place = gl.allocate_shared_memory(gl.bfloat16, [C, C], operand_layout(C, C))
    if GATED:
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
    leave = gl.full([BK], 1.0, gl.float32, key_layout)  # 2^r of the previous chunk: takes its state out of its frame

    if PAIR:
        # One chunk at a time. As functions, these two loops would give other machine code (NOTES, "Registers").
        fetch_rows(q_tiles.index(0), q, b, t, h, q_b, q_t, q_h, rows_left, K, 16)
        fetch_rows(k_tiles.index(0), k, b, t, h, k_b, k_t, k_h, rows_left, K, 16)
        fetch_rows(v_tiles.index(0), v, b, t, h, v_b, v_t, v_h, rows_left, V, 16, v0)
        fetch_rows(v2_tiles.index(0), v, b, t, h, v_b, v_t, v_h, rows_left, V, 16, v0 + W)
        if GATED:
            fetch_gate_rows(g_tiles.index(0), g, b, t, h, g_b, g_t, g_h, rows_left, K)
        async_copy.commit_group()
        for j in range(chunks):
            now = j % 2
            later = (j + 1) % 2
            q_tile = q_tiles.index(now)
            k_tile = k_tiles.index(now)
            S_tile = anew(S_place)
            O_tile = anew(O_place)
            P_tile = anew(P_place)
            if GATED:
                g_tile = anew(g_tiles.index(0))
            v_tile = v_tiles.index(now)
            v2_tile = v2_tiles.index(now)
            if STORE_CHECKPOINTS:
                if j % every == 0:
                    there = checkpoints + wide_product(checkpoint_slot * H + h, K * V) + v0
                    put(there, S * leave[:, None], V, K, V, state_layout, v0)
                    put(there + W, S2 * leave[:, None], V, K, V, state_layout, v0 + W)
                    checkpoint_slot += 1
            async_copy.wait_group(0)
            thread_barrier()
            # The next chunk is copied while this one is processed.
            fetch_rows(q_tiles.index(later), q, b, t + C, h, q_b, q_t, q_h, rows_left - C, K, 16)
            fetch_rows(k_tiles.index(later), k, b, t + C, h, k_b, k_t, k_h, rows_left - C, K, 16)
            fetch_rows(v_tiles.index(later), v, b, t + C, h, v_b, v_t, v_h, rows_left - C, V, 16, v0)
            fetch_rows(v2_tiles.index(later), v, b, t + C, h, v_b, v_t, v_h, rows_left - C, V, 16, v0 + W)
            async_copy.commit_group()
            if GATED:
                halves, large = gate_halves(g_tile, g, words, C, BK)
                G = start_centred_gates(halves, anew(cumulative), C, BK)
                total = start_total_gate(halves, anew(ones), BK)
                G, total = warpgroup_mma_wait(0, deps=[G, total])
                last = gl.convert_layout(gl.max(total, axis=1), key_layout)
                half = frame_factor(last)
                enter = leave * half
                leave = half
                S *= enter[:, None]
                S2 *= enter[:, None]
                if large:
                    mark_strong(marks + place_of(cu, n, opaque(t), h, opaque(T), H, C, VARLEN), last, n)
                store_frame(q_tile, k_tile, G, last, large, scale, C, BK)
            else:
                store_scaled(q_tile, scale, C, BK)
            S_tile.store(S.to(gl.bfloat16))
            fence_async_shared()
            thread_barrier()
            if GATED:
                fetch_gate_rows(g_tile, g, b, t + C, h, g_b, g_t, g_h, rows_left - C, K)
                async_copy.commit_group()

            P = product(q_tile, k_tile.permute((1, 0)), C, C, WARPS)
            # Store the second half of the previous chunk's output only now, so that no fence waits for the store.
            token = (b * T + t) * H + h
            before = o + wide_product(token - C * H, V) + v0 + W
            put_tile(before, O_tile, H * V, gl.where(j > 0, rows_left + C, 0), V, copy_v, v0 + W)
            O = product(q_tile, S_tile, C, W, WARPS)
            S = add_product(k_tile.permute((1, 0)), v_tile, S)
            P = warpgroup_mma_wait(2, deps=[P])
            P = gl.where(triangle(C, True, True, WARPS), P, 0.0)
            P_tile.store(P.to(gl.bfloat16))
            if GATED:
                raise_where_not_finite(flags + n * H + h, P)
            fence_async_shared()
            thread_barrier()
            O = add_product(P_tile, v_tile, O)
            if STORE_STATES:
                state = states + wide_product(chunk_slot * H + h, K * V) + v0
                put_tile(state, S_tile, V, K, V, copy_v, v0)
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
                put_tile(state + W, S_tile, V, K, V, copy_v, v0 + W)
            put_tile(o + wide_product(token, V) + v0, O_tile, H * V, rows_left, V, copy_v, v0)
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
        put_tile(last, O_place, H * V, gl.where(chunks > 0, rows_left + C, 0), V, copy_v, v0 + W)
    else:
        # Two chunks at a time. Before the loop, bring the first one into its frame, and start copying its v and the
        # second one's q, k and g.
        if GATED:
            place = chunk_slot * H + h
        fetch_rows(q_tiles.index(0), q, b, t, h, q_b, q_t, q_h, rows_left, K, 16)
        fetch_rows(k_tiles.index(0), k, b, t, h, k_b, k_t, k_h, rows_left, K, 16)
        if GATED:
            fetch_gate_rows(g_tiles.index(0), g, b, t, h, g_b, g_t, g_h, rows_left, K)
        async_copy.commit_group()
        fetch_rows(v_tiles.index(0), v, b, t, h, v_b, v_t, v_h, rows_left, V, 16, v0)
        if GATED:
            fetch_gate_rows(g_tiles.index(1), g, b, t + C, h, g_b, g_t, g_h, rows_left - C, K)
        async_copy.commit_group()
        fetch_rows(q_tiles.index(1), q, b, t + C, h, q_b, q_t, q_h, rows_left - C, K, 16)
        fetch_rows(k_tiles.index(1), k, b, t + C, h, k_b, k_t, k_h, rows_left - C, K, 16)
        async_copy.commit_group()
        async_copy.wait_group(2)
        thread_barrier()
        if GATED:
            G, total, large = start_frame(g_tiles.index(0), g, words, cumulative, ones, C, BK)
            G, total = warpgroup_mma_wait(0, deps=[G, total])
            last = gl.convert_layout(gl.max(total, axis=1), key_layout)
            half = frame_factor(last)
            if large:
                mark_strong(marks + place, last, n)
            store_frame(q_tiles.index(0), k_tiles.index(0), G, last, large, scale, C, BK)
        else:
            store_scaled(q_tiles.index(0), scale, C, BK)

        for j in range(chunks):
            now = j % 2
            later = (j + 1) % 2
            q_tile = q_tiles.index(now)
            k_tile = k_tiles.index(now)
            v_tile = v_tiles.index(now)
            if STORE_CHECKPOINTS:
                if j % every == 0:
                    there = checkpoints + wide_product(checkpoint_slot * H + h, K * V) + v0
                    put(there, S * leave[:, None], V, K, V, state_layout, v0)
                    checkpoint_slot += 1
            async_copy.wait_group(1)  # this chunk's v
            if GATED:
                S *= (leave * half)[:, None]
                leave = half
            S_place.store(S.to(gl.bfloat16))
            fence_async_shared()
            thread_barrier()
            P = product(q_tile, k_tile.permute((1, 0)), C, C, WARPS)
            O = product(q_tile, S_place, C, W, WARPS)
            S = add_product(k_tile.permute((1, 0)), v_tile, S)
            # Meanwhile, the next chunk's gates. Their products queue up behind these.
            if GATED:
                G, total, large = start_frame(g_tiles.index(later), g, words, cumulative, ones, C, BK)
            P = warpgroup_mma_wait(6 if GATED else 2, deps=[P])
            P = gl.where(triangle(C, True, True, WARPS), P, 0.0)
            P_place.store(P.to(gl.bfloat16))
            if GATED:
                raise_where_not_finite(flags + n * H + h, P)
            async_copy.wait_group(0)  # the next chunk's q and k
            fence_async_shared()
            thread_barrier()
            O = add_product(P_place, v_tile, O)
            # Behind the loads of gates, which would wait for these copies.
            fetch_rows(v_tiles.index(later), v, b, t + C, h, v_b, v_t, v_h, rows_left - C, V, 16, v0)
            if GATED:
                fetch_gate_rows(g_tiles.index(now), g, b, t + 2 * C, h, g_b, g_t, g_h, rows_left - 2 * C, K)
            async_copy.commit_group()
            if STORE_STATES:
                state = states + wide_product(chunk_slot * H + h, K * V) + v0
                put(state, S_place.load(copy_v), V, K, V, copy_v, v0)
                chunk_slot += 1
            if GATED:
                G, total = warpgroup_mma_wait(1, deps=[G, total])
                last = gl.convert_layout(gl.max(total, axis=1), key_layout)
                place += H
                half = frame_factor(last)
                if large:
                    mark_strong(marks + opaque(place), last, n)  # beyond the last chunk, gates are 0
                store_frame(q_tiles.index(later), k_tiles.index(later), G, last, large, scale, C, BK)
            else:
                store_scaled(q_tiles.index(later), scale, C, BK)
            O, S = warpgroup_mma_wait(0, deps=[O, S])
            thread_barrier()  # no product reads q_tile or k_tile any more
            fetch_rows(q_tile, q, b, t + 2 * C, h, q_b, q_t, q_h, rows_left - 2 * C, K, 16)
            fetch_rows(k_tile, k, b, t + 2 * C, h, k_b, k_t, k_h, rows_left - 2 * C, K, 16)
            async_copy.commit_group()
            row = o + wide_product((b * T + t) * H + h, V) + v0
            put(row, gl.convert_layout(O.to(gl.bfloat16), copy_v), H * V, rows_left, V, copy_v, v0)
            t += C
            rows_left -= C
        async_copy.wait_group(0)

    S *= leave[:, None]
    if PAIR:
        S2 *= leave[:, None]
    if STORE_FINAL:
        final += piece.to(gl.int64) * final_p + h * K * V + v0
        put(final, S, V, K, V, state_layout, v0)
        if PAIR:
            put(final + W, S2, V, K, V, state_layout, v0 + W)
    if GATED:
        nothing = S * 0.0 + S2 * 0.0 if PAIR else S * 0.0
        raise_where_state_not_finite(flags + n * H + h, nothing, chunks)
