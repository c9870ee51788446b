"""Systems as the papers describe them: rivals of what is built today, and no product. Each is small.

FIN is the final paper (Gated Linear Attention Transformers with Hardware-Efficient Training), V3 its third version.
"""

# Targets whose exponents for all sources and channels `forms.parallel_gla` has in memory at a time.
TARGETS = 16


def value_columns(K: int, V: int, gated_backward: bool) -> int:
    """Value columns of a program of `one_pass.py`, which computes all scores that it needs itself.

    With more, the backward with gates has several hundred bytes of stack.
    """
    return max(16, min(V, 64, (2048 if gated_backward else 8192) // K))
