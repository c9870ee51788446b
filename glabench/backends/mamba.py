"""Mamba-1's selective scan, from the mamba-ssm package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from glabench.backends.base import Backend, Requirement
from glabench.sweeps.model import Cell

if TYPE_CHECKING:
    from torch import Tensor


class Mamba1(Backend):
    """`selective_scan_fn`. It takes the op's inputs as they are: u and delta [B, D, T], B and C [B, N, T]."""

    name, op, title = "mamba1", "mamba1", "Mamba-1 selective scan, the mamba-ssm package"
    requires = (Requirement("mamba_ssm", "pip install 'glabench[mamba]'"),)
    packages = ("mamba-ssm",)
    has_own_code = False
    devices = frozenset({"cuda"})
    dtypes = frozenset({"bf16", "fp16", "fp32"})

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
