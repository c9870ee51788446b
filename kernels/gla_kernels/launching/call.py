"""One call of the kernels: its sizes, its launch plan, what has been decided for it, and how it launches a kernel."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache, wraps
from types import NoneType
from typing import Any, ParamSpec, TypeVar

import torch
import triton.language as tl

from gla_kernels.launching.device import Gpu, gpu_of, prime_below
from gla_kernels.launching.direct import Launcher, launcher
from gla_kernels.launching.plans import (
    EXACT_ROWS,
    LEAST_NARROW_PIECES,
    LaunchPlan,
    Operands,
    Tile,
    operands,
    parse_plan,
    plan,
    scan_tile,
    strong_shares,
)
from gla_kernels.limits import SHORT_TOKENS

# Calls whose decisions are remembered: at most this many different shapes.
_CALLS = 512
# With 4, checkpoints of heads of 64 x 64 are 3 % of all tensors of a call; shorter pieces cost more than they save.
_LEAST_CHUNKS_PER_CHECKPOINT = 4

_Result = TypeVar("_Result")
_Numbers = ParamSpec("_Numbers")

_TL_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def chunks_per_checkpoint(chunks: int) -> int:
    """Chunks from one checkpoint to the next in a sequence of `chunks` chunks, if states are not materialized.

    Checkpoints are kept, in float32; the states between two of them are recomputed into scratch, where one takes half
    as much memory. The sum of both is least near sqrt(2 * chunks). Of the powers of two around it, the larger one needs
    fewer launches.
    """
    for limit, checkpoint_chunks in ((32, 8), (128, 16), (512, 32)):
        if chunks <= limit:
            return checkpoint_chunks
    return 64


_OtherCall = TypeVar("_OtherCall", bound="Call")


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
    multiprocessors: int = Gpu().multiprocessors
    plan_is_given: bool = False  # by the caller, at least its chunk size
    head_gated: bool = False  # a gate per head and token; then `gated` is false

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
    def sums_dtype(self) -> torch.dtype:
        """The dtype of the sums of a gate per head.

        A decay is of the difference of two sums, which has the rounding of the larger one: with float32 and gates of
        -34, some 1e-5 of the decay.
        """
        return torch.float64 if self.dtype == torch.float32 else torch.float32

    @cached_property
    def chunks(self) -> int:
        """Chunks of the longest possible sequence: all T tokens."""
        return (self.T + self.plan.chunk_size - 1) // self.plan.chunk_size

    @property
    def is_short(self) -> bool:
        """Whether going token by token is faster than chunks, if nothing is kept for a backward."""
        return self.T <= SHORT_TOKENS and not self.plan_is_given

    @property
    def narrow_programs(self) -> int:
        """Programs of the Gluon kernels for narrow heads that run at once."""
        return 2 * self.multiprocessors

    @property
    def strong_programs(self) -> int:
        """Programs of the forward for chunks with strong gates."""
        return 2 * self.multiprocessors

    @property
    def strong_backward_programs(self) -> int:
        """Programs of the backward for chunks with strong gates.

        A prime number, because a program handles every so many items, of which each chunk has as many: with 264
        programs and three items per chunk, one would get the same part of every chunk.
        """
        return prime_below(2 * self.multiprocessors)

    @property
    def exact_programs(self) -> int:
        """Programs of the exact kernels: each fills a multiprocessor, and most find no work.

        A prime number, because flagged items are often evenly spaced (one head of every sequence).
        """
        return prime_below(self.multiprocessors)

    @cached_property
    def has_few_narrow_heads(self) -> bool:
        """Whether sequences that are long enough are cut into pieces, as `narrow/launches.py` does."""
        few = LEAST_NARROW_PIECES * self.sequences * self.H <= self.narrow_programs
        return self.plan.family == "hopper" and few

    @cached_property
    def checkpoint_chunks(self) -> int:
        """Chunks from one checkpoint to the next, for sequences of average length."""
        checkpoint_chunks = chunks_per_checkpoint(self.chunks // self.sequences if self.varlen else self.chunks)
        if self.has_few_narrow_heads:
            # A backward cuts sequences at their checkpoints, so these have to be enough for the GPU's programs.
            while (
                checkpoint_chunks > _LEAST_CHUNKS_PER_CHECKPOINT
                and self.slots(checkpoint_chunks) * self.H < self.narrow_programs * 3 // 4
            ):
                checkpoint_chunks //= 2
        return checkpoint_chunks

    def slots(self, chunks: int) -> int:
        """Slots of a buffer with one per piece of `chunks` chunks, in all sequences; see `tiles.first_slot`."""
        rows = chunks * self.plan.chunk_size
        return self.T // rows + self.sequences if self.varlen else self.sequences * ((self.T + rows - 1) // rows)

    def tile_of_scan(self, piece_chunks: int) -> Tile:
        """The tile of a scan over pieces of so many chunks: by how many of them a sequence of average length has."""
        return scan_tile(self.slots(piece_chunks) // self.sequences)

    def state_shape(self, slots: int) -> tuple[int, int, int, int]:
        return slots, self.H, self.K, self.V

    def kept_shape(self, materialize: bool) -> tuple[int, int, int, int]:
        """Shape of the states kept for the backward: before every chunk, or before every `checkpoint_chunks`-th."""
        return self.state_shape(self.slots(1 if materialize else self.checkpoint_chunks))

    def kept_dtype(self, materialize: bool) -> torch.dtype:
        return self.operands.dtype if materialize else torch.float32

    def parts(self, tile: Tile) -> int:
        """Number of blocks of value columns."""
        return (self.V + tile.block_v - 1) // tile.block_v

    def blocks(self, tile: Tile) -> int:
        """Number of blocks of key and value columns."""
        return -(-self.K // tile.block_k) * self.parts(tile)

    @cached_property
    def key_parts(self) -> int:
        """Partial sums of o and dv: a program of the portable plain form handles one block of key columns."""
        return -(-self.K // self.plan.forward.block_k) if self.plan.family == "triton" else 1

    @cached_property
    def value_parts(self) -> int:
        """Partial sums of dq, dk and dg: a program of its backward handles one block of value columns."""
        return self.parts(self.plan.backward) if self.plan.family == "triton" else 1

    @cached_property
    def gate_parts(self) -> int:
        """Partial sums of the gradient of a gate per head: a program handles one block of key columns.

        A portable one handles one of value columns, too.
        """
        if not self.head_gated:
            return 1
        return -(-self.K // self.plan.backward.block_k) * self.value_parts

    def new_states(self, like: torch.Tensor, count: int | None = None, zero: bool = False) -> torch.Tensor:
        """`count` float32 states (None: one per sequence) of every head on `like`'s device, zeros or uninitialised."""
        make = like.new_zeros if zero else like.new_empty
        return make(self.state_shape(self.sequences if count is None else count), dtype=torch.float32)

    @cached_property
    def numbers(self) -> dict[str, Any]:
        """Arguments that every kernel of the call takes, by name."""
        return {"scale": self.scale, "T": self.T, "H": self.H}

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
            "HEAD_GATED": self.head_gated,
            "VARLEN": self.varlen,
            "KEY_PARTS": self.key_parts,
            "VALUE_PARTS": self.value_parts,
            "SHARES": strong_shares(self.K),
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


