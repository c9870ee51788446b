# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
"""Where a program works, how it starts, and what it reports: sequences, pieces, slots, flags and marks."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra import cuda

from gla_kernels.hopper.gates import SPAN_LIMIT


@gluon.jit
def let_next_kernel_start():
    """Programs of the next kernel may start once all programs of this one have come here, and there is room."""
    cuda.gdc_launch_dependents()


@gluon.jit
def wait_for_previous_kernel(LET_NEXT: gl.constexpr = True):
    """Waits for the previous kernel to end.

    With programmatic dependent launch (`Call.launch`), this kernel's programs may start before that. All programs of a
    call's kernels wait before they let the next kernel start, as they do by ending, too. So all but the last kernel
    have ended then, and what they and the caller have written may be read before this, but not by the call's first
    kernel.

    LET_NEXT: programs of the next kernel may start, and run up to their own call of this, once all programs of this
    kernel have started and there is room. This suits kernels of one or two programs per multiprocessor. Smaller
    programs would crowd on the few multiprocessors that are free by then.
    """
    cuda.gdc_wait()
    if LET_NEXT:
        let_next_kernel_start()


@gluon.jit
def locate(cu_seqlens, n, T, VARLEN: gl.constexpr):
    """Batch row, first token and length of sequence n: all of row n or, if packed, tokens cu[n] to cu[n + 1]."""
    if VARLEN:
        begin = gl.load(cu_seqlens + n).to(gl.int32)
        return 0, begin, gl.load(cu_seqlens + n + 1).to(gl.int32) - begin
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
def find_piece(cu_seqlens, slot, N, T, rows, VARLEN: gl.constexpr):
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
            late = gl.load(cu_seqlens + middle).to(gl.int32) // rows + middle > slot
            beyond = gl.where(late, middle, beyond)
            n = gl.where(late, n, middle)
        b, begin, length = locate(cu_seqlens, n, T, VARLEN)
        return n, slot - begin // rows - n, b, begin, length
    per_sequence = gl.cdiv(T, rows)
    n = slot // per_sequence
    b, begin, length = locate(cu_seqlens, n, T, VARLEN)
    return n, slot % per_sequence, b, begin, length


@gluon.jit
def raise_where(flag, mask, value=1):
    """Sets `flag` to `value` if any element of the mask is true: the thread that has it stores it, not a reduction."""
    nowhere = gl.full(mask.shape, 0, gl.int32, mask.type.layout)
    gl.store(flag + nowhere, nowhere + value, mask)


@gluon.jit
def mark_strong(mark, total, n):
    """Marks a chunk of sequence n if a channel's total gate is beyond -SPAN_LIMIT; see `buffers.Flags`."""
    raise_where(mark, total < -SPAN_LIMIT, n + 1)
