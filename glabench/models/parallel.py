"""Models on several GPUs, each of which takes some rows of a batch: by DDP, or by FSDP2, which shards weights, too.

Processes have joined torch's default group before. Shares are equally large, so that the means over the ranks of losses
and gradients are those of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from glabench.models.model import LanguageModel, mean_loss

Loss = Callable[[Tensor, Tensor], Tensor]


def loss_by_ddp(model: LanguageModel) -> Loss:
    """The loss of this rank's tokens and targets, whose backward gives the gradients' means over all ranks."""
    shared = DistributedDataParallel(model, gradient_as_bucket_view=True)  # without it, gradients would be held twice
    return lambda tokens, targets: mean_loss(shared(tokens), targets)


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
