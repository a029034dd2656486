"""Grammars that meet a limit while their request runs: it goes on, or is told."""

from __future__ import annotations

import random
import re
import time
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.constrained import llguidance_backend
from sglang.srt.constrained.base_grammar import GrammarLimitError
from sglang.srt.constrained.grammar_library import GrammarLibrary
from sglang.srt.constrained.grammar_manager import GrammarManager
from sglang.srt.constrained.llguidance_backend import LLGuidanceBackend
from sglang.srt.constrained.llguidance_compiler import StateLimits
from sglang.srt.managers.batch.req import Req
from sglang.srt.managers.messages.io_struct import GenerateReq
from sglang.srt.managers.scheduler import grammar_queue
from sglang.srt.managers.scheduler.grammar_queue import GrammarQueue
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.sampling.vocab_mask import allocate_vocab_mask
from sglang.srt.utils.paths import bundled_demo_model_path
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness, Finished
from sglang.test.spec_world import ModelFolders, SpecConfig, plain_engine, spec_engine
from sglang.test.tiny_models import write_tiny_model

register_cpu_ci(est_time=6, suite="cpu")

# Every word makes states of its own.
WORDS = r"([a-e]+[fg]?){1,300}"
ASKED: dict[str, Any] = {
    "max_new_tokens": 70,
    "temperature": 1.0,
    "regex": WORDS,
    "return_logprob": True,
    "stream": True,
}
TREE = SpecConfig(
    algorithm="EAGLE3",
    topk=4,
    page_size=4,
    num_steps=4,
    nodes="middle",
    backend="cpu_native",
    overlap=True,
    model="demo",
    variant=None,
)
SetLimits = Callable[[int], None]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return write_tiny_model(folder, "LlamaForCausalLM")


