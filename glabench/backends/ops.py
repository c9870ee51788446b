"""Ops: what is computed. Tensor shapes, random inputs, a float64 reference. Importing this does not import torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from glabench.sweeps.model import Cell

if TYPE_CHECKING:
    from torch import Generator, Tensor

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


@dataclass(frozen=True)
class Spec:
    """One input: its shape, and the kind of values in it. `dtype` None means the cell's; gates and decays are wider."""

    shape: tuple[int, ...]
    kind: str = "normal"
    dtype: str | None = None

    def bytes(self, cell: Cell) -> int:
        """Size in memory."""
        return math.prod(self.shape) * BYTES[self.dtype or cell.dtype]


@dataclass(frozen=True)
class Op:
    """A function of named inputs, with a slow and exact reference.

    `corner` cuts the inputs down to their first tokens in the last sequence, and `output_corner` the output alike.
    `forward_flops` counts the equation's multiplications and additions, exponentials left out; what an implementation
    computes beyond that (products within a chunk, recomputation in backward) is its own affair.
    """

    name: str
    equation: str
    specs: Callable[[Cell], dict[str, Spec]]
    output: Callable[[Cell], tuple[int, ...]]
    reference: Callable[[Mapping[str, Tensor]], Tensor]
    reference_name: str
    corner: Callable[[Mapping[str, Tensor], int], dict[str, Tensor]]
    output_corner: Callable[[Tensor, int], Tensor]
    forward_flops: Callable[[Cell], int]
    gated: bool = False

    def make_inputs(self, cell: Cell) -> dict[str, Tensor]:
        """Random inputs from the cell's seed, on its device."""
        generator = _generator(cell, 0)
        return {name: _make(spec, cell, generator) for name, spec in self.specs(cell).items()}

    def make_grad_output(self, cell: Cell) -> Tensor:
        """A random gradient of the output."""
        return _make(Spec(self.output(cell)), cell, _generator(cell, 1))

    def least_bytes(self, cell: Cell) -> int:
        """Inputs and output, and for a pass with a backward the gradients of both: the least that a cell must hold."""
        inputs = sum(spec.bytes(cell) for spec in self.specs(cell).values())
        both = inputs + Spec(self.output(cell)).bytes(cell)
        return 2 * both if cell.has_backward else both

    def moved_bytes(self, cell: Cell) -> int:
        """What a perfect pass moves: each tensor read or written once, and nothing kept between forward and backward.

        The forward reads the inputs and writes the output; the backward reads the inputs and the gradient of the
        output, and writes the gradients of the inputs.
        """
        inputs = sum(spec.bytes(cell) for spec in self.specs(cell).values())
        output = Spec(self.output(cell)).bytes(cell)
        forward, backward = inputs + output, 2 * inputs + output
        return {"infer": forward, "fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[cell.pass_]

    def flops(self, cell: Cell) -> int:
        """Floating-point operations of a pass: a backward takes two products for each one of the forward."""
        forward = self.forward_flops(cell)
        return {"infer": forward, "fwd": forward, "bwd": 2 * forward, "fwd+bwd": 3 * forward}[cell.pass_]


def _generator(cell: Cell, stream: int) -> Generator:
    import torch

    return torch.Generator(device=cell.device).manual_seed(2 * cell.seed + stream)


def _make(spec: Spec, cell: Cell, generator: Generator) -> Tensor:
    import torch
    import torch.nn.functional as F

    dtype = torch_dtype(spec.dtype or cell.dtype)
    x = torch.randn(spec.shape, generator=generator, device=cell.device, dtype=dtype)
    if spec.kind == "gate":
        return make_gate(x, cell.gate or "", generator)
    if spec.kind == "timestep":  # softplus of it, as Mamba starts: steps of 0.001 to 0.1
        return x.sub_(4.5)
    if spec.kind == "decay":  # A = -exp(log of 1..N), Mamba's S4D-real start
        rates = torch.arange(1, spec.shape[-1] + 1, device=cell.device, dtype=dtype)
        return -rates.expand(spec.shape).contiguous() * F.softplus(x * 0.1 + 0.54)
    return x


def make_gate(x: Tensor, kind: str, generator: Generator) -> Tensor:
    """Gates (natural log, at most 0) of a named distribution from normal x.

    `logsigmoid/16` is GLA's own; `logsigmoid` without the temperature; `slow` decays less (mean +4), `strong` more
    (3x - 3); `resets` is the first with g = -inf for 2 % of the tokens.
    """
    import torch
    import torch.nn.functional as F

    if kind == "strong":
        return F.logsigmoid(3 * x - 3)
    if kind == "logsigmoid":
        return F.logsigmoid(x)
    g = F.logsigmoid(x + 4 if kind == "slow" else x) / 16
    if kind == "resets":
        hit = torch.rand(g.shape[:3], generator=generator, device=g.device) < 0.02
        g[hit] = -math.inf
    return g


def torch_dtype(name: str) -> torch.dtype:  # type: ignore[name-defined]  # noqa: F821
    """The torch dtype of a short name: bf16, fp16, fp32, fp64."""
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}[name]


def _wide(cell: Cell) -> str:
    """The dtype of gates and decays: float32, in float64 cells float64."""
    return "fp64" if cell.dtype == "fp64" else "fp32"


def _qkv(cell: Cell) -> dict[str, Spec]:
    lead = (cell.batch, cell.seqlen, cell.heads)
    return {"q": Spec((*lead, cell.key_dim)), "k": Spec((*lead, cell.key_dim)), "v": Spec((*lead, cell.value_dim))}


