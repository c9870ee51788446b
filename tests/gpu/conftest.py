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
