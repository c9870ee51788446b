"""K or V above 64. `passes` says which kernels run, `launches` launches each, `pieces` cuts sequences in time.

A state walks through time in the registers of one program; what is computed from stored states has a program per chunk.

- `forward`: states and o, K up to 128, with gates per channel, for up to 256 value columns per program.
- `head_forward`: the same with no gates or one per head, for up to 128 value columns.
- `specialized`: the same for 256 value columns; copies have warps of their own.
- `frames`, `walk`: operands in their frames, then states and o or, in reverse, dv; K up to 256.
- `recurrence`: states or, in reverse, their gradients.
- `readout`: o or dv from stored states, K above 256.
- `gradients`: dq, dk, dg, and dv for K up to 128, from states and their gradients.
- `backward`: all gradients in one kernel, K and V up to 128.
- `tiles`: products and rows of two warpgroups.
"""
