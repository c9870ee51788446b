"""The command `glabench decode`: models that generate token by token."""

from glabench.cli.measuring import measure
from glabench.cli.options import SweepOptions
from glabench.cli.speed import ResumedRun


def decode(options: SweepOptions, folder: ResumedRun = None) -> None:
    """Measure decoding by language models: a prefill, then one token per sequence at a time (preset decode-340m).

    The time is that of a step, from a CUDA graph on a GPU (--graphs off: from Python). Tables also show the prefill,
    the tokens per second, and the bytes that a sequence needs and that are there for it: states, or keys and values.

    Example: glabench decode --backend gla-decode,transformer-decode --prefix 1k,64k --batch 1
    """
    measure("decode-340m", options, folder, op="decode")
