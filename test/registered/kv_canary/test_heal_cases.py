"""Healing where it is hard: damage upon damage, overflowing rings, full pools, clients
that leave, faults that do not go away."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from heal_world import (
    check,
    healer_of,
    healing,
    heals,
    is_exact,
    prompt_of,
    submit,
)

from kv_canary.reporter import CanaryViolation
from sglang.faults.driver import PerturbDriver
from sglang.srt.forward.batch import ForwardBatch
from sglang.srt.managers.batch.req import Req
from sglang.srt.utils.paths import bundled_demo_model_path
from sglang.test.canary_traffic import canary_of, faults_of
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness, Finished
from sglang.test.heal_traffic import check_books, joined
from sglang.test.scale import count
from sglang.test.spec_canary_traffic import VOCAB

register_cpu_ci(est_time=20, suite="cpu")

OnStep = Callable[[int], None]


class EveryForward:
    """Damages a request in every forward, or in each decode step alone."""

    def __init__(
        self,
        harness: EngineHarness,
        patch: pytest.MonkeyPatch,
        *,
        rid: str,
        decode_only: bool,
    ) -> None:
        self.rid, self.decode_only = rid, decode_only
        manager = canary_of(harness)
        self._serials = manager.serials
        self._state = manager.target.buffers.state
        faults = faults_of(harness)
        before = faults.before_forward

        def damaged(batch: ForwardBatch) -> None:
            before(batch)
            self._damage(batch)

        patch.setattr(faults, "before_forward", damaged)
        patch.setattr(PerturbDriver, "is_idle", False, raising=False)
        faults.is_idle = False
        faults._has_chances = True

    def _damage(self, batch: ForwardBatch) -> None:
        if self.decode_only and not batch.forward_mode.is_decode:
            return
        ends = batch.extend_lens.cumsum(0).tolist()
        for serial, end in zip(batch.req_serial.tolist(), ends, strict=True):
            if self._serials.rid(serial) == self.rid:
                batch.input_ids[end - 1] = (batch.input_ids[end - 1] + 1) % VOCAB


# -- damage upon damage ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["real_kv_used", "write_foreign", "early_free"])
def test_again_at_once(model: Path, name: str) -> None:
    """In each of eight steps, while earlier ones are being healed."""
    harness = healing(model)
    for i in range(6):
        submit(harness, i, stream=True)

    def on_step(step: int) -> None:
        if 6 <= step < 14:
            faults_of(harness).arm(name, seed=step)
        check_books(harness)

    check(harness.run(on_step=on_step), of=6)
    assert heals(harness) > 2


@pytest.mark.parametrize("name", ["shift_view", "shorten_view"])
def test_every_request_in_one_step(model: Path, name: str) -> None:
    harness = healing(model)
    for i in range(8):
        submit(harness, i)

    def on_step(step: int) -> None:
        if step == 6:
            faults_of(harness).arm(name, seed=1)

    check(harness.run(on_step=on_step), of=8)
    (incident,) = harness.scheduler.own_incidents()
    assert incident["healing"]["num_recomputed"] == 8


@pytest.mark.parametrize("name", ["early_free", "write_foreign", "alias_row"])
def test_an_overflowing_ring(
    model: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries that found no place may be about any slot of the flagged requests; where
    one was written to, about any slot."""
    monkeypatch.setenv("SGLANG_KV_CANARY_RING_CAPACITY", "1")
    harness = healing(model)
    for i in range(6):
        submit(harness, i)

    def on_step(step: int) -> None:
        if step == 8:
            faults_of(harness).arm(name, seed=3)
            faults_of(harness).arm("write_foreign", seed=4)

    check(harness.run(on_step=on_step), of=6)
    assert harness.scheduler.own_incidents()[0]["dropped"] > 0
    assert healer_of(harness).quarantine.num_pages == 0


# -- the prefix cache ------------------------------------------------------------------


def test_a_prefix_that_twenty_share(model: Path) -> None:
    """Found while they run: all of them are recomputed, nobody else is."""
    harness = healing(model)
    shared = prompt_of(99, 64)
    harness.generate(shared, max_new_tokens=1)
    submit(harness, 0)
    rids = [
        harness.submit([*shared, i], rid=f"s{i}", max_new_tokens=12, ignore_eos=True)
        for i in range(20)
    ]

    def on_step(step: int) -> None:
        if step == 4:
            node = next(iter(harness.scheduler.cache.root.children.values()))
            while len(node.slots) < 64:
                node = next(
                    n for n in harness.scheduler.cache.iter_nodes() if n.start == 0
                )
            state = canary_of(harness).target.buffers.state
            state.tail[int(node.slots[8]), 1] ^= 1

    answers = harness.run(on_step=on_step)
    for i, rid in enumerate(rids):
        assert is_exact([*shared, i], answers[rid])
    healing_done = harness.scheduler.own_incidents()[0]["healing"]
    assert healing_done["num_recomputed"] == 20
    assert {about["rid"] for about in healing_done["recomputed"]} == set(rids)
    assert is_exact(prompt_of(0), answers["q0"])


