"""fla's own language model with GLA, from the weights of ours: a rival as its authors made it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from glabench.models.model import LanguageModel

_EPS, _MIXER_EPS = 1e-6, 1e-5
# Parameters of ours and of fla's that say the same, by parts of their names.
_NAMES = (
    ("embedding.", "model.embeddings."),
    ("blocks.", "model.layers."),
    (".mixer.q.", ".attn.q_proj."),
    (".mixer.k.", ".attn.k_proj."),
    (".mixer.v.", ".attn.v_proj."),
    (".mixer.swish.", ".attn.g_proj."),
    (".mixer.gate.", ".attn.gk_proj."),
    (".mixer.norm.", ".attn.g_norm_swish_gate."),
    (".mixer.out.", ".attn.o_proj."),
    (".mlp.0.", ".mlp_norm."),
    (".mlp.1.gate.", ".mlp.gate_proj."),
    (".mlp.1.up.", ".mlp.up_proj."),
    (".mlp.1.down.", ".mlp.down_proj."),
    (".norm.", ".attn_norm."),
    ("head.", "lm_head."),
)


def their_name(ours: str) -> str:
    """The name that a parameter of our GLA model has in fla's `GLAForCausalLM`."""
    if ours.startswith("norm."):
        return f"model.{ours}"
    for own, theirs in _NAMES:
        # The norm of a block is the last of its name: those of the mixer and the MLP are replaced before.
        if own in ours and not (own == ".norm." and ".attn." in ours):
            ours = ours.replace(own, theirs, 1)
    return ours


class FlaLanguageModel(nn.Module):
    """`fla.models.GLAForCausalLM` with its fused norms, MLPs and cross-entropy, and our model's sizes and weights.

    Parameters have our names in `named`.
    """

    def __init__(self, ours: LanguageModel) -> None:
        super().__init__()
        from fla.models import GLAConfig, GLAForCausalLM
        from fla.modules import FusedCrossEntropyLoss

        config, sizes = ours.config, ours.config.layer_sizes
        heads, d = sizes["heads"], config.width
        theirs = GLAConfig(
            hidden_size=d, num_hidden_layers=config.blocks, num_heads=heads, vocab_size=config.vocabulary,
            expand_k=heads * sizes["key_dim"] / d, expand_v=heads * sizes["value_dim"] / d,
            intermediate_size=config.hidden, norm_eps=_EPS, use_cache=False,
        )  # fmt: skip
        with next(ours.parameters()).device:
            self.theirs = GLAForCausalLM(theirs)
        for layer in self.theirs.model.layers:
            layer.attn.g_norm_swish_gate.eps = _MIXER_EPS  # as the layer's own default; a model passes on another
        self._loss = FusedCrossEntropyLoss(inplace_backward=True)  # as the model's own, which drops the last target
        named = dict(self.theirs.named_parameters())
        self.named = {name: named[their_name(name)] for name, _ in ours.named_parameters()}
        with torch.no_grad():
            for name, x in ours.named_parameters():
                self.named[name].copy_(x)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of targets [B, T] after tokens [B, T]."""
        logits = self.theirs(input_ids=tokens).logits
        loss: Tensor = self._loss(logits.flatten(0, -2), targets.flatten())
        return loss
