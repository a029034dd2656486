"""Historical faults of speculation, each re-opened and not, and the checks that see
them."""

from __future__ import annotations

import random

import pytest

from sglang.faults import fault_points
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness
from sglang.test.mock_oracle import MockOracle
from sglang.test.spec_accept import AcceptRecorder, predicted_acceptance
from sglang.test.spec_parity import check_no_leak
from sglang.test.tiny_models import write_mock_draft, write_mock_model

register_cpu_ci(est_time=15, suite="cpu")

VOCAB = 1000


def open_fault(monkeypatch, fault):
    name = "" if fault is None else fault.name
    monkeypatch.setenv("SGLANG_DEBUG_REVERT_PR", name)


def make_engine(root, *, context=256, source="attention", **options):
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": context}
    model = write_mock_model(root / "target", **sizes)
    draft = write_mock_draft(root / "draft", kind="EAGLE", source=source, **sizes)
    tree = {
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
    }
    return EngineHarness(
        model,
        **{
            "speculative_algorithm": "EAGLE",
            "speculative_draft_model_path": str(draft),
            "skip_tokenizer_init": True,
            # It would see most of these faults first.
            "kv_canary": "none",
        }
        | tree
        | options,
    )


def answers_and_acceptance(engine, prompts, *, new_tokens):
    """Run greedy requests; their outputs are right whatever the draft does."""
    recorder = AcceptRecorder(engine.scheduler)
    for i, prompt in enumerate(prompts):
        engine.submit(prompt, rid=str(i), max_new_tokens=new_tokens, ignore_eos=True)
    answers = engine.run()
    for i, prompt in enumerate(prompts):
        oracle = MockOracle(prompt, vocab_size=VOCAB)
        assert answers[str(i)].output_ids == oracle.take(new_tokens)
    check_no_leak(engine)
    found = predicted_acceptance(recorder, engine, list(answers))
    return found, recorder.mean()


def random_prompts(count, lengths, seed=3):
    rng = random.Random(seed)
    return [
        [rng.randrange(VOCAB) for _ in range(rng.choice(lengths))] for _ in range(count)
    ]


@pytest.mark.parametrize("source", ["attention", "hidden"])
def test_early_draft_positions_change_accept_lengths(tmp_path, monkeypatch, source):
    """25015: nothing but the accept lengths tells."""
    prompts = random_prompts(8, range(5, 60))
    means = {}
    for fault in (None, fault_points.EARLY_POSITIONS):
        open_fault(monkeypatch, fault)
        engine = make_engine(tmp_path, source=source)
        found, means[fault] = answers_and_acceptance(engine, prompts, new_tokens=50)
        assert bool(found.differing) == (fault is not None), found
    assert means[fault_points.EARLY_POSITIONS] < means[None] - 0.3


def test_sampled_tail_of_a_chunk_changes_accept_lengths(tmp_path, monkeypatch):
    """26329: the slot of a chunk's last token is computed from the wrong next token."""
    prompts = random_prompts(8, range(70, 150))
    means = {}
    for fault in (None, fault_points.SAMPLED_TAIL):
        open_fault(monkeypatch, fault)
        engine = make_engine(tmp_path, chunked_prefill_size=32)
        found, means[fault] = answers_and_acceptance(engine, prompts, new_tokens=30)
        assert bool(found.differing) == (fault is not None), found
    assert means[fault_points.SAMPLED_TAIL] < means[None] - 0.3


def test_prompt_tail_of_a_chunk_changes_accept_lengths(tmp_path, monkeypatch):
    """28254: a retracted request prefills its output, too, whose chunks end after the
    prompt."""
    prompts = random_prompts(6, range(5, 20))
    for fault in (None, fault_points.PROMPT_TAIL):
        open_fault(monkeypatch, fault)
        engine = make_engine(
            tmp_path,
            chunked_prefill_size=16,
            max_total_tokens=360,
            schedule_conservativeness=0.1,
            # The cache would keep most of what a retracted request had.
            disable_radix_cache=True,
        )
        found, _ = answers_and_acceptance(engine, prompts, new_tokens=90)
        assert engine.scheduler.stats_snapshot().num_retracted_reqs > 0
        assert bool(found.differing) == (fault is not None), found


PAGED_TREE = {
    "speculative_num_steps": 5,
    "speculative_eagle_topk": 8,
    "speculative_num_draft_tokens": 32,
    "speculative_draft_layout": "paged",
}


def multi_turn(engine, *, turns, prompt_len, new_tokens):
    """A conversation: each turn's prompt is the whole conversation so far and more."""
    rng = random.Random(5)
    said = []
    for _ in range(turns):
        said += [rng.randrange(VOCAB) for _ in range(prompt_len)]
        answer = engine.generate(said, max_new_tokens=new_tokens, ignore_eos=True)
        oracle = MockOracle(said, vocab_size=VOCAB)
        assert answer.output_ids == oracle.take(new_tokens)
        said += answer.output_ids
    return answer


def test_page_512_multi_turn_needs_wide_rows(tmp_path, monkeypatch):
    """26972: the reserve of eight branches of two pages goes far beyond the context."""
    options = {"context": 2048, "page_size": 512, "max_total_tokens": 512 * 48}
    engine = make_engine(tmp_path, **options, **PAGED_TREE)
    last = multi_turn(engine, turns=4, prompt_len=330, new_tokens=40)
    assert last.cached_tokens >= 1024
    check_no_leak(engine)
    open_fault(monkeypatch, fault_points.NARROW_ROWS)
    engine = make_engine(tmp_path, **options, **PAGED_TREE)
    with pytest.raises(RuntimeError, match="rows must be widened by the reserve"):
        multi_turn(engine, turns=4, prompt_len=330, new_tokens=40)


def test_page_256_near_the_context_limit_needs_wide_rows(tmp_path, monkeypatch):
    """26972: a prompt that leaves a few positions of the context."""
    tree = PAGED_TREE | {
        "speculative_eagle_topk": 2,
        "speculative_num_draft_tokens": 12,
    }
    options = {"context": 2048, "page_size": 256, "max_total_tokens": 256 * 32}
    prompts = [prompt[:2040] for prompt in random_prompts(1, [2040])]
    engine = make_engine(tmp_path, **options, **tree)
    answers_and_acceptance(engine, prompts, new_tokens=8)
    open_fault(monkeypatch, fault_points.NARROW_ROWS)
    engine = make_engine(tmp_path, **options, **tree)
    with pytest.raises(RuntimeError, match=r"needs \d+ columns of a request row"):
        answers_and_acceptance(engine, prompts, new_tokens=8)


def test_an_unknown_fault_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_DEBUG_REVERT_PR", "12345")
    with pytest.raises(ValueError, match="names no fault point"):
        make_engine(tmp_path)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
