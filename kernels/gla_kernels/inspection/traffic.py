"""The bytes that each kernel of a call reads and writes at the least: its tensors, each once."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from gla_kernels.launching.buffers import Inputs, on_meta
from gla_kernels.launching.call import Call, make_call, version_of
from gla_kernels.launching.plans import Tile
from gla_kernels.operators.passes import KEEP_NOTHING, KEEP_STATES, launch_backward, launch_forward

# What these touch depends on the gates: chunks and heads that others have marked.
_IF_MARKED = ("strong", "exact", "clear_tails")


@dataclass(frozen=True)
class _Notes(Call):
    """A call whose launches are noted, not made."""

    bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int), hash=False, compare=False)

    def launch(
        self, kernel: Any, tile: Tile, programs: tuple[int, ...], arguments: tuple[Any, ...], switches: dict[str, Any],  # noqa: ARG002
        *, early: bool = True,  # noqa: ARG002
    ) -> None:  # fmt: skip
        name = kernel.__name__
        if not any(word in name for word in _IF_MARKED):
            tensors = {id(x): x for x in arguments if isinstance(x, torch.Tensor)}
            self.bytes[name] += sum(x.numel() * x.element_size() for x in tensors.values())


@torch.no_grad()
def kernel_bytes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, *,
    initial_state: torch.Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None, chunk_size: int | None = None, passes: str = "fwd+bwd",
) -> Mapping[str, int]:  # fmt: skip
    """Bytes by the names of kernels, of a call of `chunk_gla` or, by g, of `chunk_simple_gla` or `chunk_linear_attn`.

    `passes`: infer, fwd, bwd or fwd+bwd; the last three keep all states. A kernel whose bytes the gates decide is left
    out. What programs share and read more than once is counted once, as if it stayed in the L2 cache.
    """
    call = make_call(q, v, g, cu_seqlens, q.shape[-1] ** -0.5, chunk_size, None)
    inputs = Inputs.of(call, q, k, v, g, cu_seqlens).on_meta()
    keep = KEEP_NOTHING if passes == "infer" else KEEP_STATES
    notes = {name: version_of(call, _Notes) for name in ("forward", "backward")}
    o, final, kept, flags = launch_forward(
        notes["forward"], inputs, on_meta(initial_state), output_final_state, keep
    )  # fmt: skip
    if passes in ("bwd", "fwd+bwd") and kept is not None:
        dfinal = None if final is None else torch.empty_like(final)
        needs = initial_state is not None, g is not None
        launch_backward(notes["backward"], inputs, torch.empty_like(o), dfinal, kept, flags, *needs, keep)
    found: dict[str, int] = defaultdict(int)
    for name, size in _of(notes, passes):
        found[name] += size
    return found


def _of(notes: Mapping[str, _Notes], passes: str) -> Iterator[tuple[str, int]]:
    if passes != "bwd":
        yield from notes["forward"].bytes.items()
    yield from notes["backward"].bytes.items()
