"""The weight-streaming product against a float32 product.

Without a GPU the kernels run in the interpreter, in float16: it computes bfloat16
products wrongly.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from sglang.srt.layers.ops.activation.op import GATED
from sglang.srt.layers.ops.head_linear.op import head_linear_ref
from sglang.srt.layers.ops.head_linear.triton import head_linear
from sglang.srt.layers.ops.linear import triton as gemm
from sglang.srt.layers.ops.linear import triton_table as gemm_table
from sglang.srt.layers.ops.linear.triton_table import GemmConfig
from sglang.srt.utils import triton_launch
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=15, suite="cpu")
register_cuda_ci(est_time=60, suite="cuda")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16] if DEVICE == "cpu" else [torch.float16, torch.bfloat16]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}

SPLITS = [
    GemmConfig(block_n=64, block_k=64, split_k=1, stages=2, prefetch=1),
    GemmConfig(block_n=32, block_k=64, split_k=3, stages=3),
    GemmConfig(block_n=64, block_k=128, split_k=16, stages=2, dependent=False),
]
GEMV = GemmConfig(block_n=4, block_k=128, split_k=0)
TALL = GemmConfig(
    block_n=32, block_k=64, split_k=1, stages=2, prefetch=2, warps=8, is_tall=True
)
SHAPES = [(70, 200), (128, 256), (33, 72)]
if DEVICE == "cuda":
    SHAPES += [(6144, 4096), (4096, 14336)]


@pytest.fixture(autouse=True)
def same_numbers_every_time() -> None:
    torch.manual_seed(7)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    assert bool(actual.isfinite().all())
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm())


def problem(rows: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, k, device=DEVICE).to(dtype)
    weight = (torch.randn(n, k, device=DEVICE) * k**-0.5).to(dtype)
    return x, weight


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", [*SPLITS, GEMV], ids=lambda c: f"split{c.split_k}")
def test_product(dtype: torch.dtype, config: GemmConfig) -> None:
    rows_tried = [1] if config.split_k == 0 else [1, 5, 17, 64]
    for n, k in SHAPES:
        for rows in rows_tried:
            x, weight = problem(rows, n, k, dtype)
            out = torch.full((rows, n), float("nan"), dtype=dtype, device=DEVICE)
            assert gemm.gemm(x, weight, config=config, out=out) is out
            expected = x.float() @ weight.float().t()
            assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", [*SPLITS, GEMV], ids=lambda c: f"split{c.split_k}")
def test_epilogues(dtype: torch.dtype, config: GemmConfig) -> None:
    rows = 1 if config.split_k == 0 else 3
    x, weight = problem(rows, 72, 200, dtype)
    bias = torch.randn(72, device=DEVICE).to(dtype)
    residual = torch.randn(rows, 72, device=DEVICE).to(dtype)
    expected = gemm.gemm_ref(x, weight, bias, residual=residual)
    out = gemm.gemm(x, weight, bias, config=config, residual=residual, out=residual)
    assert out is residual
    assert relative_error(out, expected) < TOLERANCE[dtype]
    both = x.float() @ weight.float().t()
    for name, activation in GATED.items():
        actual = gemm.gemm_gated(x, weight, name, config=config)
        assert relative_error(actual, activation(both)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 65, 97, 128])
def test_tall_tile(dtype: torch.dtype, rows: int) -> None:
    """Outputs and depths that no tile divides, one block of depth, the shape served."""
    shapes = [(35, 200, TALL), (64, 64, TALL), (33, 72, TALL)]
    if DEVICE == "cuda":
        served = gemm_table.lookup(rows=rows, n=28672, k=4096, gated=True)
        narrow = gemm_table.lookup(rows=rows, n=16384, k=2048, gated=True)
        if rows > gemm_table.MAX_ROWS:
            shapes += [(14336, 4096, served), (8192, 2048, narrow)]
        shapes += [(3072, 1024, TALL)]
    turns = itertools.cycle(GATED.items())
    for (outputs, k, config), (name, activation) in zip(shapes, turns, strict=False):
        x, weight = problem(rows, 2 * outputs, k, dtype)
        both = x.float() @ weight.float().t()
        expected = activation(both)
        for given in (x, *placements(x), x.view(1, rows, k)):
            canvas = torch.full((rows + 1, outputs), 7.0, dtype=dtype, device=DEVICE)
            out = canvas[:rows].view(*given.shape[:-1], outputs)
            assert gemm.gemm_gated(given, weight, name, config=config, out=out) is out
            assert relative_error(out.view(rows, -1), expected) < TOLERANCE[dtype]
            assert bool((canvas[rows] == 7).all())


def placements(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x in both halves of wider rows, in odd rows, and begun between multiples of 16
    bytes."""
    rows, k = x.shape
    wide = torch.cat((x, x), dim=1)
    odd = torch.cat((x[:, :1], x), dim=1)
    shifted = torch.cat((x[0, :1], x.flatten()))
    return wide[:, :k], wide[:, k:], odd[:, 1:], shifted[1:].view(rows, k)


