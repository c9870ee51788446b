"""Steps whose intermediate values are computed again in the backward, so that only one step's are in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.step = step
        ctx.save_for_backward(*tensors)
        return step(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        own = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            outputs = ctx.step(*own)
        return None, *torch.autograd.grad(outputs, own, gradients, allow_unused=True)


def recomputed(step: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """`step(*tensors)`, which keeps nothing but `tensors` for the backward; `step` must not refer to other tensors.

    As `torch.utils.checkpoint`, whose first use imports torch's compiler and so takes two seconds.
    """
    found: tuple[Tensor, ...] = _Recomputed.apply(step, *tensors)  # type: ignore[no-untyped-call]
    return found
