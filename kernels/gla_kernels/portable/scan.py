# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
"""The states at the borders of a sequence's pieces, from what each piece adds to the state: a scan, in Triton.

GLA's transition is diagonal, so a piece is a state and a vector of decays, and merging two is a product and a sum.
"""

import triton
import triton.language as tl

from gla_kernels.portable.tiles import first_slot, locate, wait_for_previous_kernel


@triton.jit
def scan_place(slot, i, pieces, H, h, REVERSE: tl.constexpr):
    """Where the i-th piece of a scan has its state, among those of all pieces and heads (64 bits)."""
    return (slot + (pieces - 1 - i if REVERSE else i)).to(tl.int64) * H + h


@triton.jit(do_not_specialize=["T", "H", "rows", "words"])
def scan_pieces(
    local,  # [pieces, H, K, V] float32: the state after each piece if it starts from zero; in reverse before it
    decays,  # [pieces, H, K] float32: total gate of each piece, in log2; unused if not GATED
    initial,  # [N, H, K, V] float32: the state before each sequence; in reverse after it
    borders,  # [pieces, H, K, V] float32: the state before each piece; in reverse after it
    final,  # [N, H, K, V] float32: the state after each sequence; in reverse before it
    cleared,  # [words] int32: set to 0 if CLEAR
    cu_seqlens,  # [N + 1] int32 or int64: boundaries of packed sequences
    T,
    H,
    rows,  # tokens of a piece
    words,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,  # pieces whose states are loaded together
    GATED: tl.constexpr,
    VARLEN: tl.constexpr,
    PDL: tl.constexpr,
    REVERSE: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    STORE_FINAL: tl.constexpr,
    CLEAR: tl.constexpr,
):
    """S <- 2^decay S + local from piece to piece. A program handles BLOCK elements of the state of a head."""
    wait_for_previous_kernel(PDL)
    if CLEAR:
        share = tl.cdiv(words, tl.num_programs(0) * tl.num_programs(1))
        begin = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * share
        for start in range(0, share, BLOCK):
            word = start + tl.arange(0, BLOCK)
            there = (word < share) & (begin + word < words)
            tl.store(cleared + begin + word, tl.zeros([BLOCK], tl.int32), mask=there)
    nh = tl.program_id(0)
    n = nh // H
    h = nh % H
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < K * V
    _, begin, length = locate(cu_seqlens, n, T, VARLEN)
    pieces = (length + rows - 1) // rows
    slot = first_slot(n, begin, length, rows, VARLEN)
    S = tl.zeros([BLOCK], dtype=tl.float32)
    if HAS_INITIAL:
        S = tl.load(initial + nh.to(tl.int64) * K * V + at, mask=inside)
    for start in range(0, pieces, STAGES):
        # No load depends on S: several at a time take as long as one.
        added = ()
        decay = ()
        for j in tl.static_range(STAGES):
            place = scan_place(slot, start + j, pieces, H, h, REVERSE)
            there = inside & (start + j < pieces)
            added += (tl.load(local + place * K * V + at, mask=there, other=0.0),)  # type: ignore[assignment]
            if GATED:
                decay += (tl.load(decays + place * K + at // V, mask=there, other=0.0),)  # type: ignore[assignment]
        for j in tl.static_range(STAGES):
            place = scan_place(slot, start + j, pieces, H, h, REVERSE)
            tl.store(borders + place * K * V + at, S, mask=inside & (start + j < pieces))
            if GATED:
                S *= tl.exp2(decay[j])
            S += added[j]
    if STORE_FINAL:
        tl.store(final + nh.to(tl.int64) * K * V + at, S, mask=inside)
