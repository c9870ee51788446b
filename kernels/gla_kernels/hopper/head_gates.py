# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
"""One gate per head and token: decays of a chunk's rows and scores.

With a_i the sum of a chunk's gates up to token i, in log2, and a_C its total, a decay is a number per row or per pair
of tokens, and no exponent is above 0:

    O  = 2^a Q S + (P o D) V,    D_ij = 2^(a_i - a_j) for j <= i, else 0
    S' = 2^(a_C) S + K^T 2^(a_C - a) V

So strong gates need no other kernel. All backwards are computed like this, forwards of wide heads, and those of narrow
heads in chunks with strong gates. Gates are at least LEAST_GATE, so that a difference of two sums is finite.
`portable/sums.py` computes the sums, or a call's first kernel (`gate_sums.py`).

In the forward of narrow heads, chunks with mild gates, whose total is -HEAD_SPAN_LIMIT or more, have factors of values
in place of the decays of scores:

    O  = scale 2^a (Q S + tril(Q K^T) V~),    V~ = 2^(-a) V,    S' = 2^(a_C) (S + K^T V~)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from gla_kernels import limits
from gla_kernels.hopper.values import opaque

HEAD_SPAN_LIMIT = gl.constexpr(limits.HEAD_SPAN_LIMIT)


@gluon.jit
def make_sums(buffers: gl.constexpr, C: gl.constexpr):
    """Shared memory for the sums of `buffers` chunks."""
    return gl.allocate_shared_memory(gl.float32, [buffers, C], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def sums_in(sums, b, t, h, T, H):
    """Pointer to the sum of token t of batch row b and head h, in [B, H, T]."""
    return sums + ((b.to(gl.int64) * H + h) * T + t)


@gluon.jit
def fetch_sums(vector, ptr, rows_left):
    """Starts the copy of a chunk's sums to shared memory; behind the last token there are copies of its sum."""
    C: gl.constexpr = vector.shape[0]
    rows = opaque(gl.arange(0, C, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])))
    at = gl.maximum(gl.minimum(rows, rows_left - 1), 0)
    async_copy.async_copy_global_to_shared(vector, ptr + at, at < rows_left)


@gluon.jit
def row_sums(vector, tile: gl.constexpr):
    """The sums of a chunk's rows [C], beside a tile [C, ...] with the layout `tile`."""
    return vector.load(gl.SliceLayout(1, tile))


@gluon.jit
def chunk_gate(vector):
    """a_C, from a chunk's sums [C] in shared memory."""
    C: gl.constexpr = vector.shape[0]
    last = vector.slice(C - 1, 1).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    return gl.max(last, axis=0)


@gluon.jit
def decay_to_end(a, total):
    """2^(a_C - a) of each row, as a column."""
    return gl.exp2(total - a)[:, None]


@gluon.jit
def score_decays(vector, layout: gl.constexpr, LOWER: gl.constexpr):
    """2^(a_i - a_j) of each pair of tokens: token i is the row and j the column (LOWER), or the other way round.

    Outside the triangle, which the caller masks, values can be infinite.
    """
    rows = row_sums(vector, layout)[:, None]
    columns = vector.load(gl.SliceLayout(0, layout))[None, :]
    return gl.exp2(rows - columns if LOWER else columns - rows)


