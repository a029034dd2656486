"""Gluon kernel of decode attention on Hopper: tile copies run ahead of products.

The split kernel of `decode_kernels` with its own pipeline: K and V of a tile are copied
from the pool to shared memory, slot by slot, while earlier tiles are multiplied. The
slots of a tile are looked up one tile before its copy begins.

    tile        0      1      2      3
    slots       |......|......|......|
    copy        |-----------|-----------|      STAGES - 1 tiles in flight
    products           |======|======|======|
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: allow-untyped-calls

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents

from sglang.srt.layers.ops.attention.decode.checked import Compared
from sglang.srt.layers.ops.attention.decode_hopper.checked import (
    end_watch,
    start_watch,
    tile_elements,
    watch_tile,
)
from sglang.srt.layers.ops.attention.decode_hopper.operands import (
    HEADROOM,
    add_values,
    empty_results,
    keep_queries,
    multiply,
    operands,
    query_operands,
    query_parts,
    tile_layout,
    whole_results,
    words_of,
)
from sglang.srt.layers.ops.attention.decode_hopper.reads import (
    load_slots,
    make_reads,
)
from sglang.srt.layers.ops.attention.decode_hopper.results import put_result
from sglang.srt.layers.ops.attention.shared.args import Compares, Scale
from sglang.srt.layers.ops.attention.shared.attend import Sums

_LOG2_E = gl.constexpr(1.4426950408889634)
# Queries of a tile: the rows of the matrix unit's instruction.
_QUERIES = gl.constexpr(16)
# Channels of queries that are kept in registers.
_KEPT_CHANNELS = gl.constexpr(128)
_NEVER = gl.constexpr(int(Compares.NEVER))
_IN_TURN = gl.constexpr(int(Compares.IN_TURN))


@gluon.jit
def copy_tile(at, stride, slot, is_read, place, LAYOUT: gl.constexpr):
    """Start copying K or V of slots. Elements that are not read become zero."""
    D: gl.constexpr = place.shape[1]
    channel = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
    cells = at + gl.expand_dims(slot.to(gl.int64) * stride, 1)
    cells = cells + gl.expand_dims(channel, 0)
    mask = gl.expand_dims(is_read, 1)
    async_copy.async_copy_global_to_shared(place, cells, mask=mask)


@gluon.jit
def copy_elements(reads, slot, element, keys, values, LAYOUT: gl.constexpr):
    """Start the copies of a tile as one group."""
    is_read = element < reads.end
    copy_tile(reads.k, reads.k_stride, slot, is_read, keys, LAYOUT)
    copy_tile(reads.v, reads.v_stride, slot, is_read, values, LAYOUT)
    async_copy.commit_group()


@gluon.jit
def start_copies(
    reads, element, keys, values, PAGE: gl.constexpr, LAYOUT: gl.constexpr
):
    """Start the copies of as many tiles as have room, less one. Return (elements of the
    next tile, their slots)."""
    for stage in gl.static_range(keys.shape[0] - 1):
        slot = load_slots(reads, element, PAGE)
        copy_elements(
            reads, slot, element, keys.index(stage), values.index(stage), LAYOUT
        )
        element += keys.shape[1]
    return element, load_slots(reads, element, PAGE)


@gluon.jit
def to_scores(product, scale):
    """`attend.to_scores`. The factor may be one for each head, [heads, 1]."""
    score = product * scale.factor
    if scale.cap is not None:
        power = gl.exp2(gl.abs(score) * (-2.0 * _LOG2_E))
        size = (1.0 - power) / (1.0 + power)
        score = gl.where(score < 0.0, -size, size) * scale.cap
    return score


@gluon.jit
def fold(score, top, total, ROOM: gl.constexpr):
    """Fold one more tile into the softmax: return (weights, factor on earlier results,
    power of a weight of one, sum of weights). The largest weight is 2 ** ROOM."""
    most = gl.max(score, 1)
    if ROOM > 0:
        # Where scores are so large that the difference is rounded, it could be more.
        lower = most - ROOM
        most = gl.where(most - lower > ROOM, most, lower)
    new_top = gl.maximum(top, most)
    shrink = gl.exp2(top - new_top)
    weight = gl.exp2(score - gl.expand_dims(new_top, 1))
    return weight, shrink, new_top, total * shrink + gl.sum(weight, 1)


@gluon.jit
def load_queries(q, row, head, is_member, D: gl.constexpr):
    """Load a row's queries: [heads, channels]."""
    WARPS: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 * 8 // D, D // 8], [WARPS, 1], [1, 0]
    )
    channel = gl.arange(0, D, layout=gl.SliceLayout(0, ROWS))
    head = gl.convert_layout(head, gl.SliceLayout(1, ROWS))
    is_member = gl.convert_layout(is_member, gl.SliceLayout(1, ROWS))
    cells = gl.expand_dims(row * q.stride + head * D, 1) + gl.expand_dims(channel, 0)
    return gl.load(q.at + cells, mask=gl.expand_dims(is_member, 1), other=0.0)


