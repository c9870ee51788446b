"""GLA with gates of keys and of values in two levels of chunks, in PyTorch (V3 equations 16 and 17, Listing 1).

Tensors are q, k, g [B, T, H, K] and v, gv, o [B, T, H, V]; q is scaled by K ** -0.5. Gradients are autograd's. As
printed, the listing reads the state after a chunk as the one before it, and takes decays from a chunk's first row in
place of the row before: here it is mended.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class _Sums:
    """Sums of gates x [B, H, N, subs, c, D] over rows of a subchunk, and over whole subchunks of a chunk.

    Each is a sum of the gates between two tokens, never a difference of sums, so that gates of -inf are right.
    """

    def __init__(self, x: Tensor) -> None:
        self._gates, self._totals = x, x.sum(4)
        self.chunk = self._totals.sum(3)  # [B, H, N, D]
        self.since_sub = x.cumsum(4)  # from the subchunk's start to a row, that included
        self.until_sub = F.pad(_summed_from_behind(x[..., 1:, :]), (0, 0, 0, 1))  # from after a row to its end
        before = F.pad(self._totals.cumsum(3)[..., :-1, :], (0, 0, 1, 0))
        after = F.pad(_summed_from_behind(self._totals[..., 1:, :]), (0, 0, 0, 1))
        self.since, self.until = self.since_sub + before[..., None, :], self.until_sub + after[..., None, :]

    def between(self, s: int) -> Tensor:
        """Of the whole subchunks between each earlier one and subchunk s, [..., s, 1, D]."""
        return F.pad(_summed_from_behind(self._totals[..., 1:s, :]), (0, 0, 0, 1))[..., None, :]

    def of_pairs(self) -> Tensor:
        """From after row j to row i of a subchunk, [..., i, j, D]; 0 where j > i."""
        steps = torch.arange(self._gates.shape[4], device=self._gates.device)
        behind = (steps[:, None] > steps[None, :])[..., None]
        return torch.where(behind, self._gates[..., :, None, :], 0.0).cumsum(-3)


def _summed_from_behind(x: Tensor) -> Tensor:
    return x.flip(-2).cumsum(-2).flip(-2)


def two_gates_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, gv: Tensor, chunk: int = 64, subchunk: int = 16
) -> Tensor:
    """`S_t = diag(exp g_t) S_{t-1} diag(exp gv_t) + k_t^T v_t`, `o_t = q_t S_t`, computed in the gates' dtype.

    Between chunks and between subchunks there are products of matrices, whose rows have decayed to a border, on both
    sides; within a subchunk every pair of tokens has a factor of its own in every channel of keys and of values.
    """
    T, subs = q.shape[1], chunk // subchunk

    def in_chunks(x: Tensor) -> Tensor:
        """[B, T, H, D] to [B, H, N, subs, c, D], with zeros behind the last token."""
        x = F.pad(x.to(gv.dtype), (0, 0, 0, 0, 0, -T % chunk))
        return x.view(len(x), -1, subs, subchunk, *x.shape[2:]).permute(0, 4, 1, 2, 3, 5)

    qc, kc, vc = in_chunks(q) * q.shape[-1] ** -0.5, in_chunks(k), in_chunks(v)
    of_keys, of_values = _Sums(in_chunks(g)), _Sums(in_chunks(gv))

    # The state before each chunk, and what its tokens read from it.
    added = torch.einsum("bhnsik,bhnsiv->bhnkv", kc * of_keys.until.exp(), vc * of_values.until.exp())
    decay = of_keys.chunk.exp()[..., None] * of_values.chunk.exp()[..., None, :]
    states = [torch.zeros_like(added[:, :, 0])]
    for n in range(added.shape[2] - 1):
        states.append(states[-1] * decay[:, :, n] + added[:, :, n])
    out = torch.einsum("bhnsik,bhnkv->bhnsiv", qc * of_keys.since.exp(), torch.stack(states, 2)) * of_values.since.exp()

    # What each subchunk reads from earlier ones of its chunk.
    q_in, v_in = qc * of_keys.since_sub.exp(), of_values.since_sub.exp()
    k_out, v_out = kc * of_keys.until_sub.exp(), vc * of_values.until_sub.exp()
    parts = [torch.zeros_like(out[..., 0, :, :])]
    for s in range(1, subs):
        keys, values = (x[..., :s, :, :] * sums.between(s).exp() for x, sums in ((k_out, of_keys), (v_out, of_values)))
        scores = torch.einsum("bhnik,bhnujk->bhniuj", q_in[..., s, :, :], keys)
        parts.append(torch.einsum("bhniuj,bhnujv->bhniv", scores, values) * v_in[..., s, :, :])
    out = out + torch.stack(parts, 3)

    # Pairs of tokens of a subchunk.
    scores = torch.einsum("bhnsik,bhnsjk,bhnsijk->bhnsij", qc, kc, of_keys.of_pairs().exp()).tril()
    out = out + torch.einsum("bhnsij,bhnsjv,bhnsijv->bhnsiv", scores, vc, of_values.of_pairs().exp())
    return out.permute(0, 2, 3, 4, 1, 5).flatten(1, 3)[:, :T].to(v.dtype)
