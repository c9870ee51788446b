"""The kernels in plain Triton, for any GPU and for Triton's interpreter, and their launches.

- `tiles`: loads and stores, sums of gates, a chunk's frame.
- `tree`: decays of pairs of tokens, without positive exponents.
- `forward`, `backward`: the plain form.
- `strong`: what that leaves out of chunks with strong gates.
- `exact`, `exact_backward`: the heads whose values are too large for it.
- `recurrence`: token by token.
- `scan`: states at the borders of pieces, for the families that cut sequences.
- `tail`: zeros behind the last packed sequence.
- `launches`: launches of the plain form, of `scan` and of `tail`.
"""
