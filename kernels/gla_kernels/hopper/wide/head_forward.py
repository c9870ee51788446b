# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
# ruff: noqa: E741, SIM102
"""Forward kernel for wide heads on Hopper, in Gluon, K up to 128 and 128 value columns, with no gates or one per head.

    O = 2^a Q S + (Q K^T o D) V,    S' = 2^(a_C) S + (2^(a_C - a) K)^T V

as in `head_gates.py`; without gates all decays are 1. Two warpgroups divide every accumulator of 64 rows by columns, so
a left operand of these must be in shared memory; of the state, each has half of the rows, so decayed keys may be in
registers. One program fills a multiprocessor, so no other program runs while it waits.

Products come first. While those that need no scores run, copies are started two chunks ahead. Keys are decayed a chunk
ahead. Triton puts a barrier behind a wait for copies unless there is one, so fences stand before such waits: a chunk's
copies have arrived when the chunk before ends, and the fence at its own start is between them and its products.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, warpgroup_mma_wait

from gla_kernels.hopper.copies import fetch_rows, load_state, write
from gla_kernels.hopper.head_gates import chunk_gate, fetch_sums, make_sums, row_sums, sums_in
from gla_kernels.hopper.layouts import accumulator, copy_layout, left_operand, operand_layout
from gla_kernels.hopper.places import find_piece, first_slot, wait_for_previous_kernel
from gla_kernels.hopper.products import add_product, masked, product, triangle
from gla_kernels.hopper.values import thread_barrier, to_float32, wide_product
from gla_kernels.hopper.wide.tiles import WARPS, zeros

BUFFERS = gl.constexpr(3)  # chunks in memory at once


@gluon.jit
def fetch_chunk(
    q_tiles, k_tiles, v_tiles, buffer, q, k, v, b, t, h, rows_left,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, v0, K: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """Starts copying a chunk's q, k and v from token t on, of which `rows_left` rows are there."""
    fetch_rows(q_tiles.index(buffer), q, b, t, h, q_b, q_t, q_h, rows_left, K, 16)
    fetch_rows(k_tiles.index(buffer), k, b, t, h, k_b, k_t, k_h, rows_left, K, 16)
    fetch_rows(v_tiles.index(buffer), v, b, t, h, v_b, v_t, v_h, rows_left, V, 16, v0)


@gluon.jit
def decayed_keys(k_tile, sums, BV: gl.constexpr):
    """(2^(a_C - a) K)^T as the left operand of a product of BV columns, from a chunk's sums of gates per head."""
    layout: gl.constexpr = left_operand(BV, k_tile.shape[1], WARPS)
    decays = gl.exp2(chunk_gate(sums) - sums.load(gl.SliceLayout(0, layout)))[None, :]
    return (to_float32(k_tile.permute((1, 0)).load(layout)) * decays).to(gl.bfloat16)


