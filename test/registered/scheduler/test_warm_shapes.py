"""The prefills of the warm-up launch every variant of attention that others can."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton")

import torch

from sglang.srt.layers.attention.triton_ops.extend_dense import dense_launch, reads_new
from sglang.srt.layers.attention.triton_ops.extend_split import (
    _WORKSPACE_BYTES,
    extend_splits,
    split_combine_launch,
)
from sglang.srt.layers.attention.triton_ops.extend_table import (
    LaunchShape,
    choose_tile,
    extend_launch,
)
from sglang.srt.managers.scheduler_components.warm_up import warm_up
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness
from sglang.test.tiny_models import write_mock_model

register_cpu_ci(est_time=30, suite="cpu")

CONTEXT, CHUNK = 8192, 8192
# Query heads, KV heads, channels.
HEADS = [
    *((32, 8, 128), (32, 32, 128), (16, 2, 128), (24, 8, 128), (40, 8, 128)),
    *((8, 1, 64), (64, 8, 64), (14, 2, 64), (8, 4, 256)),
]

Shape = tuple[int, int]


class Warmed(NamedTuple):
    """(rows, new tokens) of the prefills of a warm-up, and the most rows."""

    rows: int
    shapes: set[Shape]


@pytest.fixture(scope="module", params=[20, 256])
def warmed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Warmed:
    model = write_mock_model(
        tmp_path_factory.mktemp("mock"),
        vocab_size=1000,
        max_position_embeddings=CONTEXT,
    )
    engine = EngineHarness(
        model,
        skip_tokenizer_init=True,
        max_running_requests=request.param,
        max_total_tokens=1 << 17,
        chunked_prefill_size=CHUNK,
    )
    runner, found = engine.scheduler.worker.model_runner, set()
    forward = runner.forward

    def watched(batch: ForwardBatch) -> Any:
        if batch.forward_mode is ForwardMode.EXTEND:
            found.add((batch.batch_size, batch.num_tokens))
        return forward(batch)

    runner.forward = watched  # type: ignore[method-assign]
    warm_up(engine.server_args, engine.scheduler.worker, None)
    return Warmed(request.param, found)


def variants(shape: Shape, heads: tuple[int, int, int]) -> Iterator[str]:
    """The kernels of one launch and their compile-time parameters."""
    rows, tokens = shape
    q_heads, kv_heads, head_dim = heads
    launch = LaunchShape(tokens, rows, q_heads, kv_heads, head_dim)
    if reads_new(
        tokens=tokens,
        rows=rows,
        head_dim=head_dim,
        dtype=torch.bfloat16,
        has_tree=False,
    ):
        yield f"dense {dense_launch(launch, page_size=1, pdl=True)}"
        return
    tile = choose_tile(launch, itemsize=2)
    options = extend_launch(tile, launch, page_size=1)
    if not tile.programs:
        yield f"extend {options}"
        return
    yield f"split {options}"
    cells = _WORKSPACE_BYTES // (4 * head_dim)
    workspace: Any = SimpleNamespace(
        max_context=CONTEXT, lse=SimpleNamespace(numel=lambda: cells)
    )
    splits = extend_splits(tile, launch, workspace)
    if splits > 1:
        combine = split_combine_launch(
            q_heads=q_heads, head_dim=head_dim, splits=splits
        )
        yield f"combine {combine}"


def every_shape(most_rows: int) -> Iterator[Shape]:
    """Rows with up to 80 new tokens on average, and some longer ones."""
    for rows in range(1, most_rows + 1):
        for tokens in range(rows, min(80 * rows, CHUNK) + 1, max(rows // 8, 1)):
            yield rows, tokens
        for tokens in range(80 * rows, CHUNK, 512):
            yield rows, tokens


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_every_variant_is_warm(warmed: Warmed, heads: tuple[int, int, int]) -> None:
    warm = {variant for shape in warmed.shapes for variant in variants(shape, heads)}
    cold: dict[str, Shape] = {}
    for shape in every_shape(warmed.rows):
        for variant in variants(shape, heads):
            if variant not in warm:
                cold.setdefault(variant, shape)
    assert not cold


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
