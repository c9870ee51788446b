"""Causal softmax attention of torch: the kernels of scaled_dot_product_attention, and flex_attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

from glabench.backends.base import COMPILER, Backend, Counts
from glabench.backends.compiling import compiled
from glabench.ops import BYTES, SOFTMAX
from glabench.ops.softmax import keys_of
from glabench.sweeps.model import Cell

if TYPE_CHECKING:
    from torch import Tensor

HALF = frozenset({"bf16", "fp16"})


def flash_limits(cell: Cell) -> str | None:
    """FlashAttention-2's limit on head dims, in torch and in flash-attn."""
    (D,) = cell.sizes("head_dim")
    return f"head dims go up to 256; got {D}" if D > 256 else None


def prefix_limits(cell: Cell, most: int | None = None) -> str | None:
    """What attention does not take beside a prefix: gradients, and more tokens than `most`."""
    if cell.get("prefix") is None:
        return None
    if cell.pass_ != "infer":
        return f"a prefix is for --pass infer; got {cell.pass_}"
    return f"takes {most} token after a prefix; got {cell.seqlen}" if most and cell.seqlen > most else None


class _Sdpa(Backend):
    """`torch.nn.functional.scaled_dot_product_attention`, restricted to one kernel."""

    op = "softmax"
    packages: ClassVar[tuple[str, ...]] = ("torch",)
    has_own_code = False
    features: ClassVar[frozenset[str]] = frozenset({"prefix"})
    kernel: ClassVar[str]

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor]:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        q, k, v = (inputs[name].transpose(1, 2) for name in ("q", "k", "v"))
        kernel = getattr(SDPBackend, self.kernel)
        # torch's mask begins at the first key, which is right without a prefix; a single token sees all keys.
        causal = cell.get("prefix") is None

        def forward() -> Tensor:
            with sdpa_kernel(kernel):
                return scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

        return forward


class SdpaFlash(_Sdpa):
    """torch's FlashAttention-2 kernel."""

    name = "sdpa-flash"
    title = "FlashAttention-2, built into torch"
    kernel = "FLASH_ATTENTION"

    def limits(self, cell: Cell) -> str | None:
        if cell.device == "cuda" and cell.dtype not in HALF:
            return f"dtype {cell.dtype} is not supported on a GPU; it takes bf16, fp16"
        return flash_limits(cell) or prefix_limits(cell, 1)


class SdpaCudnn(_Sdpa):
    """torch's cuDNN kernel."""

    name = "sdpa-cudnn"
    title = "cuDNN attention through torch"
    packages = ("torch", "nvidia-cudnn-cu13")
    kernel = "CUDNN_ATTENTION"
    devices = frozenset({"cuda"})
    dtypes = HALF

    def limits(self, cell: Cell) -> str | None:
        (D,) = cell.sizes("head_dim")
        if D > 128 and cell.has_backward:
            return f"head dims go up to 128 in backward; got {D}"
        return prefix_limits(cell, 1)


class SdpaMath(_Sdpa):
    """torch's unfused attention."""

    name = "sdpa-math"
    title = "attention as plain PyTorch products, O(T^2) memory"
    kernel = "MATH"

    def limits(self, cell: Cell) -> str | None:
        return prefix_limits(cell, 1)

    def working_bytes(self, cell: Cell) -> int:
        """The T x T scores, before and after softmax, and both again in the backward."""
        (H,) = cell.sizes("heads")
        scores = cell.batch * H * cell.seqlen * keys_of(cell) * max(4, BYTES[cell.dtype])
        return scores * (4 if cell.has_backward else 2)

    def executes(self, cell: Cell) -> Counts:
        """All pairs, masked ones included; the scores are written and read before and after the softmax."""
        (H, D), pairs = cell.sizes("heads", "head_dim"), cell.batch * cell.seqlen * keys_of(cell)
        backward = {"infer": 0, "fwd": 0, "bwd": 2, "fwd+bwd": 2}[cell.pass_]
        forward = 0 if cell.pass_ == "bwd" else 1
        scores = 4 * pairs * H * BYTES[cell.dtype]
        passes = forward + backward
        return Counts(passes * 4 * pairs * H * D, SOFTMAX.moved_bytes(cell) + passes * scores)


class Flex(Backend):
    """`torch.nn.attention.flex_attention` with a causal block mask, compiled by torch."""

    name, op, title = "flex", "softmax", "torch's flex_attention, compiled"
    packages: ClassVar[tuple[str, ...]] = ("torch", "triton")
    early_modules = COMPILER
    has_own_code = False
    devices = frozenset({"cuda"})
    dtypes = HALF

    def limits(self, cell: Cell) -> str | None:
        (D,) = cell.sizes("head_dim")
        return f"head dims are powers of two up to 256; got {D}" if D > 256 or D & (D - 1) else None

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
            return query >= key

        q, k, v = (inputs[name].transpose(1, 2) for name in ("q", "k", "v"))
        mask = create_block_mask(causal, None, None, cell.seqlen, cell.seqlen, device=q.device)
        attend = compiled(flex_attention, dynamic=False)
        return lambda: attend(q, k, v, block_mask=mask).transpose(1, 2)
