"""One call of the kernels: its sizes, its buffers, and the launches of both passes except those of `wide.py`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, wraps
from types import NoneType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import triton.language as tl

from gla_kernels.backward import gla_backward_kernel
from gla_kernels.direct import Launcher, launcher
from gla_kernels.exact import gla_backward_exact, gla_forward_exact
from gla_kernels.forward import gla_forward_kernel
from gla_kernels.launch import (
    EXACT_PROGRAMS,
    EXACT_ROWS,
    HOPPER_PROGRAMS,
    STRONG_PROGRAMS,
    LaunchPlan,
    Operands,
    Tile,
    exact_tile,
    operands,
    parse_plan,
    plan,
    strong_tile,
)
from gla_kernels.strong import gla_backward_strong, gla_forward_strong

# Calls whose decisions are remembered: at most this many different shapes.
_CALLS = 512

_Result = TypeVar("_Result")
_Numbers = ParamSpec("_Numbers")

_TL_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def chunks_per_checkpoint(chunks: int) -> int:
    """Chunks from one checkpoint to the next in a sequence of `chunks` chunks, if states are not materialized.

    Checkpoints are kept, in float32; the states between two of them are recomputed into scratch, where one takes half
    as much memory. The sum of both is least near sqrt(2 * chunks). Of the powers of two around it, the larger one needs
    fewer launches.
    """
    for limit, every in ((32, 8), (128, 16), (512, 32)):
        if chunks <= limit:
            return every
    return 64


@dataclass(frozen=True)
class Call:
    """Sizes, options and launch plan of a call, without its tensors.

    Calls on equal shapes share one object (see `make_call`), which remembers what has been decided for it: the
    properties below, the results of functions that are `decided_once`, and its launches.
    """

    B: int
    T: int
    H: int
    K: int
    V: int
    sequences: int
    varlen: bool
    gated: bool
    scale: float
    dtype: torch.dtype
    plan: LaunchPlan
    bfloat16_gates: bool = False  # else float32

    @cached_property
    def decisions(self) -> dict[tuple[object, ...], Any]:
        """Results of functions that are `decided_once`."""
        return {}

    @cached_property
    def _launchers(self) -> dict[tuple[object, ...], Launcher]:
        """By kernel, tile and switches. A launcher holds its kernel, whose id therefore stays its own."""
        return {}

    @cached_property
    def operands(self) -> Operands:
        return operands(self.dtype)

    @cached_property
    def chunks(self) -> int:
        """Chunks of the longest possible sequence: all T tokens."""
        return (self.T + self.plan.chunk_size - 1) // self.plan.chunk_size

    @cached_property
    def every(self) -> int:
        """Chunks from one checkpoint to the next, for sequences of average length."""
        return chunks_per_checkpoint(self.chunks // self.sequences if self.varlen else self.chunks)

    def slots(self, chunks: int) -> int:
        """Slots of a buffer with one per piece of `chunks` chunks, in all sequences; see `tiles.first_slot`."""
        rows = chunks * self.plan.chunk_size
        return self.T // rows + self.sequences if self.varlen else self.sequences * ((self.T + rows - 1) // rows)

    def state_shape(self, slots: int) -> tuple[int, int, int, int]:
        return slots, self.H, self.K, self.V

    def kept_shape(self, materialize: bool) -> tuple[int, int, int, int]:
        """Shape of the states kept for the backward: before every chunk, or before every `every`-th."""
        return self.state_shape(self.slots(1 if materialize else self.every))

    def kept_dtype(self, materialize: bool) -> torch.dtype:
        return self.operands.dtype if materialize else torch.float32

    def parts(self, tile: Tile) -> int:
        """Number of blocks of value columns."""
        return (self.V + tile.block_v - 1) // tile.block_v

    @cached_property
    def gradient_parts(self) -> int:
        """Partial sums of dq, dk and dg: the portable Triton backward has one program per block of value columns."""
        return self.parts(self.plan.backward) if self.plan.family == "triton" else 1

    def new_states(self, like: torch.Tensor, count: int | None = None, zero: bool = False) -> torch.Tensor:
        """`count` float32 states (None: one per sequence) of every head on `like`'s device, zeros or uninitialised."""
        make = like.new_zeros if zero else like.new_empty
        return make(self.state_shape(self.sequences if count is None else count), dtype=torch.float32)

    def constants(self, tile: Tile) -> dict[str, Any]:
        """The call's compile-time constants; a kernel gets those that it has parameters for."""
        return {
            "K": self.K,
            "V": self.V,
            "BK": tile.block_k,
            "BV": tile.block_v,
            "C": self.plan.chunk_size,
            "R": EXACT_ROWS,
            "DOT": _TL_DTYPE[self.operands.dtype],
            "PRECISION": self.operands.precision,
            "GATED": self.gated,
            "VARLEN": self.varlen,
            "PARTS": self.gradient_parts,
            "STAGES": tile.stages,
            "PDL": self.pdl,
        }

    @cached_property
    def pdl(self) -> bool:
        """Whether a kernel may start before the previous one has ended: CUDA's programmatic dependent launch."""
        return self.plan.family != "triton"

    def options(self, tile: Tile, early: bool) -> dict[str, Any]:
        """Triton's launch options."""
        return tile.options | ({"launch_pdl": True} if self.pdl and early else {})

    def launch(
        self, kernel: Any, tile: Tile, programs: tuple[int, ...], arguments: tuple[Any, ...], switches: dict[str, Any],
        *, early: bool = True,
    ) -> None:  # fmt: skip
        """Launches one kernel with those of the call's constants and of the switches that it has parameters for.

        `early`: whether it may start before the previous kernel has ended. Every program then waits for that kernel,
        even if it ended long ago; with thousands of programs this costs more than the early start gains.
        """
        key = (id(kernel), tile, early, *switches.items())
        found = self._launchers.get(key)
        if found is None:
            constants = named(kernel, self.constants(tile) | switches)
            options = self.options(tile, early)
            found = self._launchers[key] = launcher(kernel, tuple(constants.items()), tuple(options.items()))
        found(programs, arguments)


