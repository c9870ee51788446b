"""Chunkwise forms in pure PyTorch, which the paper compares its kernels with. Any device, gradients by autograd."""

from collections.abc import Callable
from functools import partial

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
    """Runs `S = decay_n S + update_n` over chunks: (states before each chunk [B, H, N, K, V], final state).

    `decay` [B, H, N, K, V], or with 1 in the place of V.
    """
    state = torch.zeros_like(update[:, :, 0]) if initial_state is None else initial_state.to(update.dtype)
    before = []
    for n in range(update.shape[2]):
        before.append(state)
        if decay is not None:
            state = state * decay[:, :, n]
        state = state + update[:, :, n]
    return torch.stack(before, 2), state


class _Sums:
    """Sums of gates x [B, H, N, subs, c, D] over the rows of a subchunk, and over whole subchunks of a chunk."""

    def __init__(self, x: torch.Tensor) -> None:
        self._gates = x
        self._total = x.sum(4)  # a subchunk's total, [B, H, N, subs, D]
        self.chunk = self._total.sum(3)
        self.since_sub = x.cumsum(4)  # from the subchunk's start to i, i included
        # From after j to the subchunk's end: a sum over later rows.
        self.until_sub = F.pad(x[..., 1:, :].flip(4).cumsum(4).flip(4), (0, 0, 0, 1))
        self.since = self.since_sub + F.pad(self._total.cumsum(3)[..., :-1, :], (0, 0, 1, 0))[..., None, :]
        after = F.pad(self._total[..., 1:, :].flip(3).cumsum(3).flip(3), (0, 0, 0, 1))
        self.until = self.until_sub + after[..., None, :]

    def within(self, s: int) -> torch.Tensor:
        """From the start of subchunk s to its rows, [..., c, D]."""
        return self.since_sub[..., s, :, :]

    def between(self, s: int) -> torch.Tensor:
        """Whole subchunks between each earlier one and subchunk s, [..., u < s, 1, D]."""
        return F.pad(self._total[..., 1:s, :].flip(3).cumsum(3).flip(3), (0, 0, 0, 1))[..., None, :]

    def of_pairs(self) -> torch.Tensor:
        """From after j to i, for all pairs i >= j of a subchunk, summed over rows: [..., i, j, D]."""
        steps = torch.arange(self._gates.shape[4], device=self._gates.device)
        behind = (steps[:, None] > steps[None, :])[..., None]
        return torch.where(behind, self._gates[..., :, None, :], 0.0).cumsum(-3)


def two_level_chunk_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    *,
    gv: torch.Tensor | None = None,
    chunk_size: int = 64,
    subchunk_size: int = 16,
    half: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """GLA by the paper's two-level chunking (Fig. 7; with gv that of version 3, Listing 1), all chunks at once.

    A token reaches tokens of later chunks through the state, of later subchunks through a product relative to the
    start of the later subchunk, and of its own subchunk element by element. Every exponent is a sum of the gates
    between the two tokens, never a difference of cumulative sums, so gates of 0, -100 or -inf give the right result.

    Shapes, scale, states and gv as in `chunk_gla`, and g may be None beside gv; `chunk_size` is a multiple of
    `subchunk_size`. Computes in float32, or float64 for float64 inputs; `half`: matrix products in the inputs' dtype,
    as the final paper has them on tensor cores (section 4.3), and what is no matrix product inside subchunks in float32
    still. Uses much memory: terms of [T, subchunk_size, K], and with gv of [T, subchunk_size, V], inside subchunks.

    Raises ValueError for a `chunk_size` that is no multiple, and without any gates.
    """
    if chunk_size % subchunk_size:
        raise ValueError(f"chunk_size: got {chunk_size}; it needs a multiple of subchunk_size = {subchunk_size}")
    if g is None and gv is None:
        raise ValueError("g: got None; it needs a tensor of q's shape, or gates of values (gv) beside it")
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32

    def product(equation: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.einsum(equation, a.to(q.dtype), b.to(q.dtype)).to(wide) if half else torch.einsum(equation, a, b)

    T, K = q.shape[1], q.shape[-1]
    scale = K**-0.5 if scale is None else scale
    c, subs = subchunk_size, chunk_size // subchunk_size
    g = torch.zeros_like(q) if g is None else g
    # [B, H, N, subs, c, D]
    qc, kc, vc, gc = (_in_chunks(x, chunk_size, wide).unflatten(3, (subs, c)) for x in (q, k, v, g))
    qc = qc * scale
    of_keys = _Sums(gc)
    of_values = None if gv is None else _Sums(_in_chunks(gv, chunk_size, wide).unflatten(3, (subs, c)))

    def gated(x: torch.Tensor, exponents: Callable[[_Sums], torch.Tensor]) -> torch.Tensor:
        """x, of value columns, times what its gates leave of it."""
        return x if of_values is None else x * exponents(of_values).exp()

    # Between chunks.
    update = product("bhnsik,bhnsiv->bhnkv", kc * of_keys.until.exp(), gated(vc, lambda sums: sums.until))
    decay = gated(of_keys.chunk.exp()[..., None], lambda sums: sums.chunk[..., None, :])
    states, final = _states_before(update, decay, initial_state)
    read = product("bhnsik,bhnkv->bhnsiv", qc * of_keys.since.exp(), states)
    out = gated(read, lambda sums: sums.since)

    # Between subchunks: from the end of subchunk u to the start of subchunk s lie the whole subchunks between them.
    k_sub, v_sub = kc * of_keys.until_sub.exp(), gated(vc, lambda sums: sums.until_sub)
    for s in range(1, subs):
        keys = k_sub[..., :s, :, :] * of_keys.between(s).exp()
        values = gated(v_sub[..., :s, :, :], partial(_Sums.between, s=s))
        scores = product("bhnik,bhnujk->bhniuj", qc[..., s, :, :] * of_keys.within(s).exp(), keys)
        read = product("bhniuj,bhnujv->bhniv", scores, values)
        piece = gated(read, partial(_Sums.within, s=s))
        out = torch.cat([out[..., :s, :, :], (out[..., s, :, :] + piece)[..., None, :, :], out[..., s + 1 :, :, :]], 3)

    # Inside a subchunk: all pairs i >= j.
    weighted = qc[..., :, None, :] * kc[..., None, :, :] * of_keys.of_pairs().exp()
    scores = weighted.sum(-1).tril()
    if of_values is None:
        out = out + product("bhnsij,bhnsjv->bhnsiv", scores, vc)
    else:
        out = out + (scores[..., None] * vc[..., None, :, :] * of_values.of_pairs().exp()).sum(-2)
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
