"""For developers: compiled kernels without a GPU.

- `ahead`: compiles every kernel of a shape and prints registers, spills and shared memory (`python -m`).
- `ptx`, `sass`: look for two compiler faults that have produced wrong kernels.
"""