def _qkvg(cell: Cell) -> dict[str, Spec]:
    tensors = _qkv(cell)
    return tensors | {"g": Spec(tensors["q"].shape, "gate", _wide(cell))}


def _heads_output(cell: Cell) -> tuple[int, ...]:
    return (cell.batch, cell.seqlen, cell.heads, cell.value_dim)


def _mamba_specs(cell: Cell) -> dict[str, Spec]:
    B, T, D, N = cell.batch, cell.seqlen, cell.heads * cell.value_dim, cell.key_dim
    return {
        "u": Spec((B, D, T)),
        "delta": Spec((B, D, T), "timestep"),
        "A": Spec((D, N), "decay", _wide(cell)),
        "B": Spec((B, N, T)),
        "C": Spec((B, N, T)),
        "D": Spec((D,), dtype=_wide(cell)),
    }


def _mamba_output(cell: Cell) -> tuple[int, ...]:
    return (cell.batch, cell.heads * cell.value_dim, cell.seqlen)


def _heads_corner(inputs: Mapping[str, Tensor], tokens: int) -> dict[str, Tensor]:
    """The first tokens of the last sequence and head."""
    return {name: _heads_output_corner(x, tokens) for name, x in inputs.items()}


def _heads_output_corner(x: Tensor, tokens: int) -> Tensor:
    return x[-1:, :tokens, -1:]


def _mamba_corner(inputs: Mapping[str, Tensor], tokens: int) -> dict[str, Tensor]:
    """The first tokens of the last sequence; the channels share B and C and stay together."""
    return {name: _mamba_output_corner(x, tokens) if x.dim() == 3 else x for name, x in inputs.items()}


def _mamba_output_corner(x: Tensor, tokens: int) -> Tensor:
    return x[-1:, :, :tokens]


def _linear_flops(cell: Cell) -> int:
    """2KV for k^T v added to the state, 2KV for q times the state."""
    return cell.batch * cell.seqlen * cell.heads * 4 * cell.key_dim * cell.value_dim


def _gla_flops(cell: Cell) -> int:
    """As without a gate, and KV for the state's decay."""
    return cell.batch * cell.seqlen * cell.heads * 5 * cell.key_dim * cell.value_dim


def _softmax_flops(cell: Cell) -> int:
    """2K for a score and 2V for its share of the output, for each pair of a token and one not after it."""
    pairs = cell.seqlen * (cell.seqlen + 1) // 2
    return cell.batch * cell.heads * pairs * 2 * (cell.key_dim + cell.value_dim)


def _mamba_flops(cell: Cell) -> int:
    """Six for each state (step times A, decay, input times B, sum, 2 to read it out); three a channel (step, D)."""
    return cell.batch * cell.seqlen * cell.heads * cell.value_dim * (6 * cell.key_dim + 3)


def _recurrent(inputs: Mapping[str, Tensor]) -> Tensor:
    from gla_kernels import naive_recurrent_gla

    return naive_recurrent_gla(inputs["q"], inputs["k"], inputs["v"], inputs.get("g"))[0]


def _causal_softmax(inputs: Mapping[str, Tensor]) -> Tensor:
    import torch

    q, k, v = (inputs[name].transpose(1, 2) for name in ("q", "k", "v"))
    out: Tensor
    T = q.shape[2]
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    out = (scores.masked_fill(future, -math.inf).softmax(-1) @ v).transpose(1, 2)
    return out


def _selective_scan(inputs: Mapping[str, Tensor]) -> Tensor:
    import torch
    import torch.nn.functional as F

    u, A, B, C = inputs["u"], inputs["A"], inputs["B"], inputs["C"]
    delta = F.softplus(inputs["delta"])
    state = u.new_zeros((*u.shape[:2], A.shape[1]))
    outputs = []
    for t in range(u.shape[2]):
        step = delta[:, :, t, None]
        state = state * (step * A).exp() + step * u[:, :, t, None] * B[:, None, :, t]
        outputs.append((state * C[:, None, :, t]).sum(-1))
    return torch.stack(outputs, 2) + u * inputs["D"][:, None]


OPS: Mapping[str, Op] = {
    op.name: op
    for op in (
        Op(
            "gla",
            "S_t = diag(exp g_t) S_{t-1} + k_t^T v_t,  o_t = q_t S_t / sqrt(K)",
            _qkvg,
            _heads_output,
            _recurrent,
            "naive_recurrent_gla",
            _heads_corner,
            _heads_output_corner,
            _gla_flops,
            gated=True,
        ),
        Op(
            "linear",
            "S_t = S_{t-1} + k_t^T v_t,  o_t = q_t S_t / sqrt(K)",
            _qkv,
            _heads_output,
            _recurrent,
            "naive_recurrent_gla without a gate",
            _heads_corner,
            _heads_output_corner,
            _linear_flops,
        ),
        Op(
            "softmax",
            "o = softmax(q k^T / sqrt(K), causal) v",
            _qkv,
            _heads_output,
            _causal_softmax,
            "softmax attention",
            _heads_corner,
            _heads_output_corner,
            _softmax_flops,
        ),
        Op(
            "mamba1",
            "x_t = exp(D_t A) x_{t-1} + D_t B_t u_t,  y_t = C_t x_t + D u_t, D_t = softplus(delta_t)",
            _mamba_specs,
            _mamba_output,
            _selective_scan,
            "selective scan, token by token",
            _mamba_corner,
            _mamba_output_corner,
            _mamba_flops,
        ),
    )
}
