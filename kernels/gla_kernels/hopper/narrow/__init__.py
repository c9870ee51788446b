"""K and V of 16, 32, 48 or 64. `launches` cuts sequences of few heads into pieces that run side by side.

- `forward`, `backward`: the plain form, which carries the state, or its gradient, from chunk to chunk.
- `head_backward`: the backward with a gate per head.
- `outputs`: what a chunk of `forward` gives; `states`: the states between two checkpoints, for the backwards.
- `recurrence`: what a piece adds to the state, so that states at the borders are known first.
"""
