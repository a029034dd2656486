"""The prefills of the warm-up launch every variant that others can: of attention, of
the store of K and V before it, and of the products of experts after it. Its decodes
without a graph launch every variant of attention on Hopper."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor

from sglang.srt.forward.batch import ForwardBatch, ForwardMode
from sglang.srt.layers.ops.attention.decode.launch import decode_splits
from sglang.srt.layers.ops.attention.decode_hopper.launch import (
    QUERIES,
    StoredHead,
    decode_hopper_launch,
    places_of,
    splits_that_fit,
)
from sglang.srt.layers.ops.attention.extend.table import (
    LaunchShape,
    choose_tile,
    extend_launch,
)
from sglang.srt.layers.ops.attention.extend_dense.launch import dense_launch, reads_new
from sglang.srt.layers.ops.attention.extend_split.launch import (
    _WORKSPACE_BYTES,
    extend_splits,
    split_combine_launch,
)
from sglang.srt.layers.ops.attention.shared.args import Compares
from sglang.srt.layers.ops.moe.triton_sort import CHUNKS
from sglang.srt.layers.ops.moe.triton_table import block_rows
from sglang.srt.layers.ops.rope.triton import store_launch
from sglang.srt.managers.scheduler.warm_up import warm_up
from sglang.srt.managers.scheduler.warm_up_scenes import SceneLimits, scenes
from sglang.srt.model_executor.breakable_cuda_graph_runner import (
    BreakableCudaGraphRunner,
)
from sglang.srt.model_executor.memory_plan import (
    MAX_WHOLE_TOKENS,
    prefill_token_counts,
    whole_token_counts,
)
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness
from sglang.test.recording_backend import RecordingBackend
from sglang.test.scale import is_full, sampled
from sglang.test.tiny_models import write_mock_model

register_cpu_ci(est_time=18, suite="cpu")

CONTEXT, CHUNK = 8192, 8192
# Query heads, KV heads, channels.
HEADS = [
    *((32, 8, 128), (32, 32, 128), (16, 2, 128), (24, 8, 128), (40, 8, 128)),
    *((8, 1, 64), (64, 8, 64), (14, 2, 64), (8, 4, 256)),
    # Few heads: of small models, and of a shard.
    *((4, 1, 128), (8, 2, 128), (16, 4, 128), (9, 3, 64), (32, 8, 64), (7, 1, 64)),
    *((4, 1, 256), (16, 4, 256), (16, 2, 256), (2, 1, 24), (4, 2, 16), (4, 1, 24)),
]

# Experts, and how many of them a token has.
EXPERTS = [(8, 2), (32, 4), (128, 8), (128, 4), (160, 6), (256, 8), (384, 8)]

Shape = tuple[int, int]


class SetUp(NamedTuple):
    """An engine: its most rows, tokens of a chunk (-1: no chunks), prefill graphs, and
    tokens of a request."""

    rows: int
    chunk: int = CHUNK
    has_graphs: bool = False
    context: int = CONTEXT

    @property
    def most_tokens(self) -> int:
        """Of a prefill."""
        return min(n for n in (self.chunk, CHUNK) if n > 0)

    def most_of(self, rows: int) -> int:
        """Tokens of a prefill of so many prompts, each with room for an output."""
        return min(self.most_tokens, rows * (self.context - 1))


SET_UPS = [
    *(SetUp(20), SetUp(256), SetUp(32, has_graphs=True), SetUp(256, has_graphs=True)),
    *(SetUp(rows, 128, has_graphs=True) for rows in (1, 2, 3, 4, 32)),
    *(SetUp(32, 96, has_graphs=True), SetUp(32, -1, has_graphs=True), SetUp(8, 512)),
    *(SetUp(32, context=2048), SetUp(4, -1, context=1024)),
]


class Warmed(NamedTuple):
    """What a warm-up has launched: (rows, new tokens) of prefills.

    Fields:
        attended: of launches of attention. stored: of the store of K and V.
        multiplied: new tokens alone, of the products of whole forwards.
    """

    set_up: SetUp
    attended: set[Shape]
    stored: set[Shape]
    multiplied: set[int]


@pytest.fixture(
    scope="module",
    params=sampled(SET_UPS, key=lambda each: each.has_graphs, ci=4),
    ids=str,
)
def warmed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Warmed:
    set_up: SetUp = request.param
    model = write_mock_model(
        tmp_path_factory.mktemp("mock"),
        vocab_size=1000,
        max_position_embeddings=set_up.context,
    )
    engine = EngineHarness(
        model,
        skip_tokenizer_init=True,
        max_running_requests=set_up.rows,
        max_total_tokens=1 << 17,
        chunked_prefill_size=set_up.chunk,
        max_prefill_tokens=CHUNK,
    )
    runner = engine.scheduler.worker.model_runner
    # Launches follow from shapes, whatever is attended.
    runner.attn_backend.extend_op = _write_zeros  # type: ignore[attr-defined]
    result = Warmed(set_up, set(), set(), set())
    graphs = None
    if set_up.has_graphs:
        counts = prefill_token_counts(set_up.most_tokens)
        graphs = runner.prefill_graph_runner = BreakableCudaGraphRunner(
            runner, token_counts=counts, make_backend=RecordingBackend
        )
        # Captured with one row; those of one request have their attention in them.
        result.stored.update((1, count) for count in counts)
        result.attended.update((1, count) for count in whole_token_counts(counts))
        result.multiplied.update(counts)
    forward = runner.forward

    def watched(batch: ForwardBatch) -> Any:
        if batch.forward_mode is ForwardMode.EXTEND:
            shape = (batch.batch_size, batch.num_tokens)
            is_eager = graphs is None or graphs.refusal(batch) is not None
            if is_eager:
                result.stored.add(shape)
                result.multiplied.add(shape[1])
            if is_eager or shape[0] > 1 or shape[1] > MAX_WHOLE_TOKENS:
                result.attended.add(shape)
        return forward(batch)

    runner.forward = watched  # type: ignore[method-assign]
    warm_up(engine.server_args, engine.scheduler.worker, None)
    return result


def _write_zeros(*given: Tensor, out: Tensor, **others: object) -> None:
    out.zero_()


@functools.cache
def variants(shape: Shape, heads: tuple[int, int, int]) -> tuple[str, ...]:
    """The kernels of one forward's launches and their compile-time parameters."""
    return (*attention_variants(shape, heads), store_variant(shape, heads))


