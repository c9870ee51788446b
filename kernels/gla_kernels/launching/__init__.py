"""From a call to a kernel on a GPU, whatever the family.

- `device`: what decisions read of a GPU.
- `plans`: which family, chunk size and tiles a call runs with; `autotune` times plans.
- `call`: a call's sizes and decisions, and how it launches a kernel; `buffers`: its tensors.
- `direct`: launches of compiled kernels without Triton's Python.
- `recording`, `replay`, `native`, `cuda`: a whole pass written down, and repeated by one function in C.
"""
