"""GLA with a second gate, on values: portable Triton kernels for any gates, and their operators.

- `states`: the kernel that walks the state, or its gradient, through time; `chunks`: what every chunk reads from it.
- `launches`: a forward and a backward of both; `operators`: these as torch sees them.
"""
