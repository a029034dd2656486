"""Random healthy traffic of speculating engines under the canary: no violation in
either pool, and every row of every branch was checked."""

from __future__ import annotations

import itertools
import random
from collections import Counter as CountsOf
from pathlib import Path

import numpy as np
import pytest
import torch

from kv_canary.records import Counter
from sglang.srt.configs.draft_layout import TreeShape
from sglang.srt.managers.batch.forward_result import GenerationBatchResult
from sglang.srt.managers.batch.schedule_batch import ScheduleBatch
from sglang.srt.managers.worker.grammar_masks import GrammarMasks
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.harness import EngineHarness, Finished
from sglang.test.mock_traffic import Traffic, check
from sglang.test.scale import count, is_full
from sglang.test.spec_canary_traffic import (
    CONTEXT,
    VOCAB,
    canaries_of,
    speculating,
    worker_of,
)
from sglang.test.tiny_models import write_mock_draft, write_mock_model

register_cpu_ci(est_time=25, suite="cpu", full_time=800)
register_cuda_ci(est_time=300, suite="cuda")

REQUESTS = count(ci=7, full=2000)
# Few requests must make the pool short by their length; after so many, most are short.
SHORT_AFTER = 100
ALGORITHMS = ["EAGLE", "EAGLE3", "STANDALONE"]
# topk -> (topk, steps, nodes), and where the mock draft's proposals come from.
TREES = {
    1: ((1, 4, 5), "attention"),
    4: ((4, 4, 12), "hidden"),
    8: ((8, 5, 24), "hidden"),
}
# By page size, for chains and for trees: small enough to evict and, with small pages,
# to retract.
SLOTS = {1: (800, 800), 4: (1200, 800), 64: (6144, 1024)}