def named(kernel: Any, constants: dict[str, Any]) -> dict[str, Any]:
    """Those of the constants that the kernel has a parameter for."""
    return {name: value for name, value in constants.items() if name in kernel.arg_names}


def decided_once(function: Callable[_Numbers, _Result]) -> Callable[_Numbers, _Result]:
    """Decorates a function of a call (and of values that can be hashed): it is called once for each call object."""

    @wraps(function)
    def decided(*arguments: _Numbers.args, **named: _Numbers.kwargs) -> _Result:
        call: Any = arguments[0]
        key = (function, *arguments[1:], *named.items())
        found = call.decisions.get(key)
        if found is None:
            found = call.decisions[key] = function(*arguments, **named)
        return found  # type: ignore[no-any-return]

    return decided


def make_call(
    q: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, cu_seqlens: torch.Tensor | None, scale: float,
    chunk_size: int | None, plan_of_choice: str | None,
) -> Call:  # fmt: skip
    """The call for these tensors, whose values are not read; with the table's plan if none is given."""
    shape, V = q.shape, v.shape[-1]
    sequences = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    B, T, H, K = shape
    # Head dims are fixed even in a trace with symbolic shapes, whose calls are not remembered.
    gates = None if g is None else g.dtype
    details = B, T, H, int(K), int(V), sequences, gates, scale, q.dtype, chunk_size, plan_of_choice, q.device
    fixed = type(B) is type(T) is type(H) is int and type(sequences) in (int, NoneType) and type(scale) is float
    return _remembered_call(*details) if fixed else _call(*details)


