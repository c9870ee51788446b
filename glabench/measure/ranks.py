"""Ranks: the processes that take a step together, one per GPU, and what they have to agree on.

All of them measure the same cell by the same code. Whatever decides how many steps are taken has to be the same in all,
or one would wait for the others for ever: so it comes from numbers that all ranks know.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """This process's number among `size`, from 0. Alone, it says everything itself and waits for nobody.

    Every method but `share` has to be called by all ranks, in the same order.
    """

    rank: int = 0
    size: int = 1

    def gather(self, x: float) -> list[float]:
        """What each rank says, in the order of their numbers; it waits for all of them, but not for their GPUs."""
        if self.size == 1:
            return [x]
        import torch
        from torch import distributed

        own = torch.tensor([x], dtype=torch.float64)  # on the host, so that it does not wait for kernels
        said = [torch.empty_like(own) for _ in range(self.size)]
        distributed.all_gather(said, own)
        return [float(y) for y in said]

    def wait(self) -> None:
        """Waits until all ranks are here."""
        self.gather(0.0)

    def first(self, x: float) -> float:
        """What rank 0 says."""
        return self.gather(x)[0]

    def most(self, x: float) -> float:
        """The largest of all; infinite if one is no number."""
        return max(math.inf if math.isnan(y) else y for y in self.gather(x))

    def mean(self, x: float) -> float:
        """The mean of all."""
        return sum(self.gather(x)) / self.size

    def share(self, batch: Mapping[str, Tensor], dim: int = 0) -> dict[str, Tensor]:
        """This rank's part of tensors of which `size` divides a dimension: rows of a batch, or tokens (1)."""
        return {name: x.chunk(self.size, dim)[self.rank].contiguous() for name, x in batch.items()}


ALONE = Ranks()


def known_ranks(size: int) -> Ranks:
    """This process among the `size` that torchrun has started; alone if that is 1."""
    return ALONE if size == 1 else Ranks(int(os.environ["RANK"]), size)


def join_ranks(ranks: Ranks, device: str, timeout_s: float) -> None:
    """Joins the other ranks, by NCCL between GPUs and by gloo between hosts' memory.

    Selects the GPU that is as many after the first one, `device`, as the rank's number.
    """
    import torch
    from torch import distributed

    if device != "cpu":
        torch.cuda.set_device(torch.device(device).index + ranks.rank)
        torch.cuda.init()  # type: ignore[no-untyped-call]  # or a mesh of devices would select a GPU by itself
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    distributed.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
