"""Sizes that the kernels support. Imports neither torch nor Triton."""

CHUNK_SIZES = (16, 32, 64, 128)
# Most columns of keys and of values: as a single head of model width 1024 has.
MAX_KEY_DIM, MAX_VALUE_DIM = 512, 1024
# Tokens up to which `fused_recurrent_gla` goes token by token, as fla's layer does.
MAX_RECURRENT_TOKENS = 64
# Tokens up to which the chunk functions do, too, if no gradient is needed. With more, the chunk kernels are faster for
# some shapes (kernels/NOTES.md, "Token by token").
SHORT_TOKENS = 12
# Bytes of shared memory that a program may have on an H100, and the least on which two stages of any tile fit (A100).
SHARED_BYTES = 227 * 1024
LARGE_SHARED_BYTES = 163 * 1024
# What AMD's programs may have: the backward without gates takes 80 KiB in chunks of 128.
SMALL_SHARED_BYTES = 64 * 1024
# Head dims of the narrow Hopper kernels: tiles have 64 columns, and rows are copied in 16-byte units.
NARROW_HEAD_DIMS = (16, 32, 48, 64)
# Head dims of the wide Hopper kernels are multiples of this, for the same 16-byte units.
WIDE_MULTIPLE = 16
# Key columns per block in the wide Hopper kernels.
WIDE_KEY_BLOCK = 128
# Most key columns of a state that one program can keep in registers, as two such blocks. With more, states go through
# memory from one kernel to the next.
WALKED_KEYS = 2 * WIDE_KEY_BLOCK

# Gates are in log2 units in kernels.
LOG2E = 1.4426950408889634
# The least gate of a token in the plain form, in log2: 2^-34 of a value is beyond float32's precision. Four such gates
# (four resets in a chunk) do not reach the span limit of bfloat16, three not that of float32. bfloat16 has this number
# exactly.
LEAST_GATE = -34.0
# The largest span of a chunk's gates in the plain form, in log2, with bfloat16 and with float32 operands. Half of it is
# the largest exponent of a scaled operand, far below the 127 of both. With float32 operands, sums of gates stay below
# 128, since their rounding, which doubles there, is a share of the results' error.
SPAN_LIMIT = 144.0
SPAN_LIMIT_FLOAT32 = 128.0
# The same with a gate per head, in the forward of narrow heads on Hopper, where it is the largest exponent itself.
# Beyond it, a chunk's scores have decays, too, which takes up to an eighth longer. It is less than a reset
# (-LEAST_GATE), so that chunks with one are strong. No other kernel computes again what overflows: with v, or sums of
# q k v or of k v, beyond 2^96, not 2^128, a chunk that is not strong has results that are infinite or NaN.
HEAD_SPAN_LIMIT = 32.0


def padded(size: int) -> int:
    """The tile width for `size` columns: the next power of two, and at least 16, the minimum of a product."""
    return max(16, 1 << (size - 1).bit_length())


def fitting_chunks(
    K: int, operand_bytes: int, shared_bytes: int = SHARED_BYTES, tensor_memory: bool = False
) -> tuple[int, ...]:
    """Chunk sizes whose tiles fit a GPU with so much shared memory per program, as found in the compiled kernels.

    `operand_bytes` is 2 for bfloat16 inputs and 4 for float16 and float32, whose products use float32 operands.
    `tensor_memory`: the GPU's products add up there, in 512 columns, and those of longer chunks need up to 1,376.
    """
    if tensor_memory:
        largest = 32
    elif operand_bytes == 2:
        largest = 128 if padded(K) <= 64 and shared_bytes > SMALL_SHARED_BYTES else 64
    else:
        largest = 64 if shared_bytes >= LARGE_SHARED_BYTES else 32
    return tuple(size for size in CHUNK_SIZES if size <= largest)
