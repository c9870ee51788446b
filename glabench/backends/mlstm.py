"""The mLSTM's kernels, from the mlstm-kernels package (Tiled Flash Linear Attention)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from glabench.backends.base import COMPILER, Backend, Requirement
from glabench.ops.base import torch_dtype
from glabench.sweeps.model import Cell
from glabench.sweeps.parameters import integers

if TYPE_CHECKING:
    from torch import Tensor

# The package's default.
_CHUNK = 128


class MlstmKernels(Backend):
    """`mlstm_siging_chunkwise__xl_chunk`, without its normalizer; chunks may be longer than what one program holds."""

    name, op, title = "mlstm-kernels", "mlstm", "mLSTM with sigmoid gates, the mlstm-kernels package"
    requires = (Requirement("mlstm_kernels", "pip install 'glabench[mlstm]'"),)
    packages = ("mlstm-kernels", "triton")
    early_modules = COMPILER
    has_own_code = False
    devices = frozenset({"cuda"})
    dtypes = frozenset({"bf16", "fp16", "fp32"})
    parameters = (integers("chunk", "Chunk length C, or auto.", auto=True),)

    def limits(self, cell: Cell) -> str | None:
        chunk = cell.get("chunk") or min(_CHUNK, cell.seqlen)
        return f"whole chunks of {chunk} tokens only; got {cell.seqlen}" if cell.seqlen % chunk else None

    def working_bytes(self, cell: Cell) -> int:
        """States of every chunk and their gradients in float32."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        return cell.batch * H * (2 * cell.seqlen // (cell.get("chunk") or _CHUNK) + 2) * K * V * 4

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor]:
        from mlstm_kernels.torch.chunkwise.triton_xl_chunk_siging import mlstm_siging_chunkwise__xl_chunk

        tensors = [inputs[name] for name in ("q", "k", "v", "i", "f")]
        chunk, dtype = cell.get("chunk") or min(_CHUNK, cell.seqlen), torch_dtype(cell.dtype)

        def forward() -> Tensor:
            return mlstm_siging_chunkwise__xl_chunk(  # type: ignore[no-any-return]
                *tensors, normalize=False, chunk_size=chunk, autocast_kernel_dtype=dtype
            )

        return forward
