"""Settings for all tests: kernels run in Triton's interpreter without a GPU; some cases run only with --full."""

import gc
import os
import sys

if "PYTEST_XDIST_WORKER" in os.environ:
    # One thread, because tests already use every core. Set before torch is imported; started processes inherit it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

LOADED = pytest.StashKey[int]()  # modules, when garbage was frozen last

if not torch.cuda.is_available():
    # Set before Triton is imported anywhere, because Triton reads it once.
    os.environ.setdefault("TRITON_INTERPRET", "1")

    import quick_interpreter

    quick_interpreter.make_quick()


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run the cases marked `full` too")


def pytest_collection_modifyitems(config, items):
    if config.getoption("full"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


def pytest_runtest_setup(item):
    """Measuring collects garbage often, which need not look through all that was imported, in earlier tests too."""
    if len(sys.modules) > item.config.stash.get(LOADED, 0):
        item.config.stash[LOADED] = len(sys.modules)
        gc.collect()
        gc.freeze()