def _call(
    B: int, T: int, H: int, K: int, V: int, sequences: int | None, gates: torch.dtype | None, scale: float,
    dtype: torch.dtype, chunk_size: int | None, plan_of_choice: str | None, device: torch.device,
) -> Call:  # fmt: skip
    gated, packed = gates is not None, sequences is not None
    choice = parse_plan(plan_of_choice) if plan_of_choice else plan(K, V, dtype, chunk_size, device, gated)
    return Call(
        B, T, H, K, V, B if sequences is None else sequences, packed, gated, scale, dtype, choice,
        gates == torch.bfloat16,
    )  # fmt: skip


_remembered_call = lru_cache(_CALLS)(_call)


def readable(call: Call, x: torch.Tensor) -> torch.Tensor:
    """x as the call's kernels can read it: the last dimension contiguous, the others with any strides.

    The Gluon kernels also need rows of aligned 16-byte units, which the compiler assumes only of strides that are
    multiples of 16. q, k and v cut from one projection have such strides. Other tensors are copied, even contiguous
    ones: they may start at an unaligned address, or a single head may have a stride of 1.
    """
    b, t, h, last = x.stride()
    fits = last == 1
    if call.plan.family != "triton":
        fits = fits and b % 16 == t % 16 == h % 16 == 0 and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def strides_of(*tensors: torch.Tensor | None) -> tuple[int, ...]:
    """Strides of batch, time and head of each tensor, as the kernels take them; 0 for None."""
    found: list[int] = []
    for x in tensors:
        found += (0, 0, 0) if x is None else x.stride()[:3]
    return tuple(found)


