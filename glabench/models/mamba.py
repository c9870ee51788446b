"""The blocks of Mamba-1 and Mamba-2, as the package mamba-ssm has them: their scans are kernels of backends.

With the package's kernel, and where no states are asked for, all behind the first projection is one function of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glabench.models.kernels import Kernel
from glabench.models.parts import CausalConv, Norm, widened
from glabench.models.states import LayerStates, MixerLayer, Place

_EPS = 1e-5
# Steps after softplus are drawn from this range, evenly in their logarithms.
_LEAST_STEP, _MOST_STEP = 1e-3, 1e-1
_MOST_DECAY = 16.0
_GROUP = 8


class Mamba1(MixerLayer):
    """x, z = W_in u; x = conv(x); D, B, C from W_x x; y = scan(x, D, A, B, C) + D x; W_out (y * Swish(z)).

    Steps D_t come through d / 16 channels (Mamba, section 3.6). With inner width E, N states, R = d / 16 channels and
    4 tokens of the convolution, parameters: 3 d E + E (2 R + 2 N) + E (N + 7).
    """

    op = "mamba1"

    def __init__(self, width: int, inner: int, state_size: int, kernel: Kernel) -> None:
        super().__init__()
        self._kernel, rank = kernel, math.ceil(width / 16)
        self._sizes = [rank, state_size, state_size]
        self.enter = nn.Linear(width, 2 * inner, bias=False)
        self.conv = CausalConv(inner)
        self.data = nn.Linear(inner, sum(self._sizes), bias=False)
        self.step = nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.arange(1, state_size + 1, dtype=torch.float32).log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.out = nn.Linear(inner, width, bias=False)
        self.reset()

    def reset(self) -> None:
        """Draws the steps' parameters as Mamba does; other initializations leave them alone."""
        bound = self.step.in_features**-0.5
        nn.init.uniform_(self.step.weight, -bound, bound)
        self.step.bias.data.copy_(_steps(self.step.out_features))

    def forward(self, u: Tensor) -> Tensor:
        """u [B, T, d] to [B, T, d]."""
        if (fused := self._kernel.fused_layer(u)) is not None:
            return self._fused(u, fused)
        x, z = self._enter(u)
        return self._project(self._kernel(self._inputs(self.conv(x)), *u.shape[:2]), z)

    def make_states(self, batch: int, room: int) -> LayerStates:  # noqa: ARG002
        """States [B, E, N] in float32 or wider, and the convolution's last tokens; zeros, whatever `room` is."""
        return LayerStates(fixed=(widened(self.A_log).new_zeros(batch, *self.A_log.shape), self.conv.make_tail(batch)))

    def prefill(self, u: Tensor, states: LayerStates) -> Tensor:
        """As `forward`; keeps the states after the last token."""
        x, z = self._enter(u)
        S, tail = states.fixed
        self.conv.keep_tail(x, tail)
        y, final = self._kernel.with_states(self._inputs(self.conv(x)), *u.shape[:2])
        S.copy_(final)
        return self._project(y, z)

    def decode(self, u: Tensor, states: LayerStates, place: Place) -> Tensor:  # noqa: ARG002
        """The next token of each sequence, u [B, 1, d] to the same; moves the states on."""
        x, z = self._enter(u)
        S, tail = states.fixed
        inputs = self._inputs(self.conv.step(x, tail))
        return self._project(self._kernel.step({**inputs, "initial": S}, len(u)), z)

    def _fused(self, u: Tensor, function: Callable[..., Tensor]) -> Tensor:
        """`function` has the arguments of `mamba_inner_fn`, and takes x and z [B, 2 E, T] with tokens side by side."""
        xz = (self.enter.weight @ u.flatten(0, 1).t()).view(-1, *u.shape[:2]).transpose(0, 1)
        return function(
            xz, self.conv.weight[:, None], self.conv.bias, self.data.weight, self.step.weight, self.out.weight, None,
            -widened(self.A_log).exp(), None, None, widened(self.D), delta_bias=widened(self.step.bias),
            delta_softplus=True,
        )  # fmt: skip

    def _enter(self, u: Tensor) -> tuple[Tensor, Tensor]:
        x, z = self.enter(u).transpose(1, 2).chunk(2, dim=1)
        return x, z

    def _inputs(self, x: Tensor) -> dict[str, Tensor]:
        """The op's inputs from x [B, E, T] behind the convolution."""
        step, B, C = self.data(x.transpose(1, 2)).split(self._sizes, dim=-1)
        return {
            "u": x,
            "delta": self.step(step).transpose(1, 2).contiguous(),
            "A": -widened(self.A_log).exp(),
            "B": B.transpose(1, 2).contiguous(),
            "C": C.transpose(1, 2).contiguous(),
            "D": widened(self.D),
        }

    def _project(self, y: Tensor, z: Tensor) -> Tensor:
        projected: Tensor = self.out((y * F.silu(z)).transpose(1, 2))
        return projected


