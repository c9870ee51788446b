"""Finds the launch plan of a call, and times plans for it if tuning is requested and no tuned plan is stored."""

import os
from concurrent.futures import ThreadPoolExecutor

import torch

from gla_kernels.launching.autotune import CallKind, kept_plan, tuned_plan
from gla_kernels.launching.plans import plan, plan_text
from gla_kernels.operators import eager
from gla_kernels.operators.passes import KEEP_NOTHING, KEEP_STATES


def autotuning() -> bool:
    """Whether the environment requests tuning for every call: GLA_AUTOTUNE=1."""
    return os.environ.get("GLA_AUTOTUNE") == "1"


def _kind(
    q: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, cu_seqlens: torch.Tensor | None, keep: int,
    materialize: bool,
) -> CallKind:  # fmt: skip
    B, T, H, K = q.shape
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return CallKind(K, v.shape[-1], q.dtype, g is not None, T, sequences * H, materialize, keep != KEEP_NOTHING)


def plan_for(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
    keep: int, materialize: bool,
) -> str | None:  # fmt: skip
    """The tuned plan for this kind of call: the stored one, or else the fastest of the candidates, timed now.

    None if none is stored and a CUDA graph is being captured.
    """
    kind = _kind(q, v, g, cu_seqlens, keep, materialize)
    kept = kept_plan(kind, q.device)
    if kept is not None or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        return kept  # kernels cannot be timed during a capture
    q, k, v = (x.detach().requires_grad_(kind.backward) for x in (q, k, v))
    g = None if g is None else g.detach().requires_grad_(kind.backward)
    do = torch.ones_like(v)

    def run(text: str) -> None:
        with torch.set_grad_enabled(kind.backward):
            o, _ = eager.chunk(q, k, v, g, None, cu_seqlens, 1.0, False, keep, None, text)
        if kind.backward:
            torch.autograd.grad(o, [x for x in (q, k, v, g) if x is not None], do)

    if q.is_cuda:
        torch.cuda.synchronize(q.device)

    def tune() -> str:
        with torch.cuda.device_of(q):
            return tuned_plan(kind, q.device, run)

    # In a separate thread: hooks that activation checkpointing has set on this one must not see what timing saves.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(tune).result()


def launch_of(
    q: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, materialize: bool, chunk_size: int | None
) -> str:
    """The launch plan, as one line of text, of an unpacked call on these tensors; with a backward if q needs one."""
    if autotuning() and chunk_size is None:
        keep = KEEP_STATES if q.requires_grad else KEEP_NOTHING
        kept = kept_plan(_kind(q, v, g, None, keep, materialize), q.device)
        if kept is not None:
            return kept
    return plan_text(plan(q.shape[-1], v.shape[-1], q.dtype, chunk_size, q.device, g is not None))
