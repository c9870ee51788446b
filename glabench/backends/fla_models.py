"""fla's own language models, whose training steps are timed beside ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from glabench.backends.base import Requirement
from glabench.backends.mixers import GLA
from glabench.backends.models import COMPILE, WEIGHTS, Model
from glabench.sweeps.model import Cell
from glabench.sweeps.parameters import Parameter

if TYPE_CHECKING:
    from torch import Tensor

    from glabench.models.fla import FlaLanguageModel


class FlaGlaModel(Model):
    """`fla.models.GLAForCausalLM` with its fused norms, MLPs and loss. Its weights are those of `gla-model`."""

    name, title = "fla-gla-model", "GLA, fla's own language model"
    kind = replace(GLA, kernels={"cuda": "fla-gla"})
    requires = (
        Requirement("fla", "pip install 'glabench[fla-models]'", "flash-linear-attention"),
        Requirement("transformers", "pip install 'glabench[fla-models]'"),
    )
    packages: ClassVar[tuple[str, ...]] = ("torch", "triton", "fla-core", "flash-linear-attention", "transformers")
    has_own_code = False
    devices: ClassVar[frozenset[str]] = frozenset({"cuda"})
    parameters: ClassVar[tuple[Parameter, ...]] = (WEIGHTS, COMPILE)

    def limits(self, cell: Cell) -> str | None:
        if cell.gpus > 1:
            return "is measured on one GPU; use --gpus 1"
        return super().limits(cell)

    def build(self, cell: Cell) -> FlaLanguageModel:  # type: ignore[override]  # a model that has a loss, too
        """Their model with the weights of ours, on the cell's device."""
        from glabench.models.fla import FlaLanguageModel

        ours = super().build(cell)
        dtype = next(ours.parameters()).dtype
        return FlaLanguageModel(ours).to(cell.device, dtype)

    def gradients(self, batch: Mapping[str, Tensor], cell: Cell) -> dict[str, Tensor]:
        """As those of our model, by our names."""
        import torch

        model = self.build(cell)
        with self.autocast(cell):
            loss = model.loss(batch["tokens"], batch["targets"])
        loss.backward()  # type: ignore[no-untyped-call]
        return {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in model.named.items()}
