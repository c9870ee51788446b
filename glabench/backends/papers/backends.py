"""Backends of the systems in Triton: two levels of chunks, stored states, five steps, all pairs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

from glabench.backends.base import FORWARDS, Backend, Counts, Part, Requirement
from glabench.backends.gla import CHUNK, KEPT, NO_CHECKPOINTS
from glabench.backends.papers import MOST_COLUMNS, MOST_ROWS, rows_of_blocks, state_columns, value_columns
from glabench.ops import BYTES, GLA, GLA_BOTH, LINEAR
from glabench.ops.base import wide
from glabench.sweeps.model import Cell
from glabench.sweeps.parameters import Parameter, integers

if TYPE_CHECKING:
    from torch import Tensor

_TRITON = (Requirement("triton", "pip install triton"),)
_POWERS = (16, 32, 64, 128, 256)


class _InTriton(Backend):
    """What systems in Triton share."""

    requires = _TRITON
    packages = ("triton",)
    devices = frozenset({"cuda"})
    dtypes = frozenset({"bf16", "fp16", "fp32"})


class LinearParallelTriton(_InTriton):
    """`parallel.parallel_linear`."""

    name, op = "linear-parallel-triton", "linear"
    title = "linear attention, all pairs of tokens without scores in memory, in Triton"

    def limits(self, cell: Cell) -> str | None:
        K, V = cell.sizes("key_dim", "value_dim")
        if any(D not in _POWERS for D in (K, V)):
            return f"head dims are powers of two from 16 to 256; got K={K} V={V}"
        return f"whole blocks of 16 tokens only; got {cell.seqlen}" if cell.seqlen % 16 else None

    def executes(self, cell: Cell) -> Counts:
        """Pairs of blocks up to the diagonal: two products forward, six backward. What is read again is in L2."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        pairs = cell.batch * H * cell.seqlen * (cell.seqlen + self._rows(cell)) // 2
        flops = (FORWARDS[cell.pass_] + cell.has_backward) * 2 * pairs * (K + V)  # the backward scores again
        return Counts(flops, LINEAR.moved_bytes(cell), flops if cell.dtype == "fp32" else 0)

    @staticmethod
    def _rows(cell: Cell) -> int:
        """Tokens of a block; tiles of wide heads in float32 have no room for 64."""
        is_large = cell.dtype == "fp32" and max(cell.sizes("key_dim", "value_dim")) > 128
        return 16 if cell.seqlen % 64 or is_large else 64

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor]:
        from glabench.backends.papers.parallel import parallel_linear

        q, k, v = (inputs[name] for name in ("q", "k", "v"))
        return lambda: parallel_linear(q, k, v, self._rows(cell))


def _keeps_nothing(cell: Cell) -> bool:
    return bool(cell.get("materialize") == "nothing")


