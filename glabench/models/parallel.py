"""Models on several GPUs: each takes some rows of a batch, or a stretch of every sequence.

Weights are all there (DDP), or, with rows of a batch, sharded, too (FSDP2).

Processes have joined torch's default group before. Shares are equally large, so that the means over the ranks of losses
and gradients are those of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from glabench.models.model import LanguageModel, mean_loss
from glabench.models.sequence import Stretch

Loss = Callable[[Tensor, Tensor], Tensor]


def loss_by_ddp(model: LanguageModel, stretch: Stretch | None = None) -> Loss:
    """The loss of this rank's tokens and targets, whose backward gives the gradients' means over all ranks.

    The tokens are rows of the batch, or this rank's stretch of every sequence.
    """
    shared = DistributedDataParallel(model, gradient_as_bucket_view=True)  # without it, gradients would be held twice
    return lambda tokens, targets: mean_loss(shared(tokens, stretch=stretch), targets)


def own_stretch() -> Stretch:
    """This rank's stretch of every sequence."""
    return Stretch(distributed.get_rank(), distributed.get_world_size())


def loss_by_fsdp(model: LanguageModel, gpus: int) -> Loss:
    """As `loss_by_ddp`; from here on, each rank holds a part of every weight, and so of gradients and moments.

    Blocks gather their weights in the weights' own type, so that a step's numbers are those of one GPU.
    """
    mesh = init_device_mesh(next(model.parameters()).device.type, (gpus,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    return model.loss


def whole(x: Tensor) -> Tensor:
    """A tensor of which this rank may hold a part, with all parts. All ranks have to ask for it."""
    return x.full_tensor() if isinstance(x, DTensor) else x
