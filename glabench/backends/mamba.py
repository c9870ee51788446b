"""Mamba-1's selective scan, Mamba-2's chunked one, and the step of both for decoding, from the mamba-ssm package."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

from glabench.backends.base import Backend, Requirement
from glabench.backends.sdpa import prefix_limits
from glabench.ops.softmax import returns_states
from glabench.sweeps.model import Cell
from glabench.sweeps.parameters import integers

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# The chunk size of the package's Mamba-2 layer.
_CHUNK = 256


class _MambaSsm(Backend):
    requires = (Requirement("mamba_ssm", "pip install 'glabench[mamba]'"),)
    packages: ClassVar[tuple[str, ...]] = ("mamba-ssm",)
    # For a module of its models, which comes with it.
    early_modules = ("transformers.generation.utils",)
    has_own_code = False
    devices = frozenset({"cuda"})
    dtypes = frozenset({"bf16", "fp16", "fp32"})


class Mamba1(_MambaSsm):
    """`selective_scan_fn`. It takes the op's inputs as they are: u and delta [B, D, T], B and C [B, N, T]."""

    name, op, title = "mamba1", "mamba1", "Mamba-1 selective scan, the mamba-ssm package"
    features = frozenset({"state"})

    def limits(self, cell: Cell) -> str | None:
        (N,) = cell.sizes("state_size")
        if N > 256:
            return f"the state size goes up to 256; got {N}"
        if cell.get("state") in ("in", "both") and cell.seqlen > 1:
            return "starts without states; use --state out"
        if cell.get("state") is not None and cell.pass_ != "infer":
            return f"final states have no gradients; use --pass infer, not {cell.pass_}"
        return None

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor | tuple[Tensor, ...]]:
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

        options = {"return_last_state": True} if returns_states(cell) else {}

        def forward() -> Tensor | tuple[Tensor, ...]:
            x = inputs
            return selective_scan_fn(  # type: ignore[no-any-return]
                x["u"], x["delta"], x["A"], x["B"], x["C"], x["D"], delta_softplus=True, **options
            )

        return forward

    def bind_step(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor]:
        return Mamba1Step().bind_step(inputs, cell)

    def fused_layer(self) -> Callable[..., Tensor] | None:
        """`mamba_inner_fn`, which needs causal-conv1d and computes much of its forward again in the backward."""
        if find_spec("causal_conv1d") is None:
            return None
        from mamba_ssm.ops.selective_scan_interface import mamba_inner_fn

        return mamba_inner_fn  # type: ignore[no-any-return]


class Mamba2(_MambaSsm):
    """`mamba_chunk_scan_combined`, with one group of B and C. It takes chunks of any power of two; its own is 256."""

    name, op, title = "mamba2", "mamba2", "Mamba-2 chunked scan, the mamba-ssm package"
    packages = ("mamba-ssm", "triton")
    features = frozenset({"state"})
    parameters = (integers("chunk", "Chunk length C, or auto.", auto=True),)

    def working_bytes(self, cell: Cell) -> int:
        """States of every chunk and their gradients in float32, and the scores of every chunk."""
        H, P, N = cell.sizes("heads", "head_dim", "state_size")
        C = cell.get("chunk") or _CHUNK
        chunks = -(-cell.seqlen // C)
        return cell.batch * chunks * (2 * H * P * N * 4 + C * C * 4)

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor | tuple[Tensor, ...]]:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        x, chunk = inputs, cell.get("chunk") or _CHUNK
        B, C = x["B"][:, :, None], x["C"][:, :, None]
        options: dict[str, object] = {"initial_states": x["initial"]} if "initial" in x else {}
        if returns_states(cell):
            options["return_final_states"] = True

        def forward() -> Tensor | tuple[Tensor, ...]:
            return mamba_chunk_scan_combined(  # type: ignore[no-any-return]
                x["x"], x["delta"], x["A"], B, C, chunk, D=x["D"], dt_softplus=True, **options
            )

        return forward

    def bind_step(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor]:
        return Mamba2Step().bind_step(inputs, cell)

    def fused_layer(self) -> Callable[..., Tensor] | None:
        """`mamba_split_conv1d_scan_combined` with the package's chunk; as that of Mamba-1."""
        if find_spec("causal_conv1d") is None:
            return None
        from mamba_ssm.ops.triton.ssd_combined import mamba_split_conv1d_scan_combined

        return partial(mamba_split_conv1d_scan_combined, chunk_size=_CHUNK)


@cache
def _zero(device: torch.device) -> Tensor:
    """A step's bias, which the package does not do without. Kept, so that no step of a model fills it again."""
    import torch

    return torch.zeros(1, device=device)


class _MambaStep(_MambaSsm):
    """`selective_state_update`: one token after a prefix. It updates the state in place, so a copy goes before it."""

    packages = ("mamba-ssm", "triton")
    features = frozenset({"prefix"})

    def limits(self, cell: Cell) -> str | None:
        if cell.get("prefix") is None:
            return "is a step after a prefix: give --prefix"
        return prefix_limits(cell, 1)

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], tuple[Tensor, ...]]:  # noqa: ARG002
        update = self.bind_update(inputs)

        def forward() -> tuple[Tensor, ...]:
            state = inputs["initial"].clone()
            return update(state), state

        return forward

    def bind_step(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor]:  # noqa: ARG002
        return partial(self.bind_update(inputs), inputs["initial"])

    def bind_update(self, inputs: Mapping[str, Tensor]) -> Callable[[Tensor], Tensor]:
        """A function that moves states on in place and returns the output."""
        from mamba_ssm.ops.triton.selective_state_update import selective_state_update

        arguments, shape = self.arguments(inputs), self.token(inputs).shape
        bias = _zero(inputs["D"].device).expand(arguments["D"].shape)

        def update(state: Tensor) -> Tensor:
            out: Tensor = selective_state_update(state, **arguments, dt_bias=bias, dt_softplus=True)
            return out.view(shape)

        return update

    @abstractmethod
    def arguments(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Views of the inputs, without time, by the names of the function's arguments."""

    @staticmethod
    @abstractmethod
    def token(inputs: Mapping[str, Tensor]) -> Tensor:
        """The input that has the output's shape."""


class Mamba1Step(_MambaStep):
    """With channels [B, D] and states [B, D, N]."""

    name, op, title = "mamba1-step", "mamba1", "Mamba-1, a step of the mamba-ssm package and a copy of the state"

    def arguments(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        u, delta, B, C = (inputs[name][..., 0] for name in ("u", "delta", "B", "C"))
        return {"x": u, "dt": delta, "A": inputs["A"], "B": B, "C": C, "D": inputs["D"]}

    @staticmethod
    def token(inputs: Mapping[str, Tensor]) -> Tensor:
        return inputs["u"]


class Mamba2Step(_MambaStep):
    """With heads [B, H, P] and states [B, H, P, N]; numbers of a head have strides of 0, which the kernel sees."""

    name, op, title = "mamba2-step", "mamba2", "Mamba-2, a step of the mamba-ssm package and a copy of the state"

    def arguments(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        x, delta, B, C = (inputs[name][:, 0] for name in ("x", "delta", "B", "C"))
        heads = x.shape[1:]
        return {
            "x": x,
            "dt": delta[..., None].expand(x.shape),
            "A": inputs["A"][:, None, None].expand(*heads, B.shape[-1]),
            "B": B[:, None],
            "C": C[:, None],
            "D": inputs["D"][:, None].expand(heads),
        }

    @staticmethod
    def token(inputs: Mapping[str, Tensor]) -> Tensor:
        return inputs["x"]
