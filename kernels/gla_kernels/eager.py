"""Calls around the dispatcher: an eager call on plain tensors runs the Python implementation itself.

A registered operator with autograd costs an eager call 40 us and more. But whatever traces a call or changes its
meaning needs the operator: torch.compile, export, functorch, modes, tensor subclasses, forward-mode derivatives.
"""

from typing import Any

import torch
from torch.autograd import forward_ad

from gla_kernels import ops, passes

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transform = torch._C._functorch.peek_interpreter_stack
_is_batched = torch._C._functorch.is_legacy_batchedtensor  # by `torch.autograd.grad(..., is_grads_batched=True)`
_traced = torch._C._get_tracing_state  # torch.jit.trace


def is_plain(*tensors: torch.Tensor | None) -> bool:
    """Whether nothing but autograd has to see what is done with these tensors."""
    # Compilers stop at the first condition.
    if _compiling() or _dispatch_modes() or _function_modes() or _transform() is not None or _traced() is not None:
        return False
    # Which level of forward-mode derivatives is entered; there is no public function that tells.
    if forward_ad._current_level >= 0:
        return False
    for x in tensors:
        if x is not None and (type(x) not in _PLAIN or not (x.is_cuda or x.is_cpu) or _is_batched(x)):
            return False
    return True


class _Chunk(torch.autograd.Function):
    """A forward that keeps something for the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor | None,
        initial_state: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        scale: float,
        output_final_state: bool,
        keep: int,
        chunk_size: int | None,
        plan: str | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        o, final, kept, flags = passes.forward(
            q, k, v, g, initial_state, cu_seqlens, scale, output_final_state, keep, chunk_size, plan
        )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, g, cu_seqlens, kept, flags)
        ctx.settings = scale, initial_state is not None, keep, chunk_size, plan
        return o, final

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor | None, dfinal: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors
        # Gradients are recorded if they are to be differentiated again, which the operator refuses.
        direct = not torch.is_grad_enabled() and is_plain(do, dfinal, *saved)
        return ops.gradients(passes.backward if direct else ops.chunk_backward, saved, ctx.settings, do, dfinal)


def chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    scale: float,
    output_final_state: bool,
    keep: int,
    chunk_size: int | None,
    plan: str | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns o and the final states, or None if not requested. `keep`, `plan`: see `passes.py`."""
    settings = (scale, output_final_state, keep, chunk_size, plan)
    if not is_plain(q, k, v, g, initial_state, cu_seqlens):
        o, final, _, _ = ops.chunk_forward(q, k, v, g, initial_state, cu_seqlens, *settings)
        return o, final if output_final_state else None
    if keep == passes.KEEP_NOTHING:
        return passes.forward(q, k, v, g, initial_state, cu_seqlens, *settings)[:2]
    found: tuple[torch.Tensor, torch.Tensor | None] = _Chunk.apply(q, k, v, g, initial_state, cu_seqlens, *settings)
    return found
