"""The token oracle with speculation: every token is its request's, and one that is not
is reported, although it agrees with what was published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kv_canary.reporter import CanaryViolation
from sglang.srt.kv_canary.token_oracle import oracle_token
from sglang.srt.utils.hashing import hash_string
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness, Finished
from sglang.test.scale import count
from sglang.test.spec_canary_traffic import canaries_of, faults_of, worker_of
from sglang.test.tiny_models import write_mock_draft, write_mock_model

register_cpu_ci(est_time=8, suite="cpu", full_time=150)

SEEDS = range(count(ci=1, full=20))
# So small that drafts, which know nothing of the oracle, are often right by chance.
VOCAB, CONTEXT = 12, 512
CHAIN, FLAT, TREE, WIDE = (
    ((1, 4, 5), 4),
    ((4, 4, 12), 1),
    ((4, 4, 12), 4),
    ((8, 3, 16), 16),
)
KINDS = ["EAGLE", "EAGLE3", "STANDALONE"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mock")
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
    write_mock_model(folder / "target", **sizes)
    for kind in ("EAGLE", "EAGLE3"):
        write_mock_draft(folder / kind, kind=kind, source="hidden", **sizes)
    write_mock_model(folder / "STANDALONE", **sizes)
    return folder


@pytest.fixture(autouse=True)
def oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_KV_CANARY_ENABLE_TOKEN_ORACLE", "1")
    monkeypatch.setenv("SGLANG_KV_CANARY_ENABLE_WRITE_INPUT_ASSERT", "1")


def serving(
    folder: Path, shape: tuple[tuple[int, int, int], int], **options: Any
) -> EngineHarness:
    (topk, steps, nodes), page_size = shape
    defaults: dict[str, Any] = {
        "speculative_algorithm": "EAGLE",
        "max_total_tokens": 4096,
        "max_running_requests": 8,
        "skip_tokenizer_init": True,
        "kv_canary": "raise",
        "kv_canary_real_data": "all",
    }
    kind = options.get("speculative_algorithm", "EAGLE")
    return EngineHarness(
        folder / "target",
        speculative_draft_model_path=str(folder / kind),
        speculative_eagle_topk=topk,
        speculative_num_steps=steps,
        speculative_num_draft_tokens=nodes,
        page_size=page_size,
        **(defaults | options),
    )


def submit(harness: EngineHarness, *, seed: int, **params: Any) -> dict[str, list[int]]:
    prompts = {
        f"s{seed}q{i}": [(seed + 7 * i + j) % VOCAB for j in range(20 + 3 * i)]
        for i in range(6)
    }
    for rid, prompt in prompts.items():
        harness.submit(prompt, rid=rid, ignore_eos=True, stream=True, **params)
    return prompts


def check_said(asked: dict[str, list[int]], said: dict[str, Finished]) -> None:
    for rid, answer in said.items():
        start, key = len(asked[rid]), hash_string(rid)
        ends = range(start, start + len(answer.output_ids))
        due = [oracle_token(key, position, vocab_size=VOCAB) for position in ends]
        assert answer.output_ids == due, rid


def stop(harness: EngineHarness) -> list[dict[str, Any]]:
    with pytest.raises(CanaryViolation, match="fail_reason=write_token"):
        harness.run()
    incident = canaries_of(harness)["target"].reporter.incidents[0]
    return list(incident["violations"])


# -- sound engines -----------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True], ids=["in-order", "overlap"])
@pytest.mark.parametrize("shape", [CHAIN, FLAT, TREE, WIDE], ids=str)
def test_every_token_is_the_oracle_s(
    folder: Path, shape: tuple[tuple[int, int, int], int], overlap: bool
) -> None:
    for seed in SEEDS:
        harness = serving(folder, shape, overlap=overlap)
        accepted = count_accepted(harness)
        asked = submit(harness, seed=seed, max_new_tokens=60)
        said = harness.run()
        check_said(asked, said)
        assert all(len(answer.output_ids) == 60 for answer in said.values())
        # Drafts are accepted, so that their tokens are looked at, too.
        assert sum(accepted) > 0


def count_accepted(harness: EngineHarness) -> list[int]:
    """The number of drafts that each verification accepts, from now on."""
    worker, found = worker_of(harness), list[int]()
    verify = worker.verify

    def counted(live: Any, *args: Any, **options: Any) -> torch.Tensor:
        processed = verify(live, *args, **options)
        found.append(int(live.result.accept_lens.sum()) - live.bs)
        return processed

    worker.verify = counted  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_algorithm_greedy_and_sampled(
    folder: Path, kind: str, temperature: float
) -> None:
    harness = serving(folder, CHAIN, speculative_algorithm=kind)
    asked = submit(harness, seed=1, max_new_tokens=40, temperature=temperature)
    check_said(asked, harness.run())


def test_a_retracted_request_is_prefilled_with_the_oracle_s_tokens(
    folder: Path,
) -> None:
    harness = serving(
        folder, CHAIN, max_total_tokens=360, schedule_conservativeness=0.05,
        disable_radix_cache=True,
    )  # fmt: skip
    asked = submit(harness, seed=1, max_new_tokens=90)
    check_said(asked, harness.run())
    assert harness.scheduler.stats_snapshot().num_retracted_reqs > 0


def test_a_retracted_request_that_took_a_wrong_token(folder: Path) -> None:
    """Its tokens come from the host, and are published as they are."""
    harness = serving(
        folder,
        CHAIN,
        max_total_tokens=360,
        schedule_conservativeness=0.05,
        disable_radix_cache=True,
    )
    submit(harness, seed=1, max_new_tokens=90)
    while not harness.scheduler.stats_snapshot().num_retracted_reqs:
        harness.scheduler.step()
    req = next(r for r in harness.scheduler.waiting if len(r.tokens) > r.prompt_len)
    at = req.prompt_len + 1
    req.tokens[at] = (req.tokens[at] + 1) % VOCAB
    found = [v for v in stop(harness) if v["rid"] == req.rid]
    (first, *_) = found
    assert (first["position"], first["forward_mode"]) == (at, "extend")


# -- tokens of the wrong request ---------------------------------------------------


@pytest.mark.parametrize("shape", [CHAIN, FLAT, TREE, WIDE], ids=str)
def test_next_token_swap(folder: Path, shape: tuple[tuple[int, int, int], int]) -> None:
    """The target chooses for two requests what is the other one's: published as it is,
    so that only the oracle can tell; each is named at its first wrong token."""
    for seed in SEEDS:
        harness = serving(folder, shape)
        asked = submit(harness, seed=seed, max_new_tokens=200)
        for _ in range(8):
            harness.scheduler.step()
        manager = canaries_of(harness)["target"]
        faults = faults_of(harness)["target"]
        faults.arm("next_token_swap", seed=seed)
        found = stop(harness)
        damage = faults.planted[0].damage
        assert damage.other is not None
        ends = {
            manager.serials.rid(serial): position
            for serial, position in ((damage.serial, damage.position), damage.other)
        }
        assert found[0]["worker"] == "target" and found[0]["launch"] == "head"
        for violation in found:
            assert violation["reasons"] == ["write_token"]
            assert violation["diagnosis"] == "wrong input of the forward"
            if violation["forward"] == found[0]["forward"]:
                assert violation["position"] >= ends[violation["rid"]]
        assert found[0]["position"] == ends[found[0]["rid"]]
        said = harness.collect()
        for rid, end in ends.items():
            # The token after an accepted path is sent before it is an input.
            assert rid is not None
            del said[rid].output_ids[end - len(asked[rid]) :]
        check_said(asked, said)


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=str)
def test_an_accepted_draft_that_is_not_the_oracle_s(
    folder: Path,
    shape: tuple[tuple[int, int, int], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every draft of a request is accepted, whatever it proposes."""
    harness = serving(folder, shape)
    asked = submit(harness, seed=3, max_new_tokens=200)
    for _ in range(6):
        harness.scheduler.step()
    worker, (_, steps, _) = worker_of(harness), shape[0]
    verify = worker.verify

    def accept_all(live: Any, logits: torch.Tensor, *rest: Any, **options: Any) -> Any:
        processed = verify(live, logits, *rest, **options)
        tokens, result = live.tree.tokens, live.result
        # The first child of each node, down to a leaf.
        node, depth = 0, 0
        while (child := int(live.tree.next_token[0, node])) > 0:
            result.predict[0, node] = tokens[0, child]
            depth += 1
            result.accept_index[0, depth] = child
            node = child
        assert 1 <= depth <= steps
        result.accept_index[0, depth + 1 :] = -1
        result.accept_lens[0] = depth + 1
        return processed

    monkeypatch.setattr(worker, "verify", accept_all)
    found = stop(harness)
    (rid,) = {v["rid"] for v in found}
    assert {v["batch_row"] for v in found} == {0}
    assert found[0]["forward_mode"] == "target_verify"
    manager = canaries_of(harness)["target"]
    row = _row_of(harness, rid)
    assert found[0]["slot"] == row[found[0]["position"]]
    assert found[0]["forward"] == int(manager.target.buffers.state.clock) - 1
    check_said(asked, harness.collect())


def _row_of(harness: EngineHarness, rid: str) -> list[int]:
    running = harness.scheduler.running
    assert running is not None
    (req,) = [req for req in running.reqs if req.rid == rid]
    pool = harness.scheduler.cache.req_to_token_pool
    slots = pool.row_slots(req.req_pool_idx, 0, req.allocated_len)
    return [int(slot) for slot in slots]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
