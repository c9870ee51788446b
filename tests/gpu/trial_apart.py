"""What comparisons say of runs of one code, measured apart in time, by how many occasions were known before.

    python tests/gpu/trial_apart.py RUN RUN...

Prints a row for every number of known occasions, the earliest first: the verdicts on all ordered pairs of the runs,
with the limit of `compare` and with that of a check.
"""

import sys
from collections import Counter
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory

import glabench
from glabench.verdicts.occasions import LEAST, Occasions

LIMITS = (0.02, 0.05)
WORDS = ("slower", "faster", "unclear", "same", "not slower")


def row(runs, known, folder):
    """Of the verdicts with these occasions: how many of each word, for both limits."""
    file = known.save(Path(folder) / "occasions.json")
    counts = []
    for limit in LIMITS:
        found = [glabench.compare(a, b, same_within=limit, occasions=file) for a, b in permutations(runs, 2)]
        verdicts = Counter(finding.verdict for comparison in found for finding in comparison.cells)
        counts += [f"{verdicts[word]:,}" for word in WORDS]
    return f"| {len(known.occasions)} | {' | '.join(counts)} |"


def main(*paths):
    runs = [glabench.load(path) for path in paths]
    known = Occasions.of(runs[0].environment["gpu"]["name"])
    print(f"| occasions | {' | '.join(f'{word}, {limit:.0%}' for limit in LIMITS for word in WORDS)} |")
    print("| ---: |" + " ---: |" * len(WORDS) * len(LIMITS))
    with TemporaryDirectory() as folder:
        for number in range(LEAST, len(known.occasions) + 1):
            print(row(runs, Occasions(known.device, known.occasions[:number]), folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