class _TwoLevel(_InTriton):
    """The states of all chunks in memory, or none: `one_pass.one_pass_gla`. The paper's chunks have 64 tokens."""

    parameters: ClassVar[tuple[Parameter, ...]] = (CHUNK, KEPT)
    has_parts = True

    def limits(self, cell: Cell) -> str | None:
        K, V = cell.sizes("key_dim", "value_dim")
        C, c = self.chunks(cell)
        if cell.get("materialize") == "checkpoints":
            return NO_CHECKPOINTS
        if _keeps_nothing(cell) and K > 128:
            return f"K is at most 128 if nothing is kept; got K={K}"
        if any(D not in _POWERS for D in (K, V)):
            return f"head dims are powers of two from 16 to 256; got K={K} V={V}"
        if C not in _POWERS or c not in _POWERS or c > C:
            return f"chunks and subchunks are powers of two from 16 to 256; got {C} and {c}"
        return f"whole chunks of {C} tokens only; got {cell.seqlen}" if cell.seqlen % C else None

    def chunks(self, cell: Cell) -> tuple[int, int]:
        """Tokens of a chunk and of a subchunk. Short sequences are one chunk."""
        C = cell.get("chunk") or max(16, min(64, cell.seqlen))
        return C, cell.get("subchunk") or min(C, 16)

    def working_bytes(self, cell: Cell) -> int:
        """States and their gradients, or shares of dq and dk."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        if _keeps_nothing(cell):
            return cell.tokens * H * self._shares(cell) if cell.has_backward else 0
        return (1 + cell.has_backward) * cell.tokens * H * K * V * BYTES[cell.dtype] // self.chunks(cell)[0]

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor]:
        from glabench.backends.papers.one_pass import one_pass_gla

        q, k, v = (inputs[name] for name in ("q", "k", "v"))
        C, c = self.chunks(cell)
        if _keeps_nothing(cell):
            return lambda: one_pass_gla(q, k, v, inputs.get("g"), C, c)
        return self._with_states(inputs, C, c)

    def launch(self, inputs: Mapping[str, Tensor], cell: Cell) -> str:  # noqa: ARG002
        """Tokens of a chunk C and, with gates, of a subchunk c."""
        C, c = self.chunks(cell)
        return f"C={C} c={c}" if self.op == "gla" else f"C={C}"

    def executes(self, cell: Cell) -> Counts:
        return self._executes_anew(cell) if _keeps_nothing(cell) else self._executes_with_states(cell)

    def parts(self, inputs: Mapping[str, Tensor], cell: Cell) -> Mapping[str, Part]:
        """Of a forward that keeps states: within chunks, across them, and what else it has. Both write an o."""
        if cell.has_backward or _keeps_nothing(cell):
            return {}
        return self._parts_with_states({name: x.detach() for name, x in inputs.items()}, cell)

    @abstractmethod
    def _with_states(self, inputs: Mapping[str, Tensor], C: int, c: int) -> Callable[[], Tensor]:
        """The call that keeps states."""

    @abstractmethod
    def _executes_with_states(self, cell: Cell) -> Counts:
        """`executes` if states are kept."""

    @abstractmethod
    def _parts_with_states(self, inputs: Mapping[str, Tensor], cell: Cell) -> Mapping[str, Part]:
        """`parts` if states are kept."""

    def _rows(self, cell: Cell) -> int:
        """The rows that a program has of scores if nothing is kept."""
        C, c = self.chunks(cell)
        return c if self.op == "gla" else min(C, MOST_ROWS)

    def _programs(self, cell: Cell, backward: bool) -> int:
        """Programs that share a head if nothing is kept."""
        K, V = cell.sizes("key_dim", "value_dim")
        return V // value_columns(K, V, backward and self.op == "gla")

    def _shares(self, cell: Cell) -> int:
        """Bytes of a token's shares of dq and dk if nothing is kept; none if one program has all, without gates."""
        programs = self._programs(cell, backward=True)
        (K,) = cell.sizes("key_dim")
        return 0 if programs == 1 and self.op == "linear" else programs * 2 * K * 4

    def _executes_anew(self, cell: Cell) -> Counts:
        """As `executes` if nothing is kept: the backward computes states and scores again, and each program scores."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        (C, _), own = self.chunks(cell), self._rows(cell)
        first, second = (self._programs(cell, backward) for backward in (False, True))
        op, of_values = GLA if self.op == "gla" else LINEAR, (C + own) * V
        of_keys = (C - own) * K + (4 if self.op == "gla" else 2) * own * K
        forward, backward = 4 * K * V + of_values + first * of_keys, 10 * K * V + 3 * (of_values + second * of_keys)
        forwards, backwards = int(cell.pass_ != "bwd"), int(cell.has_backward)
        flops = forwards * forward + backwards * backward
        own_scores = (forwards * first + 3 * backwards * second) * 4 * own * K if self.op == "gla" else 0
        scalar = flops if cell.dtype == "fp32" else own_scores
        shares = backwards * 2 * self._shares(cell)  # written and read
        tokens = cell.tokens * H
        return Counts(tokens * flops, op.moved_bytes(cell) + tokens * shares, tokens * scalar)


class GlaTwoLevel(_TwoLevel):
    """Final paper, Algorithms 3 and 4 with the subchunks of section 4.3; 5 and 6 if nothing is kept.

    With states it is `two_level.two_level_gla`, in which scores go through memory, too.
    """

    name, op, title = (
        "gla-two-level",
        "gla",
        "GLA as in the paper: two levels of chunks, states first or none kept, in Triton",
    )
    parameters: ClassVar[tuple[Parameter, ...]] = (
        CHUNK,
        integers("subchunk", "Subchunk length c, or auto.", auto=True),
        KEPT,
    )
    # Whether dg is the printed sum to the end of the sequence.
    over_sequence: ClassVar[bool] = False

    def working_bytes(self, cell: Cell) -> int:
        """Besides, two sums of gates, scores and their gradients; or one sum, if nothing is kept."""
        H, K = cell.sizes("heads", "key_dim")
        of_gates, C = K * BYTES[wide(cell)], self.chunks(cell)[0]
        scores = (1 + cell.has_backward) * C * BYTES[cell.dtype]
        held = of_gates if _keeps_nothing(cell) else 2 * of_gates + scores
        return super().working_bytes(cell) + cell.tokens * H * held

    def _executes_with_states(self, cell: Cell) -> Counts:
        """States, scores and outputs as products, with those of whole blocks; scores within a subchunk one by one."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        (C, c), tokens = self.chunks(cell), FORWARDS[cell.pass_] * cell.tokens * H
        per_token = 4 * K * V + self._pairs(cell)
        moved = (2 * K * V / C + self._score_columns(cell)) * BYTES[cell.dtype]
        scalar = per_token if cell.dtype == "fp32" else 4 * c * K
        return Counts(tokens * per_token, int(GLA.moved_bytes(cell) + tokens * moved), tokens * scalar)

    def _with_states(self, inputs: Mapping[str, Tensor], C: int, c: int) -> Callable[[], Tensor]:
        from glabench.backends.papers.two_level import two_level_gla

        q, k, v, g = (inputs[name] for name in ("q", "k", "v", "g"))
        return lambda: two_level_gla(q, k, v, g, C, c, self.over_sequence)

    def _parts_with_states(self, inputs: Mapping[str, Tensor], cell: Cell) -> Mapping[str, Part]:
        """Besides, the sums of gates."""
        from glabench.backends.papers.two_level import across_chunks, chunk_sums, within_chunks

        q, k, v, g = (inputs[name] for name in ("q", "k", "v", "g"))
        C, c = self.chunks(cell)
        b = chunk_sums(g, C)
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        size, of_gates, tokens = BYTES[cell.dtype], BYTES[wide(cell)] * K, cell.tokens * H
        tensors = 2 * (K + V) * size + of_gates
        within = Counts(tokens * self._pairs(cell), int(tokens * (tensors + self._score_columns(cell) * size)))
        across = Counts(tokens * 4 * K * V, int(tokens * (tensors + of_gates + 2 * K * V / C * size)))
        return {
            "within chunks": Part(lambda: within_chunks(q, k, v, b, C, c), within),
            "across chunks": Part(lambda: across_chunks(q, k, v, b, C, c), across),
            "sums of gates": Part(lambda: chunk_sums(g, C), Counts(tokens * K, 2 * tokens * of_gates)),
        }

    def _pairs(self, cell: Cell) -> int:
        """Operations per token of scores and of their products with values."""
        K, V = cell.sizes("key_dim", "value_dim")
        C, c = self.chunks(cell)
        return (C + min(C, MOST_ROWS)) * V + (C - c) * K + 4 * c * K

    def _score_columns(self, cell: Cell) -> float:
        """Scores that a token's row has written, and read again: blocks up to the diagonal, on average."""
        C, c = self.chunks(cell)
        return (C + c) / 2 + (C + min(C, MOST_ROWS)) / 2


