# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
"""The states of narrow heads between two checkpoints, computed again for a backward: part of `narrow/backward.py`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, warpgroup_mma_wait

from gla_kernels.hopper.copies import fetch_rows, load_state, write
from gla_kernels.hopper.gates import (
    chunk_total,
    excess,
    fetch_gate_rows,
    frame_factor,
    has_large,
    load_gates,
    start_gate_frame,
)
from gla_kernels.hopper.head_gates import chunk_gate, decay_to_end, fetch_sums, row_sums, sums_in
from gla_kernels.hopper.layouts import accumulator, copy_layout, operand_layout
from gla_kernels.hopper.products import add_product
from gla_kernels.hopper.values import negative, readdressed, thread_barrier, to_float32


@gluon.jit
def recompute_states(
    states, checkpoint, k_tiles, v_tiles, g_tiles, S_memory, ones, words, k, v, g, b, t, h, T, H, chunks, rows_left,
    k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h,
    K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, C: gl.constexpr, GATED: gl.constexpr,
    HEAD_GATED: gl.constexpr,
):  # fmt: skip
    """Stores S~ of `chunks` chunks from token t on, computed as in the forward, from the first one's checkpoint.

    With a gate per head, S is in no frame, and keys are decayed where the forward decays values.

    What is stored is soon read again, and stays in L2 meanwhile: a program has room of its own for it.
    """
    key_tile: gl.constexpr = accumulator(BK)
    copy_v: gl.constexpr = copy_layout(BV, 16)
    state_layout: gl.constexpr = accumulator(BV)
    S = load_state(checkpoint, K, V, state_layout, BK, BV)
    key_layout: gl.constexpr = gl.SliceLayout(1, state_layout)
    previous_factor = gl.full([BK], 1.0, gl.float32, key_layout)
    fetch_rows(k_tiles.index(0), k, b, t, h, k_b, k_t, k_h, rows_left, K, 16)
    fetch_rows(v_tiles.index(0), v, b, t, h, v_b, v_t, v_h, rows_left, V, 16)
    if GATED:
        fetch_gate_rows(g_tiles.index(0), g, b, t, h, g_b, g_t, g_h, rows_left, K)
    if HEAD_GATED:
        fetch_sums(g_tiles.index(0), sums_in(g, b, t, h, T, H), rows_left)
    async_copy.commit_group()
    for i in range(chunks):
        buffer = i % 2
        next_buffer = (i + 1) % 2
        async_copy.wait_group(0)
        thread_barrier()
        k_tile = k_tiles.index(buffer)
        if GATED:
            bk = k_tile.load(key_tile)
            high, low = load_gates(g_tiles.index(buffer), g, words)
            parts = g_tiles.index(buffer)._reinterpret(gl.bfloat16, [2, C, BK], operand_layout(C, BK))
            thread_barrier()
            parts.index(0).store(high)
            parts.index(1).store(low)
            fence_async_shared()
            thread_barrier()
            G, total = start_gate_frame(parts.index(0), parts.index(1), readdressed(ones), C, BK)
        t += C
        rows_left = gl.where(i + 1 < chunks, rows_left - C, 0)
        fetch_rows(k_tiles.index(next_buffer), k, b, t, h, k_b, k_t, k_h, rows_left, K, 16)
        fetch_rows(v_tiles.index(next_buffer), v, b, t, h, v_b, v_t, v_h, rows_left, V, 16)
        if GATED:
            fetch_gate_rows(g_tiles.index(next_buffer), g, b, t, h, g_b, g_t, g_h, rows_left, K)
        if HEAD_GATED:
            fetch_sums(g_tiles.index(next_buffer), sums_in(g, b, t, h, T, H), rows_left)
        async_copy.commit_group()
        if GATED:
            large = has_large(words)
            G, total = warpgroup_mma_wait(0, deps=[G, total])
            last = chunk_total(total, BV)
            factor = frame_factor(last)
            S *= (previous_factor * factor)[:, None]
            previous_factor = factor
            if large:
                beyond = gl.convert_layout(excess(last), gl.SliceLayout(0, key_tile))[None, :]
                G -= 0.5 * beyond  # r - b: k's exponents, negated
            k_tile.store((to_float32(bk) * gl.exp2(negative(G))).to(gl.bfloat16))
        if HEAD_GATED:
            sums = g_tiles.index(buffer)
            total = chunk_gate(sums)
            kept = to_float32(k_tile.load(key_tile)) * decay_to_end(row_sums(sums, key_tile), total)
            k_tile.store(kept.to(gl.bfloat16))
        S_memory.store(S.to(gl.bfloat16))
        if HEAD_GATED:
            S *= gl.exp2(total)
        fence_async_shared()
        thread_barrier()
        S = add_product(k_tile.permute((1, 0)), v_tiles.index(buffer), S)
        write(states + i * (K * V), S_memory.load(copy_v), V, K, V, copy_v)
        S = warpgroup_mma_wait(0, deps=[S])
    async_copy.wait_group(0)
    thread_barrier()
