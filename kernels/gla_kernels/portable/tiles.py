# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
"""Building blocks of the Triton kernels: loads and stores, exact masked sums, gate frames.

Shapes in comments: C = rows (tokens) of a chunk, BK and BV = key and value columns of a tile, padded to powers of two.
Gates are in log2 units, because `exp2` is the hardware's exponential.

Operands of products have the dtype `DOT`: bfloat16 for bfloat16 inputs, float32 (multiplied as tf32 or better,
`PRECISION`) for float16 and float32 inputs, because scaled operands need bfloat16's or float32's exponent range.
"""

import triton
import triton.language as tl

from gla_kernels import limits

LOG2E = tl.constexpr(limits.LOG2E)
LEAST_GATE = tl.constexpr(limits.LEAST_GATE)
SPAN_LIMIT = tl.constexpr(limits.SPAN_LIMIT)
SPAN_LIMIT_FLOAT32 = tl.constexpr(limits.SPAN_LIMIT_FLOAT32)
# A gate below this resets the state exactly: 2**-10000 is 0 in every format, and 64 of them do not overflow in a sum.
RESET_LOG2 = tl.constexpr(-10000.0)


@triton.jit
def wait_for_previous_kernel(PDL: tl.constexpr):
    """With programmatic dependent launch, waits for the previous kernel and allows programs of the next one to start.

    The same as Triton's `gdc_wait` and `gdc_launch_dependents`, which only builds for NVIDIA GPUs have.
    """
    if PDL:
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def locate(cu_seqlens, n, T, VARLEN: tl.constexpr):
    """Batch row, first token and length of sequence n: all of row n or, if packed, tokens cu[n] to cu[n + 1]."""
    if VARLEN:
        begin = tl.load(cu_seqlens + n).to(tl.int32)
        length = tl.load(cu_seqlens + n + 1).to(tl.int32) - begin
        row = 0
    else:
        begin = 0
        length = T
        row = n
    return row, begin, length


@triton.jit
def first_slot(n, begin, length, rows, VARLEN: tl.constexpr):
    """The first slot of sequence n in a buffer with one slot per piece of `rows` tokens, for all sequences.

    If packed, begin // rows + n needs no other sequence's length, and the slots of two sequences never overlap.
    """
    return begin // rows + n if VARLEN else n * ((length + rows - 1) // rows)


