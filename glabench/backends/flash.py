"""Causal softmax attention: the kernels of torch's scaled_dot_product_attention, and the flash-attn package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

from glabench.backends.base import Backend, Counts, Requirement
from glabench.ops import BYTES, SOFTMAX
from glabench.sweeps.model import Cell

if TYPE_CHECKING:
    from torch import Tensor

_HALF = frozenset({"bf16", "fp16"})


def _flash_limits(cell: Cell) -> str | None:
    """FlashAttention-2's limit on head dims, in torch and in flash-attn."""
    (D,) = cell.sizes("head_dim")
    return f"head dims go up to 256; got {D}" if D > 256 else None


class _Sdpa(Backend):
    """`torch.nn.functional.scaled_dot_product_attention`, restricted to one kernel."""

    op = "softmax"
    packages: ClassVar[tuple[str, ...]] = ("torch",)
    has_own_code = False
    kernel: ClassVar[str]

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor]:  # noqa: ARG002
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        q, k, v = (inputs[name].transpose(1, 2) for name in ("q", "k", "v"))
        kernel = getattr(SDPBackend, self.kernel)

        def forward() -> Tensor:
            with sdpa_kernel(kernel):
                return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

        return forward


class SdpaFlash(_Sdpa):
    """torch's FlashAttention-2 kernel."""

    name = "sdpa-flash"
    title = "FlashAttention-2, built into torch"
    kernel = "FLASH_ATTENTION"

    def limits(self, cell: Cell) -> str | None:
        if cell.device == "cuda" and cell.dtype not in _HALF:
            return f"dtype {cell.dtype} is not supported on a GPU; it takes bf16, fp16"
        return _flash_limits(cell)


class SdpaCudnn(_Sdpa):
    """torch's cuDNN kernel."""

    name = "sdpa-cudnn"
    title = "cuDNN attention through torch"
    packages = ("torch", "nvidia-cudnn-cu13")
    kernel = "CUDNN_ATTENTION"
    devices = frozenset({"cuda"})
    dtypes = _HALF

    def limits(self, cell: Cell) -> str | None:
        (D,) = cell.sizes("head_dim")
        return f"head dims go up to 128 in backward; got {D}" if D > 128 and cell.has_backward else None


class SdpaMath(_Sdpa):
    """torch's unfused attention."""

    name = "sdpa-math"
    title = "attention as plain PyTorch products, O(T^2) memory"
    kernel = "MATH"

    def working_bytes(self, cell: Cell) -> int:
        """The T x T scores, before and after softmax, and both again in the backward."""
        (H,) = cell.sizes("heads")
        scores = cell.batch * H * cell.seqlen**2 * max(4, BYTES[cell.dtype])
        return scores * (4 if cell.has_backward else 2)

    def executes(self, cell: Cell) -> Counts:
        """All pairs, masked ones included; the scores are written and read before and after the softmax."""
        (H, D), pairs = cell.sizes("heads", "head_dim"), cell.batch * cell.seqlen**2
        backward = {"infer": 0, "fwd": 0, "bwd": 2, "fwd+bwd": 2}[cell.pass_]
        forward = 0 if cell.pass_ == "bwd" else 1
        scores = 4 * pairs * H * BYTES[cell.dtype]
        passes = forward + backward
        return Counts(passes * 4 * pairs * H * D, SOFTMAX.moved_bytes(cell) + passes * scores)


class FlashAttn(Backend):
    """`flash_attn.flash_attn_func`."""

    name, op, title = "flash-attn", "softmax", "FlashAttention-2, the flash-attn package"
    requires = (Requirement("flash_attn", "pip install 'glabench[flash-attn]'"),)
    packages = ("flash-attn",)
    has_own_code = False
    devices = frozenset({"cuda"})
    dtypes = _HALF

    def limits(self, cell: Cell) -> str | None:
        return _flash_limits(cell)

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor]:  # noqa: ARG002
        from flash_attn import flash_attn_func

        def forward() -> Tensor:
            return flash_attn_func(inputs["q"], inputs["k"], inputs["v"], causal=True)  # type: ignore[no-any-return]

        return forward
