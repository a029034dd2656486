"""Whose logits gave whose token, in whole engines: a mistake between the last hidden
state and the token is named before a wrong token is sent; sound traffic is silent."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from kv_canary.reporter import CanaryViolation
from sglang.srt.layers import logits_processor
from sglang.srt.managers.worker.grammar_masks import GrammarMasks
from sglang.srt.sampling import penalties, sampler, sampling_batch_info
from sglang.srt.sampling.ops.keep_prefix.op import Filters
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.harness import EngineHarness, Finished
from sglang.test.scale import count, sampled
from sglang.test.spec_matrix import SpecConfig
from sglang.test.spec_world import ModelFolders, plain_engine, spec_engine

register_cpu_ci(est_time=45, suite="cpu", full_time=950)
register_cuda_ci(est_time=60, suite="cuda")

SEEDS = range(count(ci=1, full=20))
SOUND_REQUESTS = 2000
WARM_STEPS = 4
NEW_TOKENS = 40
LATE = " late"
TREE = SpecConfig(
    algorithm="EAGLE3",
    topk=4,
    page_size=4,
    num_steps=4,
    nodes="middle",
    backend="cpu_native",
    overlap=True,
    model="llama",
    variant=False,
)
CHAIN = SpecConfig(
    algorithm="STANDALONE",
    topk=1,
    page_size=1,
    num_steps=3,
    nodes=None,
    backend="cpu_native",
    overlap=False,
    model="llama",
    variant=None,
)
ENGINES = ("plain", "overlap", "chain", "tree")
# Every kind of sampling; none may end early.
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.9, "sampling_seed": 3},
    "hot": {"temperature": 1.7, "sampling_seed": 4},
    "top-k": {"temperature": 1.2, "top_k": 7, "sampling_seed": 5},
    "top-p": {"temperature": 1.1, "top_p": 0.8, "sampling_seed": 6},
    "min-p": {"temperature": 1.3, "min_p": 0.1, "sampling_seed": 7},
    "penalties": {
        "temperature": 0.8,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "sampling_seed": 8,
    },
    "bias": {"logit_bias": {10: 3.0, 65: 2.5, 32: -8.0}},
    "young": {
        "stop_token_ids": list(range(0, 256, 2)),
        "min_new_tokens": 40,
        "ignore_eos": False,
    },
    "regex": {"regex": r"([a-z]{1,6} ){40}[.]", "ignore_eos": False},
    "other-regex": {
        "regex": r"([0-9]{1,3},){60}[.]",
        "temperature": 1.0,
        "sampling_seed": 9,
        "ignore_eos": False,
    },
}
# The outputs of one prompt (n > 1) are requests that share it.
TWINS = {f"twin-{i}": {"temperature": 1.0, "sampling_seed": 20 + i} for i in range(2)}
ASKED |= TWINS
SAMPLED = {name: ASKED[name] for name in ("drawn", "hot", "top-p", "greedy", *TWINS)}
FILTERED = {name: ASKED[name] for name in ("top-k", "top-p", "min-p", "greedy")}
EDITED = {name: ASKED[name] for name in ("bias", "penalties", "young", "greedy")}
BOUND = {name: ASKED[name] for name in ("regex", "other-regex", "greedy")}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> ModelFolders:
    return ModelFolders(tmp_path_factory.mktemp("models"))


def build(folders: ModelFolders, name: str, mode: str = "raise") -> EngineHarness:
    options = {
        "skip_tokenizer_init": False,
        "kv_canary": mode,
        "chunked_prefill_size": 512,
    }
    if name in ("plain", "overlap"):
        engine = plain_engine(folders.target("llama"), **options)
        engine.scheduler.max_in_flight = int(name == "overlap")
        return engine
    return spec_engine(folders, TREE if name == "tree" else CHAIN, **options)


def submit(
    engine: EngineHarness,
    asked: dict[str, dict[str, Any]],
    seed: int,
    late: str = "",
    *,
    new_tokens: int = NEW_TOKENS,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, options in asked.items():
        length = int(torch.randint(5, 40, (), generator=generator))
        prompt = torch.randint(0, 256, (length,), generator=generator).tolist()
        if name in TWINS:
            prompt = [seed % 256] * 20
        usual = {"max_new_tokens": new_tokens, "ignore_eos": True}
        engine.submit(prompt, rid=name + late, stream=True, **usual | options)


# -- faults ----------------------------------------------------------------------------


def flipped(tensor: Tensor) -> Tensor:
    return tensor.flip(0)


@contextmanager
def wrong_head_rows() -> Iterator[None]:
    """The head reads the rows of a batch in reverse order."""
    rows_of = logits_processor._logits_rows

    def reversed_rows(batch: Any) -> Tensor | slice | None:
        rows = rows_of(batch)
        if rows is None:
            return torch.arange(batch.num_tokens, device=batch.input_ids.device).flip(0)
        return flipped(rows) if isinstance(rows, Tensor) else slice(0, 1)

    with patch.object(logits_processor, "_logits_rows", reversed_rows):
        yield


@contextmanager
def reversed_logits() -> Iterator[None]:
    """The sampler gets the rows of the logits in reverse order."""
    edit = sampler.edit_logits

    def reversed_rows(logits: Tensor, *args: Any, **options: Any) -> Tensor:
        return edit(flipped(logits), *args, **options)

    with patch.object(sampler, "edit_logits", reversed_rows):
        yield


@contextmanager
def reversed_parameters() -> Iterator[None]:
    """Each row is sampled with another row's parameters."""
    tensors = sampling_batch_info._row_tensors

    def reversed_rows(rows: Any, *args: Any) -> Any:
        return tensors(tuple(reversed(rows)), *args)

    with patch.object(sampling_batch_info, "_row_tensors", reversed_rows):
        yield


