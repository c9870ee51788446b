# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
# ruff: noqa: E741, SIM102
"""Forward kernel for wide heads on Hopper, in Gluon, K up to 128, with no gates or one per head.

    O = 2^a Q S + (Q K^T o D) V,    S' = 2^(a_C) S + (2^(a_C - a) K)^T V

as in `head_gates.py`; without gates all decays are 1. Two warpgroups multiply, and have the state and the output in
registers. To start a chunk's copies and to write its output and its state takes threads so long that products would not
be started in time, so two other warpgroups do that. They also bring keys into the form in which the state takes them,
if they have the time: writing states takes them longer than the products take.

Barriers (`mbarrier`) between the two sides:

    loaded   a chunk's q, k and sums are in memory; every copying thread arrives      copying -> multiplying
    filled   its v is; likewise                                                       copying -> multiplying
    decayed  its keys for the state are                                               copying -> multiplying
    stored   the state before the chunk is in memory, to be written                   multiplying -> copying
    kept     it has been written                                                      copying -> multiplying
    summed   the sums of all chunks are in global memory, if they are made here       multiplying -> copying
    done     no product reads the chunk any more; its output is in the memory of q    multiplying -> copying
             and k

A barrier tells only even phases from odd ones, so no side may be two phases ahead of the other. Hence one `loaded`,
`filled` and `done` per chunk in memory, and two `decayed`, as keys are made a chunk ahead.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gla_kernels.hopper.copies import fetch_rows, load_state, write
from gla_kernels.hopper.gate_sums import head_sums, keep_head_sums, load_head_gates
from gla_kernels.hopper.head_gates import chunk_gate, decay_to_end, fetch_sums, make_sums, row_sums, sums_in
from gla_kernels.hopper.layouts import accumulator, copy_layout, operand_layout
from gla_kernels.hopper.places import find_piece, first_slot, wait_for_previous_kernel
from gla_kernels.hopper.products import add_product, masked, product, triangle
from gla_kernels.hopper.values import readdressed, thread_barrier, to_float32, wide_product
from gla_kernels.hopper.wide.tiles import WARPS, write_tile

COPYING_WARPS = gl.constexpr(8)
FETCHED_SUMS = gl.constexpr(4)  # chunks whose sums are in memory at once; they are fetched two chunks ahead
# Of a copying thread; a multiplying one has what is left of 65,536. A spill takes longest here.
COPYING_REGISTERS = gl.constexpr(32)
BUFFERS = gl.constexpr(2)  # chunks in memory at once


@gluon.jit
def signal(bar):
    """Tells the other side: all threads of this one have come here, and `wgmma` sees what they wrote."""
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(bar, count=1)


@gluon.jit
def store_keys_for_state(tile, k_tile, sums):
    """Stores 2^(a_C - a) k, from a chunk's sums of gates per head."""
    layout: gl.constexpr = accumulator(k_tile.shape[1], k_tile.shape[0], WARPS)
    decays = decay_to_end(row_sums(sums, layout), chunk_gate(sums))
    tile.store((to_float32(k_tile.load(layout)) * decays).to(gl.bfloat16))


@gluon.jit
def outputs_in(qk_tiles, BV: gl.constexpr):
    """The memory of q and k as a tile of outputs per chunk."""
    C: gl.constexpr = qk_tiles.shape[1]
    gl.static_assert(2 * qk_tiles.shape[2] == BV)
    return qk_tiles._reinterpret(gl.bfloat16, [BUFFERS, C, BV], operand_layout(C, BV))


