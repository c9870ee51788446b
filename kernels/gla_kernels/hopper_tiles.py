"""Pieces that the Gluon kernels for Hopper are made of: layouts, copies, the chunk's gate frame, wgmma products.

Shapes in comments: C = 64 rows of a chunk, BK and BV = key and value columns of a tile. A product is one `wgmma` of a
warpgroup of 4 warps, so a kernel with 4 warps has every accumulator whole in its registers and can hand it to the next
product as the left operand without a trip through shared memory.

Gates are handled in log2 units. They are summed by products with constant matrices: a float32 gate is split into two
bfloat16 parts (16 bits), products with +-1/2 and 1 are exact and the accumulator is float32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    warpgroup_mma,
)
from triton.language.extra import cuda

# Triton 3.7 renamed it.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
LOG2E = gl.constexpr(1.4426950408889634)
# A chunk's gates may span so much in the plain form (log2); half of it is the largest exponent of a scaled operand, far
# from bfloat16's and float32's 127.
SPAN_LIMIT = gl.constexpr(120.0)
# Rows of the constant that sums a chunk's gates: as few as shared memory has room for, two products a part.
ONES_ROWS = gl.constexpr(32)


@gluon.constexpr_function
def accumulator(cols: int, rows: int = 64, warps: int = 4) -> gl.NVMMADistributedLayout:
    """Layout of a product's accumulator [rows, cols], 64 rows or a multiple of them, over one warpgroup or two.

    Two warpgroups (8 warps) share the rows of a tile of 128, and the columns of a tile of 64 rows.
    """
    if warps == 8 and rows == 64:
        return gl.NVMMADistributedLayout([3, 0], [4, 2], [16, cols // 2, 16])
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, cols, 16])


@gluon.constexpr_function
def left_operand(cols: int, rows: int = 64, warps: int = 4) -> gl.DotOperandLayout:
    """Layout of a product's left operand in registers.

    An accumulator of that shape converts to it without moving, but where two warpgroups share its columns.
    """
    return gl.DotOperandLayout(0, accumulator(cols, rows, warps), 2)


@gluon.constexpr_function
def copy_layout(cols: int, bits: int, warps: int = 4) -> gl.BlockedLayout:
    """Pieces of 16 bytes, those of a row in neighbouring threads."""
    piece = 128 // bits
    across = min(32, cols // piece)
    return gl.BlockedLayout([1, piece], [32 // across, across], [warps, 1], [1, 0])


@gluon.constexpr_function
def operand_layout(rows: int, cols: int) -> gl.NVMMASharedLayout:
    """Shared-memory layout of a bfloat16 operand."""
    return gl.NVMMASharedLayout.get_default_for([rows, cols], gl.bfloat16)


@gluon.constexpr_function
def gate_layout() -> gl.SwizzledSharedLayout:
    """Shared-memory layout of a tile of float32 gates, read and written in pieces of 16 bytes."""
    return gl.SwizzledSharedLayout(4, 1, 8, [1, 0])


@gluon.jit
def begin_behind(LET_NEXT: gl.constexpr = True):
    """Waits until the kernel launched before has ended, which it need not have when this one's programs begin.

    That is programmatic dependent launch (`Call.launch`). LET_NEXT: programs of the kernel launched after may begin, up
    to here, as soon as all of this one's have and there is room. That is for kernels of which a multiprocessor holds
    one program or two: small ones would crowd on the few multiprocessors that are free by then.
    """
    cuda.gdc_wait()
    if LET_NEXT:
        cuda.gdc_launch_dependents()


@gluon.jit
def opaque(x):
    """x (int32), as a value that the compiler knows nothing about and computes anew wherever it stands.

    Two reasons. ptxas 12.8 loses a register operand of `wgmma` that it can fold to a constant (it writes the register
    after the product has read it), so masks must not be foldable. And row numbers that a loop could hoist, offsets
    by the dozen, cost more registers than computing them again.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def reciprocal(x):
    """1 / x to one unit in the last place, by the one instruction for it."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def split(x):
    """float32 x as the sum of two bfloat16: 16 of its bits. The first is cut, not rounded, which costs one `and`."""
    high = (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
    return high.to(gl.bfloat16), (x - high).to(gl.bfloat16)


@gluon.jit
def offsets_and_mask(
    R: gl.constexpr, W: gl.constexpr, stride, rows_left, N: gl.constexpr, layout: gl.constexpr, column=0
):
    """Offsets of a tile [R, W] with rows `stride` apart, and which of it lie in the first rows_left rows, N columns.

    `column` is the tile's first; the offsets do not hold it, the mask does.
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
    """Writes x [R, W], held in `layout`, to ptr[0:R, 0:W] as far as rows_left and N go.

    EVICT: the L2 cache is to let go of it before all else.
    """
    offsets, mask = offsets_and_mask(x.shape[0], x.shape[1], stride, rows_left, N, layout, column)
    gl.store(ptr + offsets, x.to(ptr.dtype.element_ty), mask, eviction_policy="evict_first" if EVICT else "")


