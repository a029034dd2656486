"""Speculation with the head inside a checkpoint: the same output as without, drafts
that are accepted, and ranks that share the work."""

from __future__ import annotations

import random
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch

import sglang
from sglang.srt.managers.scheduler import draft_alarm
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.harness import EngineHarness
from sglang.test.head_models import (
    ReferenceHead,
    add_exact_head,
    add_head,
    head_tensors,
    write_head,
)
from sglang.test.hybrid_models import write_text_model
from sglang.test.scale import count, sampled
from sglang.test.spec_accept import AcceptRecorder, Run
from sglang.test.spec_parity import (
    CONTEXT,
    Traffic,
    answer_all,
    assert_parity,
    check_no_leak,
    make_asks,
)
from sglang.test.spec_world import device, plain_engine

register_cpu_ci(est_time=60, suite="cpu", full_time=400)
register_cuda_ci(est_time=180, suite="cuda")

NEXT, QWEN3_5 = "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM"
MOE, WHOLE = "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"
DEEPSEEK = "DeepseekV3ForCausalLM"
# Architecture, page size, (top-k, steps, nodes), overlap.
ENGINES = [
    (NEXT, 1, (1, 3, 4), True),
    (NEXT, 16, (4, 3, 10), True),
    (QWEN3_5, 1, (3, 4, 12), False),
    (QWEN3_5, 16, (1, 4, 5), True),
    (MOE, 1, (2, 3, 6), True),
    (WHOLE, 16, (1, 2, 3), False),
    (DEEPSEEK, 1, (1, 3, 4), True),
    (DEEPSEEK, 16, (4, 3, 10), True),
]


def nextn_engine(
    folder: Path, *, tree: tuple[int, int, int], overlap: bool = True, **flags: Any
) -> EngineHarness:
    topk, steps, nodes = tree
    usual: dict[str, Any] = {
        "device": device(),
        "dtype": "float32",
        "context_length": CONTEXT,
        "max_running_requests": 12,
        "skip_tokenizer_init": True,
        "speculative_algorithm": "NEXTN",
        "speculative_eagle_topk": topk,
        "speculative_num_steps": steps,
        "speculative_num_draft_tokens": nodes,
        "kv_canary": "raise",
        "kv_canary_real_data": "all",
        "kv_canary_sweep_interval": 8,
    }
    return EngineHarness(folder, overlap=overlap, **usual | flags)


@pytest.mark.parametrize(
    ("architecture", "page_size", "tree", "overlap"),
    sampled(ENGINES, key=itemgetter(0), ci=1),
)
def test_same_output_with_and_without(
    tmp_path: Path,
    architecture: str,
    page_size: int,
    tree: tuple[int, int, int],
    overlap: bool,
) -> None:
    """In a pool so small that requests wait and lose their slots, under the canary."""
    folder = write_text_model(tmp_path, architecture, seed=11)
    add_head(folder, architecture)
    asks = make_asks(
        random.Random(architecture), total=count(ci=24, full=200), vocab_size=264
    )
    reference = plain_engine(folder)
    expected = answer_all(reference, asks)
    engine = nextn_engine(
        folder,
        tree=tree,
        overlap=overlap,
        page_size=page_size,
        max_total_tokens=1024,
        chunked_prefill_size=64,
        schedule_conservativeness=0.3,
    )
    recorder = AcceptRecorder(engine.scheduler)
    traffic = Traffic(engine, asks, random.Random(page_size))
    found = traffic.run()
    assert_parity(asks, expected, found, aborted=traffic.aborted, reference=reference)
    recorder.check_counters()
    check_no_leak(engine)


def write_untied(folder: Path, architecture: str) -> Path:
    # A tied head would repeat the newest token.
    return write_text_model(folder, architecture, seed=11, tie_word_embeddings=False)


@pytest.mark.parametrize("tree", [(1, 3, 4), (2, 3, 11)])
@pytest.mark.parametrize("architecture", [NEXT, QWEN3_5, DEEPSEEK])
def test_a_head_that_knows_the_next_token(
    tmp_path: Path, architecture: str, tree: tuple[int, int, int]
) -> None:
    """Every draft is accepted: each verification yields a token more than steps. The
    tree holds all candidates."""
    folder = write_untied(tmp_path, architecture)
    add_exact_head(folder, architecture)
    engine = nextn_engine(folder, tree=tree)
    recorder = AcceptRecorder(engine.scheduler)
    steps, draw = tree[1], random.Random(0)
    rids = [
        engine.submit(
            draw.choices(range(250), k=20),
            max_new_tokens=1 + 8 * (steps + 1),
            ignore_eos=True,
        )
        for _ in range(4)
    ]
    answers = engine.run()
    assert all(len(answers[rid].output_ids) == 1 + 8 * (steps + 1) for rid in rids)
    assert set(recorder.lens()) == {steps + 1}


