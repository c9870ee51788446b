# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
"""Building blocks of the Gluon kernels for Hopper: layouts, copies, gate frames, `wgmma` products.

Shapes in comments: C = 64 rows (tokens) of a chunk, BK and BV = key and value columns of a tile. A product is a `wgmma`
of a warpgroup of 4 warps. A kernel with 4 warps therefore holds every accumulator in full in its registers, and can use
it as the left operand of the next product without going through shared memory.

Gates are in log2 units. They are summed by products with constant matrices: a float32 gate is split into two bfloat16
parts (16 bits), products with +-1/2 and 1 are exact, and the accumulator is float32.

The frame of a chunk is that of `forward.py` (symbols: docs/kernels.md). Its exponents are made from the centred gate
a - a_last / 2 and a channel's excess, which is 0 if the channel is mild:

    excess = min(a_last + limit, 0)
    of q:  a - r = (a - a_last / 2) + excess / 2,    of k:  b - r = excess - (a - r)

The excess takes a change of layout, so a program first asks whether its tile has a large gate (`has_large`). If not, no
channel of the chunk is strong, and the program leaves the excess out. A chunk with an excess of 0 gives the same bits
either way, so programs need not agree.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    warpgroup_mma,
)
from triton.language import PropagateNan
from triton.language.extra import cuda

# `gl.barrier` in Triton 3.7, `gl.thread_barrier` before.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
LOG2E = gl.constexpr(1.4426950408889634)
# The largest span of a chunk's gates in the plain form, in log2. Half of it is the largest exponent of a scaled
# operand, far below the 127 of bfloat16 and float32. 64 gates that are not large (`has_large`) sum to less than 128.
SPAN_LIMIT = gl.constexpr(144.0)
# The least gate of a token, in log2. 2^-34 of a state is below float32's rounding, and the span has room for four such
# gates, so that a few resets leave a chunk mild. bfloat16 has this number exactly.
LEAST_GATE = gl.constexpr(-34.0)
# The bit of a float32 that is set if its size is at least 2, or if it is NaN.
_LARGE = gl.constexpr(0x40000000)
_PROPAGATE_NAN = gl.constexpr(PropagateNan.ALL)
# Rows of the constant that sums a chunk's gates: half of a chunk, because shared memory is short, so that each bfloat16
# part takes two products.
ONES_ROWS = gl.constexpr(32)


@gluon.constexpr_function
def accumulator(cols: int, rows: int = 64, warps: int = 4) -> gl.NVMMADistributedLayout:
    """Layout of a product's accumulator [rows, cols], with a multiple of 64 rows, over one or two warpgroups.

    Two warpgroups (8 warps) divide a tile of 128 rows by rows, and a tile of 64 rows by columns.
    """
    if warps == 8 and rows == 64:
        return gl.NVMMADistributedLayout([3, 0], [4, 2], [16, cols // 2, 16])
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, cols, 16])


@gluon.constexpr_function
def left_operand(cols: int, rows: int = 64, warps: int = 4) -> gl.DotOperandLayout:
    """Layout of a product's left operand in registers.

    An accumulator of the same shape converts to it without data movement, unless two warpgroups divide its columns.
    """
    return gl.DotOperandLayout(0, accumulator(cols, rows, warps), 2)


@gluon.constexpr_function
def copy_layout(cols: int, bits: int, warps: int = 4) -> gl.BlockedLayout:
    """Layout of copies in units of 16 bytes, with the units of a row in neighbouring threads."""
    piece = 128 // bits
    across = min(32, cols // piece)
    return gl.BlockedLayout([1, piece], [32 // across, across], [warps, 1], [1, 0])


@gluon.constexpr_function
def rows_at_once(cols: int, bits: int, warps: int = 4) -> int:
    """Rows of a tile that all warps hold together in one unit of `copy_layout`; neighbouring ones are a warp's."""
    return warps * 32 // min(32, cols * bits // 128)


@gluon.constexpr_function
def operand_layout(rows: int, cols: int) -> gl.NVMMASharedLayout:
    """Shared-memory layout of a bfloat16 operand."""
    return gl.NVMMASharedLayout.get_default_for([rows, cols], gl.bfloat16)


