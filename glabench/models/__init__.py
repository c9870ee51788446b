"""Models around the mixers: embedding, blocks and head in plain PyTorch; the mixers' kernels are those of backends.

Importing this imports torch.
"""

from glabench.models.config import MIXERS, ModelConfig
from glabench.models.model import LanguageModel

__all__ = ["MIXERS", "LanguageModel", "ModelConfig"]
