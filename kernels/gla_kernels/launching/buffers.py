"""The tensors of a call: its inputs as kernels can read them, the flags that kernels raise, and the gradients."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from gla_kernels.launching.call import Call


def settled(x: torch.Tensor | None) -> torch.Tensor | None:
    """x, contiguous and in memory: torch has zeros without memory, and hooks may lay saved tensors out anew."""
    return None if x is None else x.clone() if x._is_zerotensor() else x.contiguous()


def rows(x: torch.Tensor) -> torch.Tensor:
    """x in memory, with a contiguous last dimension and any other strides."""
    return x if x.stride(-1) == 1 and not x._is_zerotensor() else x.clone(memory_format=torch.contiguous_format)


def readable(call: Call, x: torch.Tensor) -> torch.Tensor:
    """x as the call's kernels can read it: the last dimension contiguous, the others with any strides.

    The Gluon kernels also need rows of aligned 16-byte units, which the compiler assumes only of strides that are
    multiples of 16. q, k and v cut from one projection have such strides. Other tensors are copied, even contiguous
    ones: they may start at an unaligned address, or a single head may have a stride of 1.
    """
    b, t, h, last = x.stride()
    fits = last == 1 and not x._is_zerotensor()
    if call.plan.family != "triton":
        fits = fits and b % 16 == t % 16 == h % 16 == 0 and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def gates_by_kind(call: Call, g: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """g as gates per channel and as gates per head, of which one or both are None."""
    return (None, g) if call.head_gated else (g, None)


def named_strides(**tensors: torch.Tensor | None) -> dict[str, int]:
    """Strides of batch, time and head of each tensor x, as kernels take them: x_b, x_t and x_h; 0 for None."""
    found: dict[str, int] = {}
    for name, x in tensors.items():
        b, t, h = (0, 0, 0) if x is None else x.stride()[:3]
        found |= {f"{name}_b": b, f"{name}_t": t, f"{name}_h": h}
    return found


def on_meta(x: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor like x on the meta device, without data. Its strides are x's, even if x is a slice."""
    return None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


