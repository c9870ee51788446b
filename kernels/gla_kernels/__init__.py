"""Triton kernels for gated linear attention (GLA), and pure-PyTorch versions to compare them with.

All tensors are [B, T, H, D]; gates are natural logarithms, at most 0; states are [B, H, K, V] in float32.
Names are imported on first use, so that the pure-PyTorch versions work without Triton.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gla_kernels.chunk import chunk_gla, chunk_linear_attn, fused_chunk_gla
    from gla_kernels.recurrent import fused_recurrent_gla
    from gla_kernels.reference.chunkwise import two_level_chunk_gla, unaware_chunk_linear_attn
    from gla_kernels.reference.recurrent import naive_recurrent_gla
    from gla_kernels.simple import (
        chunk_retention,
        chunk_simple_gla,
        fused_recurrent_linear_attn,
        fused_recurrent_retention,
        fused_recurrent_simple_gla,
    )

__all__ = [
    "chunk_gla",
    "chunk_linear_attn",
    "chunk_retention",
    "chunk_simple_gla",
    "fused_chunk_gla",
    "fused_recurrent_gla",
    "fused_recurrent_linear_attn",
    "fused_recurrent_retention",
    "fused_recurrent_simple_gla",
    "naive_recurrent_gla",
    "two_level_chunk_gla",
    "unaware_chunk_linear_attn",
]

_HOME = {
    "chunk_gla": "chunk",
    "chunk_linear_attn": "chunk",
    "chunk_retention": "simple",
    "chunk_simple_gla": "simple",
    "fused_chunk_gla": "chunk",
    "fused_recurrent_gla": "recurrent",
    "fused_recurrent_linear_attn": "simple",
    "fused_recurrent_retention": "simple",
    "fused_recurrent_simple_gla": "simple",
    "naive_recurrent_gla": "reference.recurrent",
    "two_level_chunk_gla": "reference.chunkwise",
    "unaware_chunk_linear_attn": "reference.chunkwise",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'gla_kernels' has no attribute '{name}'")
    return getattr(import_module(f"gla_kernels.{_HOME[name]}"), name)