@gluon.jit
def make_row_sums(C: gl.constexpr, parts: gl.constexpr):
    """Shared memory for `parts` numbers per token of a chunk, whose sum counts."""
    return gl.allocate_shared_memory(gl.float32, [C, parts], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def make_totals(count: gl.constexpr):
    """Shared memory for `count` times a number per warp, whose sum counts."""
    return gl.allocate_shared_memory(gl.float32, [count, gl.num_warps()], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def halves_sums(x):
    """Sums of the rows of x [C, K]: [C, 2], one for each half of the columns, which two warpgroups hold."""
    return gl.sum(x.reshape([x.shape[0], 2, x.shape[1] // 2]), axis=2)


@gluon.jit
def store_total(totals, x):
    """Writes the sum of x [C, K] to `totals` [8]: what each of eight warps holds, 16 rows and half of the columns."""
    C: gl.constexpr = x.shape[0]
    warps = gl.sum(gl.sum(x.reshape([C // 16, 16, 2, x.shape[1] // 2]), axis=3), axis=1)
    totals._reinterpret(gl.float32, [C // 16, 2], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).store(warps)


@gluon.jit
def store_row_total(totals, x):
    """Writes the sum of x to `totals` [warps]: what each warp holds, 16 places."""
    totals.store(gl.sum(x.reshape([x.shape[0] // 16, 16]), axis=1))


@gluon.jit
def make_thread_row_sums(chunks: gl.constexpr, C: gl.constexpr):
    """Shared memory for `thread_row_sums` of so many tiles with C rows."""
    return gl.allocate_shared_memory(gl.float32, [chunks, C, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def thread_row_sums(x):
    """Sums of what each thread holds of the rows of x [C, K], an accumulator of one warpgroup: [C, 4]."""
    C: gl.constexpr = x.shape[0]
    pairs = x.reshape([C, x.shape[1] // 8, 4, 2]).permute((0, 2, 1, 3))
    return gl.sum(pairs.reshape([C, 4, x.shape[1] // 4]), axis=2)


@gluon.jit
def make_thread_totals(chunks: gl.constexpr):
    """Shared memory for a number per thread and chunk; of each chunk the sum counts."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    return gl.allocate_shared_memory(gl.float32, [chunks, gl.num_warps(), 8, 4], layout)


@gluon.jit
def thread_totals(x):
    """Sums of what each thread holds of x [64, V], an accumulator of one warpgroup: [4, 8, 4]."""
    pairs = x.reshape([4, 2, 8, x.shape[1] // 8, 4, 2]).permute((0, 2, 4, 1, 3, 5))
    return gl.sum(pairs.reshape([4, 8, 4, x.shape[1] // 2]), axis=3)


@gluon.jit
def add(x, y):
    """What a scan that sums combines two numbers by."""
    return x + y


@gluon.jit
def store_head_gates(ptr, H, sent, totals, rows_left):
    """Writes dg of a chunk's tokens: all of `totals`, and the sum of `sent` before token t.

    `ptr` is that of the first token; neighbours are H apart. A barrier lies between the writes of these and this. Every
    warp computes the same.
    """
    C: gl.constexpr = sent.shape[0]
    W: gl.constexpr = gl.num_warps()
    rows_layout: gl.constexpr = gl.BlockedLayout([C // 32, sent.shape[1]], [32, 1], [W, 1], [1, 0])
    count: gl.constexpr = totals.numel
    flat = totals._reinterpret(gl.float32, [count], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    each: gl.constexpr = count // 32 if count > 32 else count
    total = gl.sum(flat.load(gl.BlockedLayout([each], [32], [W], [0])), axis=0)
    tokens: gl.constexpr = gl.BlockedLayout([C // 32], [32], [W], [0])
    before_next = gl.associative_scan(gl.convert_layout(gl.sum(sent.load(rows_layout), axis=1), tokens), 0, add)
    next_row = gl.arange(0, C, tokens) + 1
    dtype: gl.constexpr = ptr.dtype.element_ty
    gl.store(ptr + next_row.to(gl.int64) * H, (before_next + total).to(dtype), next_row < gl.minimum(rows_left, C))
    gl.store(ptr, total.to(dtype), rows_left > 0)


@gluon.jit
def store_head_gates_of_chunks(ptr, H, sent, totals, rows_left, chunks):
    """`store_head_gates` of `chunks` chunks whose sums are there, each of them earlier in time than the one before.

    `ptr` is that of the first token of the first of these, which has `rows_left` rows. A warp computes a chunk's.
    """
    G: gl.constexpr = sent.shape[0]
    C: gl.constexpr = sent.shape[1]
    P: gl.constexpr = sent.shape[2]
    W: gl.constexpr = gl.num_warps()
    rows_layout: gl.constexpr = gl.BlockedLayout([1, C // 32, P], [1, 32, 1], [W, 1, 1], [2, 1, 0])
    tokens: gl.constexpr = gl.BlockedLayout([1, C // 32], [1, 32], [W, 1], [1, 0])
    chunk_layout: gl.constexpr = gl.SliceLayout(1, tokens)
    each: gl.constexpr = totals.numel // G
    all_sent = sent._reinterpret(gl.float32, [G, C, P], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    all_totals = totals._reinterpret(gl.float32, [G, each], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    total = gl.sum(all_totals.load(gl.BlockedLayout([1, each // 32], [1, 32], [W, 1], [1, 0])), axis=1)
    total = gl.convert_layout(total, chunk_layout)
    before_next = gl.associative_scan(gl.convert_layout(gl.sum(all_sent.load(rows_layout), axis=2), tokens), 1, add)
    number = gl.arange(0, G, chunk_layout)
    rows = gl.where(number < chunks, gl.where(number > 0, C, gl.minimum(rows_left, C)), 0)
    next_row = gl.arange(0, C, gl.SliceLayout(0, tokens)) + 1
    first_token = number * -C
    token = first_token[:, None] + next_row[None, :]
    dtype: gl.constexpr = ptr.dtype.element_ty
    gl.store(ptr + token.to(gl.int64) * H, (before_next + total[:, None]).to(dtype), next_row[None, :] < rows[:, None])
    gl.store(ptr + first_token.to(gl.int64) * H, total.to(dtype), rows > 0)
