"""How many tokens of a sequence a reference takes at a time."""

SHORTEST = 1024
# The segments of few sequences and heads are longer, up to four times, because then it is the launches that take time:
# up to so many rows of all of them, and so many numbers per row of keys.
_ROWS, _NUMBERS, _LONGEST = 2**14, 2**18, 4


def segment_tokens(parts: int, width: int) -> int:
    """Tokens whose pairs are in memory at a time, of so many sequences and heads with rows of `width` numbers."""
    return SHORTEST * max(1, min(_LONGEST, _ROWS // (parts * SHORTEST), _NUMBERS // (width * SHORTEST)))
