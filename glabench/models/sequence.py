"""Sequences whose tokens several GPUs share, each a stretch of the same length: what their mixers tell each other.

Where the state is a matrix, each tells the others the state that its stretch leaves, B H K V numbers in place of all
keys and values (GLA, final paper, appendix B). Attention trades tokens for heads and back (DeepSpeed-Ulysses, arXiv
2309.14509). Processes have joined torch's default group before, and all of them call everything in the same order, in
backwards too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd import Function
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Stretch:
    """This process's stretch of every sequence: the one after `rank` others, of `size` in all."""

    rank: int
    size: int

    def states_before(self, own: Tensor, decay: Tensor) -> Tensor:
        """The states [B, H, K, V] before this stretch, zeros before the first one.

        `own`: those that the stretch leaves if it begins with zeros. `decay` [B, H, K or 1, V or 1]: what it leaves of
        states before it, by a factor. State j + 1 is decay_j times state j, and own_j. All processes get all of both.
        """
        before: Tensor = _StatesBefore.apply(own, decay, self)  # type: ignore[no-untyped-call]
        return before

    def to_heads(self, *each: Tensor) -> tuple[Tensor, ...]:
        """Each [B, T / size, H, D] to [B, T, H / size, D]: all tokens, for this process's share of the heads."""
        x = torch.stack(each).unflatten(3, (self.size, -1))  # type: ignore[no-untyped-call]
        x = _Exchange.apply(x.permute(3, 0, 1, 2, 4, 5))  # type: ignore[no-untyped-call]
        return x.permute(1, 2, 0, 3, 4, 5).flatten(2, 3).unbind()  # type: ignore[no-any-return]

    def to_tokens(self, x: Tensor) -> Tensor:
        """[B, T, H / size, D] to [B, T / size, H, D]: what `to_heads` did, undone."""
        x = _Exchange.apply(x.unflatten(1, (self.size, -1)).movedim(1, 0))  # type: ignore[no-untyped-call]
        return x.permute(1, 2, 0, 3, 4).flatten(2, 3)


class _StatesBefore(Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, decay: Tensor, stretch: Stretch) -> Tensor:
        # Both at once: a collective costs more than its few bytes.
        told = _gather(torch.cat((own.flatten(), decay.flatten())), stretch.size)
        states = told[:, : own.numel()].view(-1, *own.shape)
        decays = told[:, own.numel() :].reshape(-1, *decay.shape)
        before = torch.zeros_like(own)
        for state, factor in zip(states[: stretch.rank], decays[: stretch.rank], strict=True):
            before = before * factor + state
        ctx.stretch = stretch
        ctx.save_for_backward(before, decays.clone())  # not a view, which would hold all states
        return before

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_before: Tensor) -> tuple[Tensor, Tensor | None, None]:
        before, decays = ctx.saved_tensors
        after, last = ctx.stretch.rank + 1, ctx.stretch.size - 1
        d_states = _gather(d_before, ctx.stretch.size)
        if after > last:
            return torch.zeros_like(before), torch.zeros_like(decays[0]), None
        # The gradient of the state behind this stretch, from all stretches that begin with it.
        d_own = d_states[last]
        for number in range(last - 1, after - 1, -1):
            d_own = d_own * decays[number] + d_states[number]
        d_decay = (d_own * before).sum_to_size(decays[0].shape) if ctx.needs_input_grad[1] else None
        return d_own, d_decay, None


class _Exchange(Function):
    """x [size, ...] to the same: part j goes to process j, and comes from it. It undoes itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        x = x.contiguous()
        y = torch.empty_like(x)
        distributed.all_to_all_single(y, x)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # noqa: ARG004
        return _Exchange.forward(None, dy)


def _gather(x: Tensor, size: int) -> Tensor:
    """What each process has, [size, ...]."""
    found = x.new_empty(size, *x.shape)
    distributed.all_gather(list(found.unbind()), x.contiguous())
    return found
