# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
"""The kernels of `strong.py` for Hopper, in Gluon: chunks of 64, bfloat16, all head dims of the Gluon kernels.

A multiprocessor holds two programs of 4 warps, by shared memory (112 KiB each) and by registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, warpgroup_mma_wait

from gla_kernels.hopper.copies import fetch, row_of, write
from gla_kernels.hopper.layouts import accumulator, copy_layout, gate_layout, left_operand, operand_layout
from gla_kernels.hopper.levels import (
    BV,
    LEVELS,
    MARK_BITS,
    MARKS_AT_ONCE,
    add_missing,
    add_products,
    all_scores,
    any_raised,
    diagonal,
    fetch_keys,
    fill_sums,
    first_exponents,
    first_raised,
    first_values,
    gate_parts,
    is_late,
    lane_numbers,
    level_operand,
    load_keys,
    marked_chunk,
    marks_of,
    memory_of,
    missing_scores,
    next_raised,
    next_values,
    output_row,
    place_of_gates,
    start_sums,
    values_come_first,
)
from gla_kernels.hopper.places import wait_for_previous_kernel
from gla_kernels.hopper.products import add_product, masked_operand, product, triangle
from gla_kernels.hopper.values import opaque, split, thread_barrier, to_float32


@gluon.jit(do_not_specialize=["T", "H", "items"])
def gla_forward_strong_hopper(
    q,  # [B, T, H, K] bfloat16, any strides of B, T and H
    k,  # [B, T, H, K]
    v,  # [B, T, H, V]
    g,  # [B, T, H, K] float32 or bfloat16, natural log, <= 0
    o,  # [B, T, H, V], contiguous: the plain form's output, to be completed
    partial,  # [groups, SHARES // 2, SHARES, C, C] float32: scores that are parts of a sum
    flags,  # [N, H] int32: sequences and heads that the exact kernel computes
    marks,  # [slots, H] int32: n + 1 if the chunk, of sequence n, has a strong channel
    cu_seqlens,  # [N + 1] int32 or int64: boundaries of packed sequences
    scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h,
    T,
    H,
    items,  # slots times heads
    K: gl.constexpr,
    V: gl.constexpr,
    BK: gl.constexpr,
    C: gl.constexpr,
    SHARES: gl.constexpr,
    VARLEN: gl.constexpr,
):  # fmt: skip
    """A group of SHARES programs completes every so many-th item, a chunk and head, if it is marked.

    If it finds but one or two, as when a call has few strong chunks, each program does a share of the steps to the
    scores, which follow one another, and the last one to end completes the output. Else each program does whole items.
    """
    wait_for_previous_kernel()
    group, share = gl.program_id(0) // SHARES, gl.program_id(0) % SHARES
    groups = gl.num_programs(0) // SHARES
    found, i, lane = next_raised(marks, marks_of(marks, 0, group, groups, items, 1), group * 0, group, groups, items)
    if lane == MARKS_AT_ONCE:  # as in most calls
        return
    # For copies of gates (two tiles, unless values come first), q, k, and a level's operands (two), and later three
    # pairs of tiles of values.
    tiles = gl.allocate_shared_memory(gl.bfloat16, [6, C, BV], operand_layout(C, BV))
    q_tile, k_tile = tiles.index(2), tiles.index(3)
    halves = gl.allocate_shared_memory(gl.bfloat16, [2, C, BK], operand_layout(C, BK))
    g_tile = place_of_gates(tiles, halves, K, V)
    sums = gl.allocate_shared_memory(gl.bfloat16, [LEVELS, C, C], operand_layout(C, C))
    steps: gl.constexpr = (K + BK - 1) // BK * 2
    filled = lane * 0  # whether `sums` is
    left = lane * 0 + SHARES // 2  # places in `partial`
    read = i - 1  # whose marks have been divided
    shared = lane < 0
    while lane < MARKS_AT_ONCE:
        if read != i:
            read = i
            shared = gl.sum((found > 0).to(gl.int32), axis=0) <= left
            if shared == 0:
                found = gl.where(lane_numbers() % SHARES == share, found, 0)
                lane = first_raised(found)
        if lane < MARKS_AT_ONCE:
            item = group + (i * MARKS_AT_ONCE + lane) * groups
            mark = gl.load(marks + item) & ((1 << MARK_BITS) - 1)
            n, h, b, t, rows_left = marked_chunk(item, mark, opaque(H), cu_seqlens, opaque(T), C, VARLEN)
            given_up = gl.load(flags + n * H + h)  # seldom, and known only after a while
            begin = gl.where(shared, share * steps // SHARES, 0)
            end = gl.where(shared, (share + 1) * steps // SHARES, steps)
            thread_barrier()
            fetch_keys(
                q_tile, k_tile, g_tile, row_of(q, b, t, h, q_b, q_t, q_h), row_of(k, b, t, h, k_b, k_t, k_h),
                row_of(g, b, t, h, g_b, g_t, g_h), q_t, k_t, g_t, rows_left, begin // 2 * BK, K,
            )  # fmt: skip
            async_copy.commit_group()
            if values_come_first(K, V, BK):
                first_values(
                    tiles, row_of(v, b, t, h, v_b, v_t, v_h), output_row(o, b, t, h, T, H, V), v_t, H * V, rows_left, V
                )  # fmt: skip
            if filled == 0:  # while the first copies come
                fill_sums(sums, C)
                filled += 1
            if given_up == 0:
                # Addresses are computed again, because registers are short.
                pairs = missing_scores(
                    q_tile, k_tile, g_tile, halves, tiles, sums, row_of(q, b, t, h, q_b, q_t, q_h),
                    row_of(k, b, t, h, k_b, k_t, k_h), row_of(g, b, t, h, g_b, g_t, g_h),
                    row_of(v, b, t, h, v_b, v_t, v_h), output_row(o, b, t, h, T, H, V), scale, q_t, k_t, g_t, v_t,
                    H * V, rows_left, begin, end, C, K, V,
                )  # fmt: skip
                completes = shared == 0
                if shared:
                    left -= 1
                    place = partial + ((group * (SHARES // 2) + left) * SHARES) * (C * C)
                    pairs, completes = all_scores(pairs, place, marks + item, share, SHARES)
                if completes:
                    add_products(
                        output_row(o, b, t, h, T, H, V), masked_operand(pairs, triangle(C, True, True)), tiles,
                        row_of(v, b, t, h, v_b, v_t, v_h), v_t, H * V, rows_left, V,
                    )  # fmt: skip
                    if shared:
                        gl.store(marks + item, mark)
            async_copy.wait_group(0)
        found, i, lane = next_raised(
            marks, gl.where(lane_numbers() == lane, 0, found), i, group, groups, items
        )  # fmt: skip


@gluon.jit
def gradients_of_pairs(tiles, v, do, v_t, do_t, rows_left, scale, C: gl.constexpr, V: gl.constexpr):
    """The gradients of all pairs' scores (C, C) bfloat16, in both places of each, and of those on the diagonal (C).

    The copy of the first values is under way.
    """
    layout: gl.constexpr = accumulator(C)
    dP = gl.zeros([C, C], gl.float32, layout) + scale * 0.0
    dPt = gl.zeros([C, C], gl.float32, layout) + scale * 0.0
    for column in range(0, V, BV):
        v_tile, do_tile = next_values(tiles, v, do, v_t, do_t, rows_left, column, V)
        dP = add_product(do_tile, v_tile.permute((1, 0)), dP)
        dPt = add_product(v_tile, do_tile.permute((1, 0)), dPt)
        dP, dPt = warpgroup_mma_wait(0, deps=[dP, dPt])
    async_copy.wait_group(0)
    own = gl.sum(gl.where(diagonal(C), dP, 0.0), axis=1)
    return gl.where(triangle(C, True, True), dP, dPt).to(gl.bfloat16), own


@gluon.jit
def rows_tile(tile, ptr, BK: gl.constexpr):
    """A shared tile's memory as [C, BK] of what ptr points to."""
    layout: gl.constexpr = gate_layout() if ptr.dtype.element_ty == gl.float32 else operand_layout(tile.shape[0], BK)
    return tile._reinterpret(ptr.dtype.element_ty, [tile.shape[0], BK], layout)


