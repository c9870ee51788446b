"""The command `glabench recall`: small models that learn to recall."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count, islice
from pathlib import Path

from glabench.cli.measuring import measure
from glabench.cli.options import SweepOptions
from glabench.cli.output import Messages
from glabench.cli.speed import ResumedRun
from glabench.records import Run
from glabench.report.rates import RATE, Learner, learners_of
from glabench.scheduling.runs import Request
from glabench.sweeps import Sweep, Variant
from glabench.sweeps.load import dump_sweep

# The file in a run folder that repeats the best learning rates, and how many other seeds it has.
_BEST, _MORE_SEEDS = "best.toml", 2


def recall(options: SweepOptions, folder: ResumedRun = None) -> None:
    """Train small models to name values by their keys, and show how many they name (preset mqar-quick).

    Multi-query associative recall, as Arora et al. define it: what a mixer's state can hold. Every learning rate is a
    cell; of a model the best rate counts. The run folder then has a sweep that repeats the best rates with two more
    seeds: `glabench run RUN/best.toml`. `glabench run mqar-paper` has the paper's whole grid.

    Example: glabench recall --backend gla-recall,transformer-recall --width 64,128 --pairs 8 --seqlen 128
    """
    measure("mqar-quick", options, folder, then=name_best, op="recall", command="recall")


def name_best(run: Run, request: Request, messages: Messages) -> tuple[Run, bool]:  # noqa: ARG001
    """Writes the sweep of the best rates, if several were tried. Returns the run, and that this worked."""
    learners = learners_of([run])
    if learners and len({record.cell.get(RATE) for record in run.records}) > 1:
        path = Path(run.path, _BEST)
        known = {record.cell.seed for record in run.records}
        seeds = ",".join(map(str, islice((seed for seed in count(1) if seed not in known), _MORE_SEEDS)))
        path.write_text(dump_sweep(_again(run.sweep, learners, seeds)), encoding="utf-8")
        messages.say(f"the best rates with seeds {seeds}: glabench run {path}")
    return run, True


def _again(sweep: Sweep, learners: Sequence[Learner], seeds: str) -> Sweep:
    """Every model with its best rate and these seeds."""
    variants = [
        Variant(
            each.cell.backend,
            {"seqlen": str(each.cell.seqlen), "batch": str(each.cell.batch), "dtype": each.cell.dtype}
            | {name: str(value) for name, value in each.cell.parameters.items()}
            | {"rate": str(each.best)},
        )
        for each in learners
    ]
    title = f"{sweep.title}: the best rates with other seeds"
    backends = {each.backend for each in variants}
    against = sweep.against if sweep.against in backends else None
    axes = {"pass": "fwd+bwd", "seed": seeds}
    return replace(sweep, title=title, axes=axes, variants=tuple(variants), against=against, on_cpu={})
