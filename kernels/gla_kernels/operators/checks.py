"""Checks of a call's arguments. Each error is a `ValueError` that names the argument, its value and what is allowed."""

import os
from collections.abc import Mapping
from itertools import pairwise
from numbers import Real
from typing import NoReturn

import torch

from gla_kernels.launching.device import gpu_of
from gla_kernels.launching.plans import operands
from gla_kernels.limits import MAX_KEY_DIM, MAX_VALUE_DIM, fitting_chunks

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def interpreting() -> bool:
    """Whether Triton interprets kernels on the CPU (`TRITON_INTERPRET=1`)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def _refuse(argument: str, got: object, needs: str) -> NoReturn:
    raise ValueError(f"{argument}: got {got}; it needs {needs}")


def check_tensors(*, optional: Mapping[str, object], **needed: object) -> None:
    """Checks that arguments are dense tensors; those that are optional may be None. Raises ValueError."""
    for name, x in (*needed.items(), *optional.items()):
        if isinstance(x, torch.Tensor):
            if x.layout != torch.strided:
                _refuse(name, f"layout {x.layout}", "a dense tensor")
        elif x is not None or name in needed:
            _refuse(name, type(x).__name__, "a tensor, or None" if name in optional else "a tensor")


def check_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    scale: float | None,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    chunk_size: int | None,
    *,
    state_v_first: bool = False,
    gates: str = "g",
    per_head: bool = False,
) -> None:
    """Checks shapes, dtypes and devices of a call of our kernels. Raises ValueError; never synchronises.

    `gates`: what the caller calls g. `per_head`: g is [B, T, H].

    Every call pays for this: what a message says is put together only if a check has failed.
    """
    like, values, dtype, device = q.shape, v.shape, q.dtype, q.device
    if len(like) != 4:
        _refuse("q", f"shape {tuple(like)}", "four dimensions [B, T, H, K]")
    if len(values) != 4:
        _refuse("v", f"shape {tuple(values)}", "four dimensions [B, T, H, V]")
    B, T, H, K = like
    V = values[-1]
    if k.shape != like:
        _refuse("k", f"shape {tuple(k.shape)}", f"q's shape {tuple(like)}")
    if values[:3] != like[:3]:
        _refuse("v", f"shape {tuple(values)}", f"[B, T, H] = {[B, T, H]} as in q")
    if min(H, K, V) <= 0:
        _refuse("q, v", f"shapes {tuple(like)}, {tuple(values)}", "no empty dimension but B and T")
    if K > MAX_KEY_DIM:
        _refuse("q", f"K = {K}", f"K of at most {MAX_KEY_DIM}")
    if V > MAX_VALUE_DIM:
        _refuse("v", f"V = {V}", f"V of at most {MAX_VALUE_DIM}")
    if dtype not in DTYPES:
        _refuse("q", dtype, "bfloat16, float16 or float32 (for float64, use naive_recurrent_gla)")
    if k.dtype != dtype:
        _refuse("k", k.dtype, f"q's dtype {dtype}")
    if v.dtype != dtype:
        _refuse("v", v.dtype, f"q's dtype {dtype}")
    if g is not None:
        if per_head and g.shape != like[:3]:
            _refuse(gates, f"shape {tuple(g.shape)}", f"[B, T, H] = {[B, T, H]} as in q")
        if not per_head and g.shape != like:
            _refuse(gates, f"shape {tuple(g.shape)}", f"q's shape {tuple(like)}")
        if g.dtype not in DTYPES:
            _refuse(gates, g.dtype, "float32 (best), bfloat16 or float16")
    if scale is not None and not isinstance(scale, Real):
        _refuse("scale", type(scale).__name__, "a number (a constant: no gradient is computed for it)")
    sequences = B
    if cu_seqlens is not None:
        needs = "one dimension [N + 1], from 0 to T, in int32 or int64"
        if cu_seqlens.dim() != 1:
            _refuse("cu_seqlens", f"shape {tuple(cu_seqlens.shape)}", needs)
        if cu_seqlens.shape[0] < 2:
            _refuse("cu_seqlens", f"{cu_seqlens.shape[0]} numbers", "at least 2: [0, T]")
        if cu_seqlens.dtype not in (torch.int32, torch.int64):
            _refuse("cu_seqlens", cu_seqlens.dtype, needs)
        if B != 1:
            _refuse("q", f"B = {B} beside cu_seqlens", "packed sequences in one row, B = 1")
        sequences = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        expected = (sequences, H, V, K) if state_v_first else (sequences, H, K, V)
        if initial_state.shape != expected:
            needs = f"one state per sequence and head, {list(expected)}"
            _refuse("initial_state", f"shape {tuple(initial_state.shape)}", needs)
        if initial_state.dtype not in DTYPES:
            _refuse("initial_state", initial_state.dtype, "float32 (best), bfloat16 or float16")
    if k.device != device:
        _refuse("k", f"device {k.device}", f"q's device {device}")
    if v.device != device:
        _refuse("v", f"device {v.device}", f"q's device {device}")
    if g is not None and g.device != device:
        _refuse(gates, f"device {g.device}", f"q's device {device}")
    if initial_state is not None and initial_state.device != device:
        _refuse("initial_state", f"device {initial_state.device}", f"q's device {device}")
    if cu_seqlens is not None and cu_seqlens.device != device:
        _refuse("cu_seqlens", f"device {cu_seqlens.device}", f"q's device {device}")
    if not (q.is_cuda or interpreting()):
        _refuse("q", f"device {device}", "a GPU (on a CPU, use naive_recurrent_gla or TRITON_INTERPRET=1)")
    if chunk_size is not None:
        gpu = gpu_of(device)
        fitting = fitting_chunks(K, operands(dtype).dtype.itemsize, gpu.shared_bytes, gpu.tensor_memory)
        if not isinstance(chunk_size, int) or chunk_size not in fitting:
            _refuse("chunk_size", chunk_size, f"one of {fitting} at K = {K} in {dtype}")


def check_values(g: torch.Tensor | None, T: int, cu_seqlens: torch.Tensor | None, gates: str = "g") -> None:
    """Checks the values of g and cu_seqlens, which synchronises with the GPU. Raises ValueError.

    `gates`: what the caller calls g.
    """
    if cu_seqlens is not None:
        marks = cu_seqlens.tolist()
        if marks[0] != 0 or marks[-1] > T or any(a > b for a, b in pairwise(marks)):
            needs = f"numbers that start at 0, never fall, and end at T = {T} or before"
            _refuse("cu_seqlens", marks if len(marks) <= 10 else f"{marks[:5]} ... {marks[-5:]}", needs)
        g = None if g is None else g[:, : marks[-1]]  # what is behind the last sequence is ignored
    if g is not None and g.numel():
        largest = g.amax().item()
        if not largest <= 0:  # NaN is not allowed either
            _refuse(gates, f"a gate of {largest}", "gates of at most 0: natural logarithms of decays")