@gluon.jit
def fetch_rows(tile, ptr, stride, rows_left, column, N: gl.constexpr):
    """Starts copying what `add_rows` will add to. `tile`: see `rows_tile`."""
    layout: gl.constexpr = copy_layout(tile.shape[1], ptr.dtype.element_ty.primitive_bitwidth)
    fetch(tile, ptr + column, stride, rows_left, N, layout, column)


@gluon.jit
def add_rows(tile, x):
    """Adds x to a tile."""
    tile.store((tile.load(accumulator(tile.shape[1])).to(gl.float32) + x).to(tile.dtype))


@gluon.jit
def write_rows(tile, ptr, stride, rows_left, column, N: gl.constexpr):
    """Writes a tile to where it came from."""
    layout: gl.constexpr = copy_layout(tile.shape[1], ptr.dtype.element_ty.primitive_bitwidth)
    write(ptr + column, tile.load(layout), stride, rows_left, N, layout, column)


@gluon.jit
def add_gradients(
    q, k, v, g, do, dq, dk, dg, tiles, keys, sums, scale, q_t, k_t, v_t, g_t, do_t, grad_t, column, rows_left,
    C: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, STORE_DG: gl.constexpr,
):  # fmt: skip
    """Adds what the missing scores give key columns from `column` on of dq, dk and dg; see `strong.add_gradients`.

    `keys` is memory for q, k and gates. `tiles` first holds values, then what is added to and the levels' operands.
    """
    key_tile: gl.constexpr = accumulator(BK)
    q_tile, k_tile = memory_of(keys, gl.bfloat16, BK).index(0), memory_of(keys, gl.bfloat16, BK).index(1)
    g_tile = memory_of(keys, gl.float32, BK).index(1)
    fetch_keys(q_tile, k_tile, g_tile, q, k, g, q_t, k_t, g_t, rows_left, column, K)
    async_copy.commit_group()
    first_values(tiles, v, do, v_t, do_t, rows_left, V)
    pairs, own = gradients_of_pairs(tiles, v, do, v_t, do_t, rows_left, scale, C, V)
    scaled = memory_of(tiles, gl.bfloat16, BK)
    scaled_at: gl.constexpr = scaled.shape[0] - 2
    # What will be added to comes while the levels are computed.
    dq_tile, dk_tile = rows_tile(tiles.index(0), dq, BK), rows_tile(tiles.index(1), dk, BK)
    thread_barrier()
    fetch_rows(dq_tile, dq, grad_t, rows_left, column, K)
    fetch_rows(dk_tile, dk, grad_t, rows_left, column, K)
    if STORE_DG:
        dg_tile = rows_tile(tiles.index(2), dg, BK)
        fetch_rows(dg_tile, dg, grad_t, rows_left, column, K)
    async_copy.commit_group()
    halves = gate_parts(g_tile)
    bq, bk, weight = load_keys(q_tile, k_tile, g_tile, halves, g, sums, scale, C)
    own = gl.convert_layout(own, gl.SliceLayout(1, key_tile))[:, None]
    bdq = own * bk
    bdk = own * bq
    balance = gl.zeros([C, BK], gl.float32, key_tile)
    factor = gl.exp2(first_exponents(halves))
    for level in range(opaque(rows_left * 0 + LEVELS)):
        # Beyond the last level too, where it is not used.
        exponents = start_sums(sums, gl.minimum(level + 1, LEVELS - 1), halves, C, BK)
        late = is_late(level, C, key_tile)
        tile = scaled.index(scaled_at + level % 2)
        tile.store((gl.where(late, bq, bk) * factor).to(gl.bfloat16))
        fence_async_shared()
        thread_barrier()
        gradient = product(level_operand(pairs, level), tile, C, BK)
        gradient, exponents = warpgroup_mma_wait(0, deps=[gradient, exponents])
        # X is read again, because a number that is stored and used takes a slow conversion of its own.
        of_q = gl.where(late, 1.0, 0.0)
        of_k = 1.0 - of_q
        if STORE_DG:
            balance += (of_k - of_q) * (to_float32(tile.load(key_tile)) * gradient)
        gradient *= factor
        bdq += of_q * gradient
        bdk += of_k * gradient
        factor = gl.exp2(exponents)
    if STORE_DG:
        high, low = split(balance)
        thread_barrier()  # no product reads the gates any more
        halves.index(0).store(high)
        halves.index(1).store(low)
        fence_async_shared()
        thread_barrier()
        before = gl.convert_layout(gl.where(triangle(C, True, False), 1.0, 0.0).to(gl.bfloat16), left_operand(C))
        bdg = product(before, halves.index(0), C, BK)
        bdg = add_product(before, halves.index(1), bdg)
    async_copy.wait_group(0)
    thread_barrier()
    add_rows(dq_tile, bdq * weight)
    add_rows(dk_tile, bdk)
    if STORE_DG:
        bdg = warpgroup_mma_wait(0, deps=[bdg])
        add_rows(dg_tile, bdg)
    thread_barrier()
    write_rows(dq_tile, dq, grad_t, rows_left, column, K)
    write_rows(dk_tile, dk, grad_t, rows_left, column, K)
    if STORE_DG:
        write_rows(dg_tile, dg, grad_t, rows_left, column, K)


