"""Tests that need a GPU: `make test-gpu`."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fills the memory of the test's first allocations with NaN, so that unwritten output cannot look correct."""
    if torch.cuda.is_available():
        blocks = [torch.full((size // 4,), float("nan"), device="cuda") for size in [2**12] * 64 + [2**24] * 16]
        del blocks


@pytest.fixture(autouse=True)
def fresh_random_numbers():
    """Gives torch's generators another state: a capture of random numbers that failed leaves theirs in the capture.

    The suite ends a worker in which something failed; tests share a process.
    """
    if torch.cuda.is_available():
        torch.cuda.init()  # else there are no generators yet
    for number in range(torch.cuda.device_count()):
        state = torch.Generator(f"cuda:{number}").graphsafe_get_state()
        torch.cuda.default_generators[number].graphsafe_set_state(state)