@gluon.constexpr_function
def gate_layout() -> gl.SwizzledSharedLayout:
    """Shared-memory layout of a tile of float32 gates, read and written in units of 16 bytes."""
    return gl.SwizzledSharedLayout(4, 1, 8, [1, 0])


@gluon.jit
def begin_behind(LET_NEXT: gl.constexpr = True):
    """Waits for the previous kernel to end.

    With programmatic dependent launch (`Call.launch`), this kernel's programs may start before that.

    LET_NEXT: programs of the next kernel may start, and run up to their own call of this, once all programs of this
    kernel have started and there is room. This suits kernels of one or two programs per multiprocessor. Smaller
    programs would crowd on the few multiprocessors that are free by then.
    """
    cuda.gdc_wait()
    if LET_NEXT:
        cuda.gdc_launch_dependents()


@gluon.jit
def opaque(x):
    """x (int32), as a value that the compiler cannot predict and recomputes at every use of this function.

    There are two reasons. ptxas 12.8 loses a register operand of `wgmma` that it can fold to a constant (it writes the
    register after the product has read it), so masks must not be foldable. And offsets that the compiler would compute
    before a loop, by the dozen, cost more registers than computing them again.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def opaque_float(x):
    """x (float32), as `opaque` gives integers: what is computed from it is not kept from an earlier use."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def negative(x):
    """-x, as part of the instruction that uses it: Triton computes -x as 0 - x, which is one of its own."""
    return x * -1.0


