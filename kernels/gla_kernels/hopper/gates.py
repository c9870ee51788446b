# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
"""Gates of a chunk, and what takes its operands into its frame.

Gates are in log2 units. They are summed by products with constant matrices: a float32 gate is split into two bfloat16
parts (16 bits), products with +-1/2 and 1 are exact, and the accumulator is float32.

The frame of a chunk: docs/kernels.md. Its exponents are made from the centred gate
a - a_last / 2 and a channel's excess, which is 0 if the channel is mild:

    excess = min(a_last + limit, 0)
    of q:  a - r = (a - a_last / 2) + excess / 2,    of k:  b - r = excess - (a - r)

The excess takes a change of layout, so most kernels first ask whether their tile has a large gate (`has_large`). If
not, no channel of the chunk is strong, and the program leaves the excess out. A chunk with an excess of 0 gives the
same bits either way, so programs need not agree.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import PropagateNan

from gla_kernels import limits
from gla_kernels.hopper.copies import fetch, row_of
from gla_kernels.hopper.layouts import accumulator, copy_layout, left_operand, operand_layout, rows_at_once
from gla_kernels.hopper.products import add_product, product, triangle
from gla_kernels.hopper.values import split

LOG2E = gl.constexpr(limits.LOG2E)
LEAST_GATE = gl.constexpr(limits.LEAST_GATE)
# 64 gates that are not large (`has_large`) sum to less than 128.
SPAN_LIMIT = gl.constexpr(limits.SPAN_LIMIT)
# The bit of a float32 that is set if its size is at least 2, or if it is NaN.
_LARGE = gl.constexpr(0x40000000)
_PROPAGATE_NAN = gl.constexpr(PropagateNan.ALL)
# Rows of the constant that sums a chunk's gates: half of a chunk, because shared memory is short, so that each bfloat16
# part takes two products.
ONES_ROWS = gl.constexpr(32)


@gluon.jit
def gates_in(tile, g):
    """The part of a shared `tile` [C, BK] float32 that gates are copied to, whose dtype is that of what g points to."""
    C: gl.constexpr = tile.shape[0]
    BK: gl.constexpr = tile.shape[1]
    if g.dtype.element_ty == gl.bfloat16:
        part = tile._reinterpret(gl.bfloat16, [2, C, BK], operand_layout(C, BK)).index(0)
    else:
        part = tile
    return part


@gluon.jit
def fetch_gates(tile, g, stride, rows_left, N: gl.constexpr, column=0):
    """`fetch` of gates to the shared `tile` [C, BK] float32, from where `load_gates` reads them."""
    bits: gl.constexpr = g.dtype.element_ty.primitive_bitwidth
    fetch(gates_in(tile, g), g, stride, rows_left, N, copy_layout(tile.shape[1], bits, gl.num_warps()), column)


@gluon.jit
def read_gates(tile, g, layout: gl.constexpr):
    """Gates in log2 (C, BK), from a tile that `fetch_gates` has filled with the dtype of g's."""
    return gates_in(tile, g).load(layout).to(gl.float32) * LOG2E


@gluon.jit
def raise_to_least(gates):
    """Gates in log2, at least LEAST_GATE. A NaN stays one."""
    return gl.maximum(gates, LEAST_GATE, propagate_nan=_PROPAGATE_NAN)


@gluon.jit
def load_gates(tile, g, words):
    """A tile's gates in log2, not less than LEAST_GATE, as two bfloat16 parts. `words` is for `has_large`."""
    bits: gl.constexpr = g.dtype.element_ty.primitive_bitwidth
    gates = raise_to_least(read_gates(tile, g, copy_layout(tile.shape[1], bits, gl.num_warps())))
    keep_bits(words, gates, rows_at_once(tile.shape[1], bits, gl.num_warps()))
    return split(gates)


