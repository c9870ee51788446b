# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
# ruff: noqa: E741
"""Outputs of a chunk of narrow heads, and the state after it: part of `narrow/forward.py`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from gla_kernels.hopper.copies import write
from gla_kernels.hopper.head_gates import chunk_gate, row_sums, score_decays
from gla_kernels.hopper.layouts import accumulator, copy_layout, used_keys
from gla_kernels.hopper.products import add_product, masked_operand, product, triangle
from gla_kernels.hopper.values import readdressed


@gluon.jit
def framed_outputs(
    Q, k_tile, v_tile, S_tile, S, states_at, K: gl.constexpr, V: gl.constexpr, STORE_STATES: gl.constexpr
):  # fmt: skip
    """Returns Q S~ + tril(Q K~^T) V and S~ + K~^T V; Q is in registers or shared memory.

    The caller takes them out of the chunk's frame, and multiplies by scale. Q may have fewer columns than the others,
    if those after them are zeros.
    """
    C: gl.constexpr = v_tile.shape[0]
    KC: gl.constexpr = Q.shape[1]
    BV: gl.constexpr = v_tile.shape[1]
    copy_v: gl.constexpr = copy_layout(BV, 16)
    P = product(Q, k_tile.slice(0, KC, 1).permute((1, 0)), C, C)
    O = product(Q, S_tile.slice(0, KC), C, BV)
    S = add_product(k_tile.permute((1, 0)), v_tile, S)
    P = warpgroup_mma_wait(2, deps=[P])
    O = add_product(masked_operand(P, triangle(C, True, True)), v_tile, O)
    if STORE_STATES:
        write(states_at, S_tile.load(copy_v), V, K, V, copy_v)
    O, S = warpgroup_mma_wait(0, deps=[O, S])
    return O, S


@gluon.jit
def strong_outputs(
    q_tile, k_tile, kept_k_tile, v_tile, S_tile, S, sums, scale, states_at,
    K: gl.constexpr, V: gl.constexpr, STORE_STATES: gl.constexpr,
):  # fmt: skip
    """Returns the outputs and 2^(a_C) S + K^T 2^(a_C - a) V, with a gate per head of any strength and in no frame.

    `kept_k_tile` holds 2^(a_C - a) K.
    """
    C: gl.constexpr = v_tile.shape[0]
    BV: gl.constexpr = v_tile.shape[1]
    KC: gl.constexpr = used_keys(K)
    copy_v: gl.constexpr = copy_layout(BV, 16)
    # Else ptxas leaves descriptors that both branches need to one of them (NOTES, "Faults").
    q_tile = readdressed(q_tile)
    k_tile = readdressed(k_tile)
    kept_k_tile = readdressed(kept_k_tile)
    v_tile = readdressed(v_tile)
    S_tile = readdressed(S_tile)
    q_part = q_tile.slice(0, KC, 1)
    P = product(q_part, k_tile.slice(0, KC, 1).permute((1, 0)), C, C)
    O = product(q_part, S_tile.slice(0, KC), C, BV)
    S = add_product(kept_k_tile.permute((1, 0)), v_tile, S * gl.exp2(chunk_gate(sums)))
    from_start = gl.exp2(row_sums(sums, accumulator(BV)))[:, None] * scale
    decays = score_decays(sums, accumulator(C), True) * scale
    P = warpgroup_mma_wait(2, deps=[P])
    P_operand = masked_operand(P * decays, triangle(C, True, True, 4, 2))
    O = warpgroup_mma_wait(1, deps=[O])
    O = add_product(P_operand, v_tile, O * from_start)
    if STORE_STATES:
        write(states_at, S_tile.load(copy_v), V, K, V, copy_v)
    O, S = warpgroup_mma_wait(0, deps=[O, S])
    return O, S
