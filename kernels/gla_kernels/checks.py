"""Checks of a call's arguments. Each error is a `ValueError` that names the argument, its value and what is allowed."""

import os
from itertools import pairwise
from numbers import Real

import torch

from gla_kernels.launch import operands
from gla_kernels.limits import MAX_HEAD_DIM, fitting_chunks

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def interpreting() -> bool:
    """Whether Triton interprets kernels on the CPU (`TRITON_INTERPRET=1`)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def _need(ok: bool, argument: str, got: object, needs: str) -> None:
    if not ok:
        raise ValueError(f"{argument}: got {got}; it needs {needs}")


def check_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    scale: float | None,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    chunk_size: int | None,
) -> None:
    """Checks shapes, dtypes and devices of a call of the chunkwise kernels. Raises ValueError; never synchronises."""
    _need(q.dim() == 4, "q", f"shape {tuple(q.shape)}", "four dimensions [B, T, H, K]")
    _need(v.dim() == 4, "v", f"shape {tuple(v.shape)}", "four dimensions [B, T, H, V]")
    B, T, H, K = q.shape
    V = v.shape[-1]
    _need(k.shape == q.shape, "k", f"shape {tuple(k.shape)}", f"q's shape {tuple(q.shape)}")
    _need(v.shape[:3] == q.shape[:3], "v", f"shape {tuple(v.shape)}", f"[B, T, H] = {[B, T, H]} as in q")
    _need(min(B, T, H, K, V) > 0, "q, v", f"shapes {tuple(q.shape)}, {tuple(v.shape)}", "no empty dimension")
    _need(K <= MAX_HEAD_DIM, "q", f"K = {K}", f"K of at most {MAX_HEAD_DIM}")
    _need(V <= MAX_HEAD_DIM, "v", f"V = {V}", f"V of at most {MAX_HEAD_DIM}")
    _need(q.dtype in DTYPES, "q", str(q.dtype), "bfloat16, float16 or float32 (for float64, use naive_recurrent_gla)")
    for name, x in (("k", k), ("v", v)):
        _need(x.dtype == q.dtype, name, str(x.dtype), f"q's dtype {q.dtype}")
    if g is not None:
        _need(g.shape == q.shape, "g", f"shape {tuple(g.shape)}", f"q's shape {tuple(q.shape)}")
        _need(g.dtype in DTYPES, "g", str(g.dtype), "float32 (best), bfloat16 or float16")
    number = scale is None or isinstance(scale, Real)
    _need(number, "scale", type(scale).__name__, "a number (a constant: no gradient is computed for it)")
    sequences = B
    if cu_seqlens is not None:
        needs = "one dimension [N + 1], from 0 to T, in int32 or int64"
        _need(cu_seqlens.dim() == 1, "cu_seqlens", f"shape {tuple(cu_seqlens.shape)}", needs)
        _need(cu_seqlens.shape[0] >= 2, "cu_seqlens", f"{cu_seqlens.shape[0]} numbers", "at least 2: [0, T]")
        _need(cu_seqlens.dtype in (torch.int32, torch.int64), "cu_seqlens", str(cu_seqlens.dtype), needs)
        _need(B == 1, "q", f"B = {B} beside cu_seqlens", "packed sequences in one row, B = 1")
        sequences = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        shape = (sequences, H, K, V)
        got = tuple(initial_state.shape)
        _need(got == shape, "initial_state", f"shape {got}", f"one state a sequence and head, {list(shape)}")
        _need(initial_state.dtype == torch.float32, "initial_state", str(initial_state.dtype), "float32")
    others = (("k", k), ("v", v), ("g", g), ("initial_state", initial_state), ("cu_seqlens", cu_seqlens))
    for name, tensor in others:
        if tensor is not None:
            _need(tensor.device == q.device, name, f"device {tensor.device}", f"q's device {q.device}")
    on_gpu = q.is_cuda or interpreting()
    _need(on_gpu, "q", f"device {q.device}", "a GPU (on a CPU, use naive_recurrent_gla or TRITON_INTERPRET=1)")
    fitting = fitting_chunks(K, operands(q.dtype).dtype.itemsize)
    fits = chunk_size is None or (isinstance(chunk_size, int) and chunk_size in fitting)
    _need(fits, "chunk_size", chunk_size, f"one of {fitting} at K = {K} in {q.dtype}")


def check_values(g: torch.Tensor | None, T: int, cu_seqlens: torch.Tensor | None) -> None:
    """Checks the values of g and cu_seqlens, which synchronises with the GPU. Raises ValueError."""
    if g is not None:
        largest = g.amax().item()
        _need(largest <= 0, "g", f"a gate of {largest}", "gates of at most 0: natural logarithms of decays")
    if cu_seqlens is not None:
        marks = cu_seqlens.tolist()
        needs = f"numbers that start at 0, never fall, and end at T = {T}"
        ok = marks[0] == 0 and marks[-1] == T and all(a <= b for a, b in pairwise(marks))
        _need(ok, "cu_seqlens", marks if len(marks) <= 10 else f"{marks[:5]} ... {marks[-5:]}", needs)
