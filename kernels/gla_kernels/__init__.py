"""Triton kernels for gated linear attention (GLA), and plain-PyTorch forms to hold them against.

All tensors are [B, T, H, D]; gates are natural logarithms, at most 0; states are [B, H, K, V] in float32.
"""

from gla_kernels.chunk import chunk_gla, chunk_linear_attn
from gla_kernels.chunkwise_torch import two_level_chunk_gla, unaware_chunk_linear_attn
from gla_kernels.naive import naive_recurrent_gla

__all__ = [
    "chunk_gla",
    "chunk_linear_attn",
    "naive_recurrent_gla",
    "two_level_chunk_gla",
    "unaware_chunk_linear_attn",
]
