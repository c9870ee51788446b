"""Linear attention that decays by one number per head: `chunk_simple_gla` and `chunk_retention`, as fla has them."""

from functools import cache

import torch

from gla_kernels.chunk import Materialize, chunk
from gla_kernels.operators.checks import DTYPES
from gla_kernels.operators.plain import is_unwatched
from gla_kernels.recurrent import fused_recurrent_gla, token_by_token


def retention_gates(heads: int, device: torch.device | None = None) -> torch.Tensor:
    """The logarithms of RetNet's decays, `log(1 - 2^(-5 - h))` for each head h, [H] float32 (RetNet, section 3.1).

    They are made on the device: a CUDA graph cannot capture a copy from the host.
    """
    return torch.log1p(-torch.exp2(-5 - torch.arange(heads, dtype=torch.float64, device=device))).float()


@cache
def _kept_gates(heads: int, device: torch.device) -> torch.Tensor:
    """`retention_gates` for eager calls, which would otherwise make them anew."""
    with torch.inference_mode(False):
        return retention_gates(heads, device)


def _gates_of(q: torch.Tensor) -> torch.Tensor:
    """`retention_gates` for q's heads. What a graph captures has to be its own."""
    keep = is_unwatched() and not (q.is_cuda and torch.cuda.is_current_stream_capturing())
    return (_kept_gates if keep else retention_gates)(q.shape[2] if q.dim() == 4 else 1, q.device)


def _gates(q: torch.Tensor, g: torch.Tensor | None, g_gamma: torch.Tensor | None) -> torch.Tensor:
    """The gates [B, T, H] of one of both, of which the other is None. Raises ValueError."""
    if (g is None) == (g_gamma is None):
        raise ValueError(f"g, g_gamma: got {'none' if g is None else 'both'}; one of them is needed")
    if q.dim() != 4:
        raise ValueError(f"q: got shape {tuple(q.shape)}; it needs four dimensions [B, T, H, K]")
    name, gates, like = ("g", g, q.shape[:3]) if g_gamma is None else ("g_gamma", g_gamma, q.shape[2:3])
    axes = "[B, T, H]" if g_gamma is None else "[H]"
    if not isinstance(gates, torch.Tensor):
        raise ValueError(f"{name}: got {type(gates).__name__}; it needs a tensor {axes}")
    if gates.shape != like:
        raise ValueError(f"{name}: got shape {tuple(gates.shape)}; it needs {axes} = {list(like)} as in q")
    if gates.dtype not in DTYPES:
        raise ValueError(f"{name}: got {gates.dtype}; it needs float32 (best), bfloat16 or float16")
    if gates.device != q.device:
        raise ValueError(f"{name}: got device {gates.device}; it needs q's device {q.device}")
    return gates if g_gamma is None else gates.expand(*q.shape[:2], -1)


def chunk_simple_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    g_gamma: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,  # noqa: ARG001
    *,
    materialize: Materialize = True,
    chunk_size: int | None = None,
    check: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """GLA with one gate per head and token: `S_t = exp(g_t) S_{t-1} + k_t^T v_t`, `o_t = scale * q_t S_t`.

    The final paper, Table 2, has it as data-dependent scalar decay; Mamba-2, the mLSTM and RetNet are of this kind. The
    arguments before the star are those of fla's function of this name, in its order. On Hopper, in bfloat16 and with K
    and V multiples of 16, it takes about as long as without gates; elsewhere longer (kernels/NOTES.md, "Portable Triton
    kernels").

    Of very large inputs, a product of q and k, of q and a state, or of k and v must be finite before it decays: nothing
    is computed again here, as `chunk_gla` does.

    Args:
        g: gates, [B, T, H], natural logarithm, <= 0, in float32 (best), bfloat16 or float16. 0, very negative values
            and -inf (a reset) are valid. A gate below -23.5 acts as -23.5: 6e-11 of the state is left.
        g_gamma: in place of g, gates that are the same for all tokens, [H].
        Others: as for `chunk_gla`.

    Returns:
        o, [B, T, H, V] in v's dtype, and the final states, [N, H, K, V] float32, or None; both differentiable with
        respect to q, k, v, the gates and initial_state.

    Raises:
        ValueError: as `chunk_gla`; and for none or both of g and g_gamma.
    """
    return chunk(
        q, k, v, _gates(q, g, g_gamma), scale, initial_state, output_final_state, state_v_first, cu_seqlens,
        materialize, chunk_size, check, False, True,
    )  # fmt: skip


def chunk_retention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    materialize: Materialize = True,
    chunk_size: int | None = None,
    check: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """RetNet's recurrence: `chunk_simple_gla` with the constant gates `retention_gates(H)`."""
    return chunk_simple_gla(
        q, k, v, None, _gates_of(q), scale, initial_state, output_final_state, state_v_first,
        cu_seqlens, materialize=materialize, chunk_size=chunk_size, check=check,
    )  # fmt: skip


def fused_recurrent_simple_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    g_gamma: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    inplace_final_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`chunk_simple_gla` token by token; see `fused_recurrent_gla`, whose arguments the others are."""
    return token_by_token(
        q, k, v, _gates(q, g, g_gamma), None, scale, initial_state, output_final_state, reverse, state_v_first,
        cu_seqlens, inplace_final_state, True,
    )  # fmt: skip


def fused_recurrent_retention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    inplace_final_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`chunk_retention` token by token; see `fused_recurrent_gla`, whose arguments the others are."""
    return fused_recurrent_simple_gla(
        q, k, v, None, _gates_of(q), scale, initial_state, output_final_state, reverse,
        state_v_first, cu_seqlens, inplace_final_state=inplace_final_state,
    )  # fmt: skip


def fused_recurrent_linear_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    inplace_final_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`chunk_linear_attn` token by token; see `fused_recurrent_gla`, whose arguments the others are."""
    return fused_recurrent_gla(
        q, k, v, None, None, scale, initial_state, output_final_state, reverse, state_v_first, cu_seqlens,
        inplace_final_state=inplace_final_state,
    )  # fmt: skip
