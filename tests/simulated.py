"""Records with simulated samples, and comparisons of them.

Samples have autocorrelated noise, drift between and within rounds, outliers, and a spread of processes.
"""

from dataclasses import dataclass

import numpy as np

from glabench.records import Record
from glabench.sweeps import Cell, Parameters
from glabench.verdicts import Limits, Side, compare_sides

SIZES = {"heads": 4, "key_dim": 64, "value_dim": 64, "materialize": "states", "gate": "logsigmoid/16"}
LIMITS = Limits.of()
CELL = Cell("gla-triton", "gla", "fwd", 2, 1024, "bf16", Parameters(SIZES))


@dataclass(frozen=True)
class World:
    """Disturbances of a measurement, as shares of the time; `memory` is the correlation of neighbouring samples."""

    noise: float = 0.01
    memory: float = 0.7
    processes: float = 0.003
    drift_a_round: float = 0.003
    drift_within: float = 0.005
    outliers: float = 0.03
    samples: int = 60

    def round(self, generator, factor=1.0, at=0):
        """The samples of one process, in milliseconds."""
        steps = generator.normal(size=self.samples) * np.sqrt(1 - self.memory**2)
        steps[0] = generator.normal()
        for i in range(1, self.samples):
            steps[i] += self.memory * steps[i - 1]
        level = factor * (1 + self.drift_a_round * at) * np.exp(generator.normal(0, self.processes))
        times = level * np.exp(self.noise * steps) * np.linspace(1, 1 + self.drift_within, self.samples)
        hit = generator.random(self.samples) < self.outliers
        times[hit] *= generator.uniform(1.2, 4, hit.sum())
        return tuple(float(t) for t in times)


# Without disturbances, except for a little noise.
STEADY = World(noise=0.001, outliers=0, drift_within=0, drift_a_round=0)


def record(samples, cell=CELL, **fields):
    """A good record with the given changes."""
    known = {"timing": "cold", "stop_reason": "precision", "peak_allocated_mib": 100.0, "rel_error": {"o": 0.003}}
    values = {"time_ms": float(np.median(samples)), "samples_ms": tuple(samples), **known, **fields}
    return Record(run_id="run", cell=cell, status="ok", **values)


def failed(status, reason=None, cell=CELL):
    """A record without a time."""
    return Record(run_id="run", cell=cell, status=status, reason=reason)


def measured(world, seed, factor=1.0, rounds=2, start=0, cell=CELL, **fields):
    """Rounds of one cell; `seed` is a number, or a generator to continue with."""
    generator = np.random.default_rng(seed)
    return [[record(world.round(generator, factor, start + at), cell, **fields)] for at in range(rounds)]


def compare(base, new, limits=LIMITS, **options):
    """A comparison of rounds of records."""
    return compare_sides(Side("base", base), Side("new", new), limits, **options)