@gluon.jit(do_not_specialize=["T", "H", "N", "base", "stride", "piece_chunks", "checkpoint_chunks"])
def head_forward(
    q,  # [B, T, H, K] bfloat16, any strides of B, T and H
    k,  # [B, T, H, K]
    v,  # [B, T, H, V]
    g,  # [B, H, T] float32 sums of gates if HEAD_GATED
    o,  # [B, T, H, V], contiguous
    initial,  # [pieces, H, K, V] float32: the state before each piece of this launch
    final,  # [pieces, H, K, V] float32: the state after each
    states,  # [slots, H, K, V] bfloat16: the state before each chunk
    checkpoints,  # [slots, H, K, V] float32: the state before every `checkpoint_chunks`-th chunk
    cu_seqlens,  # [N + 1] int32 or int64: boundaries of packed sequences
    scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h,
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
    HEAD_GATED: gl.constexpr,
    VARLEN: gl.constexpr,
    HAS_INITIAL: gl.constexpr,
    STORE_FINAL: gl.constexpr,
    STORE_STATES: gl.constexpr,
    STORE_CHECKPOINTS: gl.constexpr,
):  # fmt: skip
    """A program handles one piece and head, and BV value columns."""
    # The kernel before makes sums, which only copies of sums have to wait for.
    EARLY: gl.constexpr = HEAD_GATED and not VARLEN and not HAS_INITIAL
    blocks_v: gl.constexpr = (V + BV - 1) // BV
    copy_v: gl.constexpr = copy_layout(BV, 16, WARPS)
    state_layout: gl.constexpr = accumulator(BV, BK, WARPS)
    score_layout: gl.constexpr = accumulator(C, C, WARPS)
    output_layout: gl.constexpr = accumulator(BV, C, WARPS)
    if not EARLY:
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

    q_tiles = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, C, BK], operand_layout(C, BK))
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, C, BK], operand_layout(C, BK))
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, C, BV], operand_layout(C, BV))
    S_memory = gl.allocate_shared_memory(gl.bfloat16, [BK, BV], operand_layout(BK, BV))
    P_memory = gl.allocate_shared_memory(gl.bfloat16, [C, C], operand_layout(C, C))
    O_memory = gl.allocate_shared_memory(gl.bfloat16, [C, BV], operand_layout(C, BV))
    sums = make_sums(BUFFERS, C) if HEAD_GATED else P_memory  # with gates alone
    if HAS_INITIAL:
        S = load_state(initial + piece.to(gl.int64) * initial_p + h * K * V + v0, K, V, state_layout, BK, BV, v0)
    else:
        S = zeros(BK, BV, scale)

    for ahead in gl.static_range(2):
        fetch_chunk(
            q_tiles, k_tiles, v_tiles, ahead, q, k, v, b, t + ahead * C, h, rows_left - ahead * C,
            q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, v0, K, V,
        )  # fmt: skip
        if EARLY and ahead == 0:
            wait_for_previous_kernel()
        if HEAD_GATED:
            fetch_sums(sums.index(ahead), sums_in(g, b, t + ahead * C, h, T, H), rows_left - ahead * C)
        async_copy.commit_group()
    async_copy.wait_group(1)
    thread_barrier()
    if HEAD_GATED:
        next_keys = decayed_keys(k_tiles.index(0), sums.index(0), BV)

    for j in range(chunks):
        buffer = j % BUFFERS
        q_tile = q_tiles.index(buffer)
        k_tile = k_tiles.index(buffer)
        v_tile = v_tiles.index(buffer)
        if STORE_CHECKPOINTS:
            if j % checkpoint_chunks == 0:
                write(checkpoints + wide_product(checkpoint_slot * H + h, K * V) + v0, S, V, K, V, state_layout, v0)
                checkpoint_slot += 1
        S_memory.store(S.to(gl.bfloat16))
        if HEAD_GATED:
            these_sums = sums.index(buffer)
            of_rows = row_sums(these_sums, score_layout)
            of_columns = these_sums.load(gl.SliceLayout(0, score_layout))
            from_start = (gl.exp2(row_sums(these_sums, output_layout)) * scale)[:, None]
            S *= gl.exp2(chunk_gate(these_sums))
        fence_async_shared()
        thread_barrier()
        P = product(q_tile, k_tile.permute((1, 0)), C, C, WARPS)
        O = product(q_tile, S_memory, C, BV, WARPS)
        S = add_product(next_keys if HEAD_GATED else k_tile.permute((1, 0)), v_tile, S)
        fetch_chunk(
            q_tiles, k_tiles, v_tiles, (j + 2) % BUFFERS, q, k, v, b, t + 2 * C, h, rows_left - 2 * C,
            q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, v0, K, V,
        )  # fmt: skip
        if HEAD_GATED:
            sums_ahead = sums.index((j + 2) % BUFFERS)
            fetch_sums(sums_ahead, sums_in(g, b, t + 2 * C, h, T, H), rows_left - 2 * C)
        async_copy.commit_group()
        if HEAD_GATED:
            decays = gl.exp2(of_rows[:, None] - of_columns[None, :]) * scale
        P = warpgroup_mma_wait(2, deps=[P])
        if HEAD_GATED:
            P *= decays
        P_memory.store(masked(P, triangle(C, True, True, WARPS)).to(gl.bfloat16))
        if HEAD_GATED:
            O = warpgroup_mma_wait(1, deps=[O])
            O *= from_start
        fence_async_shared()
        if HEAD_GATED:
            async_copy.wait_group(1)  # the next chunk
        thread_barrier()
        O = add_product(P_memory, v_tile, O)
        if STORE_STATES:
            state = states + wide_product(chunk_slot * H + h, K * V) + v0
            write(state, S_memory.load(copy_v), V, K, V, copy_v, v0)
            chunk_slot += 1
        if HEAD_GATED:
            following = (j + 1) % BUFFERS
            next_keys = decayed_keys(k_tiles.index(following), sums.index(following), BV)
        O, S = warpgroup_mma_wait(0, deps=[O, S])
        if not HEAD_GATED:
            O *= scale
        O_memory.store(O.to(gl.bfloat16))
        if not HEAD_GATED:
            async_copy.wait_group(1)  # the next chunk
        thread_barrier()  # no product reads any tile of this chunk any more
        o_row = o + wide_product((b * T + t) * H + h, V) + v0
        write(o_row, O_memory.load(copy_v), H * V, rows_left, V, copy_v, v0)
        t += C
        rows_left -= C
    async_copy.wait_group(0)
    if STORE_FINAL:
        write(final + piece.to(gl.int64) * final_p + h * K * V + v0, S, V, K, V, state_layout, v0)
