"""A forward and a backward with gates of keys and of values: what is allocated, and the kernels in order."""

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
import triton.language as tl

from gla_kernels.launching.buffers import named_strides
from gla_kernels.launching.plans import Tile, operands
from gla_kernels.limits import padded
from gla_kernels.value_gated.chunks import value_gated_chunks
from gla_kernels.value_gated.states import value_gated_states

# Tokens per chunk. With 64 rows and four warps, products would be Hopper's `wgmma`, and ptxas 12.8 gives those of so
# large a kernel wrong descriptors (kernels/NOTES.md, "Faults of the compiler").
CHUNK = 32
_WARPS = 4
_STAGES = 3
_COLUMNS = 64
_DOT = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@cache
def value_gated_tile(K: int, V: int, dtype: torch.dtype) -> Tile:
    """Key and value columns of a program: 32 of float32 operands (`dtype`), which take twice the memory."""
    most = _COLUMNS if dtype == torch.bfloat16 else _COLUMNS // 2
    return Tile(min(padded(K), most), min(padded(V), most), _WARPS, _STAGES)


@cache
def value_gated_chunks_tile(K: int, V: int, dtype: torch.dtype) -> Tile:
    """The tile of `value_gated_chunks`.

    Of float32 operands ptxas 12.8 keeps all but 32 registers per thread on the stack, unless it is told to take 255.
    """
    tile = value_gated_tile(K, V, dtype)
    return tile if dtype == torch.bfloat16 else replace(tile, registers=255)


class Tensors(NamedTuple):
    """The tensors of a call: q, k, g [B, T, H, K], v, gv [B, T, H, V], cu_seqlens [N + 1]; g, cu_seqlens or None.

    All but the last have a contiguous last dimension.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor | None
    gv: torch.Tensor
    cu_seqlens: torch.Tensor | None

    @property
    def sequences(self) -> int:
        """N: rows of the batch or, if packed, sequences."""
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def slots(self) -> int:
        """Slots of a buffer with one per chunk, in all sequences; see `tiles.first_slot`."""
        T = self.q.shape[1]
        return self.sequences * -(-T // CHUNK) if self.cu_seqlens is None else T // CHUNK + self.sequences


@dataclass(frozen=True)
class ValueGated:
    """One call."""

    tensors: Tensors
    scale: float

    @cached_property
    def _tile(self) -> Tile:
        return value_gated_tile(self.tensors.q.shape[3], self.tensors.v.shape[3], self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of operands, and of states that are kept."""
        return operands(self.tensors.q.dtype).dtype

    @cached_property
    def _common(self) -> dict[str, Any]:
        x = self.tensors
        return {
            "cu_seqlens": x.cu_seqlens, "T": x.q.shape[1], "H": x.q.shape[2], "C": CHUNK,
            "DOT": _DOT[self.dtype], "PRECISION": operands(x.q.dtype).precision,
            "VARLEN": x.cu_seqlens is not None, "num_stages": self._tile.stages,
        }  # fmt: skip

    def new_states(self, dtype: torch.dtype, count: int | None = None) -> torch.Tensor:
        """`count` states of every head (None: one per sequence), uninitialised."""
        x = self.tensors
        return x.q.new_empty((x.sequences if count is None else count, *x.q.shape[2:], x.v.shape[3]), dtype=dtype)

    def walk(
        self, x: torch.Tensor, y: torch.Tensor, start: torch.Tensor | None, *, reverse: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """States before every chunk and after the last one, from k and v; in reverse their gradients, from q and do."""
        t = self.tensors
        states, end = self.new_states(self.dtype, t.slots), self.new_states(torch.float32)
        start = torch.zeros_like(end) if start is None else start
        K, V, BK, BV = t.q.shape[3], t.v.shape[3], self._tile.block_k, self._tile.block_v
        programs = t.sequences * t.q.shape[2] * -(-K // BK) * -(-V // BV)
        value_gated_states[(programs,)](
            x=x, y=y, g=t.g, gv=t.gv, initial=start, end=end, states=states, scale=self.scale if reverse else 1.0,
            **named_strides(x=x, y=y, g=t.g, gv=t.gv), K=K, V=V, BK=BK, BV=BV, REVERSE=reverse,
            KEYS_GATED=t.g is not None, **self._common, **self._tile.options,
        )  # fmt: skip
        return states, end

    def _chunks(self, keys: bool, **tensors: torch.Tensor | None) -> None:
        """Launches `value_gated_chunks`, whose tensors these are; `keys`: its own columns are keys."""
        t = self.tensors
        sizes, columns = (t.v.shape[3], t.q.shape[3]), (self._tile.block_v, self._tile.block_k)
        (D, E), (BD, BE) = (sizes[::-1], columns[::-1]) if keys else (sizes, columns)
        inputs = ("late", "early", "gates", "other_late", "other_early", "other_gates")
        programs = t.slots * t.q.shape[2] * -(-D // BD)
        strong = t.q.new_empty(programs, dtype=torch.int32)
        options = value_gated_chunks_tile(t.q.shape[3], t.v.shape[3], self.dtype).options
        for framed in (True, False):
            value_gated_chunks[(programs,)](
                **tensors, **named_strides(**{name: tensors[name] for name in inputs}), strong=strong,
                late_scale=self.scale if keys else 1.0, other_scale=1.0 if keys else self.scale, N=t.sequences,
                D=D, E=E, BD=BD, BE=BE, KEYS=keys, OWN_GATED=tensors["gates"] is not None,
                OTHER_GATED=tensors["other_gates"] is not None, FORWARD=tensors["dstates"] is None, FRAMED=framed,
                **self._common, **options,
            )  # fmt: skip

    def forward(self, initial: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """o, the final states, and the states before every chunk."""
        t = self.tensors
        states, final = self.walk(t.k, t.v, initial, reverse=False)
        o = self._new_like(t.v)
        self._chunks(
            False, late=None, early=t.v, gates=t.gv, other_late=t.q, other_early=t.k, other_gates=t.g,
            states=states, dstates=None, late_out=o, early_out=None, gates_out=None,
        )  # fmt: skip
        return o, final, states

    def backward(
        self, do: torch.Tensor, dfinal: torch.Tensor | None, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """dq, dk, dv, dg (empty without g), dgv and the gradient of the initial states."""
        t = self.tensors
        dstates, dinitial = self.walk(t.q, do, dfinal, reverse=True)
        dq, dk, dv, dgv = (self._new_like(x) for x in (t.q, t.k, t.v, t.gv))
        dg = t.q.new_empty(0, dtype=torch.float32) if t.g is None else self._new_like(t.g)
        kept = {"states": states, "dstates": dstates}
        self._chunks(
            False, late=do, early=t.v, gates=t.gv, other_late=t.q, other_early=t.k, other_gates=t.g,
            late_out=None, early_out=dv, gates_out=dgv, **kept,
        )  # fmt: skip
        self._chunks(
            True, late=t.q, early=t.k, gates=t.g, other_late=do, other_early=t.v, other_gates=t.gv,
            late_out=dq, early_out=dk, gates_out=dg, **kept,
        )  # fmt: skip
        return dq, dk, dv, dg, dgv, dinitial

    def _new_like(self, x: torch.Tensor) -> torch.Tensor:
        """An output like x: of packed sequences zeros, because no kernel writes what is behind the last one."""
        make = torch.empty_like if self.tensors.cu_seqlens is None else torch.zeros_like
        return make(x, memory_format=torch.contiguous_format)