class GlaClosedForm(GlaTwoLevel):
    """With states, and the gates' gradient summed over the sequence, as printed: right for short ones alone in bf16."""

    name, title = (
        "gla-closed-form",
        "GLA, two levels of chunks, the gates' gradient summed over the sequence, in Triton",
    )
    parameters = (CHUNK,)
    over_sequence = True


class GlaStoredStates(_InTriton):
    """`stored_states.stored_states_gla`."""

    name, op, title = "gla-stored-states", "gla", "GLA token by token with all states in memory, in Triton (Mao 2022)"

    def limits(self, cell: Cell) -> str | None:
        K, V = cell.sizes("key_dim", "value_dim")
        if K not in _POWERS or V % 16:
            return f"K is a power of two from 16 to 256, V a multiple of 16; got K={K} V={V}"
        return None

    def working_bytes(self, cell: Cell) -> int:
        """The states of all tokens, and for each of several blocks of value columns parts of dq, dk and dg.

        As many blocks as on an H100.
        """
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        parts = V // state_columns(K, V, cell.batch * H)
        return cell.tokens * H * 4 * (K * V + (3 * K * parts if cell.has_backward and parts > 1 else 0))

    def executes(self, cell: Cell) -> Counts:
        """As the equation; the forward writes all states, and the backward reads them."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        states = {"infer": 1, "fwd": 1, "bwd": 1, "fwd+bwd": 2}[cell.pass_] * cell.tokens * H * K * V * 4
        flops = GLA.flops(cell)
        return Counts(flops, GLA.moved_bytes(cell) + states, flops)

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor]:  # noqa: ARG002
        from glabench.backends.papers.stored_states import stored_states_gla

        q, k, v, g = (inputs[name] for name in ("q", "k", "v", "g"))
        return lambda: stored_states_gla(q, k, v, g, inputs.get("gv"))


class GlaBothStoredStates(GlaStoredStates):
    """`stored_states.stored_states_gla` with gates of values too, as in version 3's Table 3."""

    name, op = "gla-both-stored-states", "gla-both"
    title = "gates of keys and values, token by token with all states in memory, in Triton"

    def executes(self, cell: Cell) -> Counts:
        """As with gates of keys, plus KV per token and head for the second decay."""
        counts = super().executes(cell)
        flops = GLA_BOTH.flops(cell)
        return Counts(flops, counts.bytes + GLA_BOTH.moved_bytes(cell) - GLA.moved_bytes(cell), flops)


