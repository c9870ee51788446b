"""Ops, which define what is computed. Importing this package does not import torch."""

from glabench.ops.base import BYTES, Op, Spec
from glabench.ops.both_gates import GLA_BOTH, GLA_VALUES
from glabench.ops.decoding import DECODING
from glabench.ops.delta import GATED_DELTA, KDA
from glabench.ops.gla import GLA
from glabench.ops.hyena import HYENA
from glabench.ops.linear import LINEAR
from glabench.ops.mamba1 import MAMBA1
from glabench.ops.mamba2 import MAMBA2
from glabench.ops.mlstm import MLSTM
from glabench.ops.recall import RECALL
from glabench.ops.rwkv4 import RWKV4
from glabench.ops.simple_gla import LIGHTNING, RETENTION, SIMPLE_GLA
from glabench.ops.softmax import SOFTMAX
from glabench.ops.text import TEXT
from glabench.ops.training import TRAINING

BUILTIN: tuple[Op, ...] = (
    GLA, LINEAR, SOFTMAX, MAMBA1, MAMBA2, SIMPLE_GLA, RETENTION, LIGHTNING, GLA_BOTH, GLA_VALUES, GATED_DELTA, KDA,
    MLSTM, HYENA, RWKV4, TRAINING, RECALL, TEXT, DECODING,
)  # fmt: skip

__all__ = [
    "BUILTIN", "BYTES", "DECODING", "GATED_DELTA", "GLA", "GLA_BOTH", "GLA_VALUES", "HYENA", "KDA", "LIGHTNING",
    "LINEAR", "MAMBA1", "MAMBA2", "MLSTM", "RECALL", "RETENTION", "RWKV4", "SIMPLE_GLA", "SOFTMAX", "TEXT", "TRAINING",
    "Op", "Spec",
]  # fmt: skip
