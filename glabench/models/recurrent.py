"""Mixers whose state is a matrix per head: linear attention, and with gates that are fixed, per head or per channel."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glabench.models.kernels import Kernel
from glabench.models.parts import Norm, Rotary, widened
from glabench.models.sequence import Stretch
from glabench.models.states import LayerStates, MixerLayer, Place
from glabench.ops.simple_gla import Retention as FixedDecay

_EPS = 1e-5
# Gates are sigmoids to the power of 1/16, so that they forget slowly, and come through 16 channels.
_TAU, _RANK = 16, 16


class Linear(MixerLayer):
    """S_t = S_{t-1} + k_t^T v_t, o_t = q_t S_t / sqrt(K), y = W_o (RMSNorm(o) * Swish(W_s x)), the norm per head.

    The layer of GLA (final paper, section 4.4) without its gate. Parameters: d H (2 K + 3 V) + V.
    """

    op = "linear"

    def __init__(self, width: int, heads: int, key_dim: int, value_dim: int, kernel: Kernel) -> None:
        super().__init__()
        self._keys, self._values, self._kernel = (heads, key_dim), (heads, value_dim), kernel
        self.q = nn.Linear(width, heads * key_dim, bias=False)
        self.k = nn.Linear(width, heads * key_dim, bias=False)
        self.v = nn.Linear(width, heads * value_dim, bias=False)
        self.swish = nn.Linear(width, heads * value_dim, bias=False)
        self.norm = Norm(value_dim, eps=_EPS)
        self.out = nn.Linear(heads * value_dim, width, bias=False)

    def gates(self, x: Tensor) -> Mapping[str, Tensor]:  # noqa: ARG002
        """The op's inputs besides q, k and v."""
        return {}

    def decay(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """What all tokens leave of states before them, by a factor: [B, H, K or 1, V or 1], float32 or wider."""
        q = inputs["q"]
        return widened(q.new_ones(())).expand(q.shape[0], q.shape[2], 1, 1)

    def queries_and_keys(self, x: Tensor, start: Place | int = 0) -> tuple[Tensor, ...]:  # noqa: ARG002
        """q and k, [B, T, H, K] each. `start`: the first token's place."""
        return self.q(x).unflatten(-1, self._keys), self.k(x).unflatten(-1, self._keys)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, d] to [B, T, d]."""
        return self._project(x, self._kernel(self._inputs(x), *x.shape[:2]))

    def segment(self, x: Tensor, initial: Tensor | None = None, start: int = 0) -> tuple[Tensor, Tensor]:
        """x [B, T, d] to [B, T, d], and the states [B, H, K, V] after it, from those before it; zeros if None."""
        given = {} if initial is None else {"initial": initial}
        o, final = self._kernel.with_states({**self._inputs(x, start), **given}, *x.shape[:2])
        return self._project(x, o), final

    def share(self, x: Tensor, stretch: Stretch) -> Tensor:
        """x [B, T, d] to [B, T, d], a stretch of sequences that other processes have the rest of.

        The op runs twice: from zeros, for the state that the stretch leaves, and from the state before it.
        """
        inputs = self._inputs(x, stretch.rank * x.shape[1])
        _, own = self._kernel.with_states(inputs, *x.shape[:2])
        initial = stretch.states_before(own, self.decay(inputs).to(own.dtype))
        o, _ = self._kernel.with_states({**inputs, "initial": initial}, *x.shape[:2])
        return self._project(x, o)

    def make_states(self, batch: int, room: int) -> LayerStates:  # noqa: ARG002
        """Zeros [B, H, K, V], in float32 or wider, whatever `room` is."""
        sizes = (batch, *self._keys, self._values[1])
        return LayerStates(fixed=(widened(self.q.weight.new_zeros(1)).new_zeros(sizes),))

    def prefill(self, x: Tensor, states: LayerStates) -> Tensor:
        """As `forward`; keeps the states after the last token."""
        y, final = self.segment(x)
        states.fixed[0].copy_(final)
        return y

    def decode(self, x: Tensor, states: LayerStates, place: Place) -> Tensor:
        """The next token of each sequence, x [B, 1, d] to the same, at its place; moves the states on."""
        inputs = {**self._inputs(x, place), "initial": states.fixed[0]}
        return self._project(x, self._kernel.step(inputs, len(x)))

    def _inputs(self, x: Tensor, start: Place | int = 0) -> dict[str, Tensor]:
        q, k = self.queries_and_keys(x, start)
        return {"q": q, "k": k, "v": self.v(x).unflatten(-1, self._values), **self.gates(x)}

    def _project(self, x: Tensor, o: Tensor) -> Tensor:
        gated = self.norm(o) * F.silu(self.swish(x).unflatten(-1, self._values))
        y: Tensor = self.out(gated.flatten(-2))
        return y


class Gla(Linear):
    """S_t = diag(exp g_t) S_{t-1} + k_t^T v_t with g_t = log sigmoid(W_2 W_1 x_t + b) / 16 (final paper, section 4.4).

    Parameters: those of `Linear`, and 16 (d + H K) + H K; together about 4 d^2 for K = d / 2H and V = d / H.
    """

    op = "gla"

    def __init__(self, width: int, heads: int, key_dim: int, value_dim: int, kernel: Kernel) -> None:
        super().__init__(width, heads, key_dim, value_dim, kernel)
        self.gate = nn.Sequential(nn.Linear(width, _RANK, bias=False), nn.Linear(_RANK, heads * key_dim))

    def gates(self, x: Tensor) -> Mapping[str, Tensor]:
        """g [B, T, H, K]."""
        return {"g": F.logsigmoid(self.gate(x).unflatten(-1, self._keys)) / _TAU}

    def decay(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The product of all gates, [B, H, K, 1]."""
        return widened(inputs["g"]).sum(1).exp()[..., None]