class GlaFiveStep(_InTriton):
    """`five_step.five_step_gla`."""

    name, op, title = "gla-five-step", "gla", "GLA in five steps with chunks of 16, in Triton, without gradients"

    def limits(self, cell: Cell) -> str | None:
        K, V = cell.sizes("key_dim", "value_dim")
        if cell.pass_ != "infer":
            return f"has no backward: --pass infer; got {cell.pass_}"
        if any(size < 16 or size & (size - 1) for size in (K, V)):
            return f"head dims are powers of two of at least 16; got K={K} V={V}"
        return f"whole chunks of 16 tokens only; got {cell.seqlen}" if cell.seqlen % 16 else None

    def working_bytes(self, cell: Cell) -> int:
        """Sums of gates, scaled q and k, parts of o and scores; some of them twice when they are added up."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        blocks = max(1, K // 64)
        return cell.tokens * H * (K * (4 + 2 * BYTES[cell.dtype]) + (blocks + 2) * (V + 16) * 4)

    def executes(self, cell: Cell) -> Counts:
        """Products with the state, scores within chunks channel by channel (a difference, an exponential, two more)."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        blocks = max(1, K // 64)
        work = 4 * K * V + 16 * (5 * K + 2 * V)
        moved = K * (2 * 4 * 2 + 4 * BYTES[cell.dtype]) + blocks * (V + 16) * 4 * 2
        tokens = cell.tokens * H
        scalar = work if cell.dtype == "fp32" else 16 * 5 * K
        return Counts(tokens * work, GLA.moved_bytes(cell) + tokens * moved, tokens * scalar)

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor]:  # noqa: ARG002
        from glabench.backends.papers.five_step import five_step_gla

        return lambda: five_step_gla(*(inputs[name] for name in ("q", "k", "v", "g")))


class LinearTwoPass(_TwoLevel):
    """Final paper, Algorithms 1 and 2, with materialization or without: FlashLinearAttention."""

    name, op, title = (
        "linear-two-pass",
        "linear",
        "linear attention as in the paper: states first or none kept, in Triton",
    )

    def _executes_with_states(self, cell: Cell) -> Counts:
        """Products with those of whole blocks; each program computes the scores that it needs itself."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        (C, _), rows = self.chunks(cell), self._rows_of_blocks(cell)
        of_values, of_keys = (-(-D // MOST_COLUMNS) for D in (V, K))
        scored = (C + rows) * (V + of_values * K)
        forward, backward = 4 * K * V + scored, 8 * K * V + scored + 2 * (C + rows) * K + of_keys * 2 * C * V
        forwards, backwards = int(cell.pass_ != "bwd"), int(cell.has_backward)
        tokens = cell.tokens * H
        flops = tokens * (forwards * forward + backwards * backward)
        states = tokens * (2 * forwards + 3 * backwards) * K * V * BYTES[cell.dtype] // C
        return Counts(flops, LINEAR.moved_bytes(cell) + states, flops if cell.dtype == "fp32" else 0)

    def _rows_of_blocks(self, cell: Cell) -> int:
        return rows_of_blocks(self.chunks(cell)[0], cell.dtype == "fp32")

    def _with_states(self, inputs: Mapping[str, Tensor], C: int, c: int) -> Callable[[], Tensor]:  # noqa: ARG002
        from glabench.backends.papers.two_pass import two_pass_linear

        q, k, v = (inputs[name] for name in ("q", "k", "v"))
        return lambda: two_pass_linear(q, k, v, C)

    def _parts_with_states(self, inputs: Mapping[str, Tensor], cell: Cell) -> Mapping[str, Part]:
        from glabench.backends.papers.two_pass import across_chunks, within_chunks

        q, k, v = (inputs[name] for name in ("q", "k", "v"))
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        C, size, tokens = self.chunks(cell)[0], BYTES[cell.dtype], cell.tokens * H
        pairs = (C + self._rows_of_blocks(cell)) * (V + -(-V // MOST_COLUMNS) * K)
        within = Counts(tokens * pairs, tokens * 2 * (K + V) * size)
        across = Counts(tokens * 4 * K * V, int(tokens * (2 * (K + V) + 2 * K * V / C) * size))
        return {
            "within chunks": Part(lambda: within_chunks(q, k, v, C), within),
            "across chunks": Part(lambda: across_chunks(q, k, v, C), across),
        }