@contextmanager
def late_noise() -> Iterator[None]:
    """The noise of a draw is that of the position after it."""

    def late(op: Callable[..., Any]) -> Callable[..., Any]:
        def run(*x: Any, **given: Tensor) -> Any:
            if "positions" in given:
                given["positions"] = given["positions"] + 1
            return op(*x, **given)

        return run

    with (
        patch.object(sampler, "draw", late(sampler.draw)),
        patch.object(sampler, "choose_tokens", late(sampler.choose_tokens)),
    ):
        yield


@contextmanager
def cold_rows() -> Iterator[None]:
    """Logits are not divided by the temperature."""
    neutral = property(lambda info: torch.ones_like(info.floats[0]))
    with patch.object(SamplingBatchInfo, "temperatures", neutral):
        yield


@contextmanager
def reversed_masks() -> Iterator[None]:
    """Each row gets another row's grammar mask."""
    attach = SamplingBatchInfo.with_vocab_mask

    def reversed_rows(info: Any, mask: Tensor | None) -> Any:
        return attach(info, None if mask is None else flipped(mask))

    with patch.object(SamplingBatchInfo, "with_vocab_mask", reversed_rows):
        yield


@contextmanager
def no_masks() -> Iterator[None]:
    """Rows with a grammar are sampled without a mask."""
    attach = SamplingBatchInfo.with_vocab_mask
    with patch.object(
        SamplingBatchInfo, "with_vocab_mask", lambda info, mask: attach(info, None)
    ):
        yield


@contextmanager
def old_masks() -> Iterator[None]:
    """Masks are those of the step before."""
    last: list[Tensor] = []
    make = GrammarMasks._with_masks

    def stale(masks: GrammarMasks, batch: Any, made: Tensor) -> Any:
        last.append(made.clone())
        same = len(last) > 1 and last[-2].shape == made.shape
        return make(masks, batch, last[-2] if same else made)

    with patch.object(GrammarMasks, "_with_masks", stale):
        yield


@contextmanager
def no_bias() -> Iterator[None]:
    """Bias entries are not added."""
    with patch.object(sampler, "apply_logit_bias", lambda *args: None):
        yield


@contextmanager
def rolled_histories() -> Iterator[None]:
    """A row is penalized for the tokens of the row before it."""
    block = penalties._history_block

    def rolled(*args: Any) -> tuple[Tensor, ...]:
        return tuple(t.roll(1, 0) for t in block(*args))

    with patch.object(penalties, "_history_block", rolled):
        yield


@contextmanager
def late_penalties() -> Iterator[None]:
    """The last token of a row does not count."""
    block = penalties._history_block

    def late(*args: Any) -> tuple[Tensor, ...]:
        tokens, known, output = block(*args)
        return tokens, known, output & output.roll(-1, 1)

    with patch.object(penalties, "_history_block", late):
        yield


@contextmanager
def no_bans() -> Iterator[None]:
    """Young rows may stop."""
    with patch.object(sampler, "ban_stop_tokens", lambda *args: None):
        yield


