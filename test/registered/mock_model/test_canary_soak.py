"""Random healthy traffic under the canary: no violation, and every read was checked."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from kv_canary.records import Counter
from sglang.srt.forward.batch import ForwardBatch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.test.canary_traffic import CONTEXT, VOCAB, canary_of
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.harness import EngineHarness, Finished
from sglang.test.mock_traffic import Traffic, check
from sglang.test.scale import count
from sglang.test.tiny_models import write_mock_model

register_cpu_ci(est_time=20, suite="cpu", full_time=110)
register_cuda_ci(est_time=120, suite="cuda")

ON_GPU = torch.cuda.is_available()
# (page size, slots, chunk, policy, radix cache): pools small enough to retract.
CONFIGURATIONS = [
    (1, 900, 64, "fcfs", True),
    (1, 700, 32, "lpm", True),
    (1, 1200, -1, "fcfs", True),
    (4, 800, 16, "lpm", True),
    (4, 1000, 128, "fcfs", False),
    (16, 800, 64, "fcfs", True),
    (16, 1600, 32, "lpm", True),
    (64, 1024, 64, "fcfs", True),
    (64, 2048, 128, "lpm", True),
    (1, 600, 48, "fcfs", False),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mock_model(
        tmp_path_factory.mktemp("mock"),
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
    )


class ReadCount:
    """Counts the tokens that the launched forwards read and write."""

    def __init__(self, harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
        self.forwards = self.read = self.written = 0
        runner = harness.scheduler.worker.model_runner
        forward = runner.forward

        def counted(batch: ForwardBatch) -> LogitsProcessorOutput:
            self.forwards += 1
            self.read += int(batch.prefix_lens.sum())
            self.written += int(batch.extend_lens.sum())
            return forward(batch)

        monkeypatch.setattr(runner, "forward", counted)


@pytest.mark.parametrize("overlap", [False, True], ids=["in-order", "overlap"])
@pytest.mark.parametrize(
    "configuration", CONFIGURATIONS, ids=lambda c: "-".join(map(str, c))
)
def test_nothing_is_reported(
    model: Path,
    configuration: tuple[int, int, int, str, bool],
    overlap: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page_size, slots, chunk, policy, has_radix = configuration
    # So small that passes end inside nodes.
    monkeypatch.setenv("SGLANG_KV_CANARY_SWEEP_BUDGET", "50")
    seed = 2 * CONFIGURATIONS.index(configuration) + overlap
    harness = EngineHarness(
        model,
        overlap=overlap,
        page_size=page_size,
        max_total_tokens=slots,
        chunked_prefill_size=chunk,
        schedule_policy=policy,
        disable_radix_cache=not has_radix,
        max_running_requests=24,
        schedule_conservativeness=0.3,
        skip_tokenizer_init=True,
        kv_canary="raise",
        kv_canary_real_data="all",
        kv_canary_sweep_interval=8 if has_radix else 0,
    )
    manager = canary_of(harness)
    state = manager.target.buffers.state
    before = state.counters.tolist()  # what the capture of graphs ran
    reads = ReadCount(harness, monkeypatch)
    traffic = Traffic(harness, random.Random(seed), count(ci=10, full=200))
    answers: dict[str, Finished] = {}
    while traffic.left:
        answers |= harness.run(on_step=traffic.on_step)
    check(traffic.expected, answers, vocab_size=VOCAB)

    assert manager.reporter.total == 0
    assert int(state.ring_count) == 0
    assert not state.verdict.any()
    ran = [a - b for a, b in zip(state.counters.tolist(), before, strict=True)]
    assert ran[Counter.VERIFIED_SLOTS] == reads.read > 0
    assert ran[Counter.REHASHED_SLOTS] == reads.read + ran[Counter.SWEPT_SLOTS]
    for counter in (Counter.HEAD_SLOTS, Counter.TAIL_SLOTS):
        assert ran[counter] == reads.written
    for counter in (
        Counter.VERIFY_LAUNCHES,
        Counter.HEAD_LAUNCHES,
        Counter.TAIL_LAUNCHES,
    ):
        assert ran[counter] == reads.forwards == manager.num_forwards
    assert ran[Counter.SWEEP_LAUNCHES] == manager.num_sweep_passes
    assert (manager.num_sweep_passes > 0) == has_radix
    stats = harness.scheduler.stats_snapshot()
    assert stats.kv_canary_protected_tokens_total == before[0] + reads.read
    assert stats.num_used_tokens == 0


@pytest.mark.parametrize("real_data", ["none", "partial", "rotate"])
def test_every_other_mode_is_silent_too(model: Path, real_data: str) -> None:
    harness = EngineHarness(
        model,
        overlap=True,
        max_total_tokens=800,
        chunked_prefill_size=48,
        schedule_conservativeness=0.3,
        skip_tokenizer_init=True,
        kv_canary="raise",
        kv_canary_real_data=real_data,
        kv_canary_sweep_interval=1,
    )
    traffic = Traffic(harness, random.Random(0), count(ci=10, full=200))
    answers: dict[str, Finished] = {}
    while traffic.left:
        answers |= harness.run(on_step=traffic.on_step)
    check(traffic.expected, answers, vocab_size=VOCAB)
    manager = canary_of(harness)
    assert manager.reporter.total == 0
    rehashed = manager.counters[Counter.REHASHED_SLOTS]
    assert (rehashed > 0) == (real_data == "rotate")


@pytest.mark.parametrize("overlap", [False, True], ids=["in-order", "overlap"])
def test_retractions_are_silent(model: Path, overlap: bool) -> None:
    """More decode tokens than slots, read tokens compared one by one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_KV_CANARY_ENABLE_VERIFY_TOKEN_ASSERT", "1")
        harness = EngineHarness(
            model,
            overlap=overlap,
            max_total_tokens=400,
            chunked_prefill_size=64,
            schedule_conservativeness=0.1,
            skip_tokenizer_init=True,
            kv_canary="raise",
            kv_canary_real_data="all",
            kv_canary_sweep_interval=1,
        )
    for i in range(12):
        prompt = [(31 * i + j) % VOCAB for j in range(20)]
        harness.submit(prompt, max_new_tokens=150, ignore_eos=True)
    answers = harness.run()
    assert {len(answer.output_ids) for answer in answers.values()} == {150}
    assert harness.scheduler.stats_snapshot().num_retracted_reqs > 0
    assert canary_of(harness).reporter.total == 0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
