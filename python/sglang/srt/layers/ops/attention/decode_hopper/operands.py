"""Tiles of K and V in shared memory as operands of products, in Gluon.

A tile is copied as words of 16 bits. Where a value has 16 bits, a word is a channel.
Where it has 8, a word is two neighbouring channels, and becomes two operands: one of
the even channels and one of the odd ones, in float16, in which both types of 8 bits are
exact. A product over channels is then the sum of two, and a product with V gives the
even and the odd channels of the result.

    words of a tile     c0 c1 | c2 c3 | c4 c5 | ...        8 bits each
    even operand        c0      c2      c4                 16 bits each
    odd operand            c1      c3      c5
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: allow-untyped-calls

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

# Two words hold even and odd channels of two elements; each output takes those of both.
_E4M3 = gl.constexpr(
    """{
        .reg .b32 sorted;
        .reg .b16 even, odd;
        prmt.b32 sorted, $2, 0, 0x3120;
        mov.b32 {even, odd}, sorted;
        cvt.rn.f16x2.e4m3x2 $0, even;
        cvt.rn.f16x2.e4m3x2 $1, odd;
    }"""
)
# e5m2 is the upper byte of float16.
_E5M2 = gl.constexpr("prmt.b32 $0, $2, 0, 0x2404; prmt.b32 $1, $2, 0, 0x3414;")
# Weights are multiplied by 2 to this power, so that float16 holds those down to
# 2 ** -39 of the largest.
HEADROOM = gl.constexpr(15)
# The largest query becomes 2 to this power or less than twice that; 15 is float16's
# largest exponent.
_QUERY_POWER = gl.constexpr(14)


@gluon.constexpr_function
def words_of(head_dim, stored):
    """Return the words of a head of the type `stored`."""
    return head_dim * stored.primitive_bitwidth // 16


@gluon.constexpr_function
def tile_layout(words, itemsize):
    """Return the layout of a tile in shared memory, with rows of `words` words, as
    items of `itemsize` bytes. Eight rows of 16 bytes lie in different banks."""
    rows = max(128 // (2 * words), 1)
    return gl.SwizzledSharedLayout(16 // itemsize, rows, 8 // rows, [1, 0])


@gluon.jit
def operands(tile, LAYOUT: gl.constexpr, STORED: gl.constexpr):
    """Return a tile of words in shared memory as its operands: one or two."""
    words = tile.load(LAYOUT)
    if STORED.primitive_bitwidth == 16:
        return (words,)
    else:
        return gl.inline_asm_elementwise(
            _E4M3 if STORED.is_fp8e4nv() else _E5M2,
            "=&r,=&r,r",
            [words],
            dtype=(gl.float16, gl.float16),
            is_pure=True,
            pack=2,
        )


@gluon.jit
def query_parts(query, factor, MMA: gl.constexpr, STORED: gl.constexpr):
    """Return (queries [heads, channels] in the parts of their products, factor on
    these).

    For products in float16 each query is multiplied by a power of two, so that its
    channels keep their bits, and the factor [heads, 1] by its inverse.
    """
    if STORED.primitive_bitwidth == 16:
        return (query,), factor
    else:
        query = query.to(gl.float32)
        most = gl.max(gl.abs(query), 1).to(gl.uint32, bitcast=True) >> 23
        # Powers up and down are exponents of normal numbers.
        most = gl.maximum(most, _QUERY_POWER + 1)
        up = ((254 + _QUERY_POWER - most) << 23).to(gl.float32, bitcast=True)
        down = ((most - _QUERY_POWER) << 23).to(gl.float32, bitcast=True)
        query = (query * gl.expand_dims(up, 1)).to(gl.float16)
        PAIRS: gl.constexpr = [query.shape[0], query.shape[1] // 2, 2]
        ROWS: gl.constexpr = gl.SliceLayout(1, MMA)
        down = gl.expand_dims(gl.convert_layout(down, ROWS), 1)
        return gl.split(gl.reshape(query, PAIRS)), factor * down


@gluon.jit
def keep_queries(parts, LAYOUT: gl.constexpr, IN_MEMORY: gl.constexpr):
    """Return the parts of queries as operands, or IN_MEMORY, from where each tile loads
    them: those of wide heads would leave too few registers."""
    if len(parts) == 1:
        return (_keep(parts[0], LAYOUT, IN_MEMORY),)
    else:
        even = _keep(parts[0], LAYOUT, IN_MEMORY)
        return even, _keep(parts[1], LAYOUT, IN_MEMORY)


@gluon.jit
def _keep(part, LAYOUT: gl.constexpr, IN_MEMORY: gl.constexpr):
    if IN_MEMORY:
        SHARED: gl.constexpr = tile_layout(part.shape[1], 2)
        return gl.allocate_shared_memory(part.dtype, part.shape, SHARED, part)
    else:
        return gl.convert_layout(part, LAYOUT)


@gluon.jit
def query_operands(kept, LAYOUT: gl.constexpr, IN_MEMORY: gl.constexpr):
    """Return the operands of queries that `keep_queries` returned."""
    if not IN_MEMORY:
        return kept
    elif len(kept) == 1:
        return (kept[0].load(LAYOUT),)
    else:
        return kept[0].load(LAYOUT), kept[1].load(LAYOUT)


@gluon.jit
def multiply(left, right, total):
    """Add the products of two lists of operands to `total`."""
    total = mma_v2(left[0], right[0], total)
    if len(left) == 2:
        total = mma_v2(left[1], right[1], total)
    return total


@gluon.jit
def empty_results(
    HEADS: gl.constexpr, CHANNELS: gl.constexpr, MMA: gl.constexpr, STORED: gl.constexpr
):
    """Return results [heads, channels] of nothing, in the parts that `add_values`
    takes."""
    W: gl.constexpr = words_of(CHANNELS, STORED)
    zeros = gl.zeros([HEADS, W], gl.float32, MMA)
    if STORED.primitive_bitwidth == 16:
        return (zeros,)
    else:
        return zeros, zeros


@gluon.jit
def add_values(
    results,
    shrink,
    weight,
    tile,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    STORED: gl.constexpr,
):
    """Return results times `shrink`, plus weights [heads, elements] times V of a tile.
    LEFT, RIGHT: layouts of the operands."""
    shrink = gl.expand_dims(shrink, 1)
    if len(results) == 1:
        kept = results[0] * shrink
        (value,) = operands(tile, RIGHT, STORED)
        weight = gl.convert_layout(weight.to(value.dtype), LEFT)
        return (mma_v2(weight, value, kept),)
    else:
        # In this order it takes fewer registers.
        even, odd = operands(tile, RIGHT, STORED)
        weight = gl.convert_layout(weight.to(even.dtype), LEFT)
        first = mma_v2(weight, even, results[0] * shrink)
        return first, mma_v2(weight, odd, results[1] * shrink)


@gluon.jit
def whole_results(results, MMA: gl.constexpr):
    """Return results [heads, channels] of their parts."""
    if len(results) == 1:
        return results[0]
    else:
        SHAPE: gl.constexpr = [results[0].shape[0], 2 * results[0].shape[1]]
        joined = gl.reshape(gl.join(results[0], results[1]), SHAPE)
        return gl.convert_layout(joined, MMA)