def on_meta(x: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor like x on the meta device, without data."""
    return None if x is None else x.to("meta")


@dataclass(eq=False)
class Inputs:
    """The tensors of a call: q, k [B, T, H, K], v [B, T, H, V], g [B, T, H, K] or None, cu_seqlens [N + 1] or None."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor | None
    cu_seqlens: torch.Tensor | None

    @classmethod
    def of(
        cls, call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
    ) -> "Inputs":  # fmt: skip
        """The tensors as the call's kernels can read them (see `readable`)."""
        gates = None if g is None else readable(call, g)
        return cls(readable(call, q), readable(call, k), readable(call, v), gates, cu_seqlens)

    def on_meta(self) -> "Inputs":
        """Tensors like these on the meta device, without data."""
        return Inputs(
            self.q.to("meta"), self.k.to("meta"), self.v.to("meta"), on_meta(self.g), on_meta(self.cu_seqlens)
        )

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        return strides_of(self.q, self.k, self.v, self.g)

    def strides(self, *more: torch.Tensor) -> tuple[int, ...]:
        """Strides of q, k, v, g and `more`; see `strides_of`."""
        return self._strides + strides_of(*more)


class Flags(NamedTuple):
    """What a forward found: `rows` [N, H], 1 where a result is not finite, and `marks` of chunks with strong gates.

    Marks are [slots, H], n + 1 for a chunk of sequence n, and empty without gates. Both are int32 and start at 0,
    because kernels only write raised ones.
    """

    rows: torch.Tensor
    marks: torch.Tensor

    @classmethod
    def of(cls, call: Call, buffer: torch.Tensor) -> "Flags":
        """The parts of a buffer, which is one tensor so that it is set to 0 by one launch; see `flag_buffer`."""
        N, H = call.sequences, call.H
        slots = call.slots(1) if call.gated else 0
        begin = buffer.storage_offset() + _aligned(N * H)
        return cls(buffer.as_strided((N, H), (H, 1)), buffer.as_strided((slots, H), (H, 1), begin))


def _aligned(words: int) -> int:
    """The least multiple of 4 that is not below `words`: 16 bytes, to which kernels take pointers to be aligned."""
    return (words + 3) // 4 * 4


def flag_buffer(call: Call, like: torch.Tensor) -> torch.Tensor:
    """A buffer of zeros for `Flags`, on `like`'s device."""
    marks = call.slots(1) * call.H if call.gated else 0
    return like.new_zeros(_aligned(call.sequences * call.H) + marks, dtype=torch.int32)


def row_flags(call: Call, like: torch.Tensor) -> torch.Tensor:
    """Flags [N, H] of 0 on `like`'s device."""
    return like.new_zeros((call.sequences, call.H), dtype=torch.int32)


def forward_kernel(call: Call) -> Any:
    """The kernel of the plain form in the call's family; for wide heads on Hopper see `wide.py`."""
    if call.plan.family == "hopper":
        from gla_kernels.hopper_forward import gla_forward_hopper

        return gla_forward_hopper
    return gla_forward_kernel


def backward_kernel(call: Call) -> Any:
    """The kernel of the plain form in the call's family; for wide heads on Hopper see `wide.py`."""
    if call.plan.family == "hopper":
        from gla_kernels.hopper_backward import gla_backward_hopper

        return gla_backward_hopper
    return gla_backward_kernel


def run_forward(
    call: Call,
    inputs: Inputs,
    flags: Flags,
    *,
    first: int = 0,
    count: int | None = None,
    o: torch.Tensor | None = None,
    initial: torch.Tensor | None = None,
    from_checkpoint: bool = False,
    final: torch.Tensor | None = None,
    states: torch.Tensor | None = None,
    checkpoints: torch.Tensor | None = None,
) -> None:
    """Runs the forward over `count` chunks of every sequence, from chunk `first` on. An output of None is not computed.

    Flags and marks are raised only if o is computed. `from_checkpoint`: `initial` holds checkpoints, and `states` has
    room for `count` chunks of every sequence. For wide heads on Hopper this launches only the kernels that repair what
    the plain form cannot do (see `wide.py`).
    """
    if call.plan.family == "triton":
        initial = call.new_states(inputs.q, zero=True) if initial is None else initial
        final = call.new_states(inputs.q) if final is None else final
    tensors = (inputs.q, inputs.k, inputs.v, inputs.g, o, initial, final, states, checkpoints, flags.rows)
    numbers = (
        inputs.cu_seqlens, call.scale, *inputs.strides(), call.T, call.H, first,
        call.chunks if count is None else count, call.every,
    )  # fmt: skip
    switches = {
        "HAS_INITIAL": initial is not None,
        "FROM_CHECKPOINT": from_checkpoint,
        "STORE_O": o is not None,
        "STORE_FINAL": final is not None,
        "STORE_STATES": states is not None,
        "STORE_CHECKPOINTS": checkpoints is not None,
    }
    rows = call.sequences * call.H
    tile = call.plan.forward
    if call.plan.family == "hopper":
        # A program assumes one length for all its rows (a row is a head of a sequence), so packed rows need a program
        # each. Without gates, and if only states are computed, a program per row was faster.
        several = call.gated and o is not None and not call.varlen
        programs = min(rows, HOPPER_PROGRAMS) if several else rows
        call.launch(forward_kernel(call), tile, (programs,), (*tensors, flags.marks, *numbers, rows), switches)
    elif call.plan.family == "triton":
        programs = rows * call.parts(tile)
        call.launch(forward_kernel(call), tile, (programs,), (*tensors, flags.marks, *numbers), switches)
    if call.gated and o is not None:
        _launch_strong(
            call, gla_forward_strong,
            (
                inputs.q, inputs.k, inputs.v, inputs.g, o, flags.rows, flags.marks, inputs.cu_seqlens, call.scale,
                *inputs.strides(),
            ),
            flags,
        )  # fmt: skip
    if call.gated:
        tile = exact_tile(call.K, call.V, call.dtype)
        programs = min(rows * call.parts(tile), EXACT_PROGRAMS)
        call.launch(gla_forward_exact, tile, (programs,), (*tensors, *numbers, rows), switches)


def _launch_strong(call: Call, kernel: Any, arguments: tuple[Any, ...], flags: Flags) -> None:
    """Launches a kernel that completes the results of marked chunks."""
    items = flags.marks.numel()
    tile = strong_tile(call.K, call.V, call.plan.chunk_size)
    call.launch(kernel, tile, (min(items, STRONG_PROGRAMS),), (*arguments, call.T, call.H, items), {})


@dataclass(frozen=True)
class Gradients:
    """The backward's outputs: dv, and dq, dk and dg [B, T, H, K], or [B, T, H, parts, K] if they are partial sums."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dg: torch.Tensor | None

    @classmethod
    def empty(cls, call: Call, inputs: Inputs) -> "Gradients":
        parts = call.gradient_parts

        def part_buffer(x: torch.Tensor) -> torch.Tensor:
            if parts == 1:
                return torch.empty_like(x, memory_format=torch.contiguous_format)
            return x.new_empty((*x.shape[:3], parts, call.K), dtype=torch.float32)

        dg = None if inputs.g is None else part_buffer(inputs.g)
        dv = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
        return cls(part_buffer(inputs.q), part_buffer(inputs.k), dv, dg)

    def summed(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """dq, dk, dv and dg in the shapes and dtypes of their inputs."""

        def total(parts: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
            return parts if parts.dim() == 4 else parts.sum(3).to(like.dtype)

        dg = None if inputs.g is None or self.dg is None else total(self.dg, inputs.g)
        return total(self.dq, inputs.q), total(self.dk, inputs.k), self.dv, dg


def run_backward(
    call: Call,
    inputs: Inputs,
    do: torch.Tensor,
    states: torch.Tensor,
    flags: Flags,
    failed: torch.Tensor,
    gradients: Gradients,
    *,
    first: int = 0,
    count: int | None = None,
    from_checkpoint: bool = False,
    dfinal: torch.Tensor | None = None,
    dinitial: torch.Tensor | None = None,
) -> None:
    """Runs the backward over `count` chunks of every sequence, from chunk `first` on, whose states are in `states`.

    With gates `dinitial` is needed. For wide heads on Hopper this launches the exact kernel only (see `wide.py`).
    """
    if call.plan.family == "triton":
        dfinal = call.new_states(inputs.q, zero=True) if dfinal is None else dfinal
        dinitial = call.new_states(inputs.q) if dinitial is None else dinitial
    arguments = (
        inputs.q, inputs.k, inputs.v, inputs.g, do, states, flags.rows, failed, dfinal,
        gradients.dq, gradients.dk, gradients.dv, gradients.dg, dinitial, inputs.cu_seqlens,
        call.scale, *inputs.strides(do), call.T, call.H, first, call.chunks if count is None else count,
    )  # fmt: skip
    switches = {
        "FROM_CHECKPOINT": from_checkpoint,
        "HAS_DFINAL": dfinal is not None,
        "STORE_DINITIAL": dinitial is not None,
    }
    rows = call.sequences * call.H
    if call.plan.family != "wide":
        call.launch(backward_kernel(call), call.plan.backward, (rows * call.gradient_parts,), arguments, switches)
    if call.gated:
        tile = exact_tile(call.K, call.V, call.dtype)
        call.launch(gla_backward_exact, tile, (min(rows, EXACT_PROGRAMS),), (*arguments, rows), switches)


def run_strong_backward(
    call: Call, inputs: Inputs, do: torch.Tensor, flags: Flags, failed: torch.Tensor, gradients: Gradients
) -> None:
    """Completes the gradients of chunks with strong gates, after those of all chunks have been computed."""
    arguments = (
        inputs.q, inputs.k, inputs.v, inputs.g, do, flags.rows, failed, flags.marks,
        gradients.dq, gradients.dk, gradients.dv, gradients.dg, inputs.cu_seqlens, call.scale, *inputs.strides(do),
    )  # fmt: skip
    _launch_strong(call, gla_backward_strong, arguments, flags)
