"""What each kernel of a call does at the least: bytes of its tensors, each once, and operations of its products."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from gla_kernels.hopper.wide.pieces import programs_a_piece
from gla_kernels.launching.buffers import Inputs, on_meta
from gla_kernels.launching.call import Call, make_call, named, version_of
from gla_kernels.launching.plans import Tile
from gla_kernels.limits import WIDE_KEY_BLOCK
from gla_kernels.operators.passes import KEEP_NOTHING, KEEP_STATES, launch_backward, launch_forward

# What these touch depends on the gates: chunks and heads that others have marked.
_IF_MARKED = ("strong", "exact", "clear_tails")
# These may be launched over some of the sequences, whose tokens are then in all tensors but in states at borders.
_OF_A_RUN = ("wide_forward", "head_forward", "specialized_forward", "wide_recurrence", "wide_backward")
_AT_BORDERS = ("initial", "final", "end", "decays", "before", "after")


class Work(NamedTuple):
    """Bytes that are read and written, and floating-point operations of products; without those that sum gates."""

    bytes: int
    flops: int


class _Products(NamedTuple):
    """Multiplications of a chunk's products: rows by rows over K (scores) and over V, and K by V over rows (states)."""

    scores: int
    values: int
    states: int


_FORWARD, _BACKWARD = _Products(1, 1, 2), _Products(3, 2, 4)
_ALL_GRADIENTS, _KEY_GRADIENTS = _Products(3, 2, 3), _Products(2, 1, 2)
_PRODUCTS = {
    "gla_forward_kernel": _FORWARD, "gla_forward_hopper": _FORWARD, "wide_forward": _FORWARD,
    "head_forward": _FORWARD, "specialized_forward": _FORWARD,
    "gla_backward_kernel": _BACKWARD, "gla_backward_hopper": _BACKWARD, "wide_backward": _BACKWARD,
    "simple_gla_backward_hopper": _BACKWARD,
    "gla_recurrence_hopper": _Products(0, 0, 1), "wide_recurrence": _Products(0, 0, 1),
    "wide_frames": _Products(1, 0, 0), "wide_walk": _Products(0, 1, 2), "wide_readout": _Products(1, 1, 1),
}  # fmt: skip


def _share(call: Call, kernel: str, tile: Tile, programs: int, given: dict[str, Any]) -> float:
    """The part of all tokens that a launch is over."""
    if kernel not in _OF_A_RUN or call.varlen:
        return 1.0
    pieces: int = call.sequences * -(-call.chunks // given["piece_chunks"])
    return programs / (programs_a_piece(call, tile) * pieces)


def _products(call: Call, kernel: str) -> _Products:
    """Those of a launch over all tokens. `wide_gradients` has dv too, unless another kernel walks or reads out."""
    if kernel == "wide_gradients":
        return _ALL_GRADIENTS if call.K <= WIDE_KEY_BLOCK else _KEY_GRADIENTS
    return _PRODUCTS.get(kernel, _Products(0, 0, 0))


@dataclass(frozen=True)
class _Notes(Call):
    """A call whose launches are noted, not made."""

    work: dict[str, Work] = field(default_factory=dict, hash=False, compare=False)

    def launch(
        self, kernel: Any, tile: Tile, programs: tuple[int, ...], arguments: tuple[Any, ...], switches: dict[str, Any],
        *, early: bool = True,  # noqa: ARG002
    ) -> None:  # fmt: skip
        name = kernel.__name__
        if not any(word in name for word in _IF_MARKED):
            constants = named(kernel, self.constants(tile) | switches)
            given = dict(zip([name for name in kernel.arg_names if name not in constants], arguments, strict=True))
            share = _share(self, name, tile, programs[0], given)
            tensors = {id(x): (key, x) for key, x in given.items() if isinstance(x, torch.Tensor)}
            moved = sum(
                x.numel() * x.element_size() * (1.0 if key in _AT_BORDERS else share) for key, x in tensors.values()
            )
            C, found = self.plan.chunk_size, _products(self, name)
            per_token = (found.scores * self.K + found.values * self.V) * C + found.states * self.K * self.V
            before = self.work.get(name, Work(0, 0))
            flops = 2 * self.B * self.T * self.H * per_token * share
            self.work[name] = Work(before.bytes + round(moved), before.flops + round(flops))


@torch.no_grad()
def kernel_work(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, *,
    initial_state: torch.Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None, chunk_size: int | None = None, passes: str = "fwd+bwd",
) -> Mapping[str, Work]:  # fmt: skip
    """Work by the names of kernels, of a call of `chunk_gla` or, by g, of `chunk_simple_gla` or `chunk_linear_attn`.

    `passes`: infer, fwd, bwd or fwd+bwd; the last three keep all states. A kernel whose work the gates decide is left
    out. What programs share and read more than once is counted once, as if it stayed in the L2 cache; and what they
    compute more than once, once.
    """
    call = make_call(q, v, g, cu_seqlens, q.shape[-1] ** -0.5, chunk_size, None)
    inputs = Inputs.of(call, *(on_meta(x) for x in (q, k, v, g, cu_seqlens)))  # type: ignore[arg-type]
    keep = KEEP_NOTHING if passes == "infer" else KEEP_STATES
    notes = {name: version_of(call, _Notes) for name in ("forward", "backward")}
    o, final, kept, flags = launch_forward(
        notes["forward"], inputs, on_meta(initial_state), output_final_state, keep
    )  # fmt: skip
    if passes in ("bwd", "fwd+bwd") and kept is not None:
        dfinal = None if final is None else torch.empty_like(final)
        needs = initial_state is not None, g is not None
        launch_backward(notes["backward"], inputs, torch.empty_like(o), dfinal, kept, flags, *needs, keep)
    found: dict[str, Work] = {}
    for part in ("backward",) if passes == "bwd" else ("forward", "backward"):
        for name, work in notes[part].work.items():
            before = found.get(name, Work(0, 0))
            found[name] = Work(before.bytes + work.bytes, before.flops + work.flops)
    return found
