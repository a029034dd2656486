"""Random traffic on the mock model: every output equals the oracle, nothing leaks."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from sglang.srt.models.mock_oracle import next_tokens
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness
from sglang.test.scale import count
from sglang.test.tiny_models import write_mock_model

register_cpu_ci(est_time=60, suite="cpu")

VOCAB = 1000
CONTEXT = 512
# (page size, slots, chunk, policy, radix cache, backend): pools small enough to
# retract.
CONFIGURATIONS = [
    (1, 900, 64, "fcfs", True, "cpu_native"),
    (1, 700, 32, "lpm", True, "cpu_native"),
    (1, 1200, -1, "fcfs", True, "torch_native"),
    (4, 800, 16, "lpm", True, "cpu_native"),
    (4, 1000, 128, "fcfs", False, "cpu_native"),
    (16, 800, 64, "fcfs", True, "cpu_native"),
    (16, 1600, 32, "lpm", True, "torch_native"),
    (64, 1024, 64, "fcfs", True, "cpu_native"),
    (64, 2048, 128, "lpm", True, "cpu_native"),
    (1, 600, 48, "fcfs", False, "cpu_native"),
]


@dataclass
class Expected:
    prompt: list[int]
    max_new_tokens: int
    is_aborted: bool = False


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_mock_model(
        tmp_path_factory.mktemp("mock"),
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
    )


class Traffic:
    """Submits random requests while the scheduler runs, and aborts some of them."""

    def __init__(self, harness, rng, total):
        self.harness, self.rng = harness, rng
        self.left = total
        self.expected: dict[str, Expected] = {}
        slots = harness.scheduler.cache.allocator.size
        self.longest = min(CONTEXT, slots) - 1
        self.stems = [self._tokens(rng.randrange(20, 200)) for _ in range(4)]

    def _tokens(self, length):
        return [self.rng.randrange(VOCAB) for _ in range(length)]

    def on_step(self, step):
        rng = self.rng
        if self.left and rng.random() < 0.3:
            for _ in range(min(self.left, rng.randrange(1, 9))):
                self.submit()
        elif self.left and not self.harness.scheduler.has_work():
            self.submit()
        if self.expected and rng.random() < 0.05:
            rid = rng.choice(list(self.expected))
            self.expected[rid].is_aborted = True
            self.harness.abort(rid)

    def submit(self):
        rng = self.rng
        stem = rng.choice(self.stems)
        prompt = stem[: rng.randrange(len(stem) + 1)] + self._tokens(
            rng.randrange(1, 90)
        )
        prompt = prompt[: self.longest]
        room = self.longest + 1 - len(prompt)
        new = min(
            rng.choice((1, 2, rng.randrange(1, 40), rng.randrange(40, 160))), room
        )
        rid = self.harness.submit(
            prompt,
            rid=f"request {len(self.expected)}",
            stream=rng.random() < 0.5,
            max_new_tokens=new,
            ignore_eos=True,
            extra_key=rng.choice((None, None, None, "tenant")),
        )
        self.expected[rid] = Expected(prompt, new)
        self.left -= 1


def check(expected, answers):
    assert set(answers) == set(expected)
    for rid, want in expected.items():
        answer = answers[rid]
        predicted = next_tokens(want.prompt + answer.output_ids, vocab_size=VOCAB)
        assert answer.output_ids == predicted[len(want.prompt) - 1 : -1], rid
        reason = answer.finish_reason
        assert reason is not None
        if reason.type == "abort":
            assert want.is_aborted, reason
        else:
            assert reason.type == "length"
            assert len(answer.output_ids) == want.max_new_tokens == reason.length


@pytest.mark.parametrize("overlap", [False, True], ids=["in-order", "overlap"])
@pytest.mark.parametrize(
    "configuration", CONFIGURATIONS, ids=lambda c: "-".join(map(str, c))
)
def test_random_requests(folder, configuration, overlap):
    page_size, slots, chunk, policy, radix, backend = configuration
    seed = CONFIGURATIONS.index(configuration)
    harness = EngineHarness(
        folder,
        overlap=overlap,
        page_size=page_size,
        max_total_tokens=slots,
        chunked_prefill_size=chunk,
        schedule_policy=policy,
        disable_radix_cache=not radix,
        attention_backend=backend,
        max_running_requests=24,
        schedule_conservativeness=0.3,
        skip_tokenizer_init=True,
    )
    traffic = Traffic(harness, random.Random(seed), count(ci=10, full=100))
    answers = {}
    while traffic.left:
        answers |= harness.run(on_step=traffic.on_step)
    check(traffic.expected, answers)
    stats = harness.scheduler.stats_snapshot()
    assert stats.num_requests_total == len(traffic.expected)
    assert stats.num_used_tokens == 0
    if radix:
        assert stats.cached_tokens_total > 0
        harness.scheduler.cache.check()
        harness.scheduler.cache.reset()
    assert harness.scheduler.cache.allocator.available_size() == slots


@pytest.mark.parametrize("overlap", [False, True], ids=["in-order", "overlap"])
def test_retraction_is_exercised_and_harmless(folder, overlap):
    """More decode tokens than slots: requests are retracted, and all come out right."""
    harness = EngineHarness(
        folder,
        overlap=overlap,
        max_total_tokens=400,
        chunked_prefill_size=64,
        schedule_conservativeness=0.1,
        skip_tokenizer_init=True,
    )
    expected = {}
    for i in range(12):
        prompt = [(31 * i + j) % VOCAB for j in range(20)]
        rid = harness.submit(prompt, max_new_tokens=150, ignore_eos=True, stream=True)
        expected[rid] = Expected(prompt, 150)
    check(expected, harness.run())
    assert harness.scheduler.stats_snapshot().num_retracted_reqs > 0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
