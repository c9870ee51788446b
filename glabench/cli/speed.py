"""`glabench speed`: the main job with sensible defaults."""

from glabench.cli.measuring import find_place, measure
from glabench.cli.options import SweepOptions, with_options
from glabench.cli.output import Messages
from glabench.sweeps import load_sweep


@with_options
def speed(options: SweepOptions) -> None:
    """Time and memory against sequence length: the paper's sweep on a GPU, a small one on a CPU.

    On an NVIDIA GPU this is the preset paper-fig2 (1k..16k, batch 32, 16 heads, head dim 64, bf16); without one it
    is the preset cpu-smoke. Every axis can be changed.
    """
    place = find_place(options.device, options.plugin)
    sweep = load_sweep("paper-fig2" if place.device == "cuda" else "cpu-smoke")
    if place.device == "cpu":
        messages = Messages(options.quiet)
        messages.say("No NVIDIA GPU is used: this is the small CPU sweep. Left out:")
        for name, backend in place.registry.items():
            reason = backend.unavailable("cpu")
            if reason is not None:
                messages.say(f"  {name}: {reason}")
        messages.say("  the paper's sizes (batch 32, 16 heads, up to 16k tokens, bf16): minutes to hours on a CPU")
    measure(sweep, options, place)
