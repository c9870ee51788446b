"""Causal softmax attention: the packages of FlashAttention."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from glabench.backends.base import Backend, Requirement
from glabench.backends.sdpa import HALF, flash_limits, prefix_limits
from glabench.sweeps.model import Cell

if TYPE_CHECKING:
    from torch import Tensor


class _FlashPackage(Backend):
    """A package with a function `flash_attn_func`."""

    op = "softmax"
    has_own_code = False
    devices = frozenset({"cuda"})
    dtypes = HALF
    # Their mask ends at the last key, so it is right with a prefix too.
    features = frozenset({"prefix"})

    @staticmethod
    @abstractmethod
    def function() -> Callable[..., Tensor | tuple[Tensor, ...]]:
        """The package's function, imported here."""

    def limits(self, cell: Cell) -> str | None:
        return flash_limits(cell) or prefix_limits(cell)

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor]:  # noqa: ARG002
        attend = self.function()

        def forward() -> Tensor:
            out = attend(inputs["q"], inputs["k"], inputs["v"], causal=True)
            # Some versions return the logarithms of the softmax's sums as well.
            return out[0] if isinstance(out, tuple) else out

        return forward


class FlashAttn(_FlashPackage):
    """FlashAttention-2: `flash_attn.flash_attn_func`."""

    name, title = "flash-attn", "FlashAttention-2, the flash-attn package"
    packages = ("flash-attn",)
    early_modules = ("torch._dynamo",)  # which calls of its custom operators load
    # FlashAttention-4 has the same import name.
    requires = (Requirement("flash_attn", "pip install 'glabench[flash-attn]'", "flash-attn"),)

    @staticmethod
    def function() -> Callable[..., Tensor | tuple[Tensor, ...]]:
        from flash_attn import flash_attn_func

        return flash_attn_func  # type: ignore[no-any-return]


class FlashAttnCache(_FlashPackage):
    """FlashAttention-2 for decoding: `flash_attn.flash_attn_with_kvcache`, on a cache that has the new keys already."""

    name, title = "flash-attn-kvcache", "FlashAttention-2 for decoding, the flash-attn package"
    packages = FlashAttn.packages
    early_modules = FlashAttn.early_modules
    requires = FlashAttn.requires

    @staticmethod
    def function() -> Callable[..., Tensor | tuple[Tensor, ...]]:
        from flash_attn import flash_attn_with_kvcache

        return flash_attn_with_kvcache  # type: ignore[no-any-return]

    def limits(self, cell: Cell) -> str | None:
        return super().limits(cell) if cell.get("prefix") else "is for tokens after a prefix: give --prefix"


class FlashAttn3(_FlashPackage):
    """FlashAttention-3, for Hopper: `flash_attn_interface.flash_attn_func`."""

    name, title = "flash-attn-3", "FlashAttention-3"
    packages = ("flash-attn-3",)
    requires = (Requirement("flash_attn_interface", "https://github.com/Dao-AILab/flash-attention, folder hopper"),)

    @staticmethod
    def function() -> Callable[..., Tensor | tuple[Tensor, ...]]:
        from flash_attn_interface import flash_attn_func

        return flash_attn_func  # type: ignore[no-any-return]


class FlashAttn4(_FlashPackage):
    """FlashAttention-4, in CuTe: `flash_attn.cute.flash_attn_func`."""

    name, title = "flash-attn-4", "FlashAttention-4, the flash-attn-4 package"
    packages = ("flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels")
    requires = (Requirement("flash_attn.cute", "pip install 'glabench[flash-attn-4]'", "flash-attn-4"),)

    @staticmethod
    def function() -> Callable[..., Tensor | tuple[Tensor, ...]]:
        from flash_attn.cute import flash_attn_func

        return flash_attn_func  # type: ignore[no-any-return]

    def limits(self, cell: Cell) -> str | None:
        (D,) = cell.sizes("head_dim")
        return f"head dims go up to 128; got {D}" if D > 128 else prefix_limits(cell)