@contextmanager
def one_more_id() -> Iterator[None]:
    """Top-k and top-p keep an id more than they should, min-p has a lower floor."""
    draw = sampler.draw

    def more(probs: Tensor, filters: Filters, **noise: Tensor) -> Any:
        floors = filters.min_ps
        wider = replace(
            filters,
            top_ks=filters.top_ks + 1,
            top_ps=(filters.top_ps + 0.02).clamp(max=1.0),
            max_top_k=filters.max_top_k + 1,
            min_ps=None if floors is None else floors * 0.8,
        )
        return draw(probs, wider, **noise)

    with patch.object(sampler, "draw", more):
        yield


Fault = Callable[[], Any]
FAULTS: dict[str, tuple[Fault, set[str], dict[str, dict[str, Any]]]] = {
    "wrong head rows": (wrong_head_rows, {"logits_row"}, ASKED),
    "reversed logits": (reversed_logits, {"sampled_token", "grammar_mask"}, ASKED),
    "reversed parameters": (reversed_parameters, {"sampled_token"}, SAMPLED),
    "late noise": (late_noise, {"sampled_token"}, SAMPLED),
    "no temperature": (cold_rows, {"sampled_token"}, SAMPLED),
    "one more id": (one_more_id, {"sampled_token"}, FILTERED),
    "no bias": (no_bias, {"sampled_token"}, EDITED),
    "rolled histories": (rolled_histories, {"sampled_token"}, EDITED),
    "late penalties": (late_penalties, {"sampled_token"}, EDITED),
    "no bans": (no_bans, {"sampled_token"}, EDITED),
    "reversed masks": (reversed_masks, {"grammar_mask"}, BOUND),
    "no masks": (no_masks, {"grammar_mask"}, BOUND),
    "old masks": (old_masks, {"grammar_mask"}, BOUND),
}


def compile_grammars(engine: EngineHarness) -> None:
    """Wait until no request of the queue waits for its grammar."""
    scheduler = engine.scheduler
    for message in engine.io.requests:
        scheduler._dispatch(message)
    engine.io.requests.clear()
    assert scheduler._grammars is not None
    while decided := scheduler._grammars.decide() or len(scheduler._grammars):
        if isinstance(decided, list):
            scheduler.intake.apply_grammars(decided)
        time.sleep(0.001)


def stop_by(
    engine: EngineHarness, fault: Fault, asked: dict[str, dict[str, Any]], seed: int
) -> tuple[CanaryViolation, dict[str, Finished]]:
    """Run a few steps, then with the fault and more requests until the engine stops."""
    submit(engine, asked, seed)
    compile_grammars(engine)
    for _ in range(WARM_STEPS):
        engine.scheduler.step()
    submit(engine, asked, seed + 1, LATE)
    compile_grammars(engine)
    with fault():
        for _ in range(NEW_TOKENS):
            try:
                engine.scheduler.step()
            except CanaryViolation as error:
                return error, engine.collect()
    raise AssertionError("not reported")


class RightAnswers:
    """What engines without a fault answer; several faults ask for the same."""

    def __init__(self, folders: ModelFolders) -> None:
        self._folders = folders
        self._engines: dict[str, EngineHarness] = {}
        self._answers: dict[tuple[str, tuple[str, ...], int], dict[str, Finished]] = {}

    def to(
        self,
        kind: str,
        asked: dict[str, dict[str, Any]],
        seed: int,
        said: dict[str, Finished],
    ) -> dict[str, Finished]:
        """Return the beginnings of the right answers, at least as long as `said`."""
        key = kind, tuple(asked), seed
        if not reaches(self._answers.get(key, {}), said):
            if kind not in self._engines:
                self._engines[kind] = build(self._folders, kind)
            engine = self._engines[kind]
            submit(engine, asked, seed)
            submit(engine, asked, seed + 1, LATE)
            rids = [name + late for late in ("", LATE) for name in asked]
            self._answers[key] = run_until(engine, rids, said)
        return self._answers[key]


def reaches(answers: dict[str, Finished], said: dict[str, Finished]) -> bool:
    """Whether each answer is as long as what was said."""
    return all(
        rid in answers and len(answers[rid].output_ids) >= len(short.output_ids)
        for rid, short in said.items()
    )


def run_until(
    engine: EngineHarness, rids: Sequence[str], said: dict[str, Finished]
) -> dict[str, Finished]:
    """Run until the answers are as long as `said`, and end them: a fault stops an
    engine after a few tokens, and whole answers take ten times as long."""
    while not reaches(engine.collect(keep=True), said):
        if not engine.scheduler.step():
            assert engine.io.requests or engine.scheduler.has_work(), "ended too early"
            time.sleep(0.001)  # a grammar compiles
    for rid in rids:
        engine.abort(rid)
    return engine.run()


