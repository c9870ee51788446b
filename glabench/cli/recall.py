"""The command `glabench recall`: small models that learn to recall."""

from glabench.cli.measuring import measure
from glabench.cli.options import SweepOptions
from glabench.cli.speed import ResumedRun


def recall(options: SweepOptions, folder: ResumedRun = None) -> None:
    """Train small models to name values by their keys, and show how many they name (preset mqar-quick).

    Multi-query associative recall, as Arora et al. define it: what a mixer's state can hold. Every learning rate is a
    cell; of a model the best rate counts. `glabench run mqar-paper` has the paper's whole grid.

    Example: glabench recall --backend gla-recall,transformer-recall --width 64,128 --pairs 8 --seqlen 128
    """
    measure("mqar-quick", options, folder)
