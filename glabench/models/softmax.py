"""The mixer of Transformer++: causal softmax attention with rotary positions."""

from __future__ import annotations

from torch import Tensor, nn

from glabench.models.kernels import Kernel
from glabench.models.parts import Rotary


class Softmax(nn.Module):
    """o = softmax(q k^T / sqrt(D), causal) v with rotary positions of q and k, y = W_o o. Parameters: 4 d H D."""

    op = "softmax"

    def __init__(self, width: int, heads: int, head_dim: int, kernel: Kernel) -> None:
        super().__init__()
        self._heads, self._kernel = (heads, head_dim), kernel
        self.q = nn.Linear(width, heads * head_dim, bias=False)
        self.k = nn.Linear(width, heads * head_dim, bias=False)
        self.v = nn.Linear(width, heads * head_dim, bias=False)
        self.rotary = Rotary(head_dim)
        self.out = nn.Linear(heads * head_dim, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, d] to [B, T, d]."""
        q, k, v = (project(x).unflatten(-1, self._heads) for project in (self.q, self.k, self.v))
        q, k = self.rotary(q, k)
        y: Tensor = self.out(self._kernel({"q": q, "k": k, "v": v}, *x.shape[:2]).flatten(-2))
        return y