@gluon.jit
def anew(tile):
    """The shared `tile`, whose address the compiler computes anew wherever this stands.

    Descriptors and addresses of a loop's tiles do not change, so the compiler would make them before the loop, and
    keep them on the stack where registers are short. Loads from there come from L2: shared memory leaves little L1.
    """
    place = tile._reinterpret(tile.dtype, [1, tile.shape[0], tile.shape[1]], tile.layout)
    return place.index(opaque(0))


@gluon.jit
def no_state(BK: gl.constexpr, BV: gl.constexpr, scale, layout: gl.constexpr):
    """A state [BK, BV] of zeros, each of which is a computation of its own.

    Of registers that hold the same constant the assembler thinks that they cost nothing, fills them before the loop
    with what the loop could compute anew, and then keeps that on the stack.
    """
    rows = gl.arange(0, BK, gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, BV, gl.SliceLayout(0, layout))[None, :]
    return (rows * BV + cols).to(gl.float32) * (scale * 0.0)


@gluon.jit
def wide_product(a, b):
    """a * b (int32) in 64 bits for b a multiple of 16, computed anew wherever it stands (see `opaque`)."""
    ab = gl.inline_asm_elementwise("mul.wide.s32 $0, $1, $2;", "=l,r,r", [a, b], gl.int64, is_pure=False, pack=1)
    return gl.multiple_of(ab, 16)


@gluon.jit
def stride_product(a, stride):
    """`wide_product` of a (int32) and a stride, which comes with 64 bits where it needs them."""
    if stride.dtype == gl.int64:
        return a.to(gl.int64) * stride
    return wide_product(a, stride)


@gluon.jit
def row_of(ptr, b, t, h, stride_b, stride_t, stride_h):
    """The row of batch row b, token t and head h (int32)."""
    return ptr + (stride_product(b, stride_b) + stride_product(t, stride_t) + stride_product(h, stride_h))


@gluon.jit
def fetch_rows(
    tile, ptr, b, t, h, stride_b, stride_t, stride_h, rows_left, N: gl.constexpr, bits: gl.constexpr,
    column=0,
):  # fmt: skip
    """`fetch` of rows from token t on and columns from `column` on, of numbers of so many bits."""
    row = row_of(ptr, b, t, h, stride_b, stride_t, stride_h) + column
    fetch(tile, row, stride_t, rows_left, N, copy_layout(tile.shape[1], bits, gl.num_warps()), column)


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
def triangle(C: gl.constexpr, LOWER: gl.constexpr, INCLUSIVE: gl.constexpr, WARPS: gl.constexpr = 4):
    """Mask [C, C] of the pairs (i, j) with j <= i (LOWER) or j >= i, or without the diagonal."""
    layout: gl.constexpr = accumulator(C, C, WARPS)
    i = opaque(gl.arange(0, C, gl.SliceLayout(1, layout)))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, layout))[None, :]
    if LOWER:
        return i >= j if INCLUSIVE else i > j
    return i <= j if INCLUSIVE else i < j


@gluon.jit
def masked_operand(x, mask):
    """x (C, C) float32 where the mask holds, else 0, as a left operand. What the mask drops may be inf or NaN."""
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
    """Starts the sums of a chunk's gates: the cumulative gate about its middle, and its total.

    `high` and `low` are the two halves of the gates in log2, [C, BK]. With the middle r = G_last / 2,

        G - r = (lower triangle - 1/2) @ gates (C, BK),    G_last = gates^T @ 1 (BK, 8), in every column the same.

    The second comes with the keys down the rows, as the state has them.
    """
    half = gl.where(triangle(C, True, True), 0.5, -0.5).to(gl.bfloat16)
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
    """The chunk's G_last (BK), held as the rows of a state [BK, BV] are, from `start_gate_frame`'s total (BK, 8)."""
    return gl.convert_layout(gl.max(total, axis=1), gl.SliceLayout(1, accumulator(BV)))


@gluon.jit
def locate(cu, n, T, VARLEN: gl.constexpr):
    """The batch row, the first token and the length of sequence n: row n whole, or cu[n] to cu[n + 1] of one row."""
    if VARLEN:
        begin = gl.load(cu + n).to(gl.int32)
        return 0, begin, gl.load(cu + n + 1).to(gl.int32) - begin
    return n, 0, T


@gluon.jit
def first_slot(n, begin, length, rows, VARLEN: gl.constexpr):
    """Where sequence n's pieces of `rows` tokens begin in a buffer that holds those of all sequences.

    Packed sequences: begin // rows + n is known without the lengths before, and no two sequences overlap.
    """
    if VARLEN:
        return begin // rows + n
    return n * ((length + rows - 1) // rows)


@gluon.jit
def load_state(
    ptr, K, V: gl.constexpr, layout: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, column=0
):  # fmt: skip
    """Reads a tile [BK, BV] of a state [.., V] float32 of which K rows are left, in `layout`, with zeros beyond."""
    offsets, mask = offsets_and_mask(BK, BV, V, K, V, layout, column)
    return gl.load(ptr + offsets, mask=mask, other=0.0)


@gluon.jit
def raise_where(flag, mask):
    """Sets `flag` to 1 if the mask holds anywhere: by the thread that holds it, without a reduction."""
    nowhere = gl.full(mask.shape, 0, gl.int32, mask.type.layout)
    gl.store(flag + nowhere, nowhere + 1, mask)
