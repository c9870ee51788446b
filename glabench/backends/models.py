"""Models, whose training steps are timed: those of `glabench.models`, with kernels of backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from glabench.backends.base import Counts
from glabench.backends.compiling import compiled
from glabench.backends.mixers import (
    GLA,
    KERNEL,
    LINEAR,
    MAMBA1,
    MAMBA2,
    RETNET,
    SIMPLE_GLA,
    TRANSFORMER,
    MixerModel,
)
from glabench.ops.base import BYTES, REFERENCE, torch_dtype
from glabench.sweeps.model import GPUS, PARALLEL, SEQUENCE, Cell, Parameters
from glabench.sweeps.parameters import Parameter, aliased, choices, count_or, extra
from glabench.sweeps.words import MATERIALIZE

if TYPE_CHECKING:
    from torch import Tensor

    from glabench.models import LanguageModel, ModelConfig

# GLA's own settings (final paper, section 5.2), but for the rate's course.
_RATE, _BETAS, _DECAY, _MOST_NORM = 3e-4, (0.9, 0.95), 0.01, 1.0

WEIGHTS = choices(
    "weights", "Type of the weights: fp32 with autocast to the dtype, or the dtype itself.", ("fp32", "pure"), "fp32"
)
COMPILE = extra("compile", "Whether torch.compile compiles the model.", "off", ("on",))
_PARAMETERS = (
    KERNEL,
    extra(PARALLEL, "How GPUs share a step: rows of a batch (DDP; FSDP2, which also shards weights, gradients and "
          "moments), or stretches of every sequence.", "ddp", ("fsdp", SEQUENCE), needs=GPUS),
    WEIGHTS,
    COMPILE,
    count_or("segments", "Segments that sequences are trained in, with states carried but no gradients.", "1"),
    extra("recompute", "Whether blocks are computed again in the backward (activation checkpointing).", "off", ("on",)),
)  # fmt: skip
_MATERIALIZE = aliased(
    "materialize", "What the forward of our kernels keeps for the backward.", ("states", "checkpoints", "nothing"),
    MATERIALIZE,
)  # fmt: skip


# Ops whose state is a matrix per head, which layers can begin with.
_CARRYING = frozenset({"gla", "linear", "simple-gla", "retention"})


def segments_of(cell: Cell) -> int:
    """How many segments a sequence is trained in."""
    return int(cell.get("segments") or 1)


class Model(MixerModel):
    """A language model; a call is a step of training on the tokens that its inputs then hold.

    Weights are drawn from the cell's seed. The optimizer is AdamW (fused on a GPU), gradients are clipped at 1. If GPUs
    share a step, each of their processes makes the same calls, its inputs are its own rows of the batch, or its own
    stretch of every sequence, and so is the loss; gradients are those of the whole batch.
    """

    op, work = "training", "training"
    parameters: ClassVar[tuple[Parameter, ...]] = _PARAMETERS

    def limits(self, cell: Cell) -> str | None:
        if cell.dtype == "fp16" and cell.get("weights") == "pure":
            return "AdamW's moments are too small for fp16; use --weights fp32 or --dtype bf16"
        if cell.get(PARALLEL) == SEQUENCE:
            return super().limits(cell) or self._refused_stretches(cell)
        if cell.batch % cell.gpus:
            return f"{cell.gpus} GPUs need a batch that is a multiple of {cell.gpus}; it is {cell.batch} (--batch)"
        return super().limits(cell) or (self._refused_segments(cell) if segments_of(cell) > 1 else None)

    def _refused_segments(self, cell: Cell) -> str | None:
        if cell.gpus > 1:
            return "segments are trained on one GPU; use --gpus 1 or --segments 1"
        if self.kind.op not in _CARRYING:
            return "carries no state from segment to segment; use --segments 1, or GLA's model or one of its kin"
        if cell.seqlen % segments_of(cell):
            return f"{cell.seqlen} tokens are not whole segments of one length; {segments_of(cell)} have to divide them"
        return self.without_states(self.kernel_of(cell))

    def _refused_stretches(self, cell: Cell) -> str | None:
        if cell.seqlen % cell.gpus:
            return f"{cell.seqlen} tokens are not {cell.gpus} stretches of one length; --gpus has to divide --seqlen"
        if segments_of(cell) > 1 or cell.get("compile"):
            return f"{SEQUENCE}s are shared without segments and torch's compiler; use --segments 1 --compile off"
        if self.kind.op in _CARRYING:
            return self.without_states(self.kernel_of(cell))
        if self.kind.op != "softmax":
            return f"has no --parallel {SEQUENCE}; use ddp or fsdp, or a model of attention, GLA or its kin"
        heads, step = self.config(cell).layer_sizes["heads"], self.step * cell.gpus
        if heads % cell.gpus:
            return f"{cell.gpus} GPUs cannot share {heads} heads; use a --width that is a multiple of {step}"
        return None

    def working_bytes(self, cell: Cell) -> int:
        """About: logits and their gradient, and per layer some numbers per channel, besides what the mixer keeps.

        Under autocast as h200-train-340m and h200-paper-fig6 have it of GLA, whose norms keep float32, too: 29, and 19
        if torch compiles the model.
        """
        d, layers, vocabulary = cell.sizes("model_width", "layers", "vocabulary")
        kept = 17
        if cell.get("recompute"):
            kept = 1
        elif self.casts(cell):
            kept = 19 if cell.get("compile") else 29
        return cell.tokens // cell.gpus // segments_of(cell) * (8 * vocabulary + kept * layers * d * BYTES[cell.dtype])

    def launch(self, inputs: Mapping[str, Tensor], cell: Cell) -> str:  # noqa: ARG002
        """The mixers' kernel, and the function that computes whole layers, if there is one."""
        name = self.kernel_of(cell)
        fused = None if name == REFERENCE else self.registry.fused_layer(name)
        return name if fused is None else f"{name}, layers by {getattr(fused, 'func', fused).__name__}"

    def config(self, cell: Cell) -> ModelConfig:
        """What the cell's model is made of. Raises UsageError for sizes that the mixer does not have."""
        from glabench.models import ModelConfig

        d, layers, vocabulary = cell.sizes("model_width", "layers", "vocabulary")
        options = {name: value for name in ("materialize",) if (value := cell.get(name)) is not None}
        return ModelConfig(self.kind.mixer, d, layers, vocabulary, self.kernel_of(cell), options=options)

    def build(self, cell: Cell) -> LanguageModel:
        """The cell's model, on its device."""
        import torch

        from glabench.models import LanguageModel

        torch.manual_seed(cell.seed)
        wanted = cell.dtype if cell.get("weights") == "pure" or cell.dtype == "fp64" else "fp32"
        with torch.device(cell.device):
            model = LanguageModel(self.config(cell), self.registry, recompute=bool(cell.get("recompute")))
        return model.to(torch_dtype(wanted))

    def loss_of(self, model: LanguageModel, cell: Cell) -> Callable[[Tensor, Tensor], Tensor]:
        """The model's loss as a function of tokens and targets; if GPUs share it, each holds its part from here on."""
        if cell.gpus == 1:
            return model.loss
        from glabench.models.parallel import loss_by_ddp, loss_by_fsdp, own_stretch

        if cell.get(PARALLEL) == "fsdp":
            return loss_by_fsdp(model, cell.gpus)
        return loss_by_ddp(model, own_stretch() if cell.get(PARALLEL) == SEQUENCE else None)

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor]:
        """A step of training; it returns the loss before the step."""
        import torch

        model = self.build(cell)
        loss_of = self.loss_of(model, cell)
        weights = list(model.parameters())
        on_gpu = cell.device == "cuda"
        optimizer = torch.optim.AdamW(weights, _RATE, _BETAS, weight_decay=_DECAY, fused=on_gpu)
        backward = self._bind_backward(model, loss_of, cell)

        def step() -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = backward(inputs)
            torch.nn.utils.clip_grad_norm_(weights, _MOST_NORM)
            optimizer.step()
            return loss

        return step

    def _bind_backward(
        self, model: LanguageModel, loss_of: Callable[[Tensor, Tensor], Tensor], cell: Cell
    ) -> Callable[[Mapping[str, Tensor]], Tensor]:
        """A function that adds the gradients of a batch's loss to the weights' own, and returns the loss."""
        import torch

        count, autocast = segments_of(cell), self.autocast(cell)
        chosen: Callable[[Any], Any] = compiled if cell.get("compile") else lambda function: function
        if count == 1:
            whole = chosen(loss_of)

            def backward(batch: Mapping[str, Tensor]) -> Tensor:
                with autocast:
                    loss: Tensor = whole(batch["tokens"], batch["targets"])
                loss.backward()  # type: ignore[no-untyped-call]
                return loss.detach()

            return backward
        of_segment = chosen(model.segment_loss)

        def backward_in_segments(batch: Mapping[str, Tensor]) -> Tensor:
            length, states, losses = cell.seqlen // count, None, []
            for start in range(0, cell.seqlen, length):
                tokens, targets = (batch[name][:, start : start + length] for name in ("tokens", "targets"))
                with autocast:
                    loss, states = of_segment(tokens, targets, states, start)
                # Before the next segment, so that no more than one is in memory.
                (loss / count).backward()
                losses.append(loss.detach())
            return torch.stack(losses).mean()

        return backward_in_segments

    def gradients(self, batch: Mapping[str, Tensor], cell: Cell) -> dict[str, Tensor]:
        """The gradients of all parameters of a new model, by name, for one batch; whole ones if GPUs share them."""
        import torch

        model = self.build(cell)
        loss_of = self.loss_of(model, cell)
        plain = replace(cell, parameters=Parameters({**cell.parameters, "compile": None}))
        self._bind_backward(model, loss_of, plain)(batch)
        found = {n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in model.named_parameters()}
        if cell.gpus == 1:
            return found
        from glabench.models.parallel import whole

        return {name: whole(x) for name, x in found.items()}

    def sent_bytes(self, cell: Cell) -> int | None:
        """Bytes that one GPU sends the others in a step for the mixers, by their sizes; None if no sequence is shared.

        If the state is a matrix, these are the state and its decay in the forward and the state's gradient in the
        backward, to each of the others. Of attention these are the other GPUs' heads of queries, keys, values and
        outputs, and of their gradients.
        """
        if cell.get(PARALLEL) != SEQUENCE or self.kind.op not in (*_CARRYING, "softmax"):
            return None
        config, n = self.config(cell), cell.gpus
        sizes = config.layer_sizes
        if self.kind.op == "softmax":
            forward = 4 * cell.tokens // n * sizes["heads"] * sizes["head_dim"] // n * BYTES[cell.dtype]
            backward = forward
        else:
            H, K, V = (sizes[name] for name in ("heads", "key_dim", "value_dim"))
            number = BYTES["fp64" if cell.dtype == "fp64" else "fp32"]
            backward = cell.batch * H * K * V * number
            forward = backward + cell.batch * H * (K if self.kind.op == "gla" else 1) * number
        forwards = 2 if cell.get("recompute") else 1
        return config.blocks * (n - 1) * (forwards * forward + backward)

    def executes(self, cell: Cell) -> Counts:
        """Three times the forward's operations: two per weight of a matrix and token, and the mixers' equations'."""
        import torch
        from torch import nn

        from glabench.models import LanguageModel

        registry, config = self.registry, self.config(cell)
        with torch.device("meta"):
            model = LanguageModel(config, registry)
        matrices = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
        mixer = registry.ops[config.kind.op].forward_flops(config.mixer_cell(cell))
        weights = sum(x.numel() for x in model.parameters())
        # AdamW reads a weight, its gradient and two moments, and writes all but the gradient, each of 4 bytes.
        return Counts(3 * (2 * matrices * cell.tokens + config.blocks * mixer), 28 * weights)


