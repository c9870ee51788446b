"""What the kernels can take, for asking without torch or Triton."""

CHUNK_SIZES = (16, 32, 64, 128)
MAX_HEAD_DIM = 512
# Key columns of one kernel with float32 operands, whose tiles are twice as large.
MAX_KEY_DIM_FLOAT32 = 256
# Head dims that the Gluon kernels for Hopper take: tiles of 64 columns, rows of whole 16-byte pieces.
NARROW_HEAD_DIMS = (16, 32, 48, 64)
# And what those of wider heads must be a multiple of, for the same rows.
WIDE_MULTIPLE = 16
# Key columns of a block in those.
WIDE_KEY_BLOCK = 128
# Key columns of a state that stays in one program's registers, as two such blocks; more need the states between
# kernels.
WALKED_KEYS = 2 * WIDE_KEY_BLOCK


def padded(size: int) -> int:
    """The tile width for `size` columns: the next power of two, at least the 16 that a product needs."""
    return max(16, 1 << (size - 1).bit_length())


def fitting_chunks(K: int, operand_bytes: int) -> tuple[int, ...]:
    """Chunk sizes whose tiles fit the shared memory of an H100 (227 KiB), read off the compiled kernels.

    `operand_bytes` is 2 for bfloat16 inputs and 4 for float16 and float32, whose products run on float32 operands.
    """
    wide, half = padded(K), operand_bytes == 2
    if wide <= 64:
        largest = 128 if half else 64
    elif wide <= 128:
        largest = 64 if half else 32
    elif wide <= 256:
        largest = 32 if half else 16
    else:
        largest = 16
    return tuple(size for size in CHUNK_SIZES if size <= largest)
