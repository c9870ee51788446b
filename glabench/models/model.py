"""A language model: embedding, blocks of a mixer and an MLP, head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from glabench.errors import UsageError
from glabench.models.config import ModelConfig
from glabench.models.kernels import Kernels
from glabench.models.parts import Norm, SwiGlu, widened
from glabench.models.recurrent import Linear
from glabench.models.sequence import Stretch
from glabench.models.softmax import Softmax
from glabench.models.states import LayerStates, Place, States

_EPS, _DEVIATION = 1e-6, 0.02


class Block(nn.Module):
    """x + mixer(RMSNorm(x)), then the same with the MLP, if the mixer has one beside it."""

    def __init__(self, config: ModelConfig, registry: Kernels) -> None:
        super().__init__()
        self.norm = Norm(config.width, eps=_EPS)
        self.mixer = config.make_mixer(registry)
        self.mlp: nn.Module | None = None
        if config.hidden is not None:
            self.mlp = nn.Sequential(Norm(config.width, eps=_EPS), SwiGlu(config.width, config.hidden))

    def forward(self, x: Tensor, stretch: Stretch | None = None) -> Tensor:
        """x [B, T, d] to [B, T, d]. `stretch`: of sequences, only for mixers with a matrix as state, and attention."""
        if stretch is None:
            return self._mix_channels(x + self.mixer(self.norm(x)))
        assert isinstance(self.mixer, (Linear, Softmax))
        return self._mix_channels(x + self.mixer.share(self.norm(x), stretch))

    def prefill(self, x: Tensor, states: LayerStates) -> Tensor:
        """As `forward`; keeps what the mixer needs to go on."""
        return self._mix_channels(x + self.mixer.prefill(self.norm(x), states))

    def decode(self, x: Tensor, states: LayerStates, place: Place) -> Tensor:
        """The next token of each sequence, x [B, 1, d] to the same, at its place."""
        return self._mix_channels(x + self.mixer.decode(self.norm(x), states, place))

    def segment(self, x: Tensor, initial: Tensor | None, start: int) -> tuple[Tensor, Tensor]:
        """As `forward` from the mixer's states before x; and those after it. Only for mixers with a matrix as state."""
        assert isinstance(self.mixer, Linear)
        mixed, final = self.mixer.segment(self.norm(x), initial, start)
        return self._mix_channels(x + mixed), final

    def _mix_channels(self, x: Tensor) -> Tensor:
        return x if self.mlp is None else x + self.mlp(x)


class LanguageModel(nn.Module):
    """Logits of the next token. Raises UsageError for what there is not.

    Parameters: 2 V d for a vocabulary of V (V d if it is tied), d for the last norm, and per block d, the mixer's and
    3 d h + d of an MLP.
    `recompute`: keep only the blocks' inputs for the backward.
    """

    def __init__(self, config: ModelConfig, registry: Kernels, recompute: bool = False) -> None:
        super().__init__()
        self.config = config
        self._recompute = recompute
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config, registry) for _ in range(config.blocks))
        self.norm = Norm(config.width, eps=_EPS)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.is_tied:
            self.head.weight = self.embedding.weight
        self.apply(_initialize)
        for block in self._blocks:
            block.mixer.reset()

    def forward(self, tokens: Tensor, places: Tensor | None = None, stretch: Stretch | None = None) -> Tensor:
        """tokens [B, T], whole numbers, to logits [B, T, vocabulary]; of some places [B, n], to [B, n, vocabulary].

        `stretch`: the one of sequences that the tokens are, if other processes have the rest.
        """
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self._run(block, x, stretch)
        if places is not None:
            x = x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))
        y: Tensor = self.head(self.norm(x))
        return y

    def make_states(self, batch: int, room: int) -> States:
        """What a batch of sequences of up to `room` tokens needs: states and caches, in place for all steps."""
        layers = tuple(block.mixer.make_states(batch, room) for block in self._blocks)
        place = torch.zeros(batch, dtype=torch.int32, device=self.embedding.weight.device)
        return States(layers, place, room)

    def prefill(self, tokens: Tensor, states: States) -> Tensor:
        """The logits [B, vocabulary] after the tokens [B, T], which begin all sequences; keeps what steps need."""
        if tokens.shape[1] > states.room:
            raise UsageError(f"{tokens.shape[1]} tokens: there is room for {states.room}; make states with more room")
        x = self.embedding(tokens)
        for block, own in zip(self._blocks, states.layers, strict=True):
            x = block.prefill(x, own)
        states.place.fill_(tokens.shape[1])
        return self._last(x)

    def decode(self, tokens: Tensor, states: States) -> Tensor:
        """The logits [B, vocabulary] after one more token of each sequence [B, 1]; moves states and places on."""
        x, place = self.embedding(tokens), Place(states.place)
        for block, own in zip(self._blocks, states.layers, strict=True):
            x = block.decode(x, own, place)
        states.place.add_(1)
        return self._last(x)

    def segment_loss(
        self, tokens: Tensor, targets: Tensor, initial: Sequence[Tensor] | None, start: int
    ) -> tuple[Tensor, list[Tensor]]:
        """`loss` of a segment of sequences that begins at the token `start`, and the states after it, by block.

        `initial`: those before it, None for zeros. No gradient goes through states that are returned.
        """
        x, finals = self.embedding(tokens), []
        for number, block in enumerate(self._blocks):
            x, final = self._run(block.segment, x, None if initial is None else initial[number], start)
            finals.append(final.detach())
        logits = self.head(self.norm(x)).flatten(0, -2)
        return F.cross_entropy(widened(logits), targets.flatten()), finals

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """A block's function; computed again in the backward, if asked for."""
        recomputed = self._recompute and torch.is_grad_enabled()
        return checkpoint(function, *arguments, use_reentrant=False) if recomputed else function(*arguments)

    @property
    def _blocks(self) -> tuple[Block, ...]:
        return tuple(self.blocks)  # type: ignore[arg-type]  # a ModuleList says nothing of its kind

    def _last(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(x[:, -1]))
        return y

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """`mean_loss` of its logits for tokens [B, T]."""
        return mean_loss(self(tokens), targets)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of targets [B, T], in float32 or wider; those of -100 do not count."""
    return F.cross_entropy(widened(logits.flatten(0, -2)), targets.flatten())


def _initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=_DEVIATION)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