@gluon.jit
def multiply(
    S, qk_tiles, v_tiles, S_memory, P_memory, sums, state_k, loaded, filled, decayed, done, stored, kept, summed,
    g, gates, gates_b, gates_t, gates_h, b, h, T, begin, length, first_chunk, checkpoints, final, scale, H, chunks,
    checkpoint_chunks, v0, K: gl.constexpr, V: gl.constexpr,
    HEAD_GATED: gl.constexpr, HELPED: gl.constexpr, EARLY: gl.constexpr, STORE_FINAL: gl.constexpr,
    STORE_STATES: gl.constexpr, STORE_CHECKPOINTS: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """What the multiplying warps do for all chunks, from the state S (BK, BV)."""
    C: gl.constexpr = v_tiles.shape[1]
    BV: gl.constexpr = S.shape[1]
    state_layout: gl.constexpr = S.type.layout
    score_layout: gl.constexpr = accumulator(C, C, WARPS)
    output_layout: gl.constexpr = accumulator(BV, C, WARPS)
    if EARLY:
        wait_for_previous_kernel()
    if SUMS > 0:
        head_gates = load_head_gates(
            gates, b, begin, h, gates_b, gates_t, gates_h, length, first_chunk, 1, chunks, SUMS, C
        )  # fmt: skip
        keep_head_sums(g, head_sums(head_gates), b, begin, h, T, H, length, first_chunk, 1, chunks)
        signal(summed)
    for j in range(chunks):
        buffer = j % BUFFERS
        phase = j // BUFFERS & 1
        if STORE_CHECKPOINTS:
            if j % checkpoint_chunks == 0:
                write(checkpoints, S, V, K, V, state_layout, v0)
                checkpoints += wide_product(H, K * V)
        q_tile = qk_tiles.index(2 * buffer)
        k_tile = qk_tiles.index(2 * buffer + 1)
        v_tile = v_tiles.index(buffer)
        S_tile = readdressed(S_memory)
        if HEAD_GATED:  # in place of k, which has another form for the state
            P_tile = readdressed(k_tile)._reinterpret(gl.bfloat16, [C, C], operand_layout(C, C))
            state_k_tile = state_k.index(j % 2)
            these_sums = sums.index(j % FETCHED_SUMS)
        else:
            P_tile = readdressed(P_memory)
            state_k_tile = k_tile
        mbarrier.wait(loaded.index(buffer), phase)
        fence_async_shared()  # the copies are other threads', and have none
        if HEAD_GATED:
            columns = these_sums.load(gl.SliceLayout(0, score_layout))
            decays = gl.exp2(row_sums(these_sums, score_layout)[:, None] - columns[None, :]) * scale
        P = product(q_tile, k_tile.permute((1, 0)), C, C, WARPS)
        if HEAD_GATED and not HELPED:
            store_keys_for_state(state_k_tile, k_tile, these_sums)
        if STORE_STATES:
            mbarrier.wait(kept, j + 1 & 1)
        S_tile.store(S.to(gl.bfloat16))
        if HEAD_GATED:
            S *= gl.exp2(chunk_gate(these_sums))
        P = warpgroup_mma_wait(0, deps=[P])
        if HEAD_GATED:
            if HELPED:
                mbarrier.wait(decayed.index(j % 2), j // 2 & 1)
            P *= decays
            thread_barrier()  # no thread reads k any more
        else:
            P *= scale
        P_tile.store(masked(P, triangle(C, True, True, WARPS)).to(gl.bfloat16))
        mbarrier.wait(filled.index(buffer), phase)
        if STORE_STATES:
            signal(stored)
        else:
            fence_async_shared()
            thread_barrier()
        none = gl.zeros([C, BV], gl.float32, output_layout)
        O = warpgroup_mma(q_tile, S_tile, none, use_acc=False, is_async=True)
        S = add_product(state_k_tile.permute((1, 0)), v_tile, S)
        O = warpgroup_mma_wait(1, deps=[O])
        if HEAD_GATED:
            O *= (gl.exp2(row_sums(these_sums, output_layout)) * scale)[:, None]
        else:
            O *= scale
        O = add_product(P_tile, v_tile, O)
        O, S = warpgroup_mma_wait(0, deps=[O, S])
        thread_barrier()  # no product reads q and k any more
        readdressed(outputs_in(qk_tiles, BV).index(buffer)).store(O.to(gl.bfloat16))
        signal(done.index(buffer))
    if STORE_FINAL:
        write(final, S, V, K, V, state_layout, v0)


@gluon.jit
def decay_keys(k_tile, state_k, sums, decayed, j):
    """Writes 2^(a_C - a) k of chunk j, the last one whose copies have been started."""
    rows: gl.constexpr = copy_layout(k_tile.shape[1], 16, COPYING_WARPS)
    these_sums = sums.index(j % FETCHED_SUMS)
    async_copy.wait_group(2 * BUFFERS - 2)  # sums are in the group before k's
    thread_barrier()
    decays = decay_to_end(row_sums(these_sums, rows), chunk_gate(these_sums))
    async_copy.wait_group(2 * BUFFERS - 3)
    thread_barrier()
    state_k.index(j % 2).store((to_float32(k_tile.load(rows)) * decays).to(gl.bfloat16))
    signal(decayed.index(j % 2))


@gluon.jit
def copy(
    q, k, v, g, o, states, qk_tiles, v_tiles, S_memory, sums, state_k, loaded, filled, decayed, done, stored, kept,
    summed, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, b, t, h, v0, T, H, rows_left, chunks, K: gl.constexpr,
    V: gl.constexpr, HEAD_GATED: gl.constexpr, HELPED: gl.constexpr, EARLY: gl.constexpr, STORE_STATES: gl.constexpr,
    SUMS: gl.constexpr,
):  # fmt: skip
    """What the copying warps do for all chunks: two groups of copies for each, of k and of the rest."""
    C: gl.constexpr = v_tiles.shape[1]
    BV: gl.constexpr = v_tiles.shape[2]
    rows_of_v: gl.constexpr = copy_layout(BV, 16, COPYING_WARPS)
    o_tiles = outputs_in(qk_tiles, BV)
    o_row = o + wide_product((b * T + t - C) * H + h, V) + v0  # of the chunk before
    if EARLY or SUMS > 0:
        fetch_rows(qk_tiles.index(1), k, b, t, h, k_b, k_t, k_h, rows_left, K, 16)
    if EARLY:
        wait_for_previous_kernel(False)
    if SUMS > 0:
        fetch_rows(qk_tiles.index(0), q, b, t, h, q_b, q_t, q_h, rows_left, K, 16)
        fetch_rows(v_tiles.index(0), v, b, t, h, v_b, v_t, v_h, rows_left, V, 16, v0)
        mbarrier.wait(summed, 0)
    if HEAD_GATED:
        fetch_sums(sums.index(0), sums_in(g, b, t, h, T, H), rows_left)
        async_copy.commit_group()
    if not EARLY and SUMS == 0:
        fetch_rows(qk_tiles.index(1), k, b, t, h, k_b, k_t, k_h, rows_left, K, 16)
    async_copy.commit_group()
    if SUMS == 0:
        fetch_rows(qk_tiles.index(0), q, b, t, h, q_b, q_t, q_h, rows_left, K, 16)
    if HEAD_GATED:
        fetch_sums(sums.index(1), sums_in(g, b, t + C, h, T, H), rows_left - C)
    async_copy.mbarrier_arrive(loaded.index(0), increment_count=False)
    if SUMS == 0:
        fetch_rows(v_tiles.index(0), v, b, t, h, v_b, v_t, v_h, rows_left, V, 16, v0)
    async_copy.mbarrier_arrive(filled.index(0), increment_count=False)
    async_copy.commit_group()
    t += C
    rows_left -= C
    if HELPED:
        decay_keys(qk_tiles.index(1), state_k, sums, decayed, 0)
    for j in range(chunks):
        there = (j + BUFFERS - 1) % BUFFERS  # where the chunk before is, and the next one to be copied goes
        mbarrier.wait(done.index(there), (j + BUFFERS - 1) // BUFFERS + 1 & 1)
        write_tile(o_row, o_tiles.index(there), H * V, gl.where(j > 0, C, 0), V, rows_of_v, v0)
        thread_barrier()
        o_row += wide_product(H, C * V)
        fetch_rows(qk_tiles.index(2 * there + 1), k, b, t, h, k_b, k_t, k_h, rows_left, K, 16)
        async_copy.commit_group()
        fetch_rows(qk_tiles.index(2 * there), q, b, t, h, q_b, q_t, q_h, rows_left, K, 16)
        if HEAD_GATED:
            fetch_sums(sums.index((j + BUFFERS) % FETCHED_SUMS), sums_in(g, b, t + C, h, T, H), rows_left - C)
        async_copy.mbarrier_arrive(loaded.index(there), increment_count=False)
        fetch_rows(v_tiles.index(there), v, b, t, h, v_b, v_t, v_h, rows_left, V, 16, v0)
        async_copy.mbarrier_arrive(filled.index(there), increment_count=False)
        async_copy.commit_group()
        t += C
        rows_left -= C
        if STORE_STATES:
            mbarrier.wait(stored, j & 1)
            write_tile(states, S_memory, V, K, V, rows_of_v, v0)
            states += wide_product(H, K * V)
            thread_barrier()
            mbarrier.arrive(kept, count=1)
        if HELPED:
            decay_keys(qk_tiles.index(2 * ((j + 1) % BUFFERS) + 1), state_k, sums, decayed, j + 1)
    there = (chunks + BUFFERS - 1) % BUFFERS
    mbarrier.wait(done.index(there), (chunks + BUFFERS - 1) // BUFFERS + 1 & 1)
    last = gl.where(chunks > 0, rows_left + BUFFERS * C, 0)
    write_tile(o_row, o_tiles.index(there), H * V, last, V, rows_of_v, v0)
    async_copy.wait_group(0)


@gluon.jit(do_not_specialize=["T", "H", "N", "base", "stride", "piece_chunks", "checkpoint_chunks"])
def specialized_forward(
    q,  # [B, T, H, K] bfloat16, any strides of B, T and H
    k,  # [B, T, H, K]
    v,  # [B, T, H, V]
    g,  # [B, H, T] float32 sums of `gates` if HEAD_GATED
    gates,  # [B, T, H] float32, bfloat16 or float16, any strides: natural log, <= 0; read if SUMS > 0
    o,  # [B, T, H, V], contiguous
    initial,  # [pieces, H, K, V] float32: the state before each piece of this launch
    final,  # [pieces, H, K, V] float32: the state after each
    states,  # [slots, H, K, V] bfloat16: the state before each chunk
    checkpoints,  # [slots, H, K, V] float32: the state before every `checkpoint_chunks`-th chunk
    cu_seqlens,  # [N + 1] int32 or int64: boundaries of packed sequences
    scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, gates_b, gates_t, gates_h,
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
    SUMS: gl.constexpr,
):  # fmt: skip
    """A program handles one piece and head, and BV value columns.

    SUMS: 0, or as many chunks as a piece may have, whose sums of gates are then made (see `gate_sums.py`). There is no
    room for them in shared memory, so they go through global memory even if no other kernel reads them.
    """
    blocks_v: gl.constexpr = (V + BV - 1) // BV
    # Each of the two warpgroups has half of the columns, not of the rows: a `wgmma` of 256 columns has more registers
    # than a thread has when the kernel starts.
    state_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BV // 2, 16])
    HELPED: gl.constexpr = HEAD_GATED and not STORE_STATES
    # The kernel before makes sums, which only copies of sums have to wait for.
    EARLY: gl.constexpr = HEAD_GATED and not VARLEN and not HAS_INITIAL and SUMS == 0
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
    if STORE_STATES:
        slot = first_slot(n, begin, length, C, VARLEN) + first_chunk
        states += wide_product(slot * H + h, K * V) + v0
    if STORE_CHECKPOINTS:
        checkpoint_slot = first_slot(n, begin, length, checkpoint_chunks * C, VARLEN)
        checkpoints += wide_product(checkpoint_slot * H + h, K * V) + v0
    if STORE_FINAL:
        final += piece.to(gl.int64) * final_p + h * K * V + v0
    if HAS_INITIAL:
        initial += piece.to(gl.int64) * initial_p + h * K * V + v0
        S = load_state(initial, K, V, state_layout, BK, BV, v0)
    else:
        S = gl.zeros([BK, BV], gl.float32, state_layout)

    qk_tiles = gl.allocate_shared_memory(gl.bfloat16, [2 * BUFFERS, C, BK], operand_layout(C, BK))
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, C, BV], operand_layout(C, BV))
    S_memory = gl.allocate_shared_memory(gl.bfloat16, [BK, BV], operand_layout(BK, BV))
    if HEAD_GATED:
        sums = make_sums(FETCHED_SUMS, C)
        state_k = gl.allocate_shared_memory(gl.bfloat16, [2, C, BK], operand_layout(C, BK))
        P_memory = sums  # unused
    else:
        P_memory = gl.allocate_shared_memory(gl.bfloat16, [C, C], operand_layout(C, C))
        sums = P_memory  # unused
        state_k = P_memory  # unused
    loaded = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    filled = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    decayed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    stored = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    kept = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    summed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for which in gl.static_range(BUFFERS):
        mbarrier.init(loaded.index(which), count=32 * COPYING_WARPS)
        mbarrier.init(filled.index(which), count=32 * COPYING_WARPS)
        mbarrier.init(done.index(which), count=1)
    if HELPED:
        for which in gl.static_range(2):
            mbarrier.init(decayed.index(which), count=1)
    if SUMS > 0:
        mbarrier.init(summed, count=1)
    if STORE_STATES:
        mbarrier.init(stored, count=1)
        mbarrier.init(kept, count=1)
    fence_async_shared()
    thread_barrier()
    # Written out here: of tuples in variables, Triton would make values of the program even of constants.
    gl.warp_specialize(
        [
            (
                multiply,
                (
                    S, qk_tiles, v_tiles, S_memory, P_memory, sums, state_k, loaded, filled, decayed, done, stored,
                    kept, summed, g, gates, gates_b, gates_t, gates_h, b, h, T, begin, length, first_chunk,
                    checkpoints, final, scale, H, chunks, checkpoint_chunks, v0, K, V, HEAD_GATED,
                    HELPED, EARLY, STORE_FINAL, STORE_STATES, STORE_CHECKPOINTS, SUMS,
                ),
            ),
            (
                copy,
                (
                    q, k, v, g, o, states, qk_tiles, v_tiles, S_memory, sums, state_k, loaded, filled, decayed, done,
                    stored, kept, summed, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, b, t, h, v0, T, H, rows_left,
                    chunks, K, V, HEAD_GATED, HELPED, EARLY, STORE_STATES, SUMS,
                ),
            ),
        ],
        [COPYING_WARPS],
        [COPYING_REGISTERS],
    )  # fmt: skip