class PlainModel(Model):
    """A model with any mixer, by its row of `glabench.models.MIXERS`: what others are compared with."""

    name, title = "plain-model", "a language model"

    def __init__(self, like: MixerModel) -> None:
        self.kind, self.registry = like.kind, like.registry


class GlaModel(Model):
    """Gated linear attention."""

    name, title, kind = "gla-model", "GLA, a language model", GLA
    parameters = (*_PARAMETERS, _MATERIALIZE)


class LinearModel(Model):
    """GLA's model without gates."""

    name, title, kind = "linear-model", "linear attention, a language model", LINEAR
    parameters = (*_PARAMETERS, _MATERIALIZE)


class SimpleGlaModel(Model):
    """GLA's model with a gate per head."""

    name, title, kind = "simple-gla-model", "a scalar gate per head, a language model", SIMPLE_GLA
    parameters = (*_PARAMETERS, _MATERIALIZE)


class RetNetModel(Model):
    """RetNet with a SwiGLU, as in the final paper, section 5.2."""

    name, title, kind = "retnet-model", "RetNet, a language model", RETNET
    parameters = (*_PARAMETERS, _MATERIALIZE)


class TransformerModel(Model):
    """Transformer++ (final paper, section 5.2)."""

    name, title, kind = "transformer-model", "Transformer++, a language model", TRANSFORMER


class Mamba1Model(Model):
    """Mamba-1, whose blocks have no MLP."""

    name, title, kind = "mamba1-model", "Mamba-1, a language model", MAMBA1


class Mamba2Model(Model):
    """Mamba-2, whose blocks have no MLP."""

    name, title, kind = "mamba2-model", "Mamba-2, a language model", MAMBA2