@dataclass(eq=False)
class Inputs:
    """The tensors of a call: q, k [B, T, H, K], v [B, T, H, V], g [B, T, H, K] or None, cu_seqlens [N + 1] or None.

    `head_gates` [B, T, H] or None: if the call is `head_gated`, in place of g.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    head_gates: torch.Tensor | None = None
    sums: torch.Tensor | None = None  # [B, H, T] in `Call.sums_dtype`: of head_gates

    @classmethod
    def of(
        cls, call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
    ) -> "Inputs":  # fmt: skip
        """The tensors as the call's kernels can read them (see `readable`). g: [B, T, H, K], [B, T, H] or None."""
        per_channel, per_head = gates_by_kind(call, g)
        gates = None if per_channel is None else readable(call, per_channel)
        return cls(readable(call, q), readable(call, k), readable(call, v), gates, settled(cu_seqlens), per_head)

    def on_meta(self) -> "Inputs":
        """Tensors like these on the meta device, without data."""
        return Inputs(
            self.q.to("meta"), self.k.to("meta"), self.v.to("meta"), on_meta(self.g), on_meta(self.cu_seqlens),
            on_meta(self.head_gates),
        )  # fmt: skip

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The tensors and their strides as kernels take them, by name."""
        tensors: dict[str, Any] = {"q": self.q, "k": self.k, "v": self.v, "g": self.g}
        return tensors | {"cu_seqlens": self.cu_seqlens} | named_strides(**tensors)


class Flags(NamedTuple):
    """What a forward found: `rows` [N, H], 1 where a result is not finite, and `marks` of chunks with strong gates.

    Marks are [slots, H], n + 1 for a chunk of sequence n. Both are int32 and start at 0, because kernels only write
    raised ones. Both are empty if the call is not `gated`. `uncleared`: their memory, if it is still to be set to 0.
    """

    rows: torch.Tensor
    marks: torch.Tensor
    uncleared: torch.Tensor | None = None

    @classmethod
    def of(cls, call: Call, buffer: torch.Tensor, *, uncleared: bool = False) -> "Flags":
        """The parts of a buffer, which is one tensor so that it is set to 0 by one launch; see `flag_buffer`."""
        if not call.gated:
            return cls(buffer[:0], buffer[:0])
        N, H, slots = call.sequences, call.H, call.slots(1)
        begin = buffer.storage_offset() + _aligned(N * H)
        rows, marks = buffer.as_strided((N, H), (H, 1)), buffer.as_strided((slots, H), (H, 1), begin)
        return cls(rows, marks, buffer if uncleared else None)


def _aligned(words: int) -> int:
    """The least multiple of 4 that is not below `words`: 16 bytes, to which kernels take pointers to be aligned."""
    return (words + 3) // 4 * 4


def flag_buffer(call: Call, like: torch.Tensor, zero: bool = True) -> torch.Tensor:
    """A buffer for `Flags`, on `like`'s device, of zeros or uninitialised.

    If the call is `head_gated`, it is for `Inputs.sums` instead, in integers of their size. Without gates, nothing uses
    it; but it is not empty, because tensors without memory take calls the long way (see `is_plain`).
    """
    if not call.gated:
        if not call.head_gated:
            return like.new_empty(1, dtype=torch.int32)
        words = torch.int64 if call.sums_dtype == torch.float64 else torch.int32
        return like.new_empty((call.B, call.H, call.T), dtype=words)
    make = like.new_zeros if zero else like.new_empty
    return make(_aligned(call.sequences * call.H) + call.slots(1) * call.H, dtype=torch.int32)


def failure_flags(call: Call, flags: Flags, after_forward: bool, *, zero: bool = True) -> torch.Tensor:
    """Flags [N, H] for a backward to raise: first 0 or, `after_forward`, as the forward has left its own.

    If not `zero`, they are still to be set to 0. Empty if the call is not `gated`.
    """
    if not call.gated:
        return flags.rows
    if not zero:
        return flags.rows.new_empty(flags.rows.shape)
    return flags.rows.clone() if after_forward else flags.rows.new_zeros(flags.rows.shape)


def output_parts(like: torch.Tensor, parts: int) -> torch.Tensor:
    """Memory for an output like `like`, [B, T, H, D] or [B, T, H]; if in parts, [B, T, H, parts, (D)] float32."""
    if parts == 1:
        return torch.empty_like(like, memory_format=torch.contiguous_format)
    return like.new_empty((*like.shape[:3], parts, *like.shape[3:]), dtype=torch.float32)


def sum_of_parts(parts: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """An output from its memory (see `output_parts`), in the dtype of `like`."""
    return parts if parts.dim() == like.dim() else parts.sum(3).to(like.dtype)


@dataclass(frozen=True)
class Gradients:
    """The backward's outputs: dq, dk, dg [B, T, H, K] and dv [B, T, H, V], or partial sums (see `output_parts`).

    `dg` is [B, T, H] if the call is `head_gated`, and None without gates, and if nobody needs their gradient.
    """

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dg: torch.Tensor | None

    @classmethod
    def empty(cls, call: Call, inputs: Inputs, needs_dg: bool) -> "Gradients":
        parts = call.value_parts
        gates = inputs.head_gates if call.head_gated else inputs.g
        dg_parts = call.gate_parts if call.head_gated else parts
        dg = output_parts(gates, dg_parts) if needs_dg and gates is not None else None
        dv = output_parts(inputs.v, call.key_parts)
        return cls(output_parts(inputs.q, parts), output_parts(inputs.k, parts), dv, dg)

    @property
    def arguments(self) -> dict[str, Any]:
        """The gradients as kernels take them, by name."""
        return {"dq": self.dq, "dk": self.dk, "dv": self.dv, "dg": self.dg}

    @property
    def switches(self) -> dict[str, bool]:
        """The switches of all kernels that write gradients."""
        return {"STORE_DG": self.dg is not None}

    def summed(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """dq, dk, dv and dg in the shapes and dtypes of their inputs."""
        dg = self.dg
        gates = inputs.head_gates if inputs.g is None else inputs.g
        if dg is not None and gates is not None:
            dg = sum_of_parts(dg, gates)
        return (
            sum_of_parts(self.dq, inputs.q), sum_of_parts(self.dk, inputs.k), sum_of_parts(self.dv, inputs.v), dg
        )  # fmt: skip
