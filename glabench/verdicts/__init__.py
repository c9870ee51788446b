"""Verdicts: the engine of `compare` and `check`, which compares two sets of rounds. It measures nothing."""

from glabench.verdicts.baseline import Baseline
from glabench.verdicts.comparison import Comparison
from glabench.verdicts.engine import CONFIRMING_ROUNDS, SAME_WITHIN, Side, compare_sides
from glabench.verdicts.findings import FAILING, Finding, Limits, Verdict

__all__ = [
    "CONFIRMING_ROUNDS", "FAILING", "SAME_WITHIN", "Baseline", "Comparison", "Finding", "Limits", "Side", "Verdict",
    "compare_sides",
]  # fmt: skip
