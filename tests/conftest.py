"""Shared by all tests: kernels run in Triton's interpreter unless a GPU is there."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before torch is imported, and handed on to the processes that tests start: there is a test for every core already.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    # Before Triton is imported anywhere, which reads it once.
    os.environ.setdefault("TRITON_INTERPRET", "1")
