"""Any order of arrivals, aborts and steps leaves the pools consistent after a step."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang.srt.managers.batch.req import Req
from sglang.srt.mem_cache.common import check_busy
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness
from sglang.test.mock_oracle import next_tokens
from sglang.test.scale import count
from sglang.test.tiny_models import write_mock_model

register_cpu_ci(est_time=4, suite="cpu")

VOCAB = 50
CONTEXT = 96

submit = st.fixed_dictionaries(
    {
        "stem": st.integers(0, 2),
        "shared": st.integers(0, 40),
        "own": st.integers(1, 30),
        "new": st.integers(0, 40),
        "stream": st.booleans(),
        "key": st.sampled_from([None, None, "tenant"]),
    }
)
operation = st.one_of(
    st.tuples(st.just("submit"), submit),
    st.tuples(st.just("step"), st.integers(1, 12)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
)
configuration = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([1, 4, 16]),
        "max_total_tokens": st.sampled_from([96, 128, 192, 320]),
        "chunked_prefill_size": st.sampled_from([-1, 16, 48]),
        "schedule_policy": st.sampled_from(["fcfs", "lpm"]),
        "disable_radix_cache": st.booleans(),
        "max_running_requests": st.sampled_from([1, 3, 8]),
        "schedule_conservativeness": st.sampled_from([0.1, 1.0]),
        "overlap": st.booleans(),
    }
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_mock_model(
        tmp_path_factory.mktemp("mock"),
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
    )


def live_requests(scheduler) -> list[Req]:
    """Requests that hold slots, each once."""
    found = {}
    for batch in (scheduler.running, scheduler.batches.last_prefill):
        for req in batch.reqs if batch is not None else []:
            found[req.serial] = req
    for launched, _ in scheduler.in_flight:
        found |= {req.serial: req for req in launched.reqs}
    if scheduler.batches.chunked is not None:
        found[scheduler.batches.chunked.serial] = scheduler.batches.chunked
    return [r for r in found.values() if not r.is_finished]


def check_books(scheduler):
    live = live_requests(scheduler)
    check_busy(scheduler.cache, live)
    scheduler.cache.check()
    pool = scheduler.cache.req_to_token_pool
    assert pool.size - pool.available_size() == len(live)
    assert len({r.req_pool_idx for r in live}) == len(live)
    for req in live:
        assert req.cache_protected_len <= req.committed_len <= req.allocated_len
        assert req.committed_len <= len(req.tokens) + len(scheduler.in_flight)
    for req in scheduler.waiting:
        assert req.req_pool_idx == 0 and req.last_node is None


@settings(
    max_examples=count(ci=30, full=800),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(config=configuration, operations=st.lists(operation, max_size=25))
def test_books_after_every_step(folder, config, operations):
    harness = EngineHarness(folder, skip_tokenizer_init=True, **config)
    stems = [[(7 * i + j) % VOCAB for j in range(40)] for i in range(3)]
    prompts: dict[str, list[int]] = {}
    answers = {}
    for name, value in operations:
        if name == "submit":
            own = [(13 * j + len(prompts)) % VOCAB for j in range(value["own"])]
            prompt = stems[value["stem"]][: value["shared"]] + own
            rid = harness.submit(
                prompt,
                max_new_tokens=value["new"],
                stream=value["stream"],
                extra_key=value["key"],
                ignore_eos=True,
            )
            prompts[rid] = prompt
        elif name == "abort":
            harness.abort(f"r{value}")
        else:
            for _ in range(value):
                harness.scheduler.step()
                check_books(harness.scheduler)
    answers = harness.run(on_step=lambda step: check_books(harness.scheduler))
    assert set(answers) == set(prompts)
    for rid, prompt in prompts.items():
        out = answers[rid].output_ids
        predicted = next_tokens(prompt + out, vocab_size=VOCAB)
        assert out == predicted[len(prompt) - 1 : len(prompt) - 1 + len(out)]
        assert answers[rid].finish_reason is not None


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
