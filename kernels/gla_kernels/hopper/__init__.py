"""The kernels in Gluon, for bfloat16 on Hopper GPUs.

- `narrow`: K and V up to 64, a warpgroup per program.
- `wide`: wider heads, two warpgroups per program.
- `layouts`, `values`, `products`, `copies`, `gates`, `head_gates`, `gate_sums`, `places`: what both are made of.
- `levels`, `strong`: what the plain form leaves out of chunks with strong gates, for both.
"""
