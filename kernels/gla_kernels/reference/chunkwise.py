"""Chunkwise forms in pure PyTorch, which the paper compares its kernels with. Any device, gradients by autograd."""

import torch
import torch.nn.functional as F


def _in_chunks(x: torch.Tensor, size: int, wide: torch.dtype) -> torch.Tensor:
    """[B, T, H, D] to [B, H, N, size, D] in dtype `wide`, with T padded to N * size by zeros."""
    B, T, H, D = x.shape
    x = F.pad(x.to(wide), (0, 0, 0, 0, 0, -T % size))
    return x.view(B, -1, size, H, D).permute(0, 3, 1, 2, 4)


def _from_chunks(x: torch.Tensor, T: int, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `_in_chunks`: [B, H, N, size, D] to [B, T, H, D] in `dtype`."""
    return x.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :T].to(dtype)


def _states_before(
    update: torch.Tensor, decay: torch.Tensor | None, initial_state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs `S = decay_n S + update_n` over chunks: (states before each chunk [B, H, N, K, V], final state)."""
    state = torch.zeros_like(update[:, :, 0]) if initial_state is None else initial_state.to(update.dtype)
    before = []
    for n in range(update.shape[2]):
        before.append(state)
        if decay is not None:
            state = state * decay[:, :, n, :, None]
        state = state + update[:, :, n]
    return torch.stack(before, 2), state


def two_level_chunk_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    *,
    chunk_size: int = 64,
    subchunk_size: int = 16,
    half: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """GLA by the paper's two-level chunking (Fig. 7), all chunks at once.

    A token reaches tokens of later chunks through the state, of later subchunks through a product relative to the
    start of the later subchunk, and of its own subchunk element by element. Every exponent is a sum of the gates
    between the two tokens, never a difference of cumulative sums, so gates of 0, -100 or -inf give the right result.

    Shapes, scale and states as in `chunk_gla`; `chunk_size` is a multiple of `subchunk_size`. Computes in float32, or
    float64 for float64 inputs; `half`: matrix products in the inputs' dtype, as the final paper has them on tensor
    cores (section 4.3), and scores inside subchunks, which are no matrix products, in float32 still. Uses much memory,
    because of the [T, subchunk_size, K] terms inside the subchunks.
    """
    if chunk_size % subchunk_size:
        raise ValueError(f"chunk_size: got {chunk_size}; it needs a multiple of subchunk_size = {subchunk_size}")
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32

    def product(equation: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.einsum(equation, a.to(q.dtype), b.to(q.dtype)).to(wide) if half else torch.einsum(equation, a, b)

    T, K = q.shape[1], q.shape[-1]
    scale = K**-0.5 if scale is None else scale
    c, subs = subchunk_size, chunk_size // subchunk_size
    # [B, H, N, subs, c, D]
    qc, kc, vc, gc = (_in_chunks(x, chunk_size, wide).unflatten(3, (subs, c)) for x in (q, k, v, g))
    qc = qc * scale
    total = gc.sum(4)  # a subchunk's total gate, [B, H, N, subs, K]
    since_sub = gc.cumsum(4)  # from the subchunk's start to i, i included
    # From after j to the subchunk's end: a sum over later rows.
    until_sub = F.pad(gc[..., 1:, :].flip(4).cumsum(4).flip(4), (0, 0, 0, 1))
    before_sub = F.pad(total.cumsum(3)[..., :-1, :], (0, 0, 1, 0))  # whole subchunks before this one
    after_sub = F.pad(total[..., 1:, :].flip(3).cumsum(3).flip(3), (0, 0, 0, 1))  # ... and after it

    # Between chunks.
    k_end = kc * (until_sub + after_sub[..., None, :]).exp()
    update = product("bhnsik,bhnsiv->bhnkv", k_end, vc)
    states, final = _states_before(update, total.sum(3).exp(), initial_state)
    out = product("bhnsik,bhnkv->bhnsiv", qc * (since_sub + before_sub[..., None, :]).exp(), states)

    # Between subchunks: from the end of subchunk u to the start of subchunk s lie the whole subchunks between them.
    q_sub, k_sub = qc * since_sub.exp(), kc * until_sub.exp()
    for s in range(1, subs):
        between = F.pad(total[..., 1:s, :].flip(3).cumsum(3).flip(3), (0, 0, 0, 1))  # [..., u < s, K]
        keys = k_sub[..., :s, :, :] * between[..., None, :].exp()
        scores = product("bhnik,bhnujk->bhniuj", q_sub[..., s, :, :], keys)
        piece = product("bhniuj,bhnujv->bhniv", scores, vc[..., :s, :, :])
        out = torch.cat([out[..., :s, :, :], (out[..., s, :, :] + piece)[..., None, :, :], out[..., s + 1 :, :, :]], 3)

    # Inside a subchunk: the gates from after j to i, for all pairs i >= j, summed over rows.
    steps = torch.arange(c, device=q.device)
    behind = (steps[:, None] > steps[None, :])[..., None]  # [i, j, 1]
    pair_gate = torch.where(behind, gc[..., :, None, :], 0.0).cumsum(-3)  # [..., i, j, K]
    weighted = qc[..., :, None, :] * kc[..., None, :, :] * pair_gate.exp()
    scores = weighted.sum(-1).tril()
    out = out + product("bhnsij,bhnsjv->bhnsiv", scores, vc)
    return _from_chunks(out.flatten(3, 4), T, v.dtype), final if output_final_state else None


def unaware_chunk_linear_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    *,
    chunk_size: int = 64,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Chunkwise linear attention without a gate (paper, Eq. 2), I/O-unaware: every step writes its result to memory.

        S_{n+1} = S_n + K_n^T V_n,    O_n = Q_n S_n + tril(Q_n K_n^T) V_n

    Shapes, scale and states as in `chunk_linear_attn`. Products run in the inputs' dtype, the sum over chunks in
    float32 (float64 for float64 inputs).
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    T, K = q.shape[1], q.shape[-1]
    qc, kc, vc = (_in_chunks(x, chunk_size, x.dtype) for x in (q, k, v))
    qc = qc * (K**-0.5 if scale is None else scale)
    summed = (kc.transpose(-1, -2) @ vc).to(wide).cumsum(2)
    states = F.pad(summed, (0, 0, 0, 0, 1, 0))  # [B, H, N + 1, K, V]
    if initial_state is not None:
        states = states + initial_state.to(wide)[:, :, None]
    out = qc @ states[:, :, :-1].to(q.dtype) + (qc @ kc.transpose(-1, -2)).tril() @ vc
    return _from_chunks(out, T, v.dtype), states[:, :, -1] if output_final_state else None