def test_the_sweep_drops_what_nobody_uses(model: Path) -> None:
    harness = healing(model, kv_canary_sweep_interval=1)
    harness.generate(prompt_of(50), max_new_tokens=1)
    cached = harness.scheduler.cache.total_size()
    faults_of(harness).arm("real_kv_unused_cache", seed=1)
    submit(harness, 0)
    check(harness.run(), of=1)
    (incident,) = harness.scheduler.own_incidents()
    assert incident["healing"]["num_recomputed"] == 0
    assert incident["healing"]["cached_tokens_cut"] >= cached - 4
    answer = harness.generate(prompt_of(50), max_new_tokens=1)
    assert answer.cached_tokens == 0


# -- requests in a special state -------------------------------------------------------


def test_a_client_that_leaves_meanwhile(model: Path) -> None:
    harness = healing(model, overlap=False)
    for i in range(4):
        submit(harness, i)

    def on_step(step: int) -> None:
        if step == 6:
            faults_of(harness).arm("shift_view", seed=1)
        if step == 7:
            # Healed in the step before: they wait.
            assert all(req.req_pool_idx == 0 for req in harness.scheduler.waiting)
            assert len(harness.scheduler.waiting) == 4
            harness.abort("q1")

    answers = harness.run(on_step=on_step)
    reason = answers["q1"].finish_reason
    assert reason is not None and reason.type == "abort" and reason.status_code == 499
    for i in (0, 2, 3):
        assert len(answers[f"q{i}"].output_ids) == 24
        assert is_exact(prompt_of(i), answers[f"q{i}"])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("last", [1, 2, 5])
def test_a_request_that_ends_in_the_damaged_step(
    model: Path, last: int, overlap: bool
) -> None:
    """Its answer is not sent before it was computed again."""
    harness = healing(model, overlap=overlap, page_size=1)
    submit(harness, 0, max_new_tokens=last + 1)
    submit(harness, 1, max_new_tokens=last + 1)

    def on_step(step: int) -> None:
        if step == last:
            faults_of(harness).arm("shift_view", seed=1)

    check(harness.run(on_step=on_step), of=2, length=last + 1)
    assert heals(harness) == 1


def test_chunks_in_flight(model: Path) -> None:
    """A prompt in the middle of its prefill, with the next chunk launched."""
    for at in range(2, 9):
        harness = healing(model, chunked_prefill_size=16, page_size=4)
        submit(harness, 0)
        long = prompt_of(7, 150)
        harness.submit(long, rid="long", max_new_tokens=8, ignore_eos=True)

        def on_step(step: int, at: int = at, harness: EngineHarness = harness) -> None:
            if step == at:
                faults_of(harness).arm("early_free", seed=at)
            check_books(harness)

        answers = harness.run(on_step=on_step)
        assert is_exact(long, answers["long"]) and heals(harness) == 1
        assert is_exact(prompt_of(0), answers["q0"])


def test_a_pool_too_small_for_all(model: Path) -> None:
    """Those that are recomputed wait for their turn; retractions go on beside."""
    harness = healing(
        model, max_total_tokens=320, schedule_conservativeness=0.05, page_size=1
    )
    rng = random.Random(1)
    for i in range(10):
        submit(harness, i, max_new_tokens=80)

    def on_step(step: int) -> None:
        if step % 25 == 10:
            name = rng.choice(["shift_view", "early_free", "write_foreign", "record"])
            faults_of(harness).arm(name, seed=step)
        check_books(harness)

    check(harness.run(on_step=on_step), of=10, length=80)
    assert heals(harness) > 4
    assert harness.scheduler.stats_snapshot().num_retracted_reqs > 0


