"""Ops, which define what is computed. Importing this package does not import torch."""

from glabench.ops.base import BYTES, Op, Spec
from glabench.ops.gla import GLA
from glabench.ops.linear import LINEAR
from glabench.ops.mamba1 import MAMBA1
from glabench.ops.mamba2 import MAMBA2
from glabench.ops.softmax import SOFTMAX

BUILTIN: tuple[Op, ...] = (GLA, LINEAR, SOFTMAX, MAMBA1, MAMBA2)

__all__ = ["BUILTIN", "BYTES", "GLA", "LINEAR", "MAMBA1", "MAMBA2", "SOFTMAX", "Op", "Spec"]
