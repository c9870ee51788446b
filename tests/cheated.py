"""Measures a cell of linear attention with a backend of a test's own."""

import cheats

from glabench.backends import load_registry
from glabench.measure.cell import CellMeter
from glabench.measure.job import Job
from glabench.measure.outcome import failure_of
from glabench.measure.settings import Settings
from glabench.measure.timer import WallTimer
from glabench.measure.work import OpWork
from glabench.sweeps import Cell, Parameters

LINEAR = load_registry().ops["linear"]
SIZES = Parameters({"heads": 2, "key_dim": 16, "value_dim": 16})
SETTINGS = Settings(min_samples=12, max_samples=12, time_limit_s=60, least_time_s=0, warm_up_s=0, precision=1e-9)
JOB = Job("honest", "run", "cpu", SETTINGS)
FORWARDS, BACKWARDS = ("infer", "fwd"), ("bwd", "fwd+bwd")


def measure(backend, pass_, timing="hot", timer=None, job=JOB, nvml=None, **parameters):
    cell = Cell("honest", "linear", pass_, 2, 600, "fp32", Parameters({**SIZES, **parameters}), "cpu")
    try:
        return CellMeter(OpWork(LINEAR, backend), job, timer or WallTimer(timing), nvml).measure(cell)
    except Exception as problem:
        return failure_of(job, cell, problem)
    finally:
        cheats.leave_contexts()