def test_watched_pages_come_back_where_memory_is_short(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an overflow all pages of a request are watched: nearly the whole pool."""
    monkeypatch.setenv("SGLANG_KV_CANARY_RING_CAPACITY", "1")
    harness = healing(model, max_total_tokens=128, page_size=4, overlap=False)
    submit(harness, 0, max_new_tokens=80)

    def on_step(step: int) -> None:
        if step in (20, 50):
            faults_of(harness).arm("early_free", seed=1)

    check(harness.run(on_step=on_step), of=1, length=80)
    assert heals(harness) == 2


def test_hidden_states_logprobs_and_embeddings(model: Path) -> None:
    """Each position once, whatever is computed again."""

    def run(*, is_damaged: bool) -> dict[str, Finished]:
        harness = healing(
            model, enable_return_hidden_states=True, chunked_prefill_size=16
        )
        submit(harness, 0, return_hidden_states=True)
        submit(harness, 1, return_logprob=True, logprob_start_len=0, top_logprobs_num=2)
        submit(harness, 2, temperature=1.0, sampling_seed=5, return_logprob=True)

        def on_step(step: int) -> None:
            if is_damaged and step in (2, 5, 9):
                faults_of(harness).arm("shift_view", seed=1)

        answers = harness.run(on_step=on_step)
        assert (heals(harness) > 1) == is_damaged
        return answers

    due, got = run(is_damaged=False), run(is_damaged=True)
    for rid, want in due.items():
        assert got[rid].output_ids == want.output_ids
        assert joined(got[rid]) == joined(want)
        torch.testing.assert_close(
            torch.tensor(got[rid].hidden_states), torch.tensor(want.hidden_states)
        )


# The text of the demo model: grammars and stop strings need a tokenizer.
TEXTS: list[dict[str, Any]] = [
    {"regex": "(ab|cd)+e[0-9]{4,9}"},
    {"json_schema": '{"type": "object", "properties": {"name": {"type": "string"}}}'},
    {"stop": ["\n    return", "zzz"]},
    {"stop_regex": ["e.{3}n"]},
    {"stop": ["self"], "min_new_tokens": 6, "frequency_penalty": 0.5},
]


@pytest.mark.parametrize(
    "name", ["take_back", "shift_view", "early_free"][: count(ci=1, full=3)]
)
def test_grammars_and_stop_strings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a grammar, a stop string and a character."""

    def run(damaged_at: int | None) -> tuple[dict[str, Finished], int]:
        harness = healing(
            bundled_demo_model_path(), skip_tokenizer_init=False, page_size=16
        )
        for i, options in enumerate(TEXTS):
            ids = [101 + i, *range(40, 60), 102]
            harness.submit(
                ids,
                rid=f"q{i}",
                max_new_tokens=40,
                temperature=1.0,
                sampling_seed=i,
                stream=True,
                **options,
            )

        forwards = harness.scheduler._stats

        def on_step(step: int) -> None:
            if damaged_at is None or forwards.num_forwards != damaged_at:
                return
            if name != "take_back":
                faults_of(harness).arm(name, seed=step)
            elif not heals(harness):
                lose_tokens(harness, monkeypatch)

        return harness.run(on_step=on_step), heals(harness)

    due, _ = run(None)
    total = 0
    for at in range(2, 12, 3):
        got, healed = run(at)
        total += healed
        for rid, want in due.items():
            assert got[rid].output_ids == want.output_ids, (rid, at)
            assert got[rid].finish_reason == want.finish_reason
    assert total >= 3


@pytest.mark.parametrize("overlap", [False, True])
def test_an_end_that_was_not_sampled(
    model: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host takes a token that ends requests, with the next step in flight: they are
    alive again before anybody is told."""
    harness = healing(model, overlap=overlap)
    for i in range(4):
        submit(harness, i, stop_token_ids=[VOCAB - 1], stream=i == 1)

    def on_step(step: int) -> None:
        if step == 6:
            lose_tokens(harness, monkeypatch, token=VOCAB - 1)

    check(harness.run(on_step=on_step), of=4)
    (incident,) = harness.scheduler.own_incidents()
    assert incident["healing"]["num_recomputed"] == 4
    stats = harness.scheduler.stats_snapshot()
    assert stats.num_requests_total == 4 and not stats.num_aborted_requests_total


def lose_tokens(
    harness: EngineHarness, patch: pytest.MonkeyPatch, *, token: int | None = None
) -> None:
    """Let the host append other tokens in the next step, to every request."""
    append = Req.append

    def wrong(req: Req, new_tokens: list[int]) -> None:
        append(req, [(new + 1) % 50 if token is None else token for new in new_tokens])

    process = harness.scheduler._results.process

    def once(*args: Any, **options: Any) -> Any:
        patch.setattr(Req, "append", wrong)
        try:
            return process(*args, **options)
        finally:
            patch.setattr(Req, "append", append)
            patch.setattr(harness.scheduler._results, "process", process)

    patch.setattr(harness.scheduler._results, "process", once)


# -- bounds ----------------------------------------------------------------------------


def test_a_prefill_that_never_heals(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After three times without a token the request ends with an error that names the
    incident; others do not notice."""
    harness = healing(model)
    EveryForward(harness, monkeypatch, rid="q1", decode_only=False)
    for i in range(4):
        submit(harness, i)
    answers = harness.run()
    reason = answers["q1"].finish_reason
    assert reason is not None and reason.status_code == 500
    number = harness.scheduler.own_incidents()[-1]["number"]
    assert reason.message is not None and reason.message.endswith(f"incident {number}")
    assert answers["q1"].output_ids == []
    assert heals(harness) == number == 4
    for i in (0, 2, 3):
        assert is_exact(prompt_of(i), answers[f"q{i}"])
        assert len(answers[f"q{i}"].output_ids) == 24


def test_a_decode_step_that_never_heals(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a graph with damaged inputs: every prefill gives a token, so that the limit
    per minute ends it, and the engine as `raise` does."""
    harness = healing(model, kv_canary_heal_limit=10)
    EveryForward(harness, monkeypatch, rid="q1", decode_only=True)
    for i in range(4):
        submit(harness, i)
    with pytest.raises(CanaryViolation, match=r"fail_reason=write_token"):
        harness.run()
    assert heals(harness) == 10
    for rid, answer in harness.collect().items():
        assert is_exact(prompt_of(int(rid[1:])), answer)


def test_a_page_that_is_written_to_meanwhile(model: Path) -> None:
    """It stays out of use and is counted; requests that need it end with an error."""
    harness = healing(model, max_total_tokens=256, kv_canary_quarantine_limit=0.1)
    healer = healer_of(harness)
    submit(harness, 0)

    def on_step(step: int) -> None:
        if step == 5:
            faults_of(harness).arm("real_kv_used", seed=1)
        if len(healer.quarantine.pages) and not len(healer.quarantine.kept):
            slot = int(healer.quarantine.pages[0]) * 4 + 1
            pool = harness.scheduler.worker.model_runner.token_to_kv_pool
            pool.k_buffer[1, slot, 0, 3] = 7.0

    check(harness.run(on_step=on_step), of=1)
    stats = harness.scheduler.stats_snapshot()
    assert stats.kv_canary_quarantined_pages == 1 and stats.kv_canary_is_degraded
    check_books(harness)
    answer = harness.generate(prompt_of(1, 253), max_new_tokens=1)
    assert answer.finish_reason is not None
    assert answer.finish_reason.status_code == 400
    assert harness.generate(prompt_of(1, 240), max_new_tokens=6).output_ids


def test_too_many_damaged_pages_stop_the_engine(model: Path) -> None:
    harness = healing(model, max_total_tokens=256, kv_canary_quarantine_limit=0.01)
    healer = healer_of(harness)
    submit(harness, 0)

    def on_step(step: int) -> None:
        if step == 5:
            faults_of(harness).arm("real_kv_used", seed=1)
        for page in healer.quarantine.pages.tolist():
            canary_of(harness).target.buffers.state.head[4 * page, 0] = 3

    with pytest.raises(CanaryViolation, match="--kv-canary-quarantine-limit 0.01"):
        harness.run(on_step=on_step)


def test_a_wrong_choice_is_not_repeated_for_ever(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token that was wrong when it was sampled is sent before anything can tell: the
    requests end with an error instead of going on with it."""
    monkeypatch.setenv("SGLANG_KV_CANARY_ENABLE_TOKEN_ORACLE", "1")
    monkeypatch.setenv("SGLANG_KV_CANARY_ENABLE_WRITE_INPUT_ASSERT", "1")
    harness = healing(model)
    for i in range(4):
        submit(harness, i)

    def on_step(step: int) -> None:
        if step == 8:
            faults_of(harness).arm("next_token_swap", seed=1)

    answers = harness.run(on_step=on_step)
    codes = [a.finish_reason and a.finish_reason.status_code for a in answers.values()]
    assert sorted(map(str, codes)) == ["500", "500", "None", "None"]


def test_numbers(model: Path) -> None:
    harness = healing(model)
    for i in range(4):
        submit(harness, i)

    def on_step(step: int) -> None:
        if step == 6:
            faults_of(harness).arm("record", seed=1)

    harness.run(on_step=on_step)
    stats = harness.scheduler.stats_snapshot()
    assert stats.kv_canary_heals_total["torn write"] == 1
    assert sum(stats.kv_canary_heals_total.values()) == 1
    assert 41 <= stats.kv_canary_healed_tokens_total <= 64
    recovery = stats.kv_canary_recovery_seconds
    assert recovery is not None and sum(recovery.counts) == 1 and recovery.sum > 0
    assert stats.kv_canary_is_degraded and stats.kv_canary_quarantined_pages == 0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