@pytest.fixture
def set_limits(monkeypatch: pytest.MonkeyPatch) -> SetLimits:
    """Sets the lexer states of grammars that schedulers compile from now on."""

    def limit(max_states: int) -> None:
        limited = partial(LLGuidanceBackend, limits=StateLimits(max_states=max_states))
        monkeypatch.setattr(grammar_queue, "LLGuidanceBackend", limited)

    return limit


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Requests that lost their grammar."""
    found: list[str] = []
    lose = Req.lose_grammar

    def note(req: Req) -> bool:
        found.append(req.rid)
        return lose(req)

    monkeypatch.setattr(Req, "lose_grammar", note)
    return found


def answer(harness: EngineHarness, **options: Any) -> list[Finished]:
    """Six constrained answers and a free one, run together."""
    rids = [
        harness.submit([65 + i], **ASKED | {"sampling_seed": i} | options)
        for i in range(6)
    ]
    rids.append(harness.submit([65], max_new_tokens=70, ignore_eos=True))
    answers = harness.run()
    return [answers[rid] for rid in rids]


def assert_same(found: list[Finished], expected: list[Finished]) -> None:
    for got, want in zip(found, expected, strict=True):
        assert got.output_ids == want.output_ids
        assert got.finish_reason == want.finish_reason
        named = [t for d in got.logprobs for _, t in d.output_token]
        assert named in ([], got.output_ids)


@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
def test_requests_go_on_with_the_same_tokens(
    tiny: Path, set_limits: SetLimits, losses: list[str], overlap: bool
) -> None:
    expected = answer(EngineHarness(tiny))
    assert not losses
    set_limits(60)
    found = answer(EngineHarness(tiny, overlap=overlap, page_size=16))
    assert len(set(losses)) >= 3
    assert_same(found, expected)
    for got in found[:-1]:
        text = bytes(t for t in got.output_ids if t < 256).decode()
        assert re.fullmatch(WORDS, text)


def test_in_draft_trees(
    tmp_path: Path, set_limits: SetLimits, losses: list[str]
) -> None:
    options = {"temperature": 0.0, "sampling_seed": None, "max_new_tokens": 24}
    usual = {"skip_tokenizer_init": False, "max_total_tokens": 16384}
    expected = answer(plain_engine(bundled_demo_model_path(), **usual), **options)
    set_limits(150)
    found = answer(spec_engine(ModelFolders(tmp_path), TREE, **usual), **options)
    assert len(set(losses)) >= 2
    assert_same(found, expected)


def test_requests_whose_grammar_compiles_fill_the_queue(tiny: Path) -> None:
    harness = EngineHarness(tiny, max_queued_requests=3)
    rids = [
        harness.submit([65], max_new_tokens=3, regex="[a-c]{2,9}") for _ in range(5)
    ]
    answers = harness.run()
    refused = [rid for rid in rids if answers[rid].finish_reason.type == "abort"]
    assert refused == rids[3:]
    assert {answers[rid].finish_reason.status_code for rid in refused} == {503}


def test_one_that_no_state_can_follow_is_a_500(
    tiny: Path, set_limits: SetLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answer(EngineHarness(tiny))
    set_limits(60)
    monkeypatch.setattr(
        llguidance_backend, "_OWN_LIMITS", StateLimits(max_states=60, step_fuel=200_000)
    )
    *found, free = answer(EngineHarness(tiny))
    failed = 0
    for got, want in zip(found, expected, strict=False):
        reason = got.finish_reason
        assert reason is not None
        if reason.type == "abort":
            failed += 1
            assert reason.status_code == 500
            assert "constrained decoding failed: the grammar stopped" in str(reason)
            assert got.output_ids == want.output_ids[: len(got.output_ids)]
        else:
            assert got.output_ids == want.output_ids
    assert failed
    assert_same([free], expected[-1:])


class Rank:
    """The grammar queue of one rank and its requests."""

    def __init__(self, tokenizer_json: str, *, decides: bool) -> None:
        backend = LLGuidanceBackend(
            tokenizer_json,
            vocab_size=300,
            eos_ids=[256],
            limits=StateLimits(max_states=60),
        )
        self.library = GrammarLibrary(max_bytes=200_000, renew_bytes=60_000)
        manager = GrammarManager(backend, self.library) if decides else None
        self.queue = GrammarQueue(backend, self.library, manager=manager)
        self.reqs: dict[str, Req] = {}

    def submit(self, rid: str, regex: str) -> None:
        request = GenerateReq(
            rid=rid, input_ids=[1], sampling_params=SamplingParams(regex=regex)
        )
        req = Req(
            request,
            tokens=array("q", request.input_ids),
            stop_ids=frozenset([256]),
            seed=0,
            max_total_len=999,
            stop_matcher=None,
        )
        self.reqs[rid] = req
        self.queue.submit(req)

    def mask(self, rid: str) -> list[int] | None:
        """The words of the next mask; None where the grammar is lost."""
        req, mask = self.reqs[rid], allocate_vocab_mask(1, 300)
        assert req.grammar is not None
        try:
            req.grammar.fill_mask(mask[0])
        except GrammarLimitError as error:
            return self._lose(req, error)
        words: list[int] = mask[0].tolist()
        return words

    def accept(self, rid: str, token: int) -> None:
        req = self.reqs[rid]
        assert req.grammar is not None
        req.append([token])
        try:
            req.grammar.accept(token)
        except GrammarLimitError as error:
            self._lose(req, error)

    def _lose(self, req: Req, error: Exception) -> None:
        req.grammar_failure = str(error)
        if req.lose_grammar():
            self.queue.submit(req)


def test_ranks_renew_alike(tiny: Path) -> None:
    """Rank 0 compiles in threads, when it can; the other one when it is told to."""
    text = (tiny / "tokenizer.json").read_text()
    ranks = [Rank(text, decides=True), Rank(text, decides=False)]
    rng = random.Random(7)
    lost = finished = 0
    deadline = time.monotonic() + 60
    while finished < 30:
        assert time.monotonic() < deadline
        if len(ranks[0].reqs) < 6:
            rid, regex = f"r{rng.random()}", rng.choice([WORDS, "[a-d]{2,}", "x+y?"])
            for rank in ranks:
                rank.submit(rid, regex)
        decisions = ranks[0].queue.decide()
        for rank in ranks:
            rank.queue.apply(decisions)
        for rid in list(ranks[0].reqs):
            reqs = [rank.reqs[rid] for rank in ranks]
            if reqs[0].grammar is not None:
                words, others = (rank.mask(rid) for rank in ranks)
                assert words == others
                if words is not None:
                    row = torch.tensor(words, dtype=torch.int32).view(torch.uint8)
                    bits = row[:, None] >> torch.arange(8) & 1
                    allowed = bits.flatten().nonzero()[:, 0].tolist()
                    token = rng.choice([t for t in allowed if t != 256] or [256])
                    for rank in ranks:
                        rank.accept(rid, token)
            lost += reqs[0].grammar_failure is not None
            assert reqs[0].grammar_failure == reqs[1].grammar_failure
            assert (reqs[0].grammar is None) == (reqs[1].grammar is None)
            if reqs[0].output_len >= 40 or reqs[0].is_finished:
                finished += 1
                for rank in ranks:
                    rank.queue.cancel(rid)
                    del rank.reqs[rid]
        assert ranks[0].library.used_bytes == ranks[1].library.used_bytes
    assert lost
    for rank in ranks:
        rank.queue.shutdown()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