class GlaValues(Linear):
    """S_t = S_{t-1} diag(exp gv_t) + k_t^T v_t with gv_t as the gate of `Gla`, of values (version 3, section 3.3).

    Parameters: those of `Linear`, and 16 (d + H V) + H V.
    """

    op = "gla-values"

    def __init__(self, width: int, heads: int, key_dim: int, value_dim: int, kernel: Kernel) -> None:
        super().__init__(width, heads, key_dim, value_dim, kernel)
        self.value_gate = nn.Sequential(nn.Linear(width, _RANK, bias=False), nn.Linear(_RANK, heads * value_dim))

    def gates(self, x: Tensor) -> Mapping[str, Tensor]:
        """gv [B, T, H, V]."""
        return {"gv": F.logsigmoid(self.value_gate(x).unflatten(-1, self._values)) / _TAU}

    def decay(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The product of all gates, [B, H, 1, V]."""
        return widened(inputs["gv"]).sum(1).exp()[..., None, :]


class GlaBoth(Gla, GlaValues):
    """S_t = diag(exp g_t) S_{t-1} diag(exp gv_t) + k_t^T v_t, with both gates (version 3, eq. 12 to 17).

    Parameters: those of `Gla`, and 16 (d + H V) + H V.
    """

    op = "gla-both"

    def gates(self, x: Tensor) -> Mapping[str, Tensor]:
        """g [B, T, H, K] and gv [B, T, H, V]."""
        return {**Gla.gates(self, x), **GlaValues.gates(self, x)}

    def decay(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The product of all gates of both kinds, [B, H, K, V]."""
        return Gla.decay(self, inputs) * GlaValues.decay(self, inputs)


class FixedGate(Linear):
    """S_t = (1 - 2^(-5-h)) S_{t-1} + k_t^T v_t in head h: RetNet's decay alone, without its positions.

    Parameters: those of `Linear`.
    """

    op = "retention"

    def decay(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The decay of all tokens, the same in all sequences: [B, H, 1, 1]."""
        B, T, H, _ = inputs["q"].shape
        heads = torch.arange(H, device=inputs["q"].device, dtype=widened(inputs["q"].new_empty(0)).dtype)
        return (T * FixedDecay().gates(heads)).exp()[:, None, None].expand(B, -1, -1, -1)


class SimpleGla(Linear):
    """S_t = exp(g_t) S_{t-1} + k_t^T v_t, g_t = log sigmoid(W x_t + b) / 16, one per head (final paper, Table 2).

    Parameters: those of `Linear`, and (d + 1) H.
    """

    op = "simple-gla"

    def __init__(self, width: int, heads: int, key_dim: int, value_dim: int, kernel: Kernel) -> None:
        super().__init__(width, heads, key_dim, value_dim, kernel)
        self.gate = nn.Linear(width, heads)

    def gates(self, x: Tensor) -> Mapping[str, Tensor]:
        """g [B, T, H]."""
        return {"g": F.logsigmoid(self.gate(x)) / _TAU}

    def decay(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The product of all gates, [B, H, 1, 1]."""
        return widened(inputs["g"]).sum(1).exp()[..., None, None]


class Retention(FixedGate):
    """S_t = (1 - 2^(-5-h)) S_{t-1} + k_t^T v_t in head h, with rotary positions of q and k (RetNet).

    Parameters: those of `Linear`; 8 d^2 for 8 heads of K = d / 8 and V = d / 4.
    """

    def __init__(self, width: int, heads: int, key_dim: int, value_dim: int, kernel: Kernel) -> None:
        super().__init__(width, heads, key_dim, value_dim, kernel)
        self.rotary = Rotary(key_dim)

    def queries_and_keys(self, x: Tensor, start: Place | int = 0) -> tuple[Tensor, ...]:
        """q and k, [B, T, H, K] each."""
        return self.rotary(*super().queries_and_keys(x), start=start)  # type: ignore[no-any-return]
