# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
# ruff: noqa: E741
"""Outputs of a chunk of narrow heads, and the state after it: part of `narrow/forward.py`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from gla_kernels.hopper.head_gates import row_sums, score_decays
from gla_kernels.hopper.layouts import accumulator
from gla_kernels.hopper.products import add_product, masked_operand, product, triangle
from gla_kernels.hopper.values import readdressed


@gluon.jit
def start_outputs(Q, k_tile, v_tile, S_tile, S, STATE_LAST: gl.constexpr):
    """Starts Q S~ + tril(Q K~^T) V~ and S~ + K~^T V~; Q is in registers or shared memory.

    The caller takes them out of the chunk's frame, and multiplies by scale. Q may have fewer columns than the others,
    if those after them are zeros. STATE_LAST: the outputs are ready first, and can be written meanwhile.
    """
    C: gl.constexpr = v_tile.shape[0]
    KC: gl.constexpr = Q.shape[1]
    P = product(Q, k_tile.slice(0, KC, 1).permute((1, 0)), C, C)
    O = product(Q, S_tile.slice(0, KC), C, v_tile.shape[1])
    if not STATE_LAST:
        next_S = add_product(k_tile.permute((1, 0)), v_tile, S)
    P = warpgroup_mma_wait(1 if STATE_LAST else 2, deps=[P])
    O = add_product(masked_operand(P, triangle(C, True, True)), v_tile, O)
    if STATE_LAST:
        next_S = add_product(k_tile.permute((1, 0)), v_tile, S)
    return O, next_S


@gluon.jit
def start_strong_outputs(q_tile, k_tile, v_tile, decayed_v_tile, S_tile, S, sums, total, KC: gl.constexpr):
    """Starts 2^a Q S + (tril(Q K^T) o D) V, and behind it 2^(a_C) S + K^T V~, with a gate per head of any strength.

    `decayed_v_tile` holds V~ = 2^(a_C - a) V. Only the first KC columns of `q_tile` count.
    """
    C: gl.constexpr = v_tile.shape[0]
    BV: gl.constexpr = v_tile.shape[1]
    # Else ptxas leaves descriptors that both branches need to one of them (NOTES, "Faults").
    q_part = readdressed(q_tile).slice(0, KC, 1)
    k_tile = readdressed(k_tile)
    decayed_v_tile = readdressed(decayed_v_tile)
    v_tile = readdressed(v_tile)
    S_tile = readdressed(S_tile)
    P = product(q_part, k_tile.slice(0, KC, 1).permute((1, 0)), C, C)
    O = product(q_part, S_tile.slice(0, KC), C, BV)
    decayed_S = S * gl.exp2(total)
    from_start = gl.exp2(row_sums(sums, accumulator(BV)))[:, None]
    decays = score_decays(sums, accumulator(C), True)
    P = warpgroup_mma_wait(1, deps=[P])
    P_operand = masked_operand(P * decays, triangle(C, True, True, 4, 2))
    O = warpgroup_mma_wait(0, deps=[O])
    O = add_product(P_operand, v_tile, O * from_start)
    return O, add_product(k_tile.permute((1, 0)), decayed_v_tile, decayed_S)
