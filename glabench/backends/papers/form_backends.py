"""Backends of the forms in `forms.py` and `two_gates.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

from glabench.backends.base import FORWARDS, Backend, Counts
from glabench.backends.papers import TARGETS
from glabench.backends.torch_forms import TwoLevels, chunk_of, padded_tokens, with_freed
from glabench.ops import BYTES, GLA, LINEAR
from glabench.ops.base import wide
from glabench.sweeps.model import Cell

if TYPE_CHECKING:
    from torch import Tensor


class _Form(Backend):
    """A function of `forms.py`."""

    packages = ("torch",)
    function: ClassVar[str]
    # Whether the backward computes the forward again.
    recomputes: ClassVar[bool] = False

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor]:  # noqa: ARG002
        from glabench.backends.papers import forms

        function = getattr(forms, self.function)
        tensors = [inputs[name] for name in ("q", "k", "v", "g") if name in inputs]
        return lambda: function(*tensors)

    def passes(self, cell: Cell) -> int:
        """How often a cell's pass does as much as a forward."""
        return FORWARDS[cell.pass_] + (self.recomputes and cell.has_backward)


class LinearParallelTorch(_Form):
    """`forms.parallel_linear`."""

    name, op, title = "linear-parallel-torch", "linear", "linear attention, all pairs of tokens in PyTorch"
    function = "parallel_linear"

    def working_bytes(self, cell: Cell) -> int:
        """The scores, unmasked and masked, and both again in the backward."""
        (H,) = cell.sizes("heads")
        return cell.batch * H * cell.seqlen**2 * BYTES[cell.dtype] * (4 if cell.has_backward else 2)

    def executes(self, cell: Cell) -> Counts:
        """All pairs, those above the diagonal included; scores are written and read, and so is their masked copy."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        pairs, passes = cell.batch * H * cell.seqlen**2, self.passes(cell)
        flops, moved = passes * 2 * pairs * (K + V), LINEAR.moved_bytes(cell) + passes * 4 * pairs * BYTES[cell.dtype]
        return Counts(flops, moved, flops if cell.dtype == "fp32" else 0)


class GlaParallelNaive(_Form):
    """`forms.naive_parallel_gla`."""

    name, op, title = "gla-parallel-naive", "gla", "GLA, all pairs as (Q B)(K / B)^T in PyTorch, unstable"
    function = "naive_parallel_gla"

    def working_bytes(self, cell: Cell) -> int:
        """The scores as in `linear-parallel-torch`, and six copies of the rows."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        numbers = cell.seqlen**2 * (4 if cell.has_backward else 2) + 6 * cell.seqlen * (K + V)
        return cell.batch * H * numbers * BYTES[wide(cell)]

    def executes(self, cell: Cell) -> Counts:
        """As `linear-parallel-torch`, in float32."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        pairs, passes = cell.batch * H * cell.seqlen**2, self.passes(cell)
        flops, moved = passes * 2 * pairs * (K + V), GLA.moved_bytes(cell) + passes * 4 * pairs * BYTES[wide(cell)]
        return Counts(flops, moved, flops)


class GlaParallelTorch(_Form):
    """`forms.parallel_gla`."""

    name, op, title = "gla-parallel-torch", "gla", "GLA, all pairs in log space in PyTorch"
    function = "parallel_gla"
    recomputes = True

    def working_bytes(self, cell: Cell) -> int:
        """Exponents of some targets in float64, a few copies of them, and copies of the rows for each group of them."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        groups = math.ceil(cell.seqlen / TARGETS) if cell.has_backward else 1
        numbers = TARGETS * cell.seqlen * K * (8 if cell.has_backward else 4) + 4 * cell.seqlen * (K + V)
        kept = groups * cell.seqlen * (K + V) // 2
        return cell.batch * H * (numbers * 8 + kept * BYTES[wide(cell)])

    def executes(self, cell: Cell) -> Counts:
        """Pairs up to the diagonal in groups of targets: a difference, an exponential's factor, two products, a sum."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        pairs, passes = cell.batch * H * cell.seqlen * (cell.seqlen + 1) // 2, self.passes(cell)
        moved = passes * pairs * K * (2 * 8 + 2 * BYTES[wide(cell)])
        flops = passes * pairs * (4 * K + 2 * V)
        return Counts(flops, GLA.moved_bytes(cell) + moved, flops)


class GlaScanTorch(_Form):
    """`forms.scan_gla`."""

    name, op, title = "gla-scan-torch", "gla", "GLA, a parallel scan over all tokens in PyTorch"
    function = "scan_gla"

    def working_bytes(self, cell: Cell) -> int:
        """The states of all tokens: three copies, and for autograd two per step of the scan."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        copies = 3 + (2 * self._steps(cell) if cell.pass_ != "infer" else 0)
        return copies * cell.tokens * H * K * V * BYTES[wide(cell)]

    def executes(self, cell: Cell) -> Counts:
        """A product and a sum per number of the states and step; each step reads and writes all states twice."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        numbers, passes = cell.tokens * H * K * V, self.passes(cell)
        steps = self._steps(cell)
        flops, moved = passes * numbers * (3 + 2 * steps), passes * numbers * (2 + 5 * steps) * BYTES[wide(cell)]
        return Counts(flops, GLA.moved_bytes(cell) + moved, flops)

    @staticmethod
    def _steps(cell: Cell) -> int:
        return max(0, math.ceil(math.log2(cell.seqlen)))


class GlaBothTorch(TwoLevels):
    """`two_gates.two_gates_gla`."""

    name, op, title = "gla-both-torch", "gla-both", "gates of keys and values, two-level chunks in PyTorch"

    def working_bytes(self, cell: Cell) -> int:
        """Several tensors of [T, 16, K] or [T, 16, V] per head, copies of the rows and the states of all chunks.

        For gradients those of K and of V are alive together.
        """
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        C = chunk_of(cell)
        rows, pairs = 8 + C // 16, 4 * 16 * max(K, V)
        if cell.pass_ != "infer":
            rows, pairs = rows + 2, 16 * (2 * (K + V) + 3 * max(K, V))
        numbers = pairs + rows * (K + V) + 4 * K * V // C
        return with_freed(cell, padded_tokens(cell, C) * H * numbers * BYTES[wide(cell)])

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor]:
        from glabench.backends.papers.two_gates import two_gates_gla

        q, k, v, gv = (inputs[name] for name in ("q", "k", "v", "gv"))
        g = inputs["g"] if "g" in inputs else q.new_zeros(q.shape)
        C = chunk_of(cell)
        return lambda: two_gates_gla(q, k, v, g, gv, C)


class GlaValuesTorch(GlaBothTorch):
    """The same with gates of values alone: those of keys are zeros."""

    name, op, title = "gla-values-torch", "gla-values", "gates of values alone, two-level chunks in PyTorch"
