"""Inputs of every kind, and runs of a GLA function with all outputs and gradients, on a CPU or a GPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exact import STATES, outputs_and_gradients
from gla_kernels import chunk_linear_attn, chunk_simple_gla
from gla_kernels.launching.buffers import Gradients, Inputs
from gla_kernels.launching.call import Call
from gla_kernels.limits import HEAD_SPAN_LIMIT
from gla_kernels.operators import passes

GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mild": lambda x: F.logsigmoid(x) / 16,
    "slow": lambda x: F.logsigmoid(x + 4) / 16,
    "logsigmoid": F.logsigmoid,
    "strong": lambda x: F.logsigmoid(3 * x - 3),
    "resets": lambda x: (F.logsigmoid(x) / 16).masked_fill(_some_tokens(x), -math.inf),
    "hard resets": lambda x: (F.logsigmoid(x) / 16).masked_fill(_some_tokens(x), -100.0),
    "one reset": lambda x: (F.logsigmoid(x) / 16).masked_fill(_middle_token(x), -math.inf),
    "one channel resets": lambda x: (F.logsigmoid(x) / 16).masked_fill(_some_tokens(x) & _first_channel(x), -math.inf),
    "dead channel": lambda x: (F.logsigmoid(x) / 16).masked_fill(_first_channel(x), -1e4),
    "at the limit": lambda x: -math.log(2.0) * HEAD_SPAN_LIMIT / 64 * _factors(x),
    "zero": torch.zeros_like,
    "-100": lambda x: torch.full_like(x, -100.0),
    "-inf": lambda x: torch.full_like(x, -math.inf),
}


def _some_tokens(x: torch.Tensor) -> torch.Tensor:
    """One token in 25, including the first of a chunk and the last of a sequence."""
    hit = torch.rand(x.shape[:3], device=x.device) < 0.04
    hit[:, 0] = hit[:, -1] = True
    return hit[..., None].expand_as(x)


def _factors(x: torch.Tensor) -> torch.Tensor:
    """Of tokens in four chunks of 64, and again: far above 1, just below, just above, far below."""
    chunks = torch.arange(x.shape[1], device=x.device) // 64
    return torch.tensor([2.0, 0.999, 1.001, 0.01], device=x.device)[chunks % 4][:, None, None].expand_as(x)


def _middle_token(x: torch.Tensor) -> torch.Tensor:
    return (torch.arange(x.shape[1], device=x.device) == x.shape[1] // 2)[:, None, None].expand_as(x)


def _first_channel(x: torch.Tensor) -> torch.Tensor:
    return (torch.arange(x.shape[-1], device=x.device) == 0).expand_as(x)


@dataclass(frozen=True)
class Case:
    """One set of inputs, the output gradients, and the float64 results."""

    inputs: dict[str, torch.Tensor | None]
    grads: dict[str, torch.Tensor]
    truth: Mapping[str, torch.Tensor]


class Later(Mapping[str, torch.Tensor]):
    """The truth of inputs as they are now, computed when it is first looked at, because many tests never do."""

    def __init__(
        self, inputs: dict[str, torch.Tensor | None], grads: dict[str, torch.Tensor], lengths: Sequence[int] | None
    ) -> None:
        self._inputs = {name: None if x is None else x.clone() for name, x in inputs.items()}
        self._grads = {name: x.clone() for name, x in grads.items()}
        self._lengths = lengths

    @cached_property
    def _found(self) -> dict[str, torch.Tensor]:
        return truth(self._inputs, self._grads, self._lengths)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def run(
    function: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    inputs: dict[str, torch.Tensor | None],
    grads: dict[str, torch.Tensor],
    frozen: Collection[str] = (),
    **options: object,
) -> dict[str, torch.Tensor]:
    """All outputs and gradients of a GLA function, by name. If `g` is None, the function is called without gates.

    `frozen`: inputs that need no gradient.
    """
    given = {name: x.clone().requires_grad_(name not in frozen) for name, x in inputs.items() if x is not None}
    positional = [given[name] for name in ("q", "k", "v", "g") if name in given]
    if "gv" in given:
        positional += [] if "g" in given else [None]
        options = options | {"gv": given["gv"]}
    o, final = function(*positional, initial_state=given.get("initial"), output_final_state=True, **options)
    leaves = {name: x for name, x in given.items() if x.requires_grad}
    outputs = {"o": o, "final": final}
    incoming = [grads[name].to(x.dtype) for name, x in outputs.items()]
    gradients = torch.autograd.grad(list(outputs.values()), list(leaves.values()), incoming)
    return {name: x.detach() for name, x in outputs.items()} | {
        f"d{name}": x for name, x in zip(leaves, gradients, strict=True)
    }


def truth(
    inputs: dict[str, torch.Tensor | None], grads: dict[str, torch.Tensor], lengths: Sequence[int] | None = None
) -> dict[str, torch.Tensor]:
    """The float64 recurrence on the same inputs; packed sequences of the given lengths run one by one."""
    if lengths is None:
        return outputs_and_gradients(inputs, grads)
    pairs = zip(sequences_of(inputs, lengths), sequences_of(grads, lengths), strict=True)
    parts = [outputs_and_gradients(*pair) for pair in pairs]
    return {name: torch.cat([part[name] for part in parts], 0 if name in STATES else 1) for name in parts[0]}


def sequences_of(
    tensors: Mapping[str, torch.Tensor | None], lengths: Sequence[int]
) -> Iterator[dict[str, torch.Tensor | None]]:
    """The tensors of each packed sequence: states have a row per sequence, the others one row of all tokens."""
    for n, (length, end) in enumerate(zip(lengths, itertools.accumulate(lengths), strict=True)):
        yield {
            name: x if x is None else x[n : n + 1] if name in STATES else x[:, end - length : end]
            for name, x in tensors.items()
        }


def run_with_a_tail(
    function: Callable[..., tuple[torch.Tensor, torch.Tensor | None]], case: Case, cu_seqlens: torch.Tensor,
    **options: object,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """What `run` gives for packed sequences with 7 tokens of NaN behind the last, for which it has to give zeros."""

    def extended(tensors: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
        return {
            name: x if x is None or name in STATES
            else torch.cat([x, x.new_full((1, 7, *x.shape[2:]), math.nan)], 1)
            for name, x in tensors.items()
        }  # fmt: skip

    found = run(function, extended(case.inputs), extended(case.grads), cu_seqlens=cu_seqlens, **options)
    T = case.grads["o"].shape[1]
    assert all(not x[:, T:].any() for name, x in found.items() if name not in STATES)
    return {name: x if name in STATES else x[:, :T] for name, x in found.items()}


def make_case(gate: str | None, lengths: Sequence[int] | None = None, **shape: Any) -> Case:
    """A case with the named gates (None: without). `lengths` of packed sequences determine B and T."""
    inputs, grads = make_values(gate, lengths=lengths, **shape)
    return Case(inputs, grads, Later(inputs, grads, lengths))


def make_values(
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
    lengths: Sequence[int] | None = None,
) -> tuple[dict[str, torch.Tensor | None], dict[str, torch.Tensor]]:
    """Inputs and output gradients of a case."""
    torch.manual_seed(seed)
    sequences = B
    if lengths is not None:
        B, T, sequences = 1, sum(lengths), len(lengths)
    inputs: dict[str, torch.Tensor | None] = {
        name: torch.randn(B, T, H, D, device=device).to(dtype) for name, D in (("q", K), ("k", K), ("v", V))
    }
    inputs["g"] = None if gate is None else GATES[gate](torch.randn(B, T, H, K, device=device))
    inputs["initial"] = torch.randn(sequences, H, K, V, device=device) if initial else None
    grads = {
        "o": torch.randn(B, T, H, V, device=device).to(dtype),
        "final": torch.randn(sequences, H, K, V, device=device),
    }
    return inputs, grads


def value_gated_case(gate: str | None, of_values: str, **shape: Any) -> Case:
    """A case with gates of values too, by another name; or with these alone."""
    inputs, grads = make_values(gate, **shape)
    inputs["gv"] = GATES[of_values](torch.randn_like(inputs["v"], dtype=torch.float32))
    return Case(inputs, grads, truth(inputs, grads, shape.get("lengths")))


def large_and_small(alone: bool, power: int, **shape: Any) -> Case:
    """Keys of about 2^power beside gates of values, or values of that size with their gates alone.

    What multiplies these is as small as they are large. A chunk's gates are so strong that its frame, were it used,
    would lose the small numbers from 40 on, and take the large ones beyond float32 at 80.
    """
    made = value_gated_case(None if alone else "mild", "mild", **shape)
    inputs, grads, large, small = dict(made.inputs), dict(made.grads), 2.0**power, 2.0**-power
    gates, sent, received, of = ("gv", "v", "o", grads) if alone else ("g", "k", "q", inputs)
    inputs[gates] = torch.full_like(inputs[gates], -2.0)
    inputs[sent] = inputs[sent] * large
    inputs["initial"] = inputs["initial"] * large
    of[received] = of[received] * small
    grads["final"] = grads["final"] * small
    return Case(inputs, grads, truth(inputs, grads))


def per_head_case(gate: str, gates_dtype: torch.dtype = torch.float32, **shape: Any) -> Case:
    """A case whose gates are those of each head's first channel, [B, T, H]."""
    inputs, grads = make_values(gate, **shape)
    g = inputs["g"][..., 0].to(gates_dtype)
    same = inputs | {"g": g.float()[..., None].expand_as(inputs["q"])}
    expected = truth(same, grads, shape.get("lengths"))
    return Case(inputs | {"g": g}, grads, expected | {"dg": expected["dg"].sum(-1)})


