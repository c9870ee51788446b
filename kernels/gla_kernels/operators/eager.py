"""Calls around the dispatcher: an eager call on plain tensors runs the Python implementation itself.

A registered operator with autograd costs an eager call 40 us and more. But whatever traces a call or changes its
meaning needs the operator: torch.compile, export, functorch, modes, tensor subclasses, forward-mode derivatives.

Calls of a kind that has been seen before repeat what its passes have allocated and launched (see `kinds.py`).
"""

from typing import Any

import torch

from gla_kernels.operators import ops, passes
from gla_kernels.operators.kinds import Passes
from gla_kernels.operators.plain import is_plain, is_transformed, is_unwatched


def _forward(
    kind_passes: Passes | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None,
    initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None, settings: tuple[Any, ...],
) -> passes.Outputs:  # fmt: skip
    if kind_passes is not None:
        made: passes.Outputs | None = kind_passes.forward(settings, q, k, v, g, cu_seqlens, initial_state)
        if made is not None:
            return made
    return passes.forward(q, k, v, g, initial_state, cu_seqlens, *settings)


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
        settings: tuple[Any, ...],
        kind_passes: Passes | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        o, final, kept, flags = _forward(kind_passes, q, k, v, g, initial_state, cu_seqlens, settings)
        scale, _, keep, chunk_size, plan = settings
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, g, cu_seqlens, kept, flags)
        ctx.settings = scale, keep, chunk_size, plan
        ctx.kind_passes = kind_passes
        return o, final

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor | None, dfinal: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        saved, settings, kind_passes = ctx.saved_tensors, ops.backward_settings(ctx), ctx.kind_passes
        # Gradients are recorded if they are to be differentiated again, which the operator refuses.
        recorded = torch.is_grad_enabled()
        if kind_passes is not None and do is not None and not recorded and is_unwatched():
            made = kind_passes.backward(settings, *saved, do, dfinal)
            if made is not None:
                return *made, None, None, None
        direct = not recorded and is_plain(do, dfinal, *saved)
        run = passes.backward if direct else ops.chunk_backward
        return *ops.gradients(run, saved, settings, do, dfinal), None, None, None


class _TransformedBackward(torch.autograd.Function):
    """The backward's operator; its results cannot be differentiated again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = ops.chunk_backward(*inputs)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        """Nothing is kept."""

    backward = staticmethod(ops.refuse)


class _Transformed(torch.autograd.Function):
    """The operator with its gradients as transforms of functorch can use them, which refuse the operator's own.

    It gives o, the final states, the kept states and the flags.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = ops.chunk_forward(*inputs)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ops.setup(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor | None, dfinal: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
        return ops.gradients(_TransformedBackward.apply, ctx.saved_tensors, ops.backward_settings(ctx), do, dfinal)


# What `_Chunk.apply` comes to if no transform of functorch is active, without its questions.
_apply_unwatched = super(torch.autograd.Function, _Chunk).apply


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
    kind_passes: Passes | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns o and the final states, or None if not requested.

    `keep`, `plan`: see `passes.py`. `kind_passes`: the passes of calls of this kind, on plain tensors.
    """
    settings = (scale, output_final_state, keep, chunk_size, plan)
    if kind_passes is None and not is_plain(q, k, v, g, initial_state, cu_seqlens):
        run = _Transformed.apply if keep != passes.KEEP_NOTHING and is_transformed() else ops.chunk_forward
        o, final, _, _ = run(q, k, v, g, initial_state, cu_seqlens, *settings)
        return o, final if output_final_state else None
    if keep == passes.KEEP_NOTHING:
        return _forward(kind_passes, q, k, v, g, initial_state, cu_seqlens, settings)[:2]
    apply = _Chunk.apply if kind_passes is None else _apply_unwatched
    found: tuple[torch.Tensor, torch.Tensor | None] = apply(
        q, k, v, g, initial_state, cu_seqlens, settings, kind_passes
    )
    return found
