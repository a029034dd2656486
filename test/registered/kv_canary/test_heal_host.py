"""Damage of the host's own records: what was sent stays sent, nothing wrong is sent,
nobody is lost, and the engine goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
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
    without_limit,
)

from kv_canary.checks import Reason, Severity
from kv_canary.findings import RING, parse_verdicts
from kv_canary.reporter import CanaryViolation
from sglang.srt.forward.batch import ForwardBatch
from sglang.srt.kv_canary.perturb import PerturbDriver, drivers_of
from sglang.srt.managers.batch.req import Req
from sglang.srt.managers.scheduler import blame
from sglang.srt.managers.scheduler.canary_gate import CanaryGate
from sglang.srt.managers.scheduler.heal_check import HealingError
from sglang.srt.managers.scheduler.scheduler import InFlight
from sglang.srt.mem_cache.groups.window_slots import WindowSlots
from sglang.test.canary_traffic import faults_of
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness
from sglang.test.heal_traffic import check_books
from sglang.test.mock_oracle import next_tokens
from sglang.test.spec_canary_traffic import VOCAB, speculating, write_mock_models

register_cpu_ci(est_time=12, suite="cpu")

Change = Callable[[InFlight, list[int]], bool]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_mock_models(tmp_path_factory.mktemp("mock"))


@pytest.fixture(scope="module")
def model(models: dict[str, Path]) -> Path:
    return models["model"]


def change_one_result(
    harness: EngineHarness, patch: pytest.MonkeyPatch, change: Change
) -> list[InFlight]:
    """Let `change` damage the words of one result on the host, before it is processed;
    returns the list that this result is put into."""
    scheduler, process, done = harness.scheduler, harness.scheduler._process, []

    def damaged(step: InFlight) -> None:
        if not done:
            words = step.result._unpacked()
            if change(step, words):
                done.append(step)
        process(step)

    patch.setattr(scheduler, "_process", damaged)
    return done


def swap_rows(words: list[int], rows: Sequence[int], stride: int = 1) -> None:
    a, b = (slice(row * stride, (row + 1) * stride) for row in rows)
    words[a], words[b] = words[b], words[a]


# -- requests that have ended ----------------------------------------------------------


def answer_of(i: int, length: int = 24) -> list[int]:
    """What request i gets."""
    tokens = prompt_of(i)
    for _ in range(length):
        tokens.append(next_tokens(tokens, vocab_size=VOCAB)[-1])
    return tokens[-length:]


def submit_until(harness: EngineHarness, i: int, length: int) -> None:
    """Submit a request that a stop token ends after `length` tokens: the next batch
    has been launched when that is known."""
    answer = answer_of(i, length)
    assert answer[-1] not in answer[:-1]
    submit(harness, i, stop_token_ids=[answer[-1]])


@pytest.mark.parametrize("ends_by", ["stop", "abort"])
def test_an_answered_request_stays_answered(
    model: Path, ends_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends in one step, and is in the launch of the next, whose result is mixed
    up."""
    harness = healing(model)
    if ends_by == "stop":
        submit_until(harness, 0, 6)
    else:
        submit(harness, 0)
    submit(harness, 1)

    def change(step: InFlight, words: list[int]) -> bool:
        ended = [req.is_finished for req in step.launched.reqs]
        if sorted(ended) != [False, True]:
            return False
        swap_rows(words, (0, 1))
        return True

    changed = change_one_result(harness, monkeypatch, change)

    def on_step(step: int) -> None:
        if step == 6 and ends_by == "abort":
            harness.abort("q0")
        check_books(harness)

    # `collect` asserts that none ends twice.
    answers = harness.run(on_step=on_step)
    assert changed and heals(harness) == 1
    for i, answer in ((0, answers["q0"]), (1, answers["q1"])):
        assert is_exact(prompt_of(i), answer)
    assert len(answers["q1"].output_ids) == 24
    assert len(answers["q0"].output_ids) <= 6
    (incident,) = harness.scheduler.own_incidents()
    assert [about["rid"] for about in incident["healing"]["recomputed"]] == ["q1"]
    assert {v["rid"] for v in incident["violations"]} == {"q0", "q1"}
    stats = harness.scheduler.stats_snapshot()
    assert stats.num_requests_total == 2


