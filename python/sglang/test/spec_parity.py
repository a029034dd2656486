"""Parity of engines with and without speculation on mixed requests in random order.

Outputs, finish reasons and logprobs must agree, and no slot may be lost.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.managers.batch.req import Req
from sglang.srt.managers.messages.io_struct import TokenLogprob
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.mem_cache.common import check_busy
from sglang.test.harness import EngineHarness, Finished

# Maximum tokens of a request.
CONTEXT = 160
# Two tokens may swap if their logits are this close.
TIE = 1e-4
MAX_EXCUSED = 0.005
LOGPROB_TOLERANCE = 1e-4


@dataclass(kw_only=True)
class Ask:
    """One request, with `options` for `EngineHarness.submit`."""

    prompt: list[int]
    options: dict[str, Any]
    is_plain: bool


# Options of a request beyond a greedy answer.
EXTRAS: tuple[dict[str, Any], ...] = (
    {"frequency_penalty": 0.7},
    {"presence_penalty": 1.1},
    {"repetition_penalty": 1.3},
    {"logit_bias": {7: 4.0, 9: -5.0}},
    {"return_logprob": True, "top_logprobs_num": 3, "stream": True},
    {"return_logprob": True, "logprob_start_len": 0},
    {"ignore_eos": False, "min_new_tokens": 6},
    {"ignore_eos": False, "stop_token_ids": list(range(0, 250, 3))},
)


def make_asks(
    rng: random.Random,
    *,
    total: int,
    vocab_size: int,
    longest: int = CONTEXT,
    new_tokens: int = 12,
) -> list[Ask]:
    """Draw mixed requests with shared beginnings.

    Every third has one of `EXTRAS`; one in thirty-three extends to the last position of
    the context.

    Args:
        longest: maximum of prompt plus output.
        new_tokens: maximum of a usual answer.
    """

    def tokens(length: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(length)]

    # One of them fills a page of any size.
    stems = [tokens(100), *(tokens(rng.randrange(20, 70)) for _ in range(2))]
    asks = []
    for i in range(total):
        stem = rng.choice(stems)
        prompt = stem[: rng.randrange(len(stem) + 1)] + tokens(rng.randrange(1, 20))
        new = rng.choice((1, 2, rng.randrange(1, new_tokens), new_tokens))
        if i % 33 == 7:
            new = rng.randrange(1, 10)
            prompt = (prompt + tokens(longest))[: longest - new]
        extra = EXTRAS[i // 3 % len(EXTRAS)] if i % 3 == 2 else {}
        options = {
            "max_new_tokens": new,
            "ignore_eos": True,
            "stream": rng.random() < 0.5,
            "extra_key": rng.choice((None, None, None, "tenant")),
        } | extra
        is_plain = not extra or bool(extra.get("return_logprob"))
        asks.append(Ask(prompt=prompt, options=options, is_plain=is_plain))
    return asks


def answer_all(harness: EngineHarness, asks: Sequence[Ask]) -> dict[str, Finished]:
    for i, ask in enumerate(asks):
        harness.submit(ask.prompt, rid=str(i), **ask.options)
    return harness.run()


@dataclass
class Traffic:
    """Submits `asks` at random times while the engine runs, and aborts some."""

    harness: EngineHarness
    asks: Sequence[Ask]
    rng: random.Random
    abort_prob: float = 0.04
    check_every: int = 16
    aborted: set[str] = field(default_factory=set)
    sent: int = 0

    def run(self) -> dict[str, Finished]:
        answers: dict[str, Finished] = {}
        while self.sent < len(self.asks):
            answers |= self.harness.run(on_step=self._on_step)
        assert set(answers) == {str(i) for i in range(len(self.asks))}
        return answers

    def _on_step(self, step: int) -> None:
        rng, scheduler = self.rng, self.harness.scheduler
        if step % self.check_every == 0:
            check_accounting(scheduler)
        left = len(self.asks) - self.sent
        if left and (rng.random() < 0.4 or not scheduler.has_work()):
            for _ in range(min(left, rng.choice((1, 2, 4, 16)))):
                self._submit()
        if self.sent and rng.random() < self.abort_prob:
            rid = str(rng.randrange(self.sent))
            self.aborted.add(rid)
            self.harness.abort(rid)

    def _submit(self) -> None:
        ask = self.asks[self.sent]
        self.harness.submit(ask.prompt, rid=str(self.sent), **ask.options)
        self.sent += 1


def live_requests(scheduler: Scheduler) -> list[Req]:
    """Return the requests that hold slots, each once."""
    found: dict[int, Req] = {}
    for batch in (scheduler.running, scheduler.batches.last_prefill):
        for req in batch.reqs if batch is not None else []:
            found[req.serial] = req
    for launched, _ in scheduler.in_flight:
        found |= {req.serial: req for req in launched.reqs}
    if scheduler.batches.chunked is not None:
        found[scheduler.batches.chunked.serial] = scheduler.batches.chunked
    return [req for req in found.values() if not req.is_finished]


def check_accounting(scheduler: Scheduler) -> None:
    """Check that every page has one holder, and the lengths of every request."""
    live = live_requests(scheduler)
    check_busy(scheduler.cache, live)
    for req in live:
        assert req.cache_protected_len <= req.committed_len <= req.allocated_len
        assert req.allocated_len <= scheduler.cache.req_to_token_pool.row_width


def check_no_leak(harness: EngineHarness) -> None:
    """Check that every slot is free at idle once the prefix cache is empty."""
    cache = harness.scheduler.cache
    assert harness.scheduler.stats_snapshot().num_used_tokens == 0
    cache.reset()
    assert cache.allocator.available_size() == cache.allocator.size
    assert cache.req_to_token_pool.available_size() == cache.req_to_token_pool.size


def assert_parity(
    asks: Sequence[Ask],
    expected: dict[str, Finished],
    found: dict[str, Finished],
    *,
    aborted: set[str],
    reference: EngineHarness | None,
) -> None:
    """Check that outputs, reasons and logprobs agree; an aborted one may be short.

    Args:
        reference: engine that provides the margin where outputs differ, or None if they
            must not differ.
    """
    excused = []
    for i, ask in enumerate(asks):
        rid = str(i)
        want, got = expected[rid], found[rid]
        reason = got.finish_reason
        assert reason is not None and want.finish_reason is not None
        shorter = len(got.output_ids)
        was_cut = reason.type == "abort"
        if was_cut:
            assert rid in aborted, reason
        if got.output_ids != want.output_ids[: shorter if was_cut else None]:
            assert reference is not None, difference(rid, want, got)
            assert _is_tie(reference, ask, want, got), difference(rid, want, got)
            excused.append(rid)
            continue
        assert was_cut or reason == want.finish_reason, (rid, reason)
        if ask.options.get("return_logprob"):
            assert_same_logprobs(rid, want, got, is_short=was_cut)
    assert len(excused) <= MAX_EXCUSED * len(asks), f"near ties: {excused}"


def difference(rid: str, want: Finished, got: Finished) -> str:
    at = next(
        (
            i
            for i, (a, b) in enumerate(
                zip(want.output_ids, got.output_ids, strict=False)
            )
            if a != b
        ),
        min(len(want.output_ids), len(got.output_ids)),
    )
    return (
        f"request {rid} differs from output token {at} on: "
        f"expected {want.output_ids[at : at + 8]} of {len(want.output_ids)}, "
        f"got {got.output_ids[at : at + 8]} of {len(got.output_ids)}"
    )


def _is_tie(reference: EngineHarness, ask: Ask, want: Finished, got: Finished) -> bool:
    """Whether the two best tokens of a plain request tie where the outputs differ."""
    if not ask.is_plain:
        return False
    both = zip(want.output_ids, got.output_ids, strict=False)
    at = next((i for i, (a, b) in enumerate(both) if a != b), None)
    if at is None:
        return False
    answer = reference.generate(
        ask.prompt + want.output_ids[:at],
        max_new_tokens=1,
        ignore_eos=True,
        return_logprob=True,
        top_logprobs_num=2,
    )
    (best, _), (second, _) = answer.logprobs[0].output_top[0]
    assert best is not None and second is not None
    return best - second < TIE


def assert_same_logprobs(
    rid: str, want: Finished, got: Finished, *, is_short: bool = False
) -> None:
    """Check that there is one entry per output token, equal to the other engine's."""
    ours, theirs = _joined(got), _joined(want)
    assert len(ours[0]) == len(got.output_ids), rid
    assert [token for _, token in ours[0]] == got.output_ids, rid
    if is_short:
        theirs = (theirs[0][: len(ours[0])], theirs[1][: len(ours[1])])
    _assert_near(rid, ours[0], theirs[0])
    assert len(ours[1]) == len(theirs[1]), rid
    for own, other in zip(ours[1], theirs[1], strict=True):
        # Tokens with nearly equal logprobs may swap.
        _assert_near(rid, [(p, 0) for p, _ in own], [(p, 0) for p, _ in other])
    named = [[e for d in a.logprobs for e in d.output_named] for a in (got, want)]
    if is_short:
        named[1] = named[1][: len(named[0])]
    for own, other in zip(*named, strict=True):
        _assert_near(rid, own, other)
    if is_short:
        return
    prompts = [
        [d.input_token for d in answer.logprobs if d.input_token is not None]
        for answer in (got, want)
    ]
    assert len(prompts[0]) == len(prompts[1]) <= 1, rid
    for own_prompt, other_prompt in zip(*prompts, strict=True):
        _assert_near(rid, own_prompt, other_prompt)


def _joined(
    answer: Finished,
) -> tuple[list[TokenLogprob], list[list[TokenLogprob]]]:
    tokens: list[TokenLogprob] = []
    top: list[list[TokenLogprob]] = []
    for delta in answer.logprobs:
        tokens += delta.output_token
        top += delta.output_top
    return tokens, top


def _assert_near(
    rid: str, own: Sequence[TokenLogprob], other: Sequence[TokenLogprob]
) -> None:
    assert [t for _, t in own] == [t for _, t in other], rid
    for (one, _), (two, _) in zip(own, other, strict=True):
        assert (one is None) == (two is None), rid
        if one is not None and two is not None:
            assert abs(one - two) < LOGPROB_TOLERANCE, (rid, one, two)