def test_what_the_copy_engine_reads() -> None:
    x = torch.randn(6, 64, device=DEVICE).half()
    left, right, odd, shifted = placements(x)
    for given in (x, left, right):
        assert triton_launch.rows_for_copies(given) is given
    for given in (odd, shifted, odd[:1], x.t().contiguous().t()):
        copy = triton_launch.rows_for_copies(given)
        assert copy is not given and torch.equal(copy, given)
        assert triton_launch.rows_for_copies(copy) is copy


@pytest.mark.parametrize("config", SPLITS, ids=lambda c: f"split{c.split_k}")
def test_same_bits_every_time(config: GemmConfig) -> None:
    x, weight = problem(4, 70, 1024, DTYPES[-1])
    first = gemm.gemm(x, weight, config=config)
    for _ in range(2 if DEVICE == "cpu" else 200):
        assert torch.equal(gemm.gemm(x, weight, config=config), first)


def test_leading_dimensions_and_strided_rows() -> None:
    x, weight = problem(6, 70, 128, DTYPES[0])
    wide = torch.cat((x, x), dim=1)
    expected = gemm.gemm_ref(x, weight)
    for rows in (wide[:, :128], x.view(2, 3, 128)):
        actual = gemm.gemm(rows, weight, config=SPLITS[1])
        assert actual.shape == (*rows.shape[:-1], 70)
        assert relative_error(actual.view(6, 70), expected) < 2e-3