def test_a_result_of_an_ended_request_alone(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is to be recomputed: it is reported."""
    harness = healing(model)
    submit_until(harness, 0, 6)
    submit(harness, 1)

    def change(step: InFlight, words: list[int]) -> bool:
        ended = [req.is_finished for req in step.launched.reqs]
        if True not in ended:
            return False
        words[ended.index(True)] ^= 1
        return True

    changed = change_one_result(harness, monkeypatch, change)
    answers = harness.run()
    assert changed
    assert is_exact(prompt_of(0), answers["q0"]) and len(answers["q0"].output_ids) == 6
    assert is_exact(prompt_of(1), answers["q1"]) and len(answers["q1"].output_ids) == 24
    (incident,) = harness.scheduler.own_incidents()
    assert incident["healing"]["num_recomputed"] == 0
    assert [v["rid"] for v in incident["violations"]] == ["q0"]


def end_wrongly(
    harness: EngineHarness, patch: pytest.MonkeyPatch, rid: str
) -> list[InFlight]:
    """Let the host read another token than was sampled in the step that ends a
    request, which is therefore answered and then revived."""

    def change(step: InFlight, words: list[int]) -> bool:
        for row, req in enumerate(step.launched.reqs):
            if req.rid == rid and req.output_len == 23 and not req.is_finished:
                words[row] ^= 1
                return True
        return False

    return change_one_result(harness, patch, change)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_revived_request_can_be_aborted(
    model: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = healing(model, overlap=overlap)
    for i in range(2):
        submit(harness, i, max_new_tokens=24 + i)
    changed, aborted = end_wrongly(harness, monkeypatch, "q0"), list[str]()

    def on_step(step: int) -> None:
        if changed and not aborted:
            (req,) = (r for r in harness.scheduler.unfinished if r.rid == "q0")
            assert not req.is_finished and req.output_len == 23
            harness.abort(req.rid)
            aborted.append(req.rid)

    answers = harness.run(on_step=on_step)
    assert aborted and heals(harness) == 1
    reason = answers["q0"].finish_reason
    assert reason is not None and reason.type == "abort"
    assert len(answers["q0"].output_ids) == 23
    assert all(is_exact(prompt_of(i), answers[f"q{i}"]) for i in range(2))


def test_a_revived_request_can_be_blamed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first step afterwards is damaged as well."""
    harness = healing(model)
    submit(harness, 0)
    changed, armed = end_wrongly(harness, monkeypatch, "q0"), list[int]()

    def on_step(step: int) -> None:
        if changed and not armed:
            faults_of(harness).arm("real_kv_used", seed=1)
            armed.append(step)

    check(harness.run(on_step=on_step), of=1)
    assert armed and heals(harness) == 2
    last = harness.scheduler.own_incidents()[-1]["healing"]
    assert [about["rid"] for about in last["recomputed"]] == ["q0"]


# -- tokens ----------------------------------------------------------------------------


@pytest.mark.parametrize("is_noted", [False, True])
@pytest.mark.parametrize("token", [-1, -5, VOCAB + 3])
@pytest.mark.parametrize("mode", ["heal", "raise"])
def test_a_token_that_is_none(
    model: Path, token: int, is_noted: bool, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that sampled nothing is noted as -1, which is also the word of token -1."""
    harness = healing(model, kv_canary=mode)
    for i in range(3):
        submit(harness, i, stream=True)

    def change(step: InFlight, words: list[int]) -> bool:
        if not step.launched.is_decode or len(step.launched.reqs) < 3:
            return False
        words[1] = token
        if is_noted:
            words[-2] = -1
        return True

    changed = change_one_result(harness, monkeypatch, change)
    if mode == "raise":
        with pytest.raises(CanaryViolation, match="result_token"):
            harness.run()
        assert changed
        for answer in harness.collect().values():
            assert token not in answer.output_ids
    else:
        check(harness.run(), of=3)
        assert changed and heals(harness) == 1


@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
@pytest.mark.parametrize("kind", ["plain", "tree"])
def test_outputs_of_one_prompt_are_taken_back_together(
    models: dict[str, Path], kind: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefill of one caches the prompt that the others rely on; its token is the
    wrong one."""
    harness = build(models, kind, overlap=overlap)
    prompt = prompt_of(0, 20)
    for i in range(3):
        harness.submit(prompt, rid=f"q{i}", max_new_tokens=12, ignore_eos=True)

    def change(step: InFlight, words: list[int]) -> bool:
        if step.launched.is_decode or len(step.launched.reqs) < 3:
            return False
        words[0] ^= 1
        return True

    changed = change_one_result(harness, monkeypatch, change)
    answers = harness.run(on_step=lambda step: check_books(harness))
    assert changed and heals(harness) == 1
    assert len(answers) == 3
    for answer in answers.values():
        assert len(answer.output_ids) == 12
        assert is_exact(prompt, answer)
    (incident,) = harness.scheduler.own_incidents()
    assert len(incident["healing"]["recomputed"]) == 3


def lose_one_append(
    patch: pytest.MonkeyPatch, *, is_due: Callable[[Req], bool]
) -> list[str]:
    """Lose the tokens of one result on their way into a request."""
    append, lost = Req.append, list[str]()

    def losing(req: Req, new_tokens: Sequence[int]) -> None:
        if not lost and is_due(req):
            lost.append(req.rid)
        else:
            append(req, new_tokens)

    patch.setattr(Req, "append", losing)
    return lost


ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chain": {"tree": (1, 3, 4)},
    "tree": {"tree": (4, 3, 8)},
}


def build(models: dict[str, Path], kind: str, **options: Any) -> EngineHarness:
    if kind == "plain":
        return healing(models["model"], **options)
    options = {"kv_canary": "heal", "overlap": True, **ENGINES[kind], **options}
    return speculating(**models, page_size=4, **without_limit(options))


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("when", ["prefill", "again"])
def test_tokens_lost_after_a_prefill(
    models: dict[str, Path], kind: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With overlap the next launch has counted on the token: the prefix cache misses it
    first, and raises an error."""
    harness = build(models, kind)
    for i in range(3):
        submit(harness, i)
    lost = lose_one_append(
        monkeypatch,
        is_due=lambda req: (
            req.rid == "q1"
            and (req.num_restarts == 1 if when == "again" else req.output_len == 0)
        ),
    )

    def on_step(step: int) -> None:
        if step == 5 and when == "again":
            state = harness.scheduler.worker.canary_managers()[0].target.buffers.state
            (req,) = (r for r in harness.scheduler.unfinished if r.rid == "q1")
            slots = harness.scheduler.cache.req_to_token_pool.row_slots(
                req.req_pool_idx, 0, 4
            )
            state.tail[slots, 1] ^= 1

    check(harness.run(on_step=on_step), of=3)
    assert lost == ["q1"]
    assert heals(harness) == (2 if when == "again" else 1)


@pytest.mark.parametrize("kind", ENGINES)
def test_an_error_of_the_host_in_mode_raise(
    models: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named, with the request."""
    harness = build(models, kind, kv_canary="raise")
    for i in range(3):
        submit(harness, i)
    lose_one_append(monkeypatch, is_due=lambda req: req.rid == "q1")
    with pytest.raises(CanaryViolation, match="result_token"):
        harness.run()
    assert "q1" not in harness.collect()


@pytest.mark.parametrize("mode", ["none", "log", "raise"])
def test_an_error_of_the_host_ends_an_engine_that_does_not_heal(
    model: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = healing(model, kv_canary=mode)
    for i in range(3):
        submit(harness, i)
    results = harness.scheduler._results
    take = results._take_tokens

    def failing(launched: Any, index: int, new_tokens: list[int]) -> int:
        if launched.reqs[index].output_len == 5:
            raise KeyError("a broken table")
        return take(launched, index, new_tokens)

    monkeypatch.setattr(results, "_take_tokens", failing)
    expected = CanaryViolation if mode == "raise" else KeyError
    with pytest.raises(expected):
        harness.run()
    assert harness.collect() == {}
    if mode != "none":
        violations = harness.scheduler.own_incidents()[0]["violations"]
        assert "host_records" in violations[0]["reasons"]


def test_an_error_while_a_result_is_processed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other requests of the step keep their tokens."""
    harness = healing(model)
    for i in range(4):
        submit(harness, i)
    results, failed = harness.scheduler._results, list[str]()
    take = results._take_tokens

    def failing(launched: Any, index: int, new_tokens: list[int]) -> int:
        req = launched.reqs[index]
        if not failed and req.rid == "q2" and req.output_len == 5:
            failed.append(req.rid)
            raise KeyError("a broken table")
        return take(launched, index, new_tokens)

    monkeypatch.setattr(results, "_take_tokens", failing)
    check(harness.run(on_step=lambda step: check_books(harness)), of=4)
    (incident,) = harness.scheduler.own_incidents()
    assert incident["violations"][0]["reasons"] == ["result_token", "host_records"]
    assert [about["rid"] for about in incident["healing"]["recomputed"]] == ["q2"]


# -- slots that nobody reads -----------------------------------------------------------

WINDOW = 24


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mock_models(
        tmp_path_factory.mktemp("windowed"),
        sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention"],
    )["model"]


def lose_page(slots: WindowSlots) -> None:
    """Forget the window page of a cached run: it is missed when the run goes."""
    slots._page_of[slots.mapped_pages()[0]] = 0


def take_free_page(slots: WindowSlots) -> None:
    """Take a page out of the free ones for nobody."""
    slots._ledger.take(1)


@pytest.mark.parametrize("damage", [lose_page, take_free_page])
def test_records_of_windows_that_nobody_reads(
    windowed: Path, damage: Callable[[WindowSlots], None]
) -> None:
    harness = healing(windowed)
    scheduler = harness.scheduler
    (slots,) = scheduler.cache.allocator.secondary
    assert isinstance(slots, WindowSlots)
    submit(harness, 0)
    assert len(harness.run()["q0"].output_ids) == 24
    damage(slots)
    scheduler.cache.groups[0].evict(slots.size)
    for i in range(1, 4):
        submit(harness, i)
    answers = harness.run()
    assert [len(answers[f"q{i}"].output_ids) for i in range(1, 4)] == [24] * 3
    (incident,) = scheduler.own_incidents()
    assert incident["violations"][0]["reasons"] == ["host_records"]
    assert heals(harness) == 1
    for i in range(1, 4):
        submit(harness, i)
    again = harness.run()
    for rid, answer in answers.items():
        assert again[rid].output_ids == answer.output_ids
    assert torch.equal(slots.expected_mapping(), slots.mapping)


def test_pages_of_the_pool_that_nobody_holds(model: Path) -> None:
    harness = healing(model)
    submit(harness, 0)
    harness.run()
    allocator = harness.scheduler.cache.allocator
    allocator._ledger.take(2)
    harness.scheduler.idle_checked = False
    submit(harness, 1)
    submit(harness, 2)
    answers = harness.run()
    assert all(is_exact(prompt_of(i), answers[f"q{i}"]) for i in (1, 2))
    assert heals(harness) == 1
    assert allocator.available_size() == allocator.size


def test_watched_pages_stay_watched_through_a_new_start(model: Path) -> None:
    harness = healing(model)
    submit(harness, 0)
    harness.run()
    quarantine = healer_of(harness).quarantine
    allocator = harness.scheduler.cache.allocator
    pages = np.flatnonzero(~allocator.owns(np.arange(64)))[1:3]
    quarantine.add(pages, num_forwards=10**6)
    allocator._ledger.take(1)
    harness.scheduler.idle_checked = False
    harness.scheduler._on_idle()
    assert heals(harness) == 1 and quarantine.num_pages == 2
    assert allocator.owns(pages).all()
    assert allocator.available_size() == allocator.size - 2 * allocator.page_size


def test_an_own_page_that_is_cached_too(model: Path) -> None:
    """By the host's damaged records a page of a request's own part belongs to the cache
    as well. The cached run goes with the request that is recomputed."""
    harness = healing(model)
    submit(harness, 0)
    scheduler = harness.scheduler
    cache, other = scheduler.cache, [VOCAB - 1 - i for i in range(4)]
    shared: list[int] = []

    def on_step(step: int) -> None:
        if step != 16:
            return
        (req,) = scheduler.unfinished
        begin = req.cache_protected_len
        slots = cache.req_to_token_pool.row_slots(req.req_pool_idx, begin, begin + 4)
        assert req.committed_len > begin + 4
        cache.insert(cache.key(other), slots)
        shared.extend(slots.tolist())
        faults_of(harness).arm("input_token", seed=1)

    check(harness.run(on_step=on_step), of=1)
    assert shared and heals(harness) == 1
    assert cache.match_length(cache.key(other)) == 0
    cached = cache.cached_slots()
    assert len(cached.unique()) == len(cached)
    check_books(harness)


# -- what is computed with damaged drafts ----------------------------------------------


@pytest.mark.parametrize("tree", [(1, 3, 4), (4, 3, 8)], ids=["chain", "tree"])
def test_damaged_drafts_of_a_request_that_ends_are_not_cached(
    models: dict[str, Path], tree: tuple[int, int, int]
) -> None:
    """The damage is in the draft's pool alone, so the answer is used; its KV must not
    stay for others."""
    found = []
    for length in range(18, 26):
        harness = speculating(
            **models, tree=tree, page_size=4, kv_canary="heal", kv_canary_heal_limit=0
        )
        _, draft = drivers_of(harness.scheduler)
        submit(harness, 0, max_new_tokens=length)

        def on_step(
            step: int,
            harness: EngineHarness = harness,
            draft: PerturbDriver = draft,
            length: int = length,
        ) -> None:
            for req in harness.scheduler.unfinished:
                if req.output_len == length - 1 and not draft.asked:
                    draft.arm("real_kv_used", seed=length)

        check(harness.run(on_step=on_step), of=1, length=length)
        if not draft.planted:
            continue
        cache, damage = harness.scheduler.cache, draft.planted[0].damage
        page = damage.slot // 4
        assert page not in (cache.cached_slots() // 4).tolist()
        found.append(length)
        assert heals(harness) == 1
    assert found


def test_tokens_beside_damaged_drafts_are_counted_once(models: dict[str, Path]) -> None:
    harness = speculating(
        **models, tree=(1, 3, 4), page_size=4, kv_canary="heal", kv_canary_heal_limit=0
    )
    _, draft = drivers_of(harness.scheduler)
    for i in range(3):
        submit(harness, i)

    def on_step(step: int) -> None:
        started = all(req.output_len > 4 for req in harness.scheduler.unfinished)
        if len(harness.scheduler.unfinished) == 3 and started and not draft.asked:
            draft.arm("real_kv_used", seed=1)

    check(harness.run(on_step=on_step), of=3)
    assert draft.planted and heals(harness) == 1
    assert harness.scheduler.stats_snapshot().generation_tokens_total == 3 * 24


# -- faults of the healing itself ------------------------------------------------------


def keep_flagged_rows(harness: EngineHarness, patch: pytest.MonkeyPatch) -> None:
    """Process the flagged rows as if they were right."""
    results = harness.scheduler._results
    process = results.process

    def every_row(launched: Any, result: Any, rows: Any = None, **options: Any) -> Any:
        if rows is not None:
            rows = [row for row, req in enumerate(launched.reqs) if not req.is_finished]
        return process(launched, result, rows, **options)

    patch.setattr(results, "process", every_row)


def queue_one_less(harness: EngineHarness, patch: pytest.MonkeyPatch) -> None:
    intake = harness.scheduler.intake
    queue = intake.queue_first
    patch.setattr(intake, "queue_first", lambda reqs: queue(reqs[1:]))


def forget_a_token(harness: EngineHarness, patch: pytest.MonkeyPatch) -> None:
    prepare = Req.prepare_again

    def shorter(req: Req) -> None:
        del req.tokens[-1:]
        prepare(req)

    patch.setattr(Req, "prepare_again", shorter)


def change_a_sent_token(harness: EngineHarness, patch: pytest.MonkeyPatch) -> None:
    prepare = Req.prepare_again

    def changed(req: Req) -> None:
        req.tokens[req.prompt_len] ^= 1
        prepare(req)

    patch.setattr(Req, "prepare_again", changed)


def change_a_prompt(harness: EngineHarness, patch: pytest.MonkeyPatch) -> None:
    """No digest that was sent covers it."""
    prepare = Req.prepare_again

    def changed(req: Req) -> None:
        req.tokens[3] ^= 1
        prepare(req)

    patch.setattr(Req, "prepare_again", changed)


def rewind_nothing(harness: EngineHarness, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Req, "rewind", lambda req, num_tokens: None)


def rewind_too_far(harness: EngineHarness, patch: pytest.MonkeyPatch) -> None:
    rewind = Req.rewind
    patch.setattr(Req, "rewind", lambda req, num: rewind(req, num - 1))


def change_a_token(step: InFlight, words: list[int]) -> bool:
    """Let the host get another token than was sampled, in the fourth row."""
    launched, stride = step.launched, step.result.stride
    if (
        not launched.is_decode
        or len(launched.reqs) < 4
        or launched.reqs[3].output_len < 4
    ):
        return False
    words[3 * stride] ^= 1
    return True


def rate_as_drafts(harness: EngineHarness, patch: pytest.MonkeyPatch) -> None:
    """Take damage of the target's pool for damage of a draft's."""
    patch.setattr(blame, "rate_severity", lambda pool, reasons: Severity.DRAFTS)


def send_the_early_only(harness: EngineHarness, patch: pytest.MonkeyPatch) -> None:
    """Lose the requests that are processed after the healing on their way to the
    streamer."""
    process = harness.scheduler._results.process

    def lossy(launched: Any, result: Any, rows: Any = None, **options: Any) -> Any:
        processed = process(launched, result, rows, **options)
        return processed if rows is None else processed._replace(reqs=[])

    patch.setattr(harness.scheduler._results, "process", lossy)


HEALING_FAULTS = {
    fault.__name__: (fault, damage)
    for fault, damage in (
        (keep_flagged_rows, "shift_view"),
        (queue_one_less, "shift_view"),
        (forget_a_token, "shift_view"),
        (change_a_sent_token, "shift_view"),
        (change_a_prompt, "shift_view"),
        (rate_as_drafts, "shift_view"),
        (send_the_early_only, "record"),
        (rewind_nothing, ""),
        (rewind_too_far, ""),
    )
}


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("name", HEALING_FAULTS)
def test_a_healing_that_goes_wrong_sends_nothing_wrong(
    models: dict[str, Path], name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine stops, with the damage that was to be healed."""
    fault, damage = HEALING_FAULTS[name]
    harness = build(models, kind)
    for i in range(4):
        submit(harness, i, stream=True)
    if not damage:
        change_one_result(harness, monkeypatch, change_a_token)
    fault(harness, monkeypatch)

    def on_step(step: int) -> None:
        if step == 5 and damage:
            faults_of(harness).arm(damage, seed=1)

    with pytest.raises(CanaryViolation) as raised:
        harness.run(on_step=on_step)
    assert isinstance(raised.value.__cause__, HealingError)
    for rid, answer in harness.collect().items():
        i = int(rid[1:])
        assert answer.finish_reason is None
        assert answer.output_ids == answer_of(i)[: len(answer.output_ids)]


@pytest.mark.parametrize("kind", ENGINES)
def test_tokens_that_change_while_a_request_waits_to_be_computed_again(
    models: dict[str, Path], kind: str
) -> None:
    """Compared with what it had before the healing when it is prefilled again."""
    harness = build(models, kind)
    for i in range(4):
        submit(harness, i, stream=True)
    changed: list[str] = []

    def on_step(step: int) -> None:
        if step == 5:
            faults_of(harness).arm("shift_view", seed=1)
        if heals(harness) and not changed:
            req = harness.scheduler.waiting[0]
            req.tokens[3] ^= 1
            changed.append(req.rid)

    with pytest.raises(RuntimeError, match="tokens of request number .* have changed"):
        harness.run(on_step=on_step)
    assert changed
    for rid, answer in harness.collect().items():
        assert answer.output_ids == answer_of(int(rid[1:]))[: len(answer.output_ids)]


def test_what_a_damaged_step_wrote_does_not_stay_cached(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = healing(model, page_size=1, overlap=False)
    for i in range(4):
        submit(harness, i)
    cache = harness.scheduler.cache

    def keep(req: Req) -> torch.Tensor:
        cache.cache_finished_req(req)
        return torch.empty(0, dtype=torch.int64)

    monkeypatch.setattr(cache, "let_go", keep)

    def on_step(step: int) -> None:
        if step == 5:
            faults_of(harness).arm("input_token", seed=1)

    with pytest.raises(CanaryViolation) as raised:
        harness.run(on_step=on_step)
    assert isinstance(raised.value.__cause__, HealingError)
    assert "still cached" in str(raised.value.__cause__)


def test_an_overwritten_page_that_nobody_follows(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads it in the next step: only the cache holds it."""
    monkeypatch.setattr(blame, "_OVERWRITTEN", Reason(0))
    harness = healing(model)
    submit(harness, 4)
    harness.run()
    for i in range(2):
        submit(harness, i)
    written: list[int] = []

    def write_elsewhere(batch: ForwardBatch, views: Any) -> None:
        if not batch.forward_mode.is_decode or written:
            return
        runs = harness.scheduler.cache.iter_cached_runs()
        written.append(next(int(run.slots[9]) for run in runs if not run.locked))
        batch.out_cache_loc[0] = written[0]

    def on_step(step: int) -> None:
        if step == 5:
            harness.scheduler.worker.canary_managers()[0].probe = write_elsewhere

    with pytest.raises(CanaryViolation) as raised:
        harness.run(on_step=on_step)
    assert written and isinstance(raised.value.__cause__, HealingError)
    assert "overwrote is kept" in str(raised.value.__cause__)


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("blind", ["inspect", "confirm"])
def test_damage_that_the_gate_overlooks_stops_the_engine(
    models: dict[str, Path], kind: str, blind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = build(models, kind)
    for i in range(4):
        submit(harness, i, stream=True)
    monkeypatch.setattr(harness.scheduler._canary, blind, lambda *args: None)
    if blind == "confirm":
        change_one_result(harness, monkeypatch, change_a_token)

    def on_step(step: int) -> None:
        if step == 5 and blind == "inspect":
            faults_of(harness).arm("shift_view", seed=1)

    with pytest.raises((CanaryViolation, HealingError)) as raised:
        harness.run(on_step=on_step)
    error = raised.value
    assert isinstance(error, HealingError) or isinstance(error.__cause__, HealingError)
    for rid, answer in harness.collect().items():
        due = answer_of(int(rid[1:]))
        assert answer.output_ids == due[: len(answer.output_ids)]


@pytest.mark.parametrize("canary", ["none", "raise", "heal"])
@pytest.mark.parametrize("is_running", [False, True])
def test_a_request_that_the_scheduler_loses_gets_an_error(
    model: Path, canary: str, is_running: bool
) -> None:
    harness = healing(model, kv_canary=canary)
    scheduler = harness.scheduler
    for i in range(3):
        submit(harness, i)

    def on_step(step: int) -> None:
        if step == (4 if is_running else 1) and "q1" in scheduler._unfinished:
            lost = scheduler._unfinished["q1"]
            scheduler.batches.take_out([lost])
            if lost in scheduler.waiting:
                scheduler.waiting.remove(lost)

    answers = harness.run(on_step=on_step)
    reason = answers["q1"].finish_reason
    assert reason is not None and reason.status_code == 500
    assert "lost this request" in (reason.message or "")
    for i in (0, 2):
        assert answers[f"q{i}"].output_ids == answer_of(i)
    assert scheduler.cache.req_to_token_pool.available_size() == (
        scheduler.cache.req_to_token_pool.size
    )
    assert is_exact(prompt_of(5), harness.generate(prompt_of(5), max_new_tokens=5))


@pytest.mark.parametrize("canary", ["none", "raise", "heal"])
def test_an_end_that_is_not_sent_in_its_step_is_sent_at_idle(
    model: Path, canary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = healing(model, kv_canary=canary)
    for i in range(3):
        submit(harness, i, stream=i == 1)
    streamer = harness.scheduler._streamer
    send = streamer.send

    def lossy(reqs: Any) -> None:
        send(req for req in reqs if req.rid == "q0" or not req.is_finished)

    monkeypatch.setattr(streamer, "send", lossy)
    check(harness.run(), of=3)
    assert not streamer.owed


@pytest.mark.parametrize("overlap", [True, False])
def test_damage_of_the_device_and_of_the_host_in_one_step(
    model: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first healing withholds the second one does not miss."""
    harness = healing(model, overlap=overlap)
    for i in range(4):
        submit(harness, i, stream=True)

    def change(step: InFlight, words: list[int]) -> bool:
        verdicts = parse_verdicts(step.result.findings[0])
        sound = [row for row in step.launched.live_rows() if not verdicts[row]]
        if not step.launched.is_decode or not any(verdicts) or not sound:
            return False
        words[sound[0]] ^= 1
        return True

    changed = change_one_result(harness, monkeypatch, change)

    def on_step(step: int) -> None:
        if step == 5:
            faults_of(harness).arm("record", seed=1)

    check(harness.run(on_step=on_step), of=4)
    assert changed and heals(harness) == 2


# -- the watchdog ----------------------------------------------------------------------


@pytest.mark.parametrize("owner", ["cache", "intake"])
def test_whatever_a_round_does_is_watched(
    model: Path, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`evict` could hang without being noticed."""
    harness = healing(model, max_total_tokens=256)
    scheduler = harness.scheduler
    seen = []
    target, name = {
        "cache": (scheduler.cache, "evict"),
        "intake": (scheduler.intake, "accept"),
    }[owner]
    call = getattr(target, name)

    def watched(*args: Any) -> Any:
        seen.append(scheduler._watchdog._section.began)
        return call(*args)

    monkeypatch.setattr(target, name, watched)
    for i in range(8):
        submit(harness, i)
    check(harness.run(), of=8)
    assert seen and None not in seen


def test_findings_of_ranks_are_united_word_by_word() -> None:
    """All but the head of each manager's findings, which counts this rank's own."""
    sent: list[list[int]] = []

    def unite(words: list[int]) -> list[int]:
        sent.append(words)
        return [word | 8 for word in words]

    gate: Any = SimpleNamespace(_group=SimpleNamespace(size=2, bitwise_or=unite))
    heads = [list(range(100, 100 + RING)), list(range(200, 200 + RING))]
    found = CanaryGate._united(gate, [heads[0] + [1, 2], heads[1] + [4, 0, 3]])
    assert found == [heads[0] + [9, 10], heads[1] + [12, 8, 11]]
    assert sent == [[1, 2, 4, 0, 3]]
    gate._group.size = 1
    assert CanaryGate._united(gate, [heads[0] + [1]]) == [heads[0] + [1]]
