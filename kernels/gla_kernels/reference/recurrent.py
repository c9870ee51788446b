"""The recurrence, token by token, in pure PyTorch: slow, but exact in float64. The ground truth for all other code."""

import torch


def naive_recurrent_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    gv: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`S_t = diag(exp g_t) S_{t-1} + k_t^T v_t`, `o_t = scale * q_t S_t` (paper, section 4.1); without g, no decay.

    With gates of values gv [B, T, H, V], `S_t = diag(exp g_t) S_{t-1} diag(exp gv_t) + k_t^T v_t` (version 3, eq. 12).
    Shapes as in `chunk_gla`. Computes in float64 for float64 inputs and in float32 otherwise; the output has v's dtype.
    Differentiable by autograd, on any device.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    B, T, H, K = q.shape
    scale = K**-0.5 if scale is None else scale
    qs, ks, vs = (x.to(wide) for x in (q, k, v))
    decay = None if g is None else g.to(wide).exp()
    value_decay = None if gv is None else gv.to(wide).exp()
    state = q.new_zeros((B, H, K, v.shape[-1]), dtype=wide) if initial_state is None else initial_state.to(wide)
    outputs = []
    for t in range(T):
        if decay is not None:
            state = state * decay[:, t, :, :, None]
        if value_decay is not None:
            state = state * value_decay[:, t, :, None]
        state = state + ks[:, t, :, :, None] * vs[:, t, :, None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", qs[:, t] * scale, state))
    return torch.stack(outputs, 1).to(v.dtype), state if output_final_state else None