def test_refusals() -> None:
    x, weight = problem(65, 70, 128, DTYPES[0])
    with pytest.raises(ValueError, match="65 rows"):
        gemm.gemm(x, weight, config=SPLITS[0])
    with pytest.raises(ValueError, match="2 rows"):
        gemm.gemm(x[:2], weight, config=GEMV)
    with pytest.raises(ValueError, match="must be equal"):
        gemm.gemm(x[:2, :64], weight, config=SPLITS[0])
    with pytest.raises(ValueError, match="129 rows"):
        gemm.gemm_gated(x[:1].expand(129, -1), weight, "silu", config=TALL)
    with pytest.raises(ValueError, match="only works for gated products"):
        gemm.gemm(x, weight, config=TALL)
    with pytest.raises(ValueError, match="2 \\* I"):
        gemm.gemm_gated(x[:2], weight[:69], "silu", config=SPLITS[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(3, 20, 40), (5, 70, 24), (2, 33, 1100), (16, 512, 128), (16, 128, 512)]
)
def test_heads_of_one_token(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Weights of either order, inputs and outputs among the channels of others."""
    heads, n, k = shape
    weight = (torch.randn(heads, n, k, device=DEVICE) * k**-0.5).to(dtype)
    turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
    x = torch.randn(1, heads, k + 6, device=DEVICE).to(dtype)[..., 3 : k + 3]
    expected = head_linear_ref(x.float(), weight.float())
    canvas = torch.zeros(1, heads, n + 8, dtype=dtype, device=DEVICE)
    for given, out in ((weight, None), (turned, canvas[..., :n])):
        actual = head_linear(x, given, out=out)
        assert relative_error(actual, expected) < TOLERANCE[dtype]
    assert not canvas[..., n:].any()
    with pytest.raises(ValueError, match=r"x is \(1, \d+, 7\)"):
        head_linear(x[..., :7], weight)
    with pytest.raises(ValueError, match="channels must be contiguous"):
        head_linear(x.transpose(1, 2).contiguous().transpose(1, 2), weight)


def test_choice_leaves_the_rest_to_cublas() -> None:
    x, weight = problem(1, 6144, 64, torch.float16)
    assert gemm.choose(x.float(), weight.float()) is None
    assert gemm.choose(x[:0], weight) is None
    assert gemm.choose(x.expand(gemm_table.MAX_ROWS + 1, -1), weight) is None
    assert gemm.choose(x, weight.t().contiguous().t()) is None
    assert gemm.choose(x[:, 1:], weight[:, 1:]) is None


@pytest.mark.parametrize("k", [1024, 2048, 2560, 3072, 4096, 7168, 9728, 14336])
@pytest.mark.parametrize("n", [1024, 2560, 3072, 4096, 6144, 28672, 151936])
def test_table_stays_within_the_device(n: int, k: int) -> None:
    for rows in (1, 2, 16, 17, 32, 33, 48, 49, 64):
        config = gemm_table.lookup(rows=rows, n=n, k=k, gated=False)
        if config is None:
            continue
        if config.split_k == 0:
            assert rows == 1
            continue
        block_m = max(16, 1 << (rows - 1).bit_length())
        tile = 2 * config.block_k * (config.block_n + block_m)
        assert config.stages >= 2 and config.stages * tile <= 227 * 1024
        assert config.split_k * 4 <= max(4, k // config.block_k)
        tiles = -(-n // config.block_n)
        assert tiles * config.split_k * block_m * config.block_n * 4 <= 32 << 20 or (
            config.split_k == 1
        )
    assert gemm_table.lookup(rows=65, n=n, k=k, gated=False) is None


def test_tall_tiles_only_where_they_fill_the_device() -> None:
    def lookup(rows: int, outputs: int) -> GemmConfig | None:
        return gemm_table.lookup(rows=rows, n=2 * outputs, k=4096, gated=True)

    for rows in (65, 128):
        config = lookup(rows, 14336)
        assert config is not None and config.is_tall
        tile = 2 * config.block_k * (gemm_table.MAX_GATED_ROWS + 2 * config.block_n)
        assert config.stages * tile <= 227 * 1024
        assert lookup(rows, 3072) is None and lookup(rows, 17408) is None
        narrow = lookup(rows, 8192)
        assert narrow is not None and narrow.is_tall and narrow.block_n == 64
        tile = 2 * narrow.block_k * (gemm_table.MAX_GATED_ROWS + 2 * narrow.block_n)
        assert narrow.stages * tile <= 227 * 1024
    assert lookup(129, 14336) is None
    few = lookup(64, 14336)
    assert few is not None and not few.is_tall


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA graph")
def test_product_in_a_graph() -> None:
    x, weight = problem(2, 6144, 4096, torch.bfloat16)
    gemm.gemm(x, weight, config=SPLITS[2])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden = x
        for _ in range(8):
            hidden = gemm.gemm(hidden, weight[:4096], config=SPLITS[1])
            hidden = gemm.gemm(hidden, weight[:4096], config=SPLITS[0])
    for _ in range(20):
        x.normal_()
        graph.replay()
        expected = x
        with triton_launch.without_dependent_launch():
            for _ in range(8):
                expected = gemm.gemm(expected, weight[:4096], config=SPLITS[1])
                expected = gemm.gemm(expected, weight[:4096], config=SPLITS[0])
        assert torch.equal(hidden, expected)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
