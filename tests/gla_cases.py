"""Inputs of every kind, and runs of a GLA function with all of its outputs and gradients; CPU and GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from gla_kernels import naive_recurrent_gla

GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mild": lambda x: F.logsigmoid(x) / 16,
    "slow": lambda x: F.logsigmoid(x + 4) / 16,
    "logsigmoid": F.logsigmoid,
    "strong": lambda x: F.logsigmoid(3 * x - 3),
    "resets": lambda x: (F.logsigmoid(x) / 16).masked_fill(_some_tokens(x), -math.inf),
    "hard resets": lambda x: (F.logsigmoid(x) / 16).masked_fill(_some_tokens(x), -100.0),
    "one channel resets": lambda x: (F.logsigmoid(x) / 16).masked_fill(_some_tokens(x) & _first_channel(x), -math.inf),
    "zero": torch.zeros_like,
    "-100": lambda x: torch.full_like(x, -100.0),
    "-inf": lambda x: torch.full_like(x, -math.inf),
}


def _some_tokens(x: torch.Tensor) -> torch.Tensor:
    """One token in 25, with the first of a chunk and the last of a sequence among them."""
    hit = torch.rand(x.shape[:3], device=x.device) < 0.04
    hit[:, 0] = hit[:, -1] = True
    return hit[..., None].expand_as(x)


def _first_channel(x: torch.Tensor) -> torch.Tensor:
    return (torch.arange(x.shape[-1], device=x.device) == 0).expand_as(x)


@dataclass(frozen=True)
class Case:
    """One set of inputs, the gradients that come in, and the float64 truth."""

    inputs: dict[str, torch.Tensor | None]
    grads: dict[str, torch.Tensor]
    truth: dict[str, torch.Tensor]


def run(
    function: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    inputs: dict[str, torch.Tensor | None],
    grads: dict[str, torch.Tensor],
    **options: object,
) -> dict[str, torch.Tensor]:
    """All outputs and gradients of a GLA function, by name; `g` None leaves the gate's argument out."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items() if x is not None}
    positional = [leaves[name] for name in ("q", "k", "v", "g") if name in leaves]
    o, final = function(*positional, initial_state=leaves.get("initial"), output_final_state=True, **options)
    outputs = {"o": o, "final": final}
    incoming = [grads[name].to(x.dtype) for name, x in outputs.items()]
    gradients = torch.autograd.grad(list(outputs.values()), list(leaves.values()), incoming)
    return {name: x.detach() for name, x in outputs.items()} | {
        f"d{name}": x for name, x in zip(leaves, gradients, strict=True)
    }


def truth(inputs: dict[str, torch.Tensor | None], grads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The float64 recurrence on the same inputs."""
    wide = {name: None if x is None else x.double() for name, x in inputs.items()}

    def reference(q, k, v, g=None, **options):
        return naive_recurrent_gla(q, k, v, g, **options)

    return run(reference, wide, grads)


def make_case(
    gate: str | None,
    B: int = 1,
    T: int = 64,
    H: int = 2,
    K: int = 32,
    V: int = 32,
    dtype: torch.dtype = torch.float32,
    initial: bool = True,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    """A case with the named gates (None: no gate)."""
    torch.manual_seed(seed)
    inputs: dict[str, torch.Tensor | None] = {
        name: torch.randn(B, T, H, D, device=device).to(dtype) for name, D in (("q", K), ("k", K), ("v", V))
    }
    inputs["g"] = None if gate is None else GATES[gate](torch.randn(B, T, H, K, device=device))
    inputs["initial"] = torch.randn(B, H, K, V, device=device) if initial else None
    grads = {
        "o": torch.randn(B, T, H, V, device=device).to(dtype),
        "final": torch.randn(B, H, K, V, device=device),
    }
    return Case(inputs, grads, truth(inputs, grads))


def errors(found: dict[str, torch.Tensor], case: Case) -> dict[str, float]:
    """Relative errors, ||x - truth|| / ||truth||, of every output and gradient. NaN stays NaN.

    Gates that let nothing through make the gradients of the gate and of the initial state zero, or 1e-40. There the
    error is held against the terms that cancel, k * dk, and against the gradient that came in.
    """
    scales = {name: x.norm() for name, x in case.truth.items()}
    terms = {"dg": (case.inputs["k"].double() * case.truth["dk"]).norm(), "dinitial": case.grads["final"].norm()}
    for name, size in terms.items():
        if name in scales and scales[name] < 1e-6 * size:
            scales[name] = size
    return {name: ((x.double() - case.truth[name]).norm() / scales[name]).item() for name, x in found.items()}


def assert_close(found: dict[str, torch.Tensor], case: Case, bound: float) -> None:
    """Fails with all errors if any is beyond the bound, or NaN."""
    got = errors(found, case)
    shown = ", ".join(f"{name} {error:.1e}" for name, error in got.items())
    assert all(error <= bound for error in got.values()), f"beyond {bound:.0e}: {shown}"
