"""What `check` says of rounds of one code against itself, in turns, and of the same with times that are 5 % longer.

    glabench check --rev HEAD --sweep trial --check small --time-limit 0.2 --no-energy --out runs/trial
    python tests/gpu/trial_of_check.py runs/trial OUT

Writes the check's own report (check.md, check.json), the verdicts' counts (trial.md), and the median of every round
(rounds.csv). If the second look was cut short, only cells with all of its rounds count in it.
"""

import json
import sys
from collections import Counter
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from unittest.mock import patch

import pandas as pd

from glabench.records.metrics import METRICS
from glabench.report.verdicts import markdown
from glabench.scheduling.folders import turns_in
from glabench.verdicts import CONFIRMING_ROUNDS, Limits, Side, compare_sides, statistics
from glabench.verdicts.engine import by_cell

LIMITS = Limits({metric.name: metric.limit for metric in METRICS if metric.limit is not None})
SLOWER = 1.05
WORDS = ("same", "not slower", "faster", "unclear", "slower")


def load(path):
    """Both sides of a check's folder."""
    folders = {side: turns_in(path, side) for side in ("base", "new")}
    return [Side(side, [run.records() for run in runs], runs[0].environment()) for side, runs in folders.items()]


def slowed(side):
    """A side whose calls all take 5 % longer."""

    def slow(record):
        return replace(record, time_ms=record.time_ms * SLOWER, samples_ms=[SLOWER * x for x in record.samples_ms])

    return replace(side, rounds=[[slow(record) for record in round_] for round_ in side.rounds])


def looks(base, new, again):
    """The comparison of the first look, and that of the second one at its suspects that have all rounds."""
    first = compare_sides(base, new, LIMITS, paired=True, expects_all=True)
    if not again:
        return first, None
    counts = [Counter(cell for cell, found in by_cell(side.rounds).items() for _ in found) for side in again]
    whole = [cell for cell in first.suspects() if all(count[cell] == CONFIRMING_ROUNDS for count in counts)]
    sides = [side.on(whole) for side in again]
    return first, compare_sides(*sides, LIMITS, paired=True, expects_all=True, before=first) if whole else None


def row(name, *comparisons):
    counts = Counter(finding.verdict for comparison in comparisons for finding in comparison.cells)
    return f"| {name} | {counts.total()} | {' | '.join(str(counts[word]) for word in WORDS)} |\n"


def as_if_apart(*sides):
    """Every round against every other, as if they were from different occasions."""
    rounds = [replace(side, rounds=[round_]) for side in sides for round_ in side.rounds]
    return [compare_sides(*pair, LIMITS, expects_all=True) for pair in permutations(rounds, 2)]


def medians(sides, look):
    """A row per cell, with the median of every round, us."""
    named = [(f"{look}{side.name}-{i + 1}", round_) for side in sides for i, round_ in enumerate(side.rounds)]
    return pd.DataFrame({name: {str(r.cell): round(r.time_ms * 1e3, 3) for r in found} for name, found in named})


def main(path, out):
    base, new = load(path)
    again = load(path / "again") if (path / "again").is_dir() else []
    first, second = looks(base, new, again)
    table = f"| sides | cells | {' | '.join(WORDS)} |\n| --- | {' | '.join(['---:'] * (len(WORDS) + 1))} |\n"
    table += row("unchanged", first)
    if second:
        table += row("unchanged, second look", second)
    table += row("unchanged, new as base", looks(new, base, again[::-1])[0])
    for name, sides, others in (("new", (base, new), again), ("base", (new, base), again[::-1])):
        once, twice = looks(sides[0], slowed(sides[1]), [*others[:1], *map(slowed, others[1:])])
        table += row(f"{name} {SLOWER - 1:.0%} slower", once)
        if twice:
            table += row(f"{name} {SLOWER - 1:.0%} slower, second look", twice)
    apart = as_if_apart(base, new)
    table += row("unchanged, single rounds, not in turns", *apart)
    with patch.object(statistics, "ASSUMED_FIXED_MS", 0.0):
        table += row("the same, no fixed time per call assumed", *as_if_apart(base, new))
    blamed = Counter(f.cell.backend for found in apart for f in found.cells if f.verdict == "slower")
    table += f"\nSlower in single rounds, not in turns: {dict(blamed) or 'none'}\n"
    out.mkdir(parents=True, exist_ok=True)
    (out / "trial.md").write_text(table)
    final = first.confirmed(second, "measured once more, in turns") if second else first
    (out / "check.md").write_text(markdown(final, "glabench check"))
    (out / "check.json").write_text(json.dumps(final.to_json()) + "\n")
    medians([base, new], "").join(medians(again, "again-")).to_csv(out / "rounds.csv", index_label="cell")
    print(table, final.summary(), sep="\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