class Mamba2(MixerLayer):
    """z, x, B, C, D = W_in u; x, B, C = conv(x, B, C); y = scan(x, D, A, B, C) + D x; W_out RMSNorm(y * Swish(z)).

    With H heads of P channels, E = H P, N states and 4 tokens of the convolution, parameters: 3 d E + 2 d N + d H
    + 5 (E + 2 N) + 3 H + E.
    """

    op = "mamba2"

    def __init__(self, width: int, heads: int, head_dim: int, state_size: int, kernel: Kernel) -> None:
        super().__init__()
        inner = heads * head_dim
        self._kernel, self._heads = kernel, (heads, head_dim)
        self._sizes, self._parts = [inner, inner + 2 * state_size, heads], [inner, state_size, state_size]
        self.enter = nn.Linear(width, sum(self._sizes), bias=False)
        self.conv = CausalConv(inner + 2 * state_size)
        self.step = nn.Parameter(_steps(heads))
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1.0, _MOST_DECAY).log())
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = Norm(inner, eps=_EPS)
        self.out = nn.Linear(inner, width, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        """u [B, T, d] to [B, T, d]."""
        # The package's convolution takes whole groups of channels.
        if sum(self._parts) % _GROUP == 0 and (fused := self._kernel.fused_layer(u)) is not None:
            return self._fused(u, fused)
        z, xBC, step = self._enter(u)
        return self._project(self._kernel(self._inputs(self.conv(xBC), step), *u.shape[:2]), z)

    def make_states(self, batch: int, room: int) -> LayerStates:  # noqa: ARG002
        """States [B, H, P, N] in float32 or wider, and the convolution's last tokens; zeros, whatever `room` is."""
        S = widened(self.A_log).new_zeros(batch, *self._heads, self._parts[1])
        return LayerStates(fixed=(S, self.conv.make_tail(batch)))

    def prefill(self, u: Tensor, states: LayerStates) -> Tensor:
        """As `forward`; keeps the states after the last token."""
        z, xBC, step = self._enter(u)
        S, tail = states.fixed
        self.conv.keep_tail(xBC, tail)
        y, final = self._kernel.with_states(self._inputs(self.conv(xBC), step), *u.shape[:2])
        S.copy_(final)
        return self._project(y, z)

    def decode(self, u: Tensor, states: LayerStates, place: Place) -> Tensor:  # noqa: ARG002
        """The next token of each sequence, u [B, 1, d] to the same; moves the states on."""
        z, xBC, step = self._enter(u)
        S, tail = states.fixed
        inputs = self._inputs(self.conv.step(xBC, tail), step)
        return self._project(self._kernel.step({**inputs, "initial": S}, len(u)), z)

    def _fused(self, u: Tensor, function: Callable[..., Tensor]) -> Tensor:
        """`function` has the arguments of `mamba_split_conv1d_scan_combined` but for the chunk."""
        return function(
            self.enter(u), self.conv.weight, self.conv.bias, widened(self.step), -widened(self.A_log).exp(),
            D=widened(self.D), activation="silu", rmsnorm_weight=self.norm.weight, rmsnorm_eps=_EPS,
            outproj_weight=self.out.weight, headdim=self._heads[1], norm_before_gate=False,
        )  # fmt: skip

    def _enter(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        entered: Tensor = self.enter(u)
        z, xBC, step = entered.split(self._sizes, dim=-1)  # type: ignore[no-untyped-call]
        return z, xBC.transpose(1, 2), step

    def _inputs(self, xBC: Tensor, step: Tensor) -> dict[str, Tensor]:
        """The op's inputs from x, B and C [B, E + 2 N, T] behind the convolution."""
        x, B, C = xBC.transpose(1, 2).split(self._parts, dim=-1)  # type: ignore[no-untyped-call]
        return {
            "x": x.unflatten(-1, self._heads).contiguous(),
            "delta": step + self.step.to(step.dtype),
            "A": -widened(self.A_log).exp(),
            "B": B.contiguous(),
            "C": C.contiguous(),
            "D": widened(self.D),
        }

    def _project(self, y: Tensor, z: Tensor) -> Tensor:
        projected: Tensor = self.out(self.norm(y.flatten(-2) * F.silu(z)))
        return projected


def _steps(count: int) -> Tensor:
    """Biases whose softplus are steps in the range, evenly in their logarithms."""
    steps = torch.exp(torch.rand(count) * math.log(_MOST_STEP / _LEAST_STEP) + math.log(_LEAST_STEP))
    return steps + torch.log(-torch.expm1(-steps))
