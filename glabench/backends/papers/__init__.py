"""Systems as the papers describe them: rivals of what is built today, and no product. Each is small.

FIN is the final paper (Gated Linear Attention Transformers with Hardware-Efficient Training), V3 its third version.
"""

# Targets whose exponents for all sources and channels `forms.parallel_gla` has in memory at a time.
TARGETS = 16
# Columns of keys and of values that a program of `two_level.py` and `two_pass.py` has at most. With 32 of 64 columns of
# keys, ptxas 12.8 gave their gradients a wrong descriptor (kernels/NOTES.md, "Faults of the compiler").
MOST_COLUMNS = 64
# Rows of a chunk that such a program, or one of `one_pass.py`, multiplies at a time.
MOST_ROWS = 64
# For sizes that follow from a GPU, if there is none.
H100_MULTIPROCESSORS = 132


def rows_of_blocks(C: int, is_float32: bool) -> int:
    """Rows that a program of `two_pass.py` has; in float32, 64 would have kilobytes of stack."""
    return min(C, 16 if is_float32 else MOST_ROWS)


def state_columns(K: int, V: int, heads: int, multiprocessors: int = H100_MULTIPROCESSORS) -> int:
    """Value columns of a program of `stored_states.py`, whose gradients of keys have a part per block of them.

    `heads` are those of all sequences. Where they are few, there are more programs, but for those that would have to
    wait for a multiprocessor.
    """
    most = max(16, min(64, 8192 // K))
    sizes = [size for size in (64, 32, 16) if size <= most and V % size == 0]
    return next((size for size in reversed(sizes) if heads * (V // size) <= multiprocessors), sizes[0])


def value_columns(K: int, V: int, gated_backward: bool) -> int:
    """Value columns of a program of `one_pass.py`, which computes all scores that it needs itself.

    With more, the backward with gates has several hundred bytes of stack.
    """
    return max(16, min(V, 64, (2048 if gated_backward else 8192) // K))
