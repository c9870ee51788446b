"""Sweeps made for tests, and their cells."""

from glabench.backends import load_registry
from glabench.sweeps import Sweep, Variant, expand, resolve

REGISTRY = load_registry()
TRAITS = REGISTRY.traits()
COMMON = {"seqlen": "64", "batch": "1", "dtype": "bf16", "pass": "fwd"}
GLA, LINEAR, SOFTMAX, MAMBA = "gla-triton", "linear-torch", "sdpa-math", "mamba1"
GOOD = """
title = "A title"
x = "seqlen"
[axes]
seqlen = "1k..2k"
batch = 1
heads = 2
dtype = "bf16"
pass = "fwd"
[[backends]]
name = "gla-triton"
"""


def sweep(*variants, **axes):
    """A sweep of backends (names or variants) with axes beside those that every cell needs."""
    return Sweep("test", COMMON | axes, tuple(Variant(v) if isinstance(v, str) else v for v in variants))


def cells(sweep, device="cuda", traits=TRAITS, **changes):
    """The sweep's cells after changes; `pass_` is the axis pass."""
    changes = {name.rstrip("_"): value for name, value in changes.items()}
    return expand(resolve(sweep, device, changes, traits), traits, device)


def values(found, *names):
    """The values of some parameters and fields in all cells, without repeats."""
    return {tuple(getattr(cell, name) if hasattr(cell, name) else cell.get(name) for name in names) for cell in found}
