"""Values of Gluon kernels on a CPU: tensors that are tiles and numbers, and pointers to global memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch


def _to(x: torch.Tensor, dtype: Any, bitcast: bool = False) -> torch.Tensor:
    dtype = dtype.dtype if isinstance(dtype, Element) else dtype
    return x.view(dtype) if bitcast else _convert(x, dtype)


_convert = torch.Tensor.to


@contextlib.contextmanager
def tensors_as_in_kernels() -> Iterator[None]:
    """Inside, tensors are tiles and numbers: operators that Python runs in place give new tensors, as in a kernel.

    A class of its own would ask Python about every operation, which takes longer than most of them.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("add", "sub", "mul", "and"):
            patch.setattr(torch.Tensor, f"__i{name}__", getattr(torch.Tensor, f"__{name}__"))
        patch.setattr(torch.Tensor, "to", _to)
        patch.setattr(torch.Tensor, "type", SimpleNamespace(layout=None))
        # What an accumulator holds once its product is done.
        patch.setattr(torch.Tensor, "finished", None, raising=False)
        yield


class Element:
    """A dtype as Gluon shows it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.primitive_bitwidth = dtype, 8 * dtype.itemsize

    def __eq__(self, other: object) -> bool:
        return self.dtype == other

    def __hash__(self) -> int:
        return hash(self.dtype)


def value_of(x: Any) -> torch.Tensor:
    if isinstance(x, torch.Tensor):
        return x
    if isinstance(x, bool):
        return torch.tensor(x)
    if isinstance(x, int):
        return torch.tensor(x, dtype=torch.int32 if abs(x) < 2**31 else torch.int64)
    return torch.tensor(x, dtype=torch.float32)


@dataclass(frozen=True)
class Pointer:
    """Addresses in a tensor's memory, counted in elements."""

    memory: torch.Tensor
    offset: Any

    @classmethod
    def to(cls, x: torch.Tensor) -> Pointer:
        memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
        return cls(memory, x.storage_offset())

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=Element(self.memory.dtype))

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset + offset)

    def places(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Indices of the elements, 0 beside the mask, and the mask in their shape, None if it hides nothing.

        Raises IndexError.
        """
        at = torch.as_tensor(self.offset, dtype=torch.int64)
        there = None
        if mask is not None:
            at, there = torch.broadcast_tensors(at, torch.as_tensor(mask))
            there = None if there.all() else there
        if there is not None:
            at = torch.where(there, at, 0)
        least, most = (x.item() for x in torch.aminmax(at))
        if not (least >= 0 and most < len(self.memory)) and (there is None or there.any()):
            raise IndexError(f"elements {least} to {most} of {len(self.memory)}")
        return at, there

    def load(self, mask: Any, other: Any) -> torch.Tensor:
        at, there = self.places(mask)
        read = self.memory[at]
        return read if there is None else torch.where(there, read, other or 0)
