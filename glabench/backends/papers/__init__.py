"""Systems as the papers describe them: rivals of what is built today, and no product. Each is small.

FIN is the final paper (Gated Linear Attention Transformers with Hardware-Efficient Training), V3 its third version.
"""

# Targets whose exponents for all sources and channels `forms.parallel_gla` has in memory at a time.
TARGETS = 16
