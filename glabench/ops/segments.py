"""How many tokens of a sequence a reference takes at a time, and what it holds of them."""

from glabench.sweeps.model import Cell

CHUNK = 16
SHORTEST = 1024
# The segments of few sequences and heads are longer, up to four times, because then it is the launches that take time:
# up to so many rows of all of them, and so many numbers per row of keys.
_ROWS, _NUMBERS, _LONGEST = 2**14, 2**18, 4
# Tensors of pairs that a segment's backward has in memory, about.
_TENSORS = 8


def segment_tokens(parts: int, width: int) -> int:
    """Tokens whose pairs are in memory at a time, of so many sequences and heads with rows of `width` numbers."""
    return SHORTEST * max(1, min(_LONGEST, _ROWS // (parts * SHORTEST), _NUMBERS // (width * SHORTEST)))


def held_tokens(cell: Cell, width: int, parts: int = 1) -> int:
    """The same of a cell's sequences, which may be shorter than a segment."""
    return min(cell.tokens if cell.get("packed") else cell.seqlen, segment_tokens(parts, width))


def pair_numbers(cell: Cell, width: int, parts: int = 1) -> int:
    """About how many numbers of pairs of rows in a chunk, for each of `width` channels, one part holds at a time."""
    return _TENSORS * held_tokens(cell, width, parts) * CHUNK * width
