"""The command `glabench train`: steps of training whole models."""

from glabench.cli.measuring import measure
from glabench.cli.options import SweepOptions
from glabench.cli.speed import ResumedRun


def train(options: SweepOptions, folder: ResumedRun = None) -> None:
    """Measure steps of training language models: GLA, its kin, Transformer++, Mamba (preset train-340m).

    A step is a forward, a backward, clipping and AdamW. Tables show tokens per second, the share of a large product's
    speed at which a step's operations run, the share of the mixers' kernels in it, and memory with weights, gradients
    and optimizer. --kernel names the backend that computes the mixers, --gpus how many GPUs share a step, --parallel
    how they do. `glabench run paper-fig6` measures 1.3B models.

    Example: glabench train --backend gla-model --kernel gla-triton,fla-gla --seqlen 2k --batch 8
    """
    measure("train-340m", options, folder, op="training")
