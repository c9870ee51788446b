"""Small models of every mixer."""

import torch

from glabench.backends import load_registry
from glabench.models import LanguageModel, ModelConfig

REGISTRY = load_registry()
SMALL = {
    "gla": {"heads": 2, "key_dim": 8, "value_dim": 16},
    "linear": {"heads": 2, "key_dim": 8, "value_dim": 16},
    "simple-gla": {"heads": 2, "key_dim": 8, "value_dim": 16},
    "fixed-gate": {"heads": 2, "key_dim": 8, "value_dim": 16},
    "gla-values": {"heads": 2, "key_dim": 8, "value_dim": 16},
    "gla-both": {"heads": 2, "key_dim": 8, "value_dim": 16},
    "retnet": {"heads": 2, "key_dim": 8, "value_dim": 16},
    "transformer": {"heads": 2, "head_dim": 16},
    "mamba1": {"inner": 64, "state_size": 4},
    "mamba2": {"heads": 4, "head_dim": 16, "state_size": 8},
    "hyena": {"inner": 32, "longest": 64},
    "rwkv4": {"inner": 32},
}
WIDTH, VOCABULARY = 32, 17


def model_of(mixer, kernel="reference", layers=1, recompute=False, dtype=torch.float64, seed=0, **options):
    torch.manual_seed(seed)
    config = ModelConfig(mixer, WIDTH, layers, VOCABULARY, kernel, SMALL[mixer], options)
    return LanguageModel(config, REGISTRY, recompute).to(dtype)


def tokens_of(B, T, seed=1):
    return torch.randint(VOCABULARY, (B, T), generator=torch.Generator().manual_seed(seed))