@gluon.jit
def split_plan(read_len, window, TILE: gl.constexpr):
    """`decode_kernels.split_plan`."""
    begin = read_len * 0
    if window is not None:
        begin = gl.maximum(read_len - window, 0)
    tiles = (read_len - begin + TILE.block_n - 1) // TILE.block_n
    tiles_per_split = gl.maximum(
        (tiles + TILE.splits - 1) // TILE.splits, TILE.least_tiles
    )
    active = (tiles + tiles_per_split - 1) // tiles_per_split
    return begin, tiles_per_split * TILE.block_n, active


class DecodeWork(NamedTuple):
    """A split of one row's elements whose first copies have started.

    Fields:
        query: `query_parts`. reads: `TileReads`. keys, values: tiles in
            shared memory [stages, elements, words].
        slot, element: of the tile whose copy starts next. begin, tiles: first element
            and number of tiles of the split. scale: `args.Scale` for these operands.
    """

    query: Any
    reads: Any
    keys: Any
    values: Any
    slot: Any
    element: Any
    begin: Any
    tiles: Any
    scale: Any


@gluon.jit
def attend_tiles(
    work,
    of,
    SHAPE: gl.constexpr,
    STORED: gl.constexpr,
    MMA: gl.constexpr,
    COPY: gl.constexpr,
    COMPARES: gl.constexpr,
):
    """Compute the softmax and result of a split, as a `Sums`.

    Args:
        STORED: the type of stored K and V.
        of: the `Compared` to compare, unless COMPARES is NEVER.
    """
    query, reads, keys, values, slot, element, begin, tiles, scale = work
    STAGES: gl.constexpr = keys.shape[0]
    N: gl.constexpr = keys.shape[1]
    ROOM: gl.constexpr = 0 if STORED.primitive_bitwidth == 16 else HEADROOM
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    IN_MEMORY: gl.constexpr = SHAPE.head_dim > _KEPT_CHANNELS
    if COMPARES != _NEVER:
        watch = start_watch(reads, begin, of, SHAPE, keys.shape[2], N)
    # Behind the digits of factors, whose scratch takes the same memory.
    kept = keep_queries(query, LEFT, IN_MEMORY)
    column = gl.arange(0, N, layout=gl.SliceLayout(0, MMA))
    top = gl.full([_QUERIES], float("-inf"), gl.float32, gl.SliceLayout(1, MMA))
    total = gl.zeros([_QUERIES], gl.float32, gl.SliceLayout(1, MMA))
    acc = empty_results(_QUERIES, SHAPE.head_dim, MMA, STORED)
    for tile in range(0, tiles):
        async_copy.wait_group(STAGES - 2)
        if COMPARES != _NEVER:
            # Their recorded sums load while this tile is multiplied.
            next_element = tile_elements(begin + (tile + 1) * N, N)
            next_slot = load_slots(reads, next_element, SHAPE.page_size)
        ahead = (tile + STAGES - 1) % STAGES
        copy_elements(
            reads, slot, element, keys.index(ahead), values.index(ahead), COPY
        )
        element += N
        slot = load_slots(reads, element, SHAPE.page_size)

        if COMPARES != _NEVER:
            watch = watch_tile(
                watch,
                keys.index(tile % STAGES),
                values.index(tile % STAGES),
                begin + tile * N,
                next_slot,
                of,
                SHAPE,
            )
        key = operands(keys.index(tile % STAGES).permute((1, 0)), RIGHT, STORED)
        parts = query_operands(kept, LEFT, IN_MEMORY)
        product = multiply(parts, key, gl.zeros([_QUERIES, N], gl.float32, MMA))
        is_read = begin + tile * N + column < reads.end
        score = gl.where(
            gl.expand_dims(is_read, 0), to_scores(product, scale), float("-inf")
        )
        weight, shrink, top, total = fold(score, top, total, ROOM)
        value = values.index(tile % STAGES)
        acc = add_values(acc, shrink, weight, value, LEFT, RIGHT, STORED)
    async_copy.wait_group(0)
    if COMPARES != _NEVER:
        end_watch(watch, reads, begin, of, SHAPE, keys.shape[2], COMPARES == _IN_TURN)
    return Sums(whole_results(acc, MMA), top, total)