def attention_variants(shape: Shape, heads: tuple[int, int, int]) -> Iterator[str]:
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


def store_variant(shape: Shape, heads: tuple[int, int, int]) -> str:
    rows, tokens = shape
    updates_k = reads_new(
        tokens=tokens,
        rows=rows,
        head_dim=heads[-1],
        dtype=torch.bfloat16,
        has_tree=False,
    )
    return f"store {store_launch(tokens)} {updates_k}"


def every_shape(set_up: SetUp) -> Iterator[Shape]:
    """Rows with up to 80 new tokens on average, and some longer ones; with graphs but a
    single token, which is never scored and so replays one. Of many rows CI takes every
    seventh number."""
    numbers = range(1, min(set_up.rows, set_up.most_tokens) + 1)
    for rows in (*numbers[:16], *numbers[16 :: 1 if is_full() else 7], numbers[-1]):
        most = set_up.most_of(rows)
        fewest = 2 if set_up.has_graphs and rows == 1 else rows
        step = max(rows // (8 if is_full() else 2), 1)
        for tokens in range(fewest, min(80 * rows, most) + 1, step):
            yield rows, tokens
        for tokens in range(80 * rows, most, 512):
            yield rows, tokens
        yield rows, most


@pytest.mark.parametrize(
    "heads", sampled(HEADS, key=lambda heads: heads[-1], ci=2), ids=str
)
def test_every_variant_is_warm(warmed: Warmed, heads: tuple[int, int, int]) -> None:
    """Whatever a graph can replay may run eagerly, too: its prompts may be scored."""
    warm = {v for shape in warmed.attended for v in variants(shape, heads)[:-1]}
    warm |= {variants(shape, heads)[-1] for shape in warmed.stored}
    cold: dict[str, Shape] = {}
    for shape in every_shape(warmed.set_up):
        for variant in variants(shape, heads):
            if variant not in warm:
                cold.setdefault(variant, shape)
    assert not cold


@pytest.mark.parametrize("experts", EXPERTS, ids=str)
def test_products_of_experts_are_warm(warmed: Warmed, experts: tuple[int, int]) -> None:
    warm = {expert_variant(tokens, *experts) for tokens in warmed.multiplied}
    cold: dict[tuple[int, ...], int] = {}
    fewest = 2 if warmed.set_up.has_graphs else 1
    for tokens in range(fewest, warmed.set_up.most_of(warmed.set_up.rows) + 1):
        variant = expert_variant(tokens, *experts)
        if variant not in warm:
            cold.setdefault(variant, tokens)
    assert not cold


DECODED = [
    *((32, 8, 128), (32, 32, 128), (16, 2, 128), (40, 8, 128), (40, 10, 128)),
    *((8, 1, 64), (64, 8, 64), (14, 2, 64)),
    *((16, 4, 256), (16, 2, 256), (8, 4, 256), (8, 1, 256)),
]


@pytest.mark.parametrize("heads", DECODED, ids=str)
@pytest.mark.parametrize("branches", [1, 8])
def test_decodes_beyond_graphs_are_warm(
    heads: tuple[int, int, int], branches: int
) -> None:
    """On Hopper, where tiles follow from rows: one per request, or one per branch of a
    draft."""
    for graph_rows, rows in ((0, 1024), (1, 48), (64, 100), (160, 300), (256, 512)):
        warm = {
            variant
            for count in decoded(graph_rows, rows)
            for variant in decode_variants(branches * count, heads)
        }
        cold: dict[str, int] = {}
        for count in range(graph_rows + 1, rows + 1):
            for variant in decode_variants(branches * count, heads):
                if variant not in warm:
                    cold.setdefault(variant, count)
        assert not cold, (graph_rows, rows)


def decoded(graph_rows: int, rows: int) -> set[int]:
    """Requests that the warm-up decodes together, more than the largest graph has."""
    limits = SceneLimits(
        rows=rows,
        slots=1 << 20,
        context=CONTEXT,
        batch_tokens=CHUNK,
        has_chunks=True,
        vocab_size=1000,
        graph_rows=graph_rows,
        is_prefill_only=False,
        has_prefix_cache=False,
        has_grammars=False,
        has_hidden_states=False,
    )
    counts = set()
    for requests in scenes(limits):
        lengths = [request.sampling_params.max_new_tokens for request in requests]
        # The prefill yields the first token of each.
        counts |= {sum(n > step for n in lengths) for step in range(1, max(lengths))}
    return {count for count in counts if count > graph_rows}


@functools.cache
def decode_variants(rows: int, heads: tuple[int, int, int]) -> tuple[str, ...]:
    """Compile-time parameters of decode attention, for each of `Compares` over K and V
    of 16 bits and of 8."""
    q_heads, kv_heads, head_dim = heads
    programs = kv_heads * -(-q_heads // kv_heads // QUERIES)
    splits = decode_splits(rows=rows, programs_per_row=programs, max_context=CONTEXT)
    found = []
    for compares, itemsize in itertools.product(Compares, (2, 1)):
        places = places_of(StoredHead(head_dim, itemsize), compares)
        launch = decode_hopper_launch(
            rows=rows,
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            itemsize=itemsize,
            page_size=1,
            splits=splits_that_fit(splits, programs=rows * programs, places=places),
            compares=compares,
        )
        found.append(str(launch.options()))
    return found


def expert_variant(tokens: int, experts: int, top_k: int) -> tuple[int, ...]:
    """Rows of a block, which all tiles follow from; the chunk in which blocks are
    listed, and whether there is only one; or none of it for a single token."""
    assignments = tokens * top_k
    if tokens == 1:
        return ()
    block_m = block_rows(assignments=assignments, experts=experts)
    chunk = next((size for size in CHUNKS if assignments <= size), CHUNKS[-1])
    return block_m, chunk, assignments <= chunk


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
