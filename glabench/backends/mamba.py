"""Mamba-1's selective scan and Mamba-2's chunked one, from the mamba-ssm package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

from glabench.backends.base import Backend, Requirement
from glabench.sweeps.model import Cell
from glabench.sweeps.parameters import integers

if TYPE_CHECKING:
    from torch import Tensor

# The chunk size of the package's Mamba-2 layer.
_CHUNK = 256


class _MambaSsm(Backend):
    requires = (Requirement("mamba_ssm", "pip install 'glabench[mamba]'"),)
    packages: ClassVar[tuple[str, ...]] = ("mamba-ssm",)
    has_own_code = False
    devices = frozenset({"cuda"})
    dtypes = frozenset({"bf16", "fp16", "fp32"})


class Mamba1(_MambaSsm):
    """`selective_scan_fn`. It takes the op's inputs as they are: u and delta [B, D, T], B and C [B, N, T]."""

    name, op, title = "mamba1", "mamba1", "Mamba-1 selective scan, the mamba-ssm package"

    def limits(self, cell: Cell) -> str | None:
        (N,) = cell.sizes("state_size")
        return f"the state size goes up to 256; got {N}" if N > 256 else None

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor]:  # noqa: ARG002
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

        def forward() -> Tensor:
            x = inputs
            return selective_scan_fn(  # type: ignore[no-any-return]
                x["u"], x["delta"], x["A"], x["B"], x["C"], x["D"], delta_softplus=True
            )

        return forward


class Mamba2(_MambaSsm):
    """`mamba_chunk_scan_combined`, with one group of B and C. It takes chunks of any power of two; its own is 256."""

    name, op, title = "mamba2", "mamba2", "Mamba-2 chunked scan, the mamba-ssm package"
    packages = ("mamba-ssm", "triton")
    parameters = (integers("chunk", "Chunk length C, or auto.", auto=True),)

    def working_bytes(self, cell: Cell) -> int:
        """States of every chunk and their gradients in float32, and the scores of every chunk."""
        H, P, N = cell.sizes("heads", "head_dim", "state_size")
        C = cell.get("chunk") or _CHUNK
        chunks = -(-cell.seqlen // C)
        return cell.batch * chunks * (2 * H * P * N * 4 + C * C * 4)

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor]:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        x, chunk = inputs, cell.get("chunk") or _CHUNK
        B, C = x["B"][:, :, None], x["C"][:, :, None]

        def forward() -> Tensor:
            return mamba_chunk_scan_combined(  # type: ignore[no-any-return]
                x["x"], x["delta"], x["A"], B, C, chunk, D=x["D"], dt_softplus=True
            )

        return forward
