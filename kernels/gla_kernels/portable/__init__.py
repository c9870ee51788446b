"""The kernels in plain Triton, for any GPU and for Triton's interpreter, and their launches.

- `tiles`: loads and stores, sums of gates, a chunk's frame.
- `tree`: decays of pairs of tokens, without positive exponents.
- `forward`, `backward`: the plain form.
- `strong`: what that leaves out of chunks with strong gates.
- `exact`: the heads whose values are too large for it.
- `recurrence`: token by token.
- `tail`: zeros behind the last packed sequence.
- `launches`: their launches, and those of `strong` and `exact` for the other families.
"""