def linear_or_per_head(gate: str | None, **shape: Any) -> tuple[Callable[..., Any], Case]:
    """A function and a case for it: linear attention without a gate, else with a gate per head."""
    if gate is None:
        return chunk_linear_attn, make_case(None, **shape)
    return chunk_simple_gla, per_head_case(gate, **shape)


def errors(found: dict[str, torch.Tensor], case: Case) -> dict[str, float]:
    """Relative errors, ||x - truth|| / ||truth||, of every output and gradient. NaN stays NaN.

    If gates block everything, the gradients of the gates and the initial state are zero, or 1e-40. Then the error is
    relative to the terms that cancel, k * dk or v * dv, or to the incoming gradient.
    """
    scales = {name: x.norm() for name, x in case.truth.items()}
    terms = {"dg": (case.inputs["k"].double() * case.truth["dk"]).norm(), "dinitial": case.grads["final"].norm()}
    terms["dgv"] = (case.inputs["v"].double() * case.truth["dv"]).norm()
    for name, size in terms.items():
        if name in scales and scales[name] < 1e-6 * size:
            scales[name] = size
    return {name: ((x.double() - case.truth[name]).norm() / scales[name]).item() for name, x in found.items()}


def assert_close(found: dict[str, torch.Tensor], case: Case, bound: float) -> None:
    """Fails, showing all errors, if one exceeds the bound or is NaN."""
    got = errors(found, case)
    shown = ", ".join(f"{name} {error:.1e}" for name, error in got.items())
    assert all(error <= bound for error in got.values()), f"beyond {bound:.0e}: {shown}"


def cumulative(lengths: Sequence[int], dtype: torch.dtype = torch.int32, device: str = "cpu") -> torch.Tensor:
    """The cu_seqlens of packed sequences of these lengths."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype, device=device)


def exact_from_checkpoints_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags everything before the exact backward from checkpoints, whose outputs are NaN until it has written them."""
    launch = passes.run_exact_backward_from_checkpoints

    def flag_and_launch(
        call: Call, inputs: Inputs, do: torch.Tensor, checkpoints: torch.Tensor, failed: torch.Tensor,
        gradients: Gradients, *, room: int, dfinal: torch.Tensor | None, dinitial: torch.Tensor | None,
    ) -> None:  # fmt: skip
        failed.fill_(1)
        for x in (gradients.dq, gradients.dk, gradients.dv, gradients.dg, dinitial):
            if x is not None:
                x.fill_(math.nan)
        launch(call, inputs, do, checkpoints, failed, gradients, room=room, dfinal=dfinal, dinitial=dinitial)

    monkeypatch.setattr(passes, "run_exact_backward_from_checkpoints", flag_and_launch)