def configurations() -> list[tuple[str, int, int]]:
    """All; of CI on a CPU every pair of two of the three."""
    shapes = list(itertools.product(TREES, SLOTS))
    if is_full() or torch.cuda.is_available():
        return [(name, *shape) for name in ALGORITHMS for shape in shapes]
    diagonal = [(ALGORITHMS[i % 2], *shape) for i, shape in enumerate(shapes)]
    return [*diagonal, ("STANDALONE", 4, 4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mock")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return write_mock_model(
        folder / "target", vocab_size=VOCAB, max_position_embeddings=CONTEXT
    )


class Reads:
    """Tokens that the launched forwards read and write by the arithmetic of an
    iteration, per pool. Padding does not count."""

    def __init__(self, harness: EngineHarness, patch: pytest.MonkeyPatch) -> None:
        self.read: CountsOf[str] = CountsOf()
        self.written: CountsOf[str] = CountsOf()
        self.forwards: CountsOf[str] = CountsOf()
        self.accept_lens: CountsOf[int] = CountsOf()
        worker = worker_of(harness)
        shape: TreeShape = harness.server_args.tree_shape
        prefill, decode = worker._prefill, worker._decode

        def after_prefill(
            batch: ScheduleBatch, sampling_info: SamplingBatchInfo
        ) -> GenerationBatchResult:
            result = prefill(batch, sampling_info)
            forward = batch.forward_batch(sampling_info)
            for pool in ("target", "draft"):
                self.read[pool] += int(forward.prefix_lens.sum())
                self.written[pool] += int(forward.extend_lens.sum())
                self.forwards[pool] += 1
            return result

        def after_decode(
            batch: ScheduleBatch, masks: GrammarMasks | None
        ) -> GenerationBatchResult:
            result = decode(batch, masks)
            part = worker.draft_worker.workspace.rows(len(batch))
            lens, rows = int(part.seq_lens.sum()), len(batch)
            inner = shape.num_steps - 1
            self.read["target"] += lens
            # A language model reads the newest token of new requests first.
            lead, behind = harness.server_args.draft_lead, batch.catch_up
            if behind is not None:
                starts = np.flatnonzero(behind)
                self.read["draft"] += int(part.seq_lens[starts].sum())
                self.written["draft"] += len(starts) * shape.accept_width
                self.forwards["draft"] += 1
            lens += lead * rows
            self.written["target"] += rows * shape.num_draft_tokens
            self.forwards["target"] += 1
            # Inner step i: a row per branch, over the prefix and i drafts.
            drafts = inner * lens + rows * inner * (inner - 1) // 2
            self.read["draft"] += shape.topk * drafts + lens
            self.written["draft"] += rows * (shape.topk * inner + shape.accept_width)
            self.forwards["draft"] += inner + 1
            self.accept_lens.update(part.result.accept_lens.tolist())
            return result

        patch.setattr(worker, "_prefill", after_prefill)
        patch.setattr(worker, "_decode", after_decode)


def serve(harness: EngineHarness, *, seed: int, requests: int) -> None:
    traffic = Traffic(harness, random.Random(seed), requests, short_after=SHORT_AFTER)
    answers: dict[str, Finished] = {}
    while traffic.left:
        answers |= harness.run(on_step=traffic.on_step)
    check(traffic.expected, answers, vocab_size=VOCAB)


@pytest.mark.parametrize(("algorithm", "topk", "page_size"), configurations())
def test_nothing_is_reported(
    folder: Path,
    model: Path,
    algorithm: str,
    topk: int,
    page_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # So small that passes end inside nodes.
    monkeypatch.setenv("SGLANG_KV_CANARY_SWEEP_BUDGET", "50")
    tree, source = TREES[topk]
    draft = write_mock_draft(
        folder / f"{algorithm}-{source}",
        kind=algorithm,
        source=None if algorithm == "STANDALONE" else source,
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
    )
    seed = 100 * ALGORITHMS.index(algorithm) + 10 * topk + page_size
    harness = speculating(
        model,
        draft,
        tree=tree,
        speculative_algorithm=algorithm,
        page_size=page_size,
        max_total_tokens=SLOTS[page_size][topk > 1],
        max_running_requests=12,
        chunked_prefill_size=64,
        schedule_conservativeness=0.3,
        kv_canary_real_data="all",
        kv_canary_sweep_interval=8,
        overlap=seed % 2 == 0,
        dtype="float32",
    )
    managers = canaries_of(harness)
    states = {pool: m.target.buffers.state for pool, m in managers.items()}
    shape = harness.scheduler.server_args.tree_shape
    assert managers["target"].target.tree_depth == shape.num_steps
    # The forwards that the capture of graphs ran.
    before = {pool: state.counters.tolist() for pool, state in states.items()}
    reads = Reads(harness, monkeypatch)
    serve(harness, seed=seed, requests=REQUESTS)

    assert managers["target"].reporter.total == 0
    for pool, state in states.items():
        assert int(state.ring_count) == 0
        assert not state.verdict.any()
        after = state.counters.tolist()
        ran = [a - b for a, b in zip(after, before[pool], strict=True)]
        assert ran[Counter.VERIFIED_SLOTS] == reads.read[pool] > 0
        swept = ran[Counter.SWEPT_SLOTS]
        assert ran[Counter.REHASHED_SLOTS] == reads.read[pool] + swept
        assert swept > 0
        for counter in (Counter.HEAD_SLOTS, Counter.TAIL_SLOTS):
            assert ran[counter] == reads.written[pool]
        for counter in (
            Counter.VERIFY_LAUNCHES,
            Counter.HEAD_LAUNCHES,
            Counter.TAIL_LAUNCHES,
        ):
            assert ran[counter] == reads.forwards[pool]
    # Not only the root, not always the whole path.
    assert len(reads.accept_lens) >= 3, reads.accept_lens
    assert harness.scheduler.stats_snapshot().num_used_tokens == 0


@pytest.mark.parametrize("real_data", ["none", "partial", "rotate"])
def test_every_other_mode_is_silent_too(
    folder: Path, model: Path, real_data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool too small for all, a sweep per launch, tokens compared one by one."""
    monkeypatch.setenv("SGLANG_KV_CANARY_ENABLE_VERIFY_TOKEN_ASSERT", "1")
    draft = write_mock_draft(
        folder / "any-mode",
        kind="EAGLE",
        source="hidden",
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
    )
    harness = speculating(
        model,
        draft,
        tree=(3, 3, 8),
        page_size=4,
        max_total_tokens=1400,
        chunked_prefill_size=48,
        schedule_conservativeness=0.1,
        kv_canary_real_data=real_data,
        kv_canary_sweep_interval=1,
        overlap=True,
        dtype="float32",
    )
    serve(harness, seed=1, requests=count(ci=10, full=200))
    for manager in canaries_of(harness).values():
        assert manager.reporter.total == 0
        rehashed = manager.counters[Counter.REHASHED_SLOTS]
        assert (rehashed > 0) == (real_data == "rotate")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graphs_ran(folder: Path, model: Path) -> None:
    """The forwards that the other tests check on a GPU were replayed."""
    draft = write_mock_draft(
        folder / "graphs",
        kind="EAGLE3",
        source="hidden",
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
    )
    harness = speculating(
        model, draft, tree=(4, 4, 12), speculative_algorithm="EAGLE3", page_size=64
    )
    serve(harness, seed=2, requests=20)
    worker = worker_of(harness)
    draft = worker.draft_worker
    replayed = (
        worker.model_runner.graph_runner,
        draft.phase.graphs.graphs,
        draft.extend.graphs.graphs,
    )
    assert all(graphs.num_replays for graphs in replayed)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