@gluon.jit
def widened(x):
    """bfloat16 x, an even number per thread, as float32: Triton takes three instructions for two of them, not two."""
    both: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    return gl.inline_asm_elementwise(both, "=f,=f,r", [x], dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def split(x):
    """float32 x as a sum of two bfloat16, which keep 16 bits. The first is truncated, not rounded: a single `and`."""
    high = (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
    return high.to(gl.bfloat16), (x - high).to(gl.bfloat16)


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
def not_less(gates):
    """Gates in log2, at least LEAST_GATE. A NaN stays one."""
    return gl.maximum(gates, LEAST_GATE, propagate_nan=_PROPAGATE_NAN)


@gluon.jit
def load_gates(tile, g, words):
    """A tile's gates in log2, not less than LEAST_GATE, as two bfloat16 parts. `words` is for `has_large`."""
    bits: gl.constexpr = g.dtype.element_ty.primitive_bitwidth
    gates = not_less(read_gates(tile, g, copy_layout(tile.shape[1], bits, gl.num_warps())))
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
def offsets_and_mask(
    R: gl.constexpr, W: gl.constexpr, stride, rows_left, N: gl.constexpr, layout: gl.constexpr, column=0
):
    """Offsets of a tile [R, W] with rows `stride` apart, and a mask of its first rows_left rows and N columns.

    `column` is the tile's first column. The mask takes it into account, the offsets do not.
    """
    rows = opaque(gl.arange(0, R, gl.SliceLayout(1, layout)))
    cols = gl.arange(0, W, gl.SliceLayout(0, layout))
    mask = (rows < rows_left)[:, None]
    if N % W != 0:
        mask = mask & (column + cols < N)[None, :]
    return rows[:, None] * stride + cols[None, :], mask


@gluon.jit
def fetch(tile, ptr, stride, rows_left, N: gl.constexpr, layout: gl.constexpr, column=0):
    """Starts the copy of ptr[0:R, 0:W] into the shared `tile` [R, W]; zeros beyond rows_left rows and N columns."""
    offsets, mask = offsets_and_mask(tile.shape[0], tile.shape[1], stride, rows_left, N, layout, column)
    async_copy.async_copy_global_to_shared(tile, ptr + offsets, mask)


@gluon.jit
def put(
    ptr, x, stride, rows_left, N: gl.constexpr, layout: gl.constexpr, column=0, EVICT: gl.constexpr = False
):  # fmt: skip
    """Writes x [R, W], which has `layout`, to the first rows_left rows and N columns of ptr[0:R, 0:W].

    EVICT: the L2 cache should evict it before other data.
    """
    offsets, mask = offsets_and_mask(x.shape[0], x.shape[1], stride, rows_left, N, layout, column)
    gl.store(ptr + offsets, x.to(ptr.dtype.element_ty), mask, eviction_policy="evict_first" if EVICT else "")


@gluon.jit
def anew(tile):
    """The shared `tile`, with an address that the compiler recomputes at every use of this function.

    Descriptors and addresses of tiles do not change in a loop, so the compiler would compute them before it, and keep
    them on the stack if registers are short. Loads from the stack go to L2, because shared memory leaves little L1.
    """
    place = tile._reinterpret(tile.dtype, [1, tile.shape[0], tile.shape[1]], tile.layout)
    return place.index(opaque(0))


@gluon.jit
def no_state(BK: gl.constexpr, BV: gl.constexpr, scale, layout: gl.constexpr):
    """A state [BK, BV] of zeros, each computed separately.

    The assembler treats registers that hold the same constant as free. It would fill them before the loop with values
    that the loop can recompute, and then keep those values on the stack.
    """
    rows = gl.arange(0, BK, gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, BV, gl.SliceLayout(0, layout))[None, :]
    return (rows * BV + cols).to(gl.float32) * (scale * 0.0)


@gluon.jit
def wide_product(a, b):
    """a * b (int32) in 64 bits, with b a multiple of 16, recomputed at every use (see `opaque`)."""
    ab = gl.inline_asm_elementwise("mul.wide.s32 $0, $1, $2;", "=l,r,r", [a, b], gl.int64, is_pure=False, pack=1)
    return gl.multiple_of(ab, 16)


@gluon.jit
def stride_product(a, stride):
    """`wide_product` of a (int32) and a stride, which has 64 bits if it needs them."""
    if stride.dtype == gl.int64:
        return a.to(gl.int64) * stride
    return wide_product(a, stride)


@gluon.jit
def row_of(ptr, b, t, h, stride_b, stride_t, stride_h):
    """Pointer to the row of batch row b, token t and head h (int32)."""
    return ptr + (stride_product(b, stride_b) + stride_product(t, stride_t) + stride_product(h, stride_h))


@gluon.jit
def fetch_rows(
    tile, ptr, b, t, h, stride_b, stride_t, stride_h, rows_left, N: gl.constexpr, bits: gl.constexpr,
    column=0,
):  # fmt: skip
    """`fetch` of rows from token t on and columns from `column` on, with elements of `bits` bits."""
    row = row_of(ptr, b, t, h, stride_b, stride_t, stride_h) + column
    fetch(tile, row, stride_t, rows_left, N, copy_layout(tile.shape[1], bits, gl.num_warps()), column)


@gluon.jit
def fetch_gate_rows(tile, ptr, b, t, h, stride_b, stride_t, stride_h, rows_left, N: gl.constexpr):
    """`fetch_gates` of rows from token t on."""
    fetch_gates(tile, row_of(ptr, b, t, h, stride_b, stride_t, stride_h), stride_t, rows_left, N)


@gluon.jit
def product(a, b, M: gl.constexpr, N: gl.constexpr, WARPS: gl.constexpr = 4):
    """Starts a @ b, [M, N] float32."""
    zeros = gl.zeros([M, N], gl.float32, accumulator(N, M, WARPS))
    return warpgroup_mma(a, b, zeros, use_acc=False, is_async=True)


@gluon.jit
def add_product(a, b, acc):
    """Starts acc + a @ b."""
    return warpgroup_mma(a, b, acc, is_async=True)


@gluon.jit
def triangle(
    C: gl.constexpr, LOWER: gl.constexpr, INCLUSIVE: gl.constexpr, WARPS: gl.constexpr = 4, SHIFT: gl.constexpr = 0
):  # fmt: skip
    """Mask [C, C] of the pairs (i, j) with j <= i (LOWER) or j >= i; without the diagonal if not INCLUSIVE.

    SHIFT is added to i and j. ptxas sees through `opaque`, computes the same masks before and behind a branch once, and
    spends two instructions on keeping each predicate. Masks with another shift are others to it.
    """
    layout: gl.constexpr = accumulator(C, C, WARPS)
    i = opaque(gl.arange(0, C, gl.SliceLayout(1, layout)) + SHIFT)[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, layout))[None, :] + SHIFT
    if LOWER:
        return i >= j if INCLUSIVE else i > j
    return i <= j if INCLUSIVE else i < j


@gluon.jit
def masked_operand(x, mask):
    """x (C, C) float32 as a left operand, with 0 outside the mask. Values outside the mask may be inf or NaN."""
    C: gl.constexpr = x.shape[0]
    return gl.convert_layout(gl.where(mask, x, 0.0).to(gl.bfloat16), left_operand(C))


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
    half = gl.where(triangle(C, True, True, 4, 1), 0.5, -0.5).to(gl.bfloat16)
    half = gl.convert_layout(half, left_operand(C))
    G = product(half, high, C, BK)
    G = add_product(half, low, G)
    total = gl.zeros([BK, 8], gl.float32, accumulator(8))
    for n in gl.static_range(C // ONES_ROWS):
        total = add_product(high.slice(n * ONES_ROWS, ONES_ROWS, 0).permute((1, 0)), ones, total)
        total = add_product(low.slice(n * ONES_ROWS, ONES_ROWS, 0).permute((1, 0)), ones, total)
    return G, total


@gluon.jit
def chunk_total(total, BV: gl.constexpr):
    """The chunk's a_last (BK), in the layout of a state's rows [BK, BV], from `start_gate_frame`'s total (BK, 8)."""
    return gl.convert_layout(gl.max(total, axis=1), gl.SliceLayout(1, accumulator(BV)))


@gluon.jit
def locate(cu, n, T, VARLEN: gl.constexpr):
    """Batch row, first token and length of sequence n: all of row n or, if packed, tokens cu[n] to cu[n + 1]."""
    if VARLEN:
        begin = gl.load(cu + n).to(gl.int32)
        return 0, begin, gl.load(cu + n + 1).to(gl.int32) - begin
    return n, 0, T


@gluon.jit
def first_slot(n, begin, length, rows, VARLEN: gl.constexpr):
    """The first slot of sequence n in a buffer with one slot per piece of `rows` tokens, for all sequences.

    If packed, begin // rows + n needs no other sequence's length, and the slots of two sequences never overlap.
    """
    if VARLEN:
        return begin // rows + n
    return n * ((length + rows - 1) // rows)


@gluon.jit
def find_piece(cu, slot, N, T, rows, VARLEN: gl.constexpr):
    """For piece `slot`: its sequence, its number there, and the sequence's batch row, first token and length.

    A piece is `rows` consecutive tokens of one sequence (its last piece may be shorter). Pieces are numbered across all
    sequences, packed or not, by the rule of `first_slot`. Kernels are launched over pieces; a number that belongs to no
    piece of its sequence has no work.
    """
    if VARLEN:
        # Binary search for the last sequence whose first slot is not beyond `slot`: cu[n] // rows + n increases with n.
        n = slot * 0
        beyond = n + N
        while beyond - n > 1:
            middle = (n + beyond) // 2
            late = gl.load(cu + middle).to(gl.int32) // rows + middle > slot
            beyond = gl.where(late, middle, beyond)
            n = gl.where(late, n, middle)
        b, begin, length = locate(cu, n, T, VARLEN)
        return n, slot - begin // rows - n, b, begin, length
    per_sequence = gl.cdiv(T, rows)
    n = slot // per_sequence
    b, begin, length = locate(cu, n, T, VARLEN)
    return n, slot % per_sequence, b, begin, length


@gluon.jit
def load_state(
    ptr, K, V: gl.constexpr, layout: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, column=0
):  # fmt: skip
    """Reads a tile [BK, BV] of a float32 state with V columns and K rows left, in `layout`; zeros beyond."""
    offsets, mask = offsets_and_mask(BK, BV, V, K, V, layout, column)
    return gl.load(ptr + offsets, mask=mask, other=0.0)


@gluon.jit
def raise_where(flag, mask, value=1):
    """Sets `flag` to `value` if any element of the mask is true: the thread that has it stores it, not a reduction."""
    nowhere = gl.full(mask.shape, 0, gl.int32, mask.type.layout)
    gl.store(flag + nowhere, nowhere + value, mask)


@gluon.jit
def mark_strong(mark, total, n):
    """Marks a chunk of sequence n if a channel's total gate is beyond -SPAN_LIMIT; see `buffers.Flags`."""
    raise_where(mark, total < -SPAN_LIMIT, n + 1)