@pytest.mark.parametrize("architecture", [NEXT, QWEN3_5, DEEPSEEK])
def test_drafts_are_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    """Accept lengths of every verification, with a head that is right now and then and
    reads all it can: tokens, states, and its own KV and states along the chain."""
    folder = write_untied(tmp_path, architecture)
    head = add_exact_head(folder, architecture, noise=0.04)
    steps, draw = 3, random.Random(1)
    engine = nextn_engine(folder, tree=(1, steps, steps + 1), page_size=4)
    recorder = AcceptRecorder(engine.scheduler)
    for length in (3, 17, 40):
        prompt = draw.choices(range(250), k=length)
        engine.submit(prompt, max_new_tokens=30, ignore_eos=True)
    engine.run()
    assert len(recorder.lens()) > 2
    for run in recorder.runs.values():
        # The last one goes beyond the tokens that were asked for.
        assert run.accept_lens[:-1] == predicted(head, run, steps=steps)


def predicted(head: ReferenceHead, run: Run, *, steps: int) -> list[int]:
    """Return the accept lengths of a chain that transformers' head drafts."""
    tokens, found, end = torch.tensor(run.tokens), [], run.start + 1
    known = head.hidden(tokens)
    for _ in run.accept_lens[:-1]:
        ids, states, matched = tokens[1:end], known[: end - 1], 0
        for step in range(steps):
            logits, hidden = head.forward(ids, states)
            drafted = logits[-1:].argmax(dim=-1)
            if drafted[0] != tokens[end + step]:
                break
            matched += 1
            ids = torch.cat((ids, drafted))
            states = torch.cat((states, hidden[-1:]))
        found.append(matched + 1)
        end += matched + 1
    return found


@pytest.mark.parametrize(
    ("is_right", "requests", "new_tokens", "alarms"),
    [(False, 8, 21, 8 * 20 // 25), (True, 60, 2, 0)],
)
def test_a_head_that_is_never_right_is_named(
    tmp_path: Path,
    is_right: bool,
    requests: int,
    new_tokens: int,
    alarms: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once in the log, and for every so many drafts in a metric. Drafts whose accepted
    tokens a request does not want are no reason."""
    monkeypatch.setattr(draft_alarm, "DRAFTS", 25)
    folder = write_untied(tmp_path, DEEPSEEK)
    head = add_exact_head(folder, DEEPSEEK)
    if not is_right:
        # Now the head likes best what the target likes least.
        with torch.no_grad():
            head.layer.eh_proj.weight.neg_()
        write_head(folder, head_tensors(head, DEEPSEEK))
    engine = nextn_engine(folder, tree=(2, 2, 4))
    for i in range(requests):
        engine.submit([i, 7, 3 * i], max_new_tokens=new_tokens, ignore_eos=True)
    engine.run()
    stats = engine.scheduler.stats_snapshot()
    assert stats.draft_never_accepted_total == alarms
    named = [r for r in caplog.records if "draft_never_accepted" in r.message]
    assert [record.levelname for record in named] == ["WARNING"] * min(alarms, 1)
    for record in named:
        assert "--speculative-algorithm NEXTN" in record.message
        assert f"--speculative-draft-model-path {folder}" in record.message


def test_two_ranks_draft_as_one(tmp_path: Path) -> None:
    """The same tokens in as many verifications."""
    folder = write_text_model(tmp_path, NEXT, seed=11)
    add_head(folder, NEXT)
    draw = random.Random(3)
    prompts = [draw.choices(range(250), k=20 + 7 * i) for i in range(6)]
    greedy = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 24}
    found = []
    for tp_size in (1, 2):
        with sglang.Engine(
            model_path=str(folder),
            device="cpu",
            tp_size=tp_size,
            max_total_tokens=2048,
            speculative_algorithm="NEXTN",
            speculative_num_steps=3,
            speculative_eagle_topk=2,
            speculative_num_draft_tokens=8,
            kv_canary="raise",
        ) as engine:
            found.append(engine.generate(input_ids=prompts, sampling_params=greedy))
    one, two = found
    assert [a["output_ids"] for a in one] == [b["output_ids"] for b in two]
    counts = [
        [a["meta_info"]["spec_verify_ct"] for a in answers] for answers in (one, two)
    ]
    assert counts[0] == counts[1]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