@pytest.fixture(scope="module")
def right_answers(folders: ModelFolders) -> RightAnswers:
    return RightAnswers(folders)


@pytest.mark.parametrize(
    ("name", "kind"),
    sampled(itertools.product(FAULTS, ENGINES), key=lambda case: case[0], ci=2),
)
def test_is_named_before_a_wrong_token_is_sent(
    folders: ModelFolders, right_answers: RightAnswers, name: str, kind: str
) -> None:
    fault, reasons, asked = FAULTS[name]
    for seed in SEEDS:
        engine = build(folders, kind)
        _, said = stop_by(engine, fault, asked, seed)
        manager = engine.scheduler.worker.canary_managers()[0]
        found = [v for i in manager.reporter.incidents for v in i["violations"]]
        assert found
        for v in found:
            # A draft's head reads wrong rows, too.
            is_draft = v["worker"] == "draft" and fault is wrong_head_rows
            assert v["launch"] == ("carried" if is_draft else "drawn"), v
            due = {"carried_state"} if is_draft else reasons
            assert due & set(v["reasons"]), v
        right = right_answers.to(kind, asked, seed, said)
        for rid, answer in said.items():
            sent = answer.output_ids
            assert sent == right[rid].output_ids[: len(sent)], rid
        engine.close()


@pytest.mark.parametrize("kind", ENGINES)
def test_sound_traffic_is_silent(folders: ModelFolders, kind: str) -> None:
    engine = build(folders, kind)
    for seed in range(count(ci=1, full=-(-SOUND_REQUESTS // len(ASKED)))):
        submit(engine, ASKED, seed)
        answers = engine.run()
        assert len(answers) == len(ASKED)
        for rid, answer in answers.items():
            assert answer.finish_reason is not None
            assert answer.finish_reason.type != "abort", (rid, answer.finish_reason)


# -- logits that are not finite --------------------------------------------------------


# Longer than the others ever get.
WILD_PROMPT = [200] * 59 + [255]


@contextmanager
def wild_logits(value: float) -> Iterator[None]:
    """Logits after `WILD_PROMPT` have a value that is not finite."""
    call = logits_processor.LogitsProcessor.__call__

    def run(self: Any, hidden: Tensor, head: Any, batch: Any, **options: Any) -> Any:
        rows = logits_processor._logits_rows(batch)
        at = slice(None) if rows is None else rows
        is_wild = batch.input_ids[at] == WILD_PROMPT[-1]
        is_wild &= batch.positions[at] == len(WILD_PROMPT) - 1

        def damaged(states: Tensor) -> Tensor:
            logits: Tensor = head(states)
            logits[is_wild, 7] = value
            return logits

        return call(self, hidden, damaged, batch, **options)

    with patch.object(logits_processor.LogitsProcessor, "__call__", run):
        yield


NOT_FINITE = "kv_canary: the logits of this request were not finite"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("mode", ["raise", "heal"])
@pytest.mark.parametrize("kind", ENGINES)
def test_a_request_whose_logits_are_not_finite_ends_alone(
    folders: ModelFolders, kind: str, mode: str, value: float
) -> None:
    engine = build(folders, kind, mode)
    submit(engine, SAMPLED, 1, new_tokens=12)
    right = engine.run()
    submit(engine, SAMPLED, 1, new_tokens=12)
    engine.submit(WILD_PROMPT, rid="wild", max_new_tokens=9, ignore_eos=True)
    with wild_logits(value):
        answers = engine.run()
    wild = answers.pop("wild")
    reason = wild.finish_reason
    assert reason is not None and reason.status_code == 500
    again = " again after it was recomputed once" if mode == "heal" else ""
    assert reason.message == f"{NOT_FINITE}{again}; see incident {1 + bool(again)}"
    assert wild.output_ids == []
    for rid, answer in answers.items():
        assert answer.output_ids == right[rid].output_ids, rid
    # Nothing of it is left to hit.
    hit = engine.generate([*WILD_PROMPT[:-1], 9], max_new_tokens=1)
    assert hit.cached_tokens == 0
    incident = engine.scheduler.own_incidents()[-1]
    assert {r for v in incident["violations"] for r in v["reasons"]} == {
        "logits_not_finite"
    }
    assert [request["rid"] for request in incident["healing"]["ended"]] == ["wild"]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
