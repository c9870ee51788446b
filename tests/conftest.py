"""Shared by all tests: kernels run in Triton's interpreter unless a GPU is there."""

import os

import torch

if not torch.cuda.is_available():
    # Before Triton is imported anywhere, which reads it once.
    os.environ.setdefault("TRITON_INTERPRET", "1")
