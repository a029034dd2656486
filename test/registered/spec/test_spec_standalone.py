"""A draft that is a language model gets the request's tokens at their own positions, so
that a model which drafts for itself is right every time."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from kv_canary.checks import Reason
from kv_canary.reporter import CanaryViolation
from sglang.srt.speculative.eagle_draft_worker import EagleDraftWorker
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.harness import EngineHarness
from sglang.test.scale import count, sampled
from sglang.test.spec_accept import AcceptRecorder
from sglang.test.spec_canary_traffic import canaries_of, worker_of
from sglang.test.spec_parity import CONTEXT
from sglang.test.spec_world import TINY, ModelFolders, device, plain_engine
from sglang.test.tiny_models import write_tiny_model

register_cpu_ci(est_time=5, suite="cpu")
register_cuda_ci(est_time=60, suite="cuda")

VOCAB = 264
# On the logits, which differ by too little for any softmax to prefer one.
SHARPER = 1000.0
STEPS = 3
CHAIN = (1, STEPS, STEPS + 1)
TREES = ((2, STEPS, 8), (4, STEPS, 12), (8, STEPS, 4))
PAGES = (1, 4, 64)
# Layouts of KV: plain, experts, latents, one window for all layers, a window pool.
MODELS = ("llama", "qwen3_moe", "deepseek_v3", "mistral", "gemma3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> ModelFolders:
    return ModelFolders(tmp_path_factory.mktemp("models"))


def write_sure(folder: Path, family: str) -> Path:
    """Write a model that gives nearly all probability to its best token."""
    write_tiny_model(
        folder,
        TINY[family],
        seed=11,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
    )
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] *= SHARPER
    save_file(weights, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def sure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sure(tmp_path_factory.mktemp("sure") / "model", "llama")


def drafting_for_itself(
    folder: Path, tree: tuple[int, int, int], **options: Any
) -> EngineHarness:
    topk, steps, nodes = tree
    defaults: dict[str, Any] = {
        "device": device(),
        "dtype": "float32",
        "chunked_prefill_size": 64,
        "max_running_requests": 6,
        "skip_tokenizer_init": True,
        "kv_canary": "raise",
        "kv_canary_real_data": "all",
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": str(folder),
        "speculative_eagle_topk": topk,
        "speculative_num_steps": steps,
        "speculative_num_draft_tokens": nodes,
    }
    return EngineHarness(folder, **defaults | options)


def prompts_with_shared_stems(rng: random.Random, number: int) -> list[list[int]]:
    stems = [[rng.randrange(VOCAB) for _ in range(n)] for n in (64, 90)]
    return [
        (rng.choice(stems) if i % 3 else [])
        + [rng.randrange(VOCAB) for _ in range(rng.choice((1, 2, 7, 30)))]
        for i in range(number)
    ]


def check_all_accepted(
    folder: Path, tree: tuple[int, int, int], *, page_size: int
) -> None:
    """With chunks, cached prefixes, and more requests than run at once; the canary sees
    nothing and the answers are those without speculation."""
    rng = random.Random(str((folder.name, tree, page_size)))
    overlap = rng.random() < 0.5
    harness = drafting_for_itself(
        folder,
        tree,
        page_size=page_size,
        overlap=overlap,
        disable_overlap_schedule=not overlap,
        max_total_tokens=4096 + 128 * page_size,
    )
    recorder = AcceptRecorder(harness.scheduler)
    prompts = prompts_with_shared_stems(rng, count(ci=9, full=40))
    plain = plain_engine(folder)
    for engine in (plain, harness):
        for i, prompt in enumerate(prompts):
            engine.submit(prompt, rid=str(i), max_new_tokens=30, ignore_eos=True)
    want, got = plain.run(), harness.run()
    for rid, answer in want.items():
        assert got[rid].output_ids == answer.output_ids, rid
    assert set(recorder.lens()) == {STEPS + 1}
    assert harness.scheduler.stats_snapshot().num_used_tokens == 0
    for manager in canaries_of(harness).values():
        assert manager.reporter.total == 0 and manager.num_forwards > 0


@pytest.mark.parametrize(
    ("model", "page_size"),
    sampled(itertools.product(MODELS, PAGES), key=lambda variant: variant[0], ci=1),
)
def test_every_draft_of_the_target_itself_is_accepted(
    folders: ModelFolders, model: str, page_size: int
) -> None:
    check_all_accepted(folders.target(model), CHAIN, page_size=page_size)


@pytest.mark.parametrize(
    ("tree", "page_size"),
    sampled(itertools.product(TREES, PAGES), key=lambda variant: variant[1], ci=1),
    ids=str,
)
def test_trees_hold_the_path_of_a_target_that_is_sure(
    sure: Path, tree: tuple[int, int, int], page_size: int
) -> None:
    """One that is not may find other paths likelier so far, and drop its own."""
    check_all_accepted(sure, tree, page_size=page_size)


@pytest.mark.parametrize("page_size", [1, 4])
def test_trees_over_a_window_pool(tmp_path: Path, page_size: int) -> None:
    """Prompts are longer than the window: in sliding layers rows begin later, and the
    positions of nodes count from there."""
    folder = write_sure(tmp_path / "model", "gemma3")
    check_all_accepted(folder, (4, STEPS, 12), page_size=page_size)


def test_a_request_that_was_retracted_is_drafted_for_as_before(
    folders: ModelFolders,
) -> None:
    folder = folders.target("llama")
    harness = drafting_for_itself(
        folder,
        CHAIN,
        page_size=4,
        max_total_tokens=320,
        schedule_conservativeness=0.05,
    )
    recorder = AcceptRecorder(harness.scheduler)
    for i in range(5):
        prompt = [(13 * i + 7 * j) % VOCAB for j in range(30)]
        harness.submit(prompt, rid=str(i), max_new_tokens=90, ignore_eos=True)
    harness.run()
    assert harness.scheduler.stats_snapshot().num_retracted_reqs > 0
    assert set(recorder.lens()) == {STEPS + 1}


def test_prefixes_are_cached_as_without_a_draft(folders: ModelFolders) -> None:
    """A head's slot depends on the next token, which costs the last token of a hit."""
    folder = folders.target("llama")
    stem = [(7 * i) % VOCAB for i in range(48)]
    found = []
    for harness in (
        plain_engine(folder, disable_radix_cache=False, page_size=16),
        drafting_for_itself(folder, CHAIN, page_size=16, max_total_tokens=4096),
    ):
        hits = []
        for i in range(4):
            rid = harness.submit([*stem, i], max_new_tokens=1, ignore_eos=True)
            hits.append(harness.run()[rid].cached_tokens)
        found.append(hits)
    assert found[0] == found[1] == [0, 48, 48, 48]


@pytest.mark.parametrize("overlap", [False, True], ids=["in-order", "overlap"])
def test_an_unread_first_token_is_reported(
    folders: ModelFolders, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the extend of the token that a prefill has sampled the draft's first
    iteration starts from nothing, and its first step reads a slot that is not there."""
    monkeypatch.setattr(EagleDraftWorker, "catch_up", lambda *_: None)
    folder = folders.target("llama")
    harness = drafting_for_itself(folder, CHAIN, overlap=overlap, max_total_tokens=2048)
    harness.submit([3, 1, 4, 1, 5], rid="q", max_new_tokens=20)
    with pytest.raises(CanaryViolation, match=r"launch_tag=draft\."):
        harness.run()
    incident = canaries_of(harness)["target"].reporter.incidents[-1]
    found = [v for v in incident["violations"] if v.get("step") == 0]
    assert {(v["rid"], v["worker"], v["position"]) for v in found} == {
        ("q", "draft", 5)
    }
    (reasons,) = {tuple(v["reasons"]) for v in found}
    assert Reason.VERIFY_FREED.name.lower() in reasons
    assert worker_of(harness).draft_worker.workspace.draft_lead == 1


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