@gluon.jit(do_not_specialize=["T", "H", "items"])
def gla_backward_strong_hopper(
    q, k, v, g,
    do,  # [B, T, H, V], any strides of B, T and H
    flags,  # [N, H] int32: sequences and heads that the exact kernel computes, because of the forward
    failed,  # [N, H] int32: and because of the plain backward
    marks,  # [slots, H] int32, as the forward raised them
    dq,  # [B, T, H, K], contiguous: the plain form's gradients, to be completed
    dk,  # [B, T, H, K]
    dv,  # [B, T, H, V]
    dg,  # [B, T, H, K]
    cu_seqlens,
    scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, do_b, do_t, do_h,
    T, H,
    items,  # slots times heads times the parts of a chunk's work: dv, and each block of key columns of the others
    K: gl.constexpr,
    V: gl.constexpr,
    BK: gl.constexpr,
    C: gl.constexpr,
    VARLEN: gl.constexpr,
    STORE_DG: gl.constexpr,
):  # fmt: skip
    """The backward of `gla_forward_strong_hopper`, item by item as there."""
    parts: gl.constexpr = 1 + (K + BK - 1) // BK
    wait_for_previous_kernel()
    if any_raised(marks, items, parts) == 0:
        return
    tiles = gl.allocate_shared_memory(gl.bfloat16, [6, C, BV], operand_layout(C, BV))
    halves = gl.allocate_shared_memory(gl.bfloat16, [2, C, BV], operand_layout(C, BV))
    sums = gl.allocate_shared_memory(gl.bfloat16, [LEVELS, C, C], operand_layout(C, C))
    fill_sums(sums, C)
    for i in range(gl.cdiv(items, MARKS_AT_ONCE * gl.num_programs(0))):
        found = marks_of(marks, i, gl.program_id(0), gl.num_programs(0), items, parts)
        lane = first_raised(found)
        while lane < MARKS_AT_ONCE:
            mark = gl.sum(gl.where(lane_numbers() == lane, found, 0), axis=0)
            item = gl.program_id(0) + (i * MARKS_AT_ONCE + lane) * gl.num_programs(0)
            n, h, b, t, rows_left = marked_chunk(item // parts, mark, H, cu_seqlens, T, C, VARLEN)
            part = item % parts
            given_up = gl.load(flags + n * H + h) | gl.load(failed + n * H + h)
            if given_up == 0:
                thread_barrier()
                token = (b.to(gl.int64) * T + t) * H + h
                q_at = row_of(q, b, t, h, q_b, q_t, q_h)
                k_at = row_of(k, b, t, h, k_b, k_t, k_h)
                g_at = row_of(g, b, t, h, g_b, g_t, g_h)
                do_at = row_of(do, b, t, h, do_b, do_t, do_h)
                if part == 0:
                    add_missing(
                        dv + token * V, do_at, q_at, k_at, g_at, tiles, halves, sums, scale, H * V, do_t, q_t, k_t, g_t,
                        rows_left, C, K, V,
                    )  # fmt: skip
                else:
                    add_gradients(
                        q_at, k_at, row_of(v, b, t, h, v_b, v_t, v_h), g_at, do_at, dq + token * K, dk + token * K,
                        dg + token * K if STORE_DG else dg, tiles, halves, sums, scale, q_t, k_t, v_t, g_t, do_t, H * K,
                        (part - 1) * BK, rows_left, C, K, V, BK, STORE_DG,
                    )  # fmt: skip
            found = gl.where(lane_numbers() == lane, 0, found)
            lane = first_raised(found)