def version_of(call: Call, kind: type[_OtherCall]) -> _OtherCall:
    """A call of a kind with other launches, with the same sizes and options."""
    return kind(**{each.name: getattr(call, each.name) for each in fields(call)})


def arranged(kernel: Any, values: dict[str, Any]) -> tuple[Any, ...]:
    """Arguments by name in the order of the kernel's parameters. Raises TypeError for a name that is none of them."""
    names = [name for name in kernel.arg_names if name in values]
    if len(names) != len(values):
        raise TypeError(f"{kernel}: no parameters {sorted(values.keys() - set(names))}")
    return tuple([values[name] for name in names])


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
    """The call for these tensors, whose values are not read; with the table's plan if none is given.

    g is [B, T, H, K] or, with a gate per head, [B, T, H].
    """
    shape, V = q.shape, v.shape[-1]
    sequences = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    B, T, H, K = shape
    # Head dims are fixed even in a trace with symbolic shapes, whose calls are not remembered.
    gates = None if g is None else g.dtype
    per_head = g is not None and g.dim() == 3
    details = B, T, H, int(K), int(V), sequences, gates, per_head, scale, q.dtype, chunk_size, plan_of_choice, q.device
    fixed = type(B) is type(T) is type(H) is int and type(sequences) in (int, NoneType) and type(scale) is float
    return _remembered_call(*details) if fixed else _call(*details)


def _call(
    B: int, T: int, H: int, K: int, V: int, sequences: int | None, gates: torch.dtype | None, per_head: bool,
    scale: float, dtype: torch.dtype, chunk_size: int | None, plan_of_choice: str | None, device: torch.device,
) -> Call:  # fmt: skip
    gated, packed = gates is not None and not per_head, sequences is not None
    choice = parse_plan(plan_of_choice) if plan_of_choice else plan(K, V, dtype, chunk_size, device, gated)
    return Call(
        B, T, H, K, V, B if sequences is None else sequences, packed, gated, scale, dtype, choice,
        gates == torch.bfloat16, gpu_of(device).multiprocessors,
        not (chunk_size is None and plan_of_choice is None), per_head,
    )  # fmt: skip


_remembered_call = lru_cache(_CALLS)(_call)