@triton.jit
def checkpoint_slot(n, begin, length, first_chunk, checkpoint_chunks, C: tl.constexpr, VARLEN: tl.constexpr):
    """The slot of sequence n's checkpoint before chunk `first_chunk`, a multiple of `checkpoint_chunks`.

    If a packed sequence ends before `first_chunk`, the slot of its last checkpoint: the state is read, but not used.
    """
    last = tl.maximum((length + checkpoint_chunks * C - 1) // (checkpoint_chunks * C) - 1, 0)
    return first_slot(n, begin, length, checkpoint_chunks * C, VARLEN) + tl.minimum(
        first_chunk // checkpoint_chunks, last
    )


@triton.jit
def load_tile(ptr, rows, cols, stride, n_rows, n_cols: tl.constexpr):
    """Loads `ptr[rows, cols]`; rows and columns beyond the tensor read as 0 (a gate or key of 0 has no effect)."""
    inside = (rows[:, None] < n_rows) & (cols[None, :] < n_cols)
    return tl.load(ptr + rows[:, None] * stride + cols[None, :], mask=inside, other=0.0)


@triton.jit
def store_tile(ptr, x, rows, cols, stride, n_rows, n_cols: tl.constexpr):
    """Stores `x` to `ptr[rows, cols]` in the pointer's dtype, except rows and columns beyond the tensor."""
    inside = (rows[:, None] < n_rows) & (cols[None, :] < n_cols)
    tl.store(ptr + rows[:, None] * stride + cols[None, :], x.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def zero_state(scale, BK: tl.constexpr, BV: tl.constexpr):
    """A state of zeros that the compiler cannot treat as constant: ptxas 12.8 loses constant operands of wgmma."""
    return tl.zeros([BK, BV], dtype=tl.float32) + scale * 0.0


@triton.jit
def select_sum(mask, x, PARTS: tl.constexpr, DOT: tl.constexpr):
    """`mask @ x` for a boolean mask (C, C) and float32 x (C, BK): sums of selected rows, on the tensor cores.

    With bfloat16 operands, x is split into PARTS bfloat16 parts (2 keep 16 bits, 3 all 24 bits); products with 0 and 1
    are exact, and the accumulator is float32. `tl.cumsum` of the same tile costs a third more registers.
    """
    if tl.bfloat16 == DOT:
        m = mask.to(tl.float32).to(tl.bfloat16)
        high = x.to(tl.bfloat16)
        rest = x - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        out = tl.dot(m, high)
        out = tl.dot(m, middle, out)
        if PARTS == 3:
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            out = tl.dot(m, low, out)
        return out
    return tl.dot(mask.to(tl.float32), x, input_precision="ieee")


@triton.jit
def exact_gates(g):
    """Gates in log2 units, with -inf replaced by a finite number that still decays any value to exactly 0."""
    step_gates = g.to(tl.float32) * LOG2E
    # Not tl.maximum, which turns a NaN into a reset on a GPU and so hides it.
    return tl.where(step_gates < RESET_LOG2, RESET_LOG2, step_gates)


@triton.jit
def plain_gates(g):
    """Gates in log2 units as the plain form takes them: at least LEAST_GATE. A NaN stays one."""
    step_gates = g.to(tl.float32) * LOG2E
    return tl.where(step_gates < LEAST_GATE, LEAST_GATE, step_gates)


@triton.jit
def span_limit(DOT: tl.constexpr):
    """The largest span of a chunk's gates for operands of this dtype; see `limits.SPAN_LIMIT`."""
    if tl.bfloat16 == DOT:
        return SPAN_LIMIT
    return SPAN_LIMIT_FLOAT32


@triton.jit
def minus_reference(total, DOT: tl.constexpr):
    """-r for a total gate of `total`, in log2: half of its size, but at most half of the limit; see `gate_frame`."""
    return tl.minimum(-0.5 * total, 0.5 * span_limit(DOT), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def load_head_sums(sums, steps, rows_left):
    """The sums of a gate per head up to each of a chunk's tokens (C), and the last of them.

    `sums` points to that of the first token. Behind the last token, of `rows_left`, there are copies of its sum.
    """
    last = tl.minimum(rows_left, steps.shape[0]) - 1
    return tl.load(sums + tl.minimum(steps, last)), tl.load(sums + last)


@triton.jit
def decay(exponents):
    """2^exponents in float32, of sums or differences of sums; 1 for those above 0, which nothing uses."""
    return tl.exp2(tl.minimum(exponents.to(tl.float32), 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def decay_between(later, earlier):
    """`decay(later - earlier)` of sums that are broadcast to pairs.

    Sums in float64 are cut into two float32 parts first, whose differences are nearly as exact as theirs: many GPUs
    have a unit for float64 for every 32 or 64 for float32.
    """
    if later.dtype == tl.float64:
        high_later = later.to(tl.float32)
        high_earlier = earlier.to(tl.float32)
        rest = (later - high_later).to(tl.float32) - (earlier - high_earlier).to(tl.float32)
        return decay((high_later - high_earlier) + rest)
    return decay(later - earlier)


@triton.jit
def gate_frame(g, steps, DOT: tl.constexpr):
    """What takes a chunk's q, k and state into its frame: exponents (C, BK), (C, BK) and (BK), and the total gate (BK).

    The exponents are those of `forward.py`: to_row - r, to_end - r and r, in log2. The sums are of the gates up to a
    token and after it, so that gates which have no effect on a value do not enter it, not even by their rounding.
    """
    step_gates = plain_gates(g)
    total = tl.sum(step_gates, axis=0)
    minus_r = minus_reference(total, DOT)
    to_row = select_sum(steps[:, None] >= steps[None, :], step_gates, 2, DOT)
    to_end = select_sum(steps[:, None] < steps[None, :], step_gates, 2, DOT)
    return to_row + minus_r[None, :], to_end + minus_r[None, :], -minus_r, total
