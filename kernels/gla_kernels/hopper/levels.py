# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
# ruff: noqa: SIM102
"""What the kernels of `hopper/strong.py` are made of: levels of pairs, their scores and products, and marks.

Every level of the tree of references (`tree.py`) has an operand X (C, BK) that is made as there: its exponents are a
constant matrix of 0 and 1, which selects the gates to be summed, times the gates. These matrices stay in shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, warpgroup_mma_wait

from gla_kernels.hopper.copies import fetch, write
from gla_kernels.hopper.gates import excess, fetch_gates, raise_to_least, read_gates
from gla_kernels.hopper.layouts import accumulator, copy_layout, gate_layout, left_operand, operand_layout
from gla_kernels.hopper.places import first_slot, locate
from gla_kernels.hopper.products import add_product, masked_operand, product, triangle
from gla_kernels.hopper.values import opaque, readdressed, split, thread_barrier

# Levels of a chunk of 64: pairs of halves of 1, 2, 4, ... 32 rows.
LEVELS = gl.constexpr(6)
# Marks that a program reads at a time.
MARKS_AT_ONCE = gl.constexpr(128)
# Bits of a mark, a sequence's number plus one. Above them, the forward counts the programs that have done their share.
MARK_BITS = gl.constexpr(28)
# Value columns of a tile.
BV = gl.constexpr(64)


@gluon.constexpr_function
def words_layout(C: int) -> gl.NVMMASharedLayout:
    """The layout of an operand [C, C], as [C, C / 2] integers that hold two of its numbers each."""
    return gl.NVMMASharedLayout.get_default_for([C, C // 2], gl.int32)


@gluon.jit
def fill_sums(sums, C: gl.constexpr):
    """Fills [LEVELS, C, C]. At 1 and above: what sums the gates of that level's exponents; at 0: of all gates.

    In row i of a second half, the exponent is the sum from the half's beginning to i, in others that from i + 1 to the
    end of the half. At level 0 it is a row's own gate or nothing, which needs no product.

    So a row has ones from i + 1 to the border of the halves, or from the border to i. The loop is not unrolled: this
    code runs once, and a program that has one chunk to do waits for all instructions to come from memory.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    words = sums._reinterpret(gl.int32, [LEVELS, C, C // 2], words_layout(C))
    i = gl.arange(0, C, gl.SliceLayout(1, layout))[:, None]
    j = gl.arange(0, C // 2, gl.SliceLayout(0, layout))[None, :] * 2
    for level in range(opaque(gl.program_id(0) * 0 + LEVELS)):
        border = (i >> level | 1) << level
        begin = gl.where(level == 0, 0, gl.minimum(border, i + 1))
        end = gl.where(level == 0, C, gl.maximum(border, i + 1))
        low = gl.where((j >= begin) & (j < end), 0x3F80, 0)  # 1.0, and in the upper half of a word
        high = gl.where((j + 1 >= begin) & (j + 1 < end), 0x3F800000, 0)
        words.index(level).store(low | high)
    fence_async_shared()


@gluon.jit
def is_late(level, C: gl.constexpr, layout: gl.constexpr):
    """Mask (C, 1) of the rows in a second half of a level."""
    return ((opaque(gl.arange(0, C, gl.SliceLayout(1, layout))) >> level) & 1 == 1)[:, None]


@gluon.jit
def beside_level(level, C: gl.constexpr):
    """0 (C, C) at the pairs of a level, in either order, which are where (i ^ j) >> level is 1; see `tree.at_level`.

    In this form that takes one or two instructions per pair, not three.
    """
    layout: gl.constexpr = accumulator(C)
    bit = 1 << level
    i = (opaque(gl.arange(0, C, gl.SliceLayout(1, layout))) ^ bit)[:, None]
    return (i ^ gl.arange(0, C, gl.SliceLayout(0, layout))[None, :]) & -bit


@gluon.jit
def level_operand(pairs, level):
    """`pairs` (C, C) bfloat16 of a level as a left operand, with 0 for others. Two stay in a register all the time."""
    choose: gl.constexpr = (
        "{ .reg .pred p, r; .reg .b32 x, y; setp.eq.s32 p, $2, 0; setp.eq.s32 r, $3, 0; "
        "selp.b32 x, $1, 0, p; selp.b32 y, $1, 0, r; prmt.b32 $0, x, y, 0x7610; }"
    )
    beside = beside_level(level, pairs.shape[0])
    chosen = gl.inline_asm_elementwise(choose, "=r,r,r,r", [pairs, beside], gl.bfloat16, is_pure=True, pack=2)
    return gl.convert_layout(chosen, left_operand(pairs.shape[0]))


@gluon.jit
def diagonal(C: gl.constexpr):
    """Mask (C, C) of the pairs of a token with itself."""
    layout: gl.constexpr = accumulator(C)
    i = opaque(gl.arange(0, C, gl.SliceLayout(1, layout)))[:, None]
    return i == gl.arange(0, C, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def start_sums(sums, level, halves, C: gl.constexpr, BK: gl.constexpr):
    """Starts the sums of gates (C, BK) that belong to a level.

    Descriptors of the gates' tiles are computed anew for every level. Kept, they would be on the stack.
    """
    total = product(sums.index(level), readdressed(halves.index(0)), C, BK)
    return add_product(sums.index(level), readdressed(halves.index(1)), total)


@gluon.jit
def fetch_keys(
    q_tile, k_tile, g_tile, q, k, g, q_t, k_t, g_t, rows_left, column, K: gl.constexpr
):  # fmt: skip
    """Starts copying key columns from `column` on of the chunk whose first row q, k and g point to."""
    BK: gl.constexpr = q_tile.shape[1]
    fetch(q_tile, q + column, q_t, rows_left, K, copy_layout(BK, 16), column)
    fetch(k_tile, k + column, k_t, rows_left, K, copy_layout(BK, 16), column)
    fetch_gates(g_tile, g + column, g_t, rows_left, K, column)


@gluon.jit
def memory_of(tiles, dtype: gl.constexpr, W: gl.constexpr):
    """The memory of bfloat16 `tiles` as tiles [C, W] of a dtype, for operands or gates."""
    C: gl.constexpr = tiles.shape[1]
    layout: gl.constexpr = gate_layout() if dtype == gl.float32 else operand_layout(C, W)
    count: gl.constexpr = tiles.shape[0] * tiles.shape[2] // (2 * W if dtype == gl.float32 else W)
    return tiles._reinterpret(dtype, [count, C, W], layout)


@gluon.jit
def gate_parts(g_tile):
    """The memory of a tile of gates [C, BK] as [2, C, BK] bfloat16."""
    C: gl.constexpr = g_tile.shape[0]
    BK: gl.constexpr = g_tile.shape[1]
    return g_tile._reinterpret(gl.bfloat16, [2, C, BK], operand_layout(C, BK))


@gluon.jit
def load_keys(q_tile, k_tile, g_tile, halves, g, sums, scale, C: gl.constexpr):
    """From a chunk's tiles: q times the missing share and the scale, k, and that factor of q.

    All are (C, BK) float32, with a factor of q that is the same in every row; see `strong.py`. The gates' parts are
    stored to `halves` [2, C, BK], which may have the memory of g_tile.
    """
    BK: gl.constexpr = q_tile.shape[1]
    key_tile: gl.constexpr = accumulator(BK)
    bits: gl.constexpr = g.dtype.element_ty.primitive_bitwidth
    high, low = split(raise_to_least(read_gates(g_tile, g, copy_layout(BK, bits))))
    thread_barrier()
    halves.index(0).store(high)
    halves.index(1).store(low)
    fence_async_shared()
    thread_barrier()
    total = start_sums(sums, 0, halves, C, BK)
    k = k_tile.load(key_tile).to(gl.float32)
    q = q_tile.load(key_tile).to(gl.float32)
    total = warpgroup_mma_wait(0, deps=[total])
    weight = (1.0 - gl.exp2(excess(total))) * scale
    return q * weight, k, weight


@gluon.jit
def first_exponents(halves):
    """The exponents (C, BK) of level 0: a row's own gate in second halves."""
    key_tile: gl.constexpr = accumulator(halves.shape[2])
    gates = halves.index(0).load(key_tile).to(gl.float32) + halves.index(1).load(key_tile).to(gl.float32)
    return gl.where(is_late(0, halves.shape[1], key_tile), gates, 0.0)


@gluon.constexpr_function
def values_come_first(K, V, BK):
    """Whether value columns are copied at once behind the keys, because there is one block of each.

    Levels then never wait behind copies, and what is copied needs no tiles of its own.
    """
    return K <= BK and V <= BV


@gluon.jit
def missing_scores(
    q_tile, k_tile, g_tile, halves, tiles, sums, q, k, g, x, y, scale, q_t, k_t, g_t, x_t, y_t, rows_left,
    begin, end, C: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """The missing scores (C, C) of the chunk whose first row q, k and g point to, and their mirror image above.

    Of all steps those from `begin` to before `end`: a step is half of the levels for BK key columns, and those of the
    lower levels are even. The copy of the first key columns is under way. That of the first value columns is started
    here, unless `values_come_first`: then it already is, as the last group. The last two of `tiles` are for operands,
    the others may hold the keys' copies until values replace them.
    """
    BK: gl.constexpr = q_tile.shape[1]
    key_tile: gl.constexpr = accumulator(BK)
    pairs = gl.zeros([C, C], gl.float32, accumulator(C)) + scale * 0.0
    for block in range(begin // 2, (end + 1) // 2):
        if values_come_first(K, V, BK):
            async_copy.wait_group(1)
        else:
            async_copy.wait_group(0)
        thread_barrier()
        bq, bk, _weight = load_keys(q_tile, k_tile, g_tile, halves, g, sums, scale, C)
        first = gl.where(block * 2 < begin, LEVELS // 2, 0)
        if first == 0:
            own = gl.convert_layout(gl.sum(bq * bk, axis=1), gl.SliceLayout(1, accumulator(C)))
            pairs += gl.where(diagonal(C), own[:, None], 0.0)
            exponents = first_exponents(halves)
        else:
            exponents = warpgroup_mma_wait(0, deps=[start_sums(sums, first, halves, C, BK)])
        factor = gl.exp2(exponents)
        for level in range(first, opaque(gl.where(block * 2 + 1 < end, LEVELS, LEVELS // 2))):
            # Beyond the last level too, where it is not used.
            exponents = start_sums(sums, gl.minimum(level + 1, LEVELS - 1), halves, C, BK)
            tile = tiles.index(tiles.shape[0] - 2 + level % 2)
            tile.store((gl.where(is_late(level, C, key_tile), bq, bk) * factor).to(gl.bfloat16))
            fence_async_shared()
            thread_barrier()
            scores = product(tile, tile.permute((1, 0)), C, C)
            if level == first:  # all have read the last copies, and nothing is read from shared memory for a while
                if K > BK:
                    if block * 2 + 2 < end:
                        column = (block + 1) * BK
                        fetch_keys(q_tile, k_tile, g_tile, q, k, g, q_t, k_t, g_t, rows_left, column, K)
                        async_copy.commit_group()
                    else:
                        first_values(tiles, x, y, x_t, y_t, rows_left, V)
                elif not values_come_first(K, V, BK):
                    first_values(tiles, x, y, x_t, y_t, rows_left, V)
            scores, exponents = warpgroup_mma_wait(0, deps=[scores, exponents])
            factor = gl.exp2(exponents)
            pairs = gl.where(beside_level(level, C) == 0, pairs + scores, pairs)
    return pairs


@gluon.jit
def all_scores(pairs, partial, mark, share, SHARES: gl.constexpr):
    """Stores this program's share of a chunk's scores (C, C) to `partial`; who is the last to do so, gets all of them.

    Every program counts itself in the upper bits of the chunk's mark. The order of the sum is always the same, that of
    one program that does all steps. Returns also whether this is the last one.
    """
    C: gl.constexpr = pairs.shape[0]
    rows = opaque(gl.arange(0, C, gl.SliceLayout(1, accumulator(C))))[:, None]
    places = rows * C + gl.arange(0, C, gl.SliceLayout(0, accumulator(C)))[None, :]
    gl.store(partial + share * (C * C) + places, pairs)
    thread_barrier()
    others = gl.atomic_add(mark, 1 << MARK_BITS, sem="acq_rel", scope="gpu") >> MARK_BITS
    if others == SHARES - 1:
        pairs = gl.load(partial + places, cache_modifier=".cg")
        for other in gl.static_range(1, SHARES):
            pairs += gl.load(partial + other * (C * C) + places, cache_modifier=".cg")
    return pairs, others == SHARES - 1


@gluon.jit
def value_tiles(tiles, column):
    """The pair of tiles for value columns from `column` on; `tiles` has three pairs, which take turns."""
    place = column // BV % 3 * 2
    return tiles.index(place), tiles.index(place + 1)


@gluon.jit
def fetch_values(tiles, x, y, x_t, y_t, rows_left, column, V: gl.constexpr):
    """Starts copying value columns from `column` on of the rows of x and y, as a group of its own."""
    x_tile, y_tile = value_tiles(tiles, column)
    fetch(x_tile, x + column, x_t, rows_left, V, copy_layout(BV, 16), column)
    fetch(y_tile, y + column, y_t, rows_left, V, copy_layout(BV, 16), column)
    async_copy.commit_group()


@gluon.jit
def first_values(tiles, x, y, x_t, y_t, rows_left, V: gl.constexpr):
    """Starts copying the first value columns, to two of the three pairs of tiles."""
    fetch_values(tiles, x, y, x_t, y_t, rows_left, 0, V)
    if V > BV:
        fetch_values(tiles, x, y, x_t, y_t, rows_left, BV, V)


@gluon.jit
def next_values(tiles, x, y, x_t, y_t, rows_left, column, V: gl.constexpr):
    """Waits for the tiles of value columns from `column` on, starts copying more, and returns the tiles."""
    if column + BV < V:
        async_copy.wait_group(1)
    else:
        async_copy.wait_group(0)
    fence_async_shared()
    thread_barrier()
    if V > 2 * BV:  # else the compiler fails on code that never runs
        if column + 2 * BV < V:
            fetch_values(tiles, x, y, x_t, y_t, rows_left, column + 2 * BV, V)
    return value_tiles(tiles, column)


@gluon.jit
def add_products(out, scores, tiles, x, x_t, out_t, rows_left, V: gl.constexpr):
    """Adds scores @ x to the rows that `out` points to. The copy of the first value columns of both is under way."""
    value_tile: gl.constexpr = accumulator(BV)
    for column in range(0, V, BV):
        x_tile, out_tile = next_values(tiles, x, out, x_t, out_t, rows_left, column, V)
        sums = out_tile.load(value_tile).to(gl.float32)
        sums = add_product(scores, x_tile, sums)
        sums = warpgroup_mma_wait(0, deps=[sums])
        out_tile.store(sums.to(gl.bfloat16))
        thread_barrier()
        rows = out_tile.load(copy_layout(BV, 16))
        write(out + column, rows, out_t, rows_left, V, copy_layout(BV, 16), column)
    async_copy.wait_group(0)


@gluon.jit
def place_of_gates(tiles, halves, K: gl.constexpr, V: gl.constexpr):
    """Where a tile of float32 gates [C, BK] is copied to: the first two of `tiles`.

    If values come first, those hold values, and gates are copied to `halves`, where their two parts then replace them.
    """
    C: gl.constexpr = tiles.shape[1]
    BK: gl.constexpr = halves.shape[2]
    if values_come_first(K, V, BK):
        return halves._reinterpret(gl.float32, [C, BK], gate_layout())
    return memory_of(tiles, gl.float32, BK).index(0)


@gluon.jit
def add_missing(
    out, x, q, k, g, tiles, halves, sums, scale, out_t, x_t, q_t, k_t, g_t, rows_left,
    C: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """Adds the missing P^T x to the rows that `out` points to. `tiles` are used as in the forward."""
    q_tile, k_tile, g_tile = tiles.index(2), tiles.index(3), place_of_gates(tiles, halves, K, V)
    fetch_keys(q_tile, k_tile, g_tile, q, k, g, q_t, k_t, g_t, rows_left, 0, K)
    async_copy.commit_group()
    if values_come_first(K, V, BV):
        first_values(tiles, x, out, x_t, out_t, rows_left, V)
    pairs = missing_scores(
        q_tile, k_tile, g_tile, halves, tiles, sums, q, k, g, x, out, scale, q_t, k_t, g_t, x_t, out_t,
        rows_left, rows_left * 0, rows_left * 0 + (K + BV - 1) // BV * 2, C, K, V,
    )  # fmt: skip
    add_products(out, masked_operand(pairs, triangle(C, False, True)), tiles, x, x_t, out_t, rows_left, V)


@gluon.jit
def marked_chunk(chunk_head, mark, H, cu_seqlens, T, C: gl.constexpr, VARLEN: gl.constexpr):
    """n, head, batch row, first token and rows left of a chunk with mark n + 1, `chunk_head` among all marks."""
    n = mark - 1
    b, begin, length = locate(cu_seqlens, n, T, VARLEN)
    chunk = chunk_head // H - first_slot(n, begin, length, C, VARLEN)
    b = n * 0 if VARLEN else b
    return n, chunk_head % H, b, begin + chunk * C, length - chunk * C


@gluon.jit
def lane_numbers():
    """0 to MARKS_AT_ONCE - 1, one per thread."""
    return gl.arange(0, MARKS_AT_ONCE, gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def marks_of(marks, i, first, step, items, PER_MARK: gl.constexpr):
    """The marks of the i-th MARKS_AT_ONCE of the items `first`, `first + step`, ...; PER_MARK items share a mark."""
    here = first + (i * MARKS_AT_ONCE + lane_numbers()) * step
    return gl.load(marks + here // PER_MARK, mask=here < items, other=0)


@gluon.jit
def any_raised(marks, items, PER_MARK: gl.constexpr):
    """Whether this program has any work. Most calls have none, and need no constants for it."""
    most = gl.program_id(0) * 0
    for i in range(gl.cdiv(items, MARKS_AT_ONCE * gl.num_programs(0))):
        here = marks_of(marks, i, gl.program_id(0), gl.num_programs(0), items, PER_MARK)
        most = gl.maximum(most, gl.max(here, axis=0))
    return most > 0


@gluon.jit
def first_raised(found):
    """The first lane whose mark is raised; MARKS_AT_ONCE if there is none."""
    return gl.min(gl.where(found > 0, lane_numbers(), MARKS_AT_ONCE), axis=0)


@gluon.jit
def next_raised(marks, found, i, first, step, items):
    """Goes on until any mark is raised: the marks that were read last, their number i, and the raised one's lane.

    `found`: the i-th marks, without those that are done. Without any mark the lane is MARKS_AT_ONCE.
    """
    lane = first_raised(found)
    while (lane == MARKS_AT_ONCE) & ((i + 1) * MARKS_AT_ONCE * step < items):
        i += 1
        found = marks_of(marks, i, first, step, items, 1)
        lane = first_raised(found)
    return found, i, lane


@gluon.jit
def output_row(ptr, b, t, h, T, H, W: gl.constexpr):
    """Pointer to the row of batch row b, token t and head h of a contiguous [B, T, H, W], computed at every use."""
    return ptr + ((b.to(gl.int64) * opaque(T) + t) * opaque(H) + h) * W
