"""The scheduler in process: limits, aborts, stops, logprobs, cache, accounting."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from test_admission import make_req

from sglang.srt.managers.batch.schedule_batch import ScheduleBatch
from sglang.srt.managers.messages.io_struct import (
    BatchOutput,
    FlushCacheReq,
    FlushCacheRsp,
)
from sglang.srt.managers.worker import tp_worker
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness
from sglang.test.mock_oracle import next_tokens
from sglang.test.tiny_models import EOS_ID, write_mock_model, write_tiny_model

register_cpu_ci(est_time=14, suite="cpu")

VOCAB = 1000
CONTEXT = 128


@pytest.fixture(scope="module")
def mock(tmp_path_factory):
    return write_mock_model(
        tmp_path_factory.mktemp("mock"),
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM")


def mock_harness(folder, **args):
    return EngineHarness(folder, **{"skip_tokenizer_init": True} | args)


def oracle(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_tokens(tokens, vocab_size=VOCAB)[-1])
    return tokens[len(prompt) :]


def test_an_idle_engine_checks_its_memory(mock):
    harness = mock_harness(mock, max_total_tokens=64)
    harness.generate([1, 2, 3], max_new_tokens=2)
    harness.scheduler.cache.allocator.alloc(1)
    with pytest.raises(RuntimeError, match="slots"):
        harness.generate([1, 2, 3], max_new_tokens=2)


@pytest.mark.parametrize("mode", ["none", "log"])
def test_the_front_gets_digests_to_compare_if_the_canary_is_on(mock, mode):
    harness = mock_harness(mock, kv_canary=mode)
    harness.submit([1, 2, 3], max_new_tokens=4)
    found = []
    while harness.io.requests or harness.scheduler.has_work():
        harness.scheduler.step()
        messages = [m for m in harness.io.responses if isinstance(m, BatchOutput)]
        found += [output.digest for m in messages for output in m.outputs]
        harness.io.responses.clear()
    assert found
    assert all((digest is None) == (mode == "none") for digest in found)


@pytest.mark.parametrize("length", [0, -1])
def test_a_prefill_of_no_tokens_is_refused(mock, length):
    env = mock_harness(mock).scheduler.env
    reqs = [make_req([1, 2, 3]), make_req([1, 2])]
    free = env.cache.allocator.available_size()
    for lengths in ([length, 2], [3, length]):
        with pytest.raises(RuntimeError, match=f"scheduled to prefill {length} tokens"):
            ScheduleBatch.prepare_for_extend(reqs, lengths, env)
    assert env.cache.allocator.available_size() == free
    assert [req.req_pool_idx for req in reqs] == [0, 0]


def test_rows_are_given_back_if_slots_do_not_suffice(mock):
    env = mock_harness(mock, max_total_tokens=64).scheduler.env
    allocator, rows = env.cache.allocator, env.cache.req_to_token_pool
    reqs, free_rows = [make_req([1, 2, 3]), make_req([1, 2])], rows.available_size()
    held = allocator.alloc(allocator.available_size() - 4)
    assert ScheduleBatch.prepare_for_extend(reqs, [3, 2], env) is None
    assert rows.available_size() == free_rows
    assert allocator.available_size() == 4
    assert [req.req_pool_idx for req in reqs] == [0, 0]
    allocator.free(held)
    assert ScheduleBatch.prepare_for_extend(reqs, [3, 2], env) is not None
    assert rows.available_size() == free_rows - 2


@pytest.mark.parametrize("overlap", [False, True])
def test_generated_tokens_are_those_that_were_sent(mock, overlap):
    """Of an aborted request, too."""
    harness = mock_harness(mock, overlap=overlap)
    for rid in "ab":
        harness.submit([1, 2, 3], rid=rid, max_new_tokens=30)
    for _ in range(6):
        harness.scheduler.step()
    harness.abort("a")
    answers = harness.run()
    sent = sum(len(answer.output_ids) for answer in answers.values())
    assert 30 < sent < 60
    assert harness.scheduler._stats._totals.generation_tokens_total == sent


def test_the_row_of_a_prompt_in_the_middle_is_not_taken_twice(mock):
    """Beside its last chunk as many start as there are free rows."""
    harness = mock_harness(mock, max_running_requests=2, chunked_prefill_size=16)
    for rid, length in (("long", 20), ("short", 5), ("third", 3)):
        start = 100 * len(rid)
        harness.submit([start + i for i in range(length)], rid=rid, max_new_tokens=9)
    for _ in range(3):
        harness.scheduler.step()
    assert {req.rid for req in harness.scheduler.running.reqs} == {"long", "short"}
    assert {req.rid for req in harness.scheduler.waiting} == {"third"}
    harness.run()


# -- limits ------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_runs_to_the_last_position_of_the_context(mock, page_size):
    harness = mock_harness(mock, page_size=page_size, max_total_tokens=512)
    prompt = list(range(40))
    answer = harness.generate(prompt, max_new_tokens=500, ignore_eos=True)
    assert len(prompt) + len(answer.output_ids) == CONTEXT
    assert answer.output_ids == oracle(prompt, CONTEXT - 40)
    assert answer.finish_reason.type == "length"


def test_longest_prompt_gets_one_token(mock):
    harness = mock_harness(mock, chunked_prefill_size=32)
    prompt = [i % VOCAB for i in range(CONTEXT - 1)]
    answer = harness.generate(prompt, max_new_tokens=9, ignore_eos=True)
    assert answer.output_ids == oracle(prompt, 1)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_uses_the_last_free_page(mock, page_size):
    """A request that needs every slot of the pool, with the cache full of others."""
    harness = mock_harness(mock, page_size=page_size, max_total_tokens=64)
    for start in (100, 200):
        harness.generate(range(start, start + 30), max_new_tokens=20, ignore_eos=True)
    prompt = list(range(33))
    answer = harness.generate(prompt, max_new_tokens=99, ignore_eos=True)
    # 64 slots hold the KV of 64 tokens; the 65th is sampled and needs none.
    assert len(answer.output_ids) == 65 - 33
    assert answer.output_ids == oracle(prompt, 65 - 33)


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        (range(CONTEXT), {}, ["128 tokens", "127"]),
        ([], {}, ["empty"]),
        ([VOCAB], {}, ["[0, 1000)"]),
        ([-1], {}, ["[0, 1000)"]),
        ([1], {"stop_token_ids": [VOCAB]}, ["stop_token_ids", "1000"]),
        ([1], {"logit_bias": {5000: 1.0}}, ["logit_bias", "5000"]),
        ([1, 1 << 70], {}, ["input_ids must lie in", str(1 << 70)]),
        ([1], {"stop": ["x"]}, ["--skip-tokenizer-init"]),
        ([1], {"regex": "a+"}, ["regex", "tokenizer"]),
    ],
)
def test_refusals_name_the_reason_and_hurt_nobody(mock, prompt, params, words):
    harness = mock_harness(mock)
    good = harness.submit([1, 2, 3], max_new_tokens=8, ignore_eos=True)
    bad = harness.submit(prompt, **params)
    answers = harness.run()
    reason = answers[bad].finish_reason
    assert (reason.type, reason.status_code) == ("abort", 400)
    for word in words:
        assert word in reason.message
    assert answers[good].output_ids == oracle([1, 2, 3], 8)


def test_prompt_longer_than_the_pool_is_refused(mock):
    harness = mock_harness(mock, max_total_tokens=32)
    answer = harness.generate(range(40))
    assert "at most 32 fit" in answer.finish_reason.message


def test_full_queue_is_refused_with_503(mock):
    harness = mock_harness(mock, max_queued_requests=5, max_running_requests=2)
    rids = [harness.submit([i], max_new_tokens=4, ignore_eos=True) for i in range(20)]
    answers = harness.run()
    refused = [r for r in rids if answers[r].finish_reason.type == "abort"]
    assert len(refused) == 15
    assert {answers[r].finish_reason.status_code for r in refused} == {503}
    for i, rid in enumerate(rids):
        if rid not in refused:
            assert answers[rid].output_ids == oracle([i], 4)


# -- ends --------------------------------------------------------------------------


def test_zero_new_tokens_only_prefills(mock):
    harness = mock_harness(mock)
    answer = harness.generate([1, 2, 3], max_new_tokens=0)
    assert answer.output_ids == []
    assert answer.finish_reason.type == "length"
    assert harness.generate([1, 2, 3, 4], max_new_tokens=1).cached_tokens == 3


def test_stop_token_and_min_new_tokens(mock):
    harness = mock_harness(mock)
    expected = oracle([1, 2], 12)
    stop = expected[5]
    answer = harness.generate([1, 2], max_new_tokens=12, stop_token_ids=[stop])
    assert answer.output_ids == expected[: expected.index(stop) + 1]
    assert answer.finish_reason.matched == stop
    longer = harness.generate(
        [1, 2], max_new_tokens=12, stop_token_ids=[stop], min_new_tokens=9
    )
    assert len(longer.output_ids) >= 9
    assert stop not in longer.output_ids[:9]


def test_eos_of_the_model_and_ignore_eos(tiny):
    harness = EngineHarness(tiny)
    bias = {EOS_ID: 100.0}
    answer = harness.generate([65, 66], max_new_tokens=5, logit_bias=bias)
    assert answer.output_ids == [EOS_ID]
    assert answer.finish_reason.matched == EOS_ID
    ignored = harness.generate(
        [65, 66], max_new_tokens=5, logit_bias=bias, ignore_eos=True
    )
    assert ignored.output_ids == [EOS_ID] * 5


def test_stop_strings_and_patterns(tiny):
    """The byte tokenizer makes any text reachable through a logit bias."""
    harness = EngineHarness(tiny)
    bias = {ord("a"): 100.0}
    answer = harness.generate([65], max_new_tokens=20, logit_bias=bias, stop=["aaaa"])
    assert answer.output_ids == [ord("a")] * 4
    assert answer.finish_reason.matched == "aaaa"
    answer = harness.generate(
        [65], max_new_tokens=20, logit_bias=bias, stop_regex=["a{6}"]
    )
    assert len(answer.output_ids) == 6
    answer = harness.generate(
        [65], max_new_tokens=20, logit_bias=bias, stop=["a"], min_new_tokens=7
    )
    assert len(answer.output_ids) == 7


def test_abort_while_waiting_running_and_chunked(mock):
    harness = mock_harness(mock, max_running_requests=2, chunked_prefill_size=16)
    running = harness.submit([1], max_new_tokens=100, ignore_eos=True, stream=True)
    chunked = harness.submit(range(100), max_new_tokens=10, ignore_eos=True)
    waiting = harness.submit([5], max_new_tokens=10, ignore_eos=True)
    kept = harness.submit([6], max_new_tokens=10, ignore_eos=True)

    def on_step(step):
        if step == 4:
            for rid in (running, chunked, waiting, "unknown"):
                harness.abort(rid)

    answers = harness.run(on_step=on_step)
    for rid in (running, chunked, waiting):
        assert answers[rid].finish_reason.type == "abort"
    assert answers[running].output_ids == oracle([1], len(answers[running].output_ids))
    assert answers[kept].output_ids == oracle([6], 10)


def test_streaming_sends_deltas_and_others_send_once(mock):
    harness = mock_harness(mock, stream_interval=4)
    streamed = harness.submit([1], max_new_tokens=10, ignore_eos=True, stream=True)
    silent = harness.submit([2], max_new_tokens=10, ignore_eos=True)
    answers = harness.run()
    assert answers[silent].messages == 1
    assert (
        answers[streamed].messages == 1 + 2 + 1
    )  # first token, two intervals, the end
    assert answers[streamed].output_ids == oracle([1], 10)


# -- prefix cache ------------------------------------------------------------------


def test_shared_prefix_is_computed_once(mock):
    harness = mock_harness(mock, chunked_prefill_size=512)
    stem = list(range(80))
    rids = [
        harness.submit([*stem, 500 + i, 1], max_new_tokens=3, ignore_eos=True)
        for i in range(8)
    ]
    answers = harness.run()
    cached = sorted(answers[rid].cached_tokens for rid in rids)
    assert cached == [0] + [80] * 7
    for i, rid in enumerate(rids):
        assert answers[rid].output_ids == oracle([*stem, 500 + i, 1], 3)


def test_namespaces_do_not_share(mock):
    harness = mock_harness(mock)
    prompt = list(range(50))
    harness.generate(prompt, max_new_tokens=2)
    assert harness.generate(prompt, max_new_tokens=2).cached_tokens == 49
    other = harness.generate(prompt, max_new_tokens=2, extra_key="tenant")
    assert other.cached_tokens == 0


def test_without_the_radix_cache_nothing_is_shared(mock):
    harness = mock_harness(mock, disable_radix_cache=True)
    for _ in range(2):
        answer = harness.generate(range(50), max_new_tokens=2, ignore_eos=True)
        assert answer.cached_tokens == 0
        assert answer.output_ids == oracle(range(50), 2)


@pytest.mark.parametrize(
    ("common", "options"),
    [(40, {"disable_radix_cache": True}), (63, {"page_size": 64})],
)
def test_nobody_waits_for_what_cannot_be_shared(mock, common, options):
    harness = mock_harness(mock, chunked_prefill_size=1024, **options)
    stem = list(range(common))
    rids = [
        harness.submit([*stem, 500 + i], max_new_tokens=1, ignore_eos=True)
        for i in range(6)
    ]
    answers = harness.run()
    for i, rid in enumerate(rids):
        assert answers[rid].output_ids == oracle([*stem, 500 + i], 1)
    assert harness.scheduler.stats_snapshot().forward_passes_total == 1


def test_a_chunk_is_no_larger_than_a_batch(mock):
    harness = mock_harness(mock, chunked_prefill_size=256, max_prefill_tokens=32)
    prompts = [list(range(n, 2 * n)) for n in (30, 90, 80)]
    rids = [harness.submit(p, max_new_tokens=2, ignore_eos=True) for p in prompts]
    seen = []
    extend = harness.scheduler._stats.on_prefill
    harness.scheduler._stats.on_prefill = lambda reqs, tokens, **rest: (
        seen.append(tokens),
        extend(reqs, tokens, **rest),
    )
    answers = harness.run()
    assert max(seen) <= 32 and sum(seen) == sum(map(len, prompts))
    for prompt, rid in zip(prompts, rids, strict=True):
        assert answers[rid].output_ids == oracle(prompt, 2)


def test_cached_tokens_are_those_of_the_first_admission(mock):
    harness = mock_harness(
        mock,
        max_total_tokens=200,
        chunked_prefill_size=64,
        schedule_conservativeness=0.1,
    )
    prompts = [[(i * 37 + j) % 900 for j in range(20)] for i in range(12)]
    rids = [harness.submit(p, max_new_tokens=60, ignore_eos=True) for p in prompts]
    answers = harness.run()
    assert harness.scheduler.stats_snapshot().num_retracted_reqs > 0
    for rid in rids:
        assert answers[rid].cached_tokens == 0


def test_flush_cache_only_at_idle(mock):
    harness = mock_harness(mock)
    harness.submit(range(50), max_new_tokens=5, ignore_eos=True)
    harness.scheduler.step()
    harness.io.requests.append(FlushCacheReq(call_id=1))
    harness.scheduler.step()
    assert FlushCacheRsp(call_id=1, success=False) in harness.io.responses
    harness.run()
    harness.io.requests.append(FlushCacheReq(call_id=2))
    harness.scheduler.step()
    assert FlushCacheRsp(call_id=2, success=True) in harness.io.responses
    assert harness.scheduler.cache.total_size() == 0


def test_flush_cache_right_after_the_last_answer(mock):
    """The batch still lists the request that has just ended."""
    harness = mock_harness(mock)
    rid = harness.submit([1, 2, 3], max_new_tokens=4, ignore_eos=True)
    while rid not in harness.collect(keep=True):
        harness.scheduler.step()
    harness.io.requests.append(FlushCacheReq(call_id=3))
    harness.scheduler.step()
    assert FlushCacheRsp(call_id=3, success=True) in harness.io.responses
    harness.run()


def test_long_prompt_does_not_starve_running_requests(mock):
    harness = mock_harness(mock, chunked_prefill_size=8)
    first = harness.submit([1], max_new_tokens=40, ignore_eos=True, stream=True)
    harness.scheduler.step()
    harness.submit(range(120), max_new_tokens=1, ignore_eos=True)
    for _ in range(20):
        harness.scheduler.step()
    produced = harness.collect(keep=True)[first].output_ids
    assert len(produced) >= 10  # one decode step between two chunks
    harness.run()


def test_rows_decode_longest_first(mock):
    """In whatever batches they come, and after some have ended."""
    harness = mock_harness(mock, chunked_prefill_size=64)
    prompts = {n: [n + i for i in range(n)] for n in (9, 40, 3, 25, 31, 12, 60)}
    rids = {n: harness.submit(p, max_new_tokens=n) for n, p in prompts.items()}
    seen = set()

    def look(_: int) -> None:
        running = harness.scheduler.running
        if running is not None:
            lens = running.seq_lens_cpu.tolist()
            assert lens == sorted(lens, reverse=True)
            seen.add(len(lens))

    answers = harness.run(on_step=look)
    assert max(seen) >= 5 and len(seen) > 3
    for n, prompt in prompts.items():
        assert answers[rids[n]].output_ids == oracle(prompt, n)


# -- logprobs, seeds, hidden states --------------------------------------------------


def reference(folder):
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder, dtype=torch.float32).eval()


NAMED = [5, 255, 0, 5]


@pytest.mark.parametrize("chunk", [7, 512])
@pytest.mark.parametrize("start", [0, 1, 13, 22, 29])
def test_logprobs_equal_transformers(tiny, chunk, start):
    harness = EngineHarness(tiny, chunked_prefill_size=chunk)
    prompt = [(7 * i) % 256 for i in range(30)]
    harness.generate(prompt[:20], max_new_tokens=1)  # a prefix that must not be reused
    answer = harness.generate(
        prompt,
        max_new_tokens=6,
        ignore_eos=True,
        return_logprob=True,
        logprob_start_len=start,
        top_logprobs_num=3,
        token_ids_logprob=NAMED,
    )
    (delta,) = answer.logprobs
    assert len(delta.input_token) == len(prompt) - start
    tokens = prompt + answer.output_ids
    with torch.inference_mode():
        logprobs = reference(tiny)(torch.tensor([tokens])).logits[0].log_softmax(-1)
    assert [t for _, t in delta.input_token] == prompt[start:]
    entries = list(enumerate(delta.input_token, start)) + list(
        enumerate(delta.output_token, len(prompt))
    )
    tops = [*delta.input_top, *delta.output_top]
    names = [*delta.input_named, *delta.output_named]
    for (position, (logprob, token)), top, named in zip(
        entries, tops, names, strict=True
    ):
        assert token == tokens[position]
        if position == 0:
            assert logprob is None and top is None and named is None
            continue
        row = logprobs[position - 1]
        assert [t for _, t in named] == NAMED
        for value, t in named:
            assert math.isclose(value, float(row[t]), abs_tol=2e-4)
        assert math.isclose(logprob, float(row[token]), abs_tol=2e-4)
        best = row.topk(3)
        assert [t for _, t in top] == best.indices.tolist()
        for (value, _), expected in zip(top, best.values.tolist(), strict=True):
            assert math.isclose(value, expected, abs_tol=2e-4)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_for_no_output_scores_what_would_have_come(tiny, overlap):
    harness = EngineHarness(tiny, overlap=overlap)
    options = {"return_logprob": True, "token_ids_logprob": NAMED, "temperature": 1.0}
    prompt = [65, 66, 67, 68]
    answer = harness.generate(prompt, max_new_tokens=0, **options)
    (delta,) = answer.logprobs
    assert answer.output_ids == delta.output_token == delta.output_top == []
    with torch.inference_mode():
        row = reference(tiny)(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    (named,) = delta.output_named
    assert [token for _, token in named] == NAMED
    for value, token in named:
        assert math.isclose(value, float(row[token]), abs_tol=2e-4)


def test_same_seed_same_text_whatever_runs_beside(tiny):
    harness = EngineHarness(tiny)
    options = {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True}
    alone = harness.generate([65, 66], sampling_seed=7, **options).output_ids
    rids = [
        harness.submit([65, 66], sampling_seed=seed, **options) for seed in (1, 7, 9)
    ]
    answers = harness.run()
    assert answers[rids[1]].output_ids == alone
    assert answers[rids[0]].output_ids != answers[rids[2]].output_ids
    unseeded = [harness.generate([65, 66], **options).output_ids for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_hidden_states(tiny):
    harness = EngineHarness(
        tiny, enable_return_hidden_states=True, chunked_prefill_size=8
    )
    prompt = list(range(65, 85))
    answer = harness.generate(
        prompt, max_new_tokens=5, ignore_eos=True, return_hidden_states=True
    )
    tokens = prompt + answer.output_ids[:-1]
    model = reference(tiny)
    with torch.inference_mode():
        expected = model.model(torch.tensor([tokens])).last_hidden_state[0]
    torch.testing.assert_close(
        torch.tensor(answer.hidden_states), expected, atol=2e-4, rtol=2e-4
    )


def test_hidden_states_do_not_depend_on_what_is_cached(tiny):
    harness = EngineHarness(tiny, enable_return_hidden_states=True)
    prompt = list(range(65, 85))
    options = {"max_new_tokens": 3, "ignore_eos": True, "return_hidden_states": True}
    first, again = (harness.generate(prompt, **options) for _ in range(2))
    assert len(first.hidden_states) == len(again.hidden_states) == len(prompt) + 2
    assert again.cached_tokens == 0
    assert harness.generate(prompt, max_new_tokens=1).cached_tokens > 0


def test_hidden_states_of_a_retracted_request_come_once(tiny):
    """States that are computed a second time are dropped."""
    harness = EngineHarness(
        tiny,
        enable_return_hidden_states=True,
        max_total_tokens=64,
        schedule_conservativeness=0.1,
    )
    prompts = {rid: [65 + i, 66] * 8 for i, rid in enumerate("ab")}
    options = {"max_new_tokens": 30, "ignore_eos": True, "return_hidden_states": True}
    for rid, prompt in prompts.items():
        harness.submit(prompt, rid=rid, **options)
    waited = []
    answers = harness.run(
        on_step=lambda step: waited.append(
            any(req.was_admitted for req in harness.scheduler.waiting)
        )
    )
    assert any(waited), "nobody was retracted"
    model = reference(tiny)
    for rid, prompt in prompts.items():
        tokens = prompt + answers[rid].output_ids[:-1]
        with torch.inference_mode():
            expected = model.model(torch.tensor([tokens])).last_hidden_state[0]
        found = torch.tensor(answers[rid].hidden_states)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("chunk", [8, 512])
def test_the_last_hidden_state_alone(tiny, chunk):
    """It comes with the end, and cached prefixes are used."""
    harness = EngineHarness(
        tiny, enable_return_hidden_states=True, chunked_prefill_size=chunk
    )
    prompt = list(range(65, 85))
    options = {"ignore_eos": True, "return_hidden_states": True, "stream": True}
    for length in (0, 1, 5):
        whole = harness.generate(prompt, max_new_tokens=length, **options)
        last = harness.generate(
            prompt, max_new_tokens=length, only_last_hidden_state=True, **options
        )
        assert last.cached_tokens > 0 == whole.cached_tokens
        (found,) = last.hidden_states
        assert found == pytest.approx(whole.hidden_states[-1], abs=2e-4)


@pytest.mark.parametrize("overlap", [False, True])
def test_hidden_states_are_kept_for_those_who_ask_until_they_end(tiny, overlap):
    harness = EngineHarness(tiny, enable_return_hidden_states=True, overlap=overlap)
    options = {"ignore_eos": True, "max_new_tokens": 9}
    harness.submit([65, 66, 67], rid="asks", return_hidden_states=True, **options)
    harness.submit([65, 66], rid="does not", ignore_eos=True, max_new_tokens=20)
    seen = {}
    for _ in range(12):
        harness.scheduler.step()
        batch = harness.scheduler.running
        seen |= {req.rid: req for req in batch.reqs} if batch is not None else {}
    harness.run()
    assert len(seen["asks"].hidden.states) == 3 + 8
    assert seen["does not"].hidden.states == []


def test_penalties_count_each_request_s_own_tokens(tiny):
    """Beside requests of other lengths, as alone."""
    options = {
        "max_new_tokens": 14,
        "ignore_eos": True,
        "frequency_penalty": 1.5,
        "presence_penalty": 0.5,
    }
    prompts = [[65], [66, 67] * 20, [68] * 9]
    alone = [EngineHarness(tiny).generate(p, **options).output_ids for p in prompts]
    harness = EngineHarness(tiny)
    rids = [harness.submit(prompt, **options) for prompt in prompts]
    answers = harness.run()
    assert [answers[rid].output_ids for rid in rids] == alone
    plain = EngineHarness(tiny).generate(prompts[0], max_new_tokens=14, ignore_eos=True)
    assert plain.output_ids != alone[0]


def test_hidden_states_need_the_flag(tiny):
    answer = EngineHarness(tiny).generate([65], return_hidden_states=True)
    assert "--enable-return-hidden-states" in answer.finish_reason.message


def test_grammar(tiny):
    harness = EngineHarness(tiny)
    answer = harness.generate([65], max_new_tokens=30, regex="(yes|no) [0-9]{3}!")
    text = bytes(answer.output_ids).decode()
    assert text in {f"{w} {n:03d}!" for w in ("yes", "no") for n in range(1000)}
    assert answer.finish_reason.type == "stop"
    bad = harness.generate([65], regex="(")
    assert (bad.finish_reason.type, bad.finish_reason.status_code) == ("abort", 400)
    assert "regex" in bad.finish_reason.message


def test_grammar_in_a_batch_with_free_requests(tiny):
    harness = EngineHarness(tiny)
    free = harness.submit([65, 66], max_new_tokens=10, ignore_eos=True)
    bound = harness.submit([65, 66], max_new_tokens=10, regex="[ab]{10}")
    answers = harness.run()
    assert set(bytes(answers[bound].output_ids)) <= set(b"ab")
    alone = harness.generate([65, 66], max_new_tokens=10, ignore_eos=True)
    assert answers[free].output_ids == alone.output_ids


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_device_sends_its_vectors_in_one_copy(count, monkeypatch):
    """Pinned memory needs a GPU; what is copied into it does not."""
    copies = []
    monkeypatch.setattr(tp_worker, "_pinned_copy", lambda t: copies.append(t) or t)
    vectors = [torch.arange(4) + 10 * i for i in range(count)]
    joined = tp_worker._join_in_one_copy(vectors)
    assert joined.tolist() == torch.cat(vectors).tolist()
    assert len(copies) == 1


def test_a_forward_hands_on_the_tokens_that_it_publishes(mock, monkeypatch):
    """A draft begins with these tokens; the next step and the client have copies."""
    run, forwards = tp_worker.TpModelWorker.run, []

    def compare(self, batch, forward_batch):
        done = run(self, batch, forward_batch)
        table = self.model_runner.req_to_token_pool.token_table
        rows, places = forward_batch.req_pool_indices, forward_batch.seq_lens
        assert done.token_ids.tolist() == table[rows, places].tolist()
        assert done.token_ids.tolist() == done.sent[0].tolist()
        assert done.forward_batch is forward_batch
        forwards.append(len(batch))
        return done

    monkeypatch.setattr(tp_worker.TpModelWorker, "run", compare)
    harness = mock_harness(mock)
    rids = [harness.submit([3, 2, 1 + i], max_new_tokens=4) for i in range(3)]
    answers = harness.run()
    assert max(forwards) == 3
    for i, rid in enumerate(rids):
        assert answers[rid].output_ids == oracle([3, 2, 1 + i], 4)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