@gluon.jit(do_not_specialize=["window", "layer"])
def decode_hopper_kernel(
    q,
    out,
    partials,
    counters,
    pool,
    pages,
    read_lens,
    sinks,
    scale,
    window,
    check,
    layer,
    SHAPE: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    COMPARES: gl.constexpr,
    ADDED: gl.constexpr,
    LETS_NEXT_START: gl.constexpr,
):
    """`decode_split_kernel` for queries in half precision, over K and V of their type
    or of 8 bits. Grid, arguments and results are the same, except that its programs
    can add up splits themselves.

    Args:
        counters: int32 [rows * programs of a row and split], zero before and after.
        SHAPE: `args.Shape`, of at least 64 channels, a power of two.
        TILE: `args.DecodeTile` of 16 query heads. STAGES: tiles in shared memory.
        COMPARES: an `args.Compares`, as in `decode_split_kernel`.
        ADDED: partial results of a head that are read at once; 0 if another kernel adds
            them up.
        LETS_NEXT_START: let the next kernel start early, if it may, once all programs
            run. A product loads its weights meanwhile.
    """
    if LETS_NEXT_START:
        gdc_launch_dependents()
    WARPS: gl.constexpr = gl.num_warps()
    D: gl.constexpr = SHAPE.head_dim
    N: gl.constexpr = TILE.block_n
    PAGE: gl.constexpr = SHAPE.page_size
    STORED: gl.constexpr = pool.k.dtype.element_ty
    W: gl.constexpr = words_of(D, STORED)
    COPY: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 * 8 // W, W // 8], [WARPS, 1], [1, 0]
    )
    SHARED: gl.constexpr = tile_layout(W, 2)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])

    HEAD_BLOCKS: gl.constexpr = (SHAPE.group + _QUERIES - 1) // _QUERIES
    kv_head = gl.program_id(0) // HEAD_BLOCKS
    split = gl.program_id(1)
    row = gl.program_id(2).to(gl.int64)
    read_len = gl.load(read_lens + row).to(gl.int32)
    first, per_split, active = split_plan(read_len, window, TILE)
    if split >= gl.maximum(active, 1):
        return
    begin = first + split * per_split
    end = gl.minimum(begin + per_split, read_len)
    tiles = (end - begin + N - 1) // N

    reads = make_reads(pool, pages, row, kv_head, end)
    word: gl.constexpr = reads.k.dtype.element_ty
    keys = gl.allocate_shared_memory(word, [STAGES, N, W], SHARED)
    values = gl.allocate_shared_memory(word, [STAGES, N, W], SHARED)
    element = begin + gl.arange(0, N, layout=gl.SliceLayout(1, COPY))
    element, slot = start_copies(reads, element, keys, values, PAGE, COPY)

    member = gl.program_id(0) % HEAD_BLOCKS * _QUERIES
    member += gl.arange(0, _QUERIES, layout=gl.SliceLayout(1, MMA))
    is_member = member < SHAPE.group
    head = kv_head * SHAPE.group + member
    query = load_queries(q, row, head, is_member, D)
    query, factor = query_parts(query, scale.factor, MMA, STORED)
    scale = Scale(factor, scale.cap)
    of = Compared(check=check, row=row, layer=layer, kv_head=kv_head)
    work = DecodeWork(query, reads, keys, values, slot, element, begin, tiles, scale)
    if COMPARES == _IN_TURN:
        if gl.load(check.state.clock) % check.layers == layer:
            sums = attend_tiles(work, of, SHAPE, STORED, MMA, COPY, COMPARES)
        else:
            sums = attend_tiles(work, of, SHAPE, STORED, MMA, COPY, _NEVER)
    else:
        sums = attend_tiles(work, of, SHAPE, STORED, MMA, COPY, COMPARES)

    put_result(
        out,
        partials,
        counters,
        sinks,
        sums,
        row,
        head,
        is_member,
        split,
        active,
        SHAPE,
        TILE,
        ADDED,
    )