@gluon.jit
def make_words():
    """Shared memory for `has_large`, a word per warp."""
    return gl.allocate_shared_memory(gl.int32, [gl.num_warps()], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def keep_bits(words, x, rows: gl.constexpr):
    """Stores which bits any element of a warp's part of x (R, W) has, if the warps hold `rows` rows of x at a time.

    So this takes no step between warps, and the barrier that makes x's next use safe serves `has_large` too.
    """
    R: gl.constexpr = x.shape[0]
    W: gl.constexpr = x.shape[1]
    warps: gl.constexpr = words.shape[0]
    bits = gl.reduce_or(x.to(gl.int32, bitcast=True).reshape([R // rows, rows, W]), 0)
    words.store(gl.reduce_or(bits.reshape([warps, rows * W // warps]), 1))


@gluon.jit
def has_large(words):
    """Whether a chunk's tile has a gate of -2 or less (log2) or NaN; the same in all threads.

    For after a barrier behind `keep_bits`, and best while the products of the gates run.
    """
    warps: gl.constexpr = words.shape[0]
    bits = words.load(gl.BlockedLayout([warps], [32], [warps], [0]))
    return (gl.reduce_or(bits, 0) & _LARGE) != 0


@gluon.jit
def frame_factor(total):
    """2^r for a channel's total gate: takes its state into the chunk's frame, and out of it."""
    return gl.exp2(gl.maximum(total * 0.5, -0.5 * SPAN_LIMIT, propagate_nan=_PROPAGATE_NAN))


@gluon.jit
def excess(total):
    """By how much a channel's total gate is beyond -SPAN_LIMIT: at most 0, and 0 for a mild channel."""
    return gl.minimum(total + SPAN_LIMIT, 0.0)


@gluon.jit
def fetch_gate_rows(tile, ptr, b, t, h, stride_b, stride_t, stride_h, rows_left, N: gl.constexpr):
    """`fetch_gates` of rows from token t on."""
    fetch_gates(tile, row_of(ptr, b, t, h, stride_b, stride_t, stride_h), stride_t, rows_left, N)


@gluon.jit
def make_ones():
    """The shared constant [ONES_ROWS, 8] of ones that `start_gate_frame` sums gates with."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [4, 1], [1, 0])
    ones = gl.full([ONES_ROWS, 8], 1.0, gl.bfloat16, layout)
    return gl.allocate_shared_memory(gl.bfloat16, [ONES_ROWS, 8], operand_layout(ONES_ROWS, 8), ones)


@gluon.jit
def start_gate_frame(high, low, ones, C: gl.constexpr, BK: gl.constexpr):
    """Starts the sums of a chunk's gates: the centred gate a - a_last / 2, and the total.

    `high` and `low` are the two bfloat16 parts of the gates in log2, [C, BK]:

        a - a_last / 2 = (lower triangle - 1/2) @ gates (C, BK),    a_last = gates^T @ 1 (BK, 8)

    In the second, keys are rows, as in the state, and all columns are the same.
    """
    centring = gl.where(triangle(C, True, True, 4, 1), 0.5, -0.5).to(gl.bfloat16)
    centring = gl.convert_layout(centring, left_operand(C))
    G = product(centring, high, C, BK)
    G = add_product(centring, low, G)
    total = gl.zeros([BK, 8], gl.float32, accumulator(8))
    for n in gl.static_range(C // ONES_ROWS):
        total = add_product(high.slice(n * ONES_ROWS, ONES_ROWS, 0).permute((1, 0)), ones, total)
        total = add_product(low.slice(n * ONES_ROWS, ONES_ROWS, 0).permute((1, 0)), ones, total)
    return G, total


@gluon.jit
def chunk_total(total, BV: gl.constexpr):
    """The chunk's a_last (BK), in the layout of a state's rows [BK, BV], from `start_gate_frame`'s total (BK, 8)."""
    return gl.convert_layout(gl.max(total, axis=1), gl.SliceLayout(1, accumulator(BV)))
