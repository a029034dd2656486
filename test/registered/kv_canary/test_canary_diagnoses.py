"""The names of faults, each of a real one in a running engine: a report that sends its
reader the wrong way costs a day."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kv_canary.explain import explain
from kv_canary.reporter import CanaryViolation
from sglang.test.canary_traffic import CONTEXT, VOCAB, canary_of, faults_of, plant
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness
from sglang.test.spec_canary_traffic import canaries_of, plant_in, speculating
from sglang.test.tiny_models import write_mock_draft, write_mock_model

register_cpu_ci(est_time=3, suite="cpu")

SIZES = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
PROMPT = list(range(40))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mock_model(tmp_path_factory.mktemp("mock"), **SIZES)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft") / "eagle"
    return write_mock_draft(folder, kind="EAGLE", source="hidden", **SIZES)


def serving(model: Path, **options: Any) -> EngineHarness:
    defaults: dict[str, Any] = {
        "max_total_tokens": 512,
        "skip_tokenizer_init": True,
        "kv_canary": "raise",
        "page_size": 4,
    }
    return EngineHarness(model, **(defaults | options))


def submit(harness: EngineHarness, prompt: list[int], rid: str) -> None:
    harness.submit(prompt, rid=rid, max_new_tokens=100, ignore_eos=True)


def step(harness: EngineHarness, times: int) -> None:
    for _ in range(times):
        harness.scheduler.step()


def stop(harness: EngineHarness) -> list[dict[str, Any]]:
    """Run until the canary stops the engine; the violations of the first incident."""
    with pytest.raises(CanaryViolation):
        harness.run()
    incident = canary_of(harness).reporter.incidents[0]
    assert incident["violations"][0]["diagnosis"] in explain(incident)
    return list(incident["violations"])


def names(violations: list[dict[str, Any]], reason: str) -> set[str]:
    return {v["diagnosis"] for v in violations if reason in v["reasons"]}


def row_of(harness: EngineHarness, rid: str) -> tuple[Any, Any]:
    """A running request, and its row of the table that forwards read."""
    running = harness.scheduler.running
    assert running is not None
    (req,) = [req for req in running.reqs if req.rid == rid]
    pool = harness.scheduler.cache.req_to_token_pool
    return req, pool.req_to_token[req.req_pool_idx]


# -- freed, or not written yet -----------------------------------------------------


def test_a_copy_that_is_missing(
    model: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Branches read their copy of the prefix's last page, in slots that others had
    before: the slots are theirs, and nothing was ever copied."""
    harness = speculating(
        model,
        draft,
        tree=(4, 4, 12),
        page_size=4,
        disable_radix_cache=True,
        speculative_draft_layout="paged",
    )
    submit(harness, PROMPT[:20], "before")
    harness.run()
    pool = canaries_of(harness)["draft"].target.kv_pool
    monkeypatch.setattr(pool, "move_kv_cache", lambda dst, src: None)
    submit(harness, PROMPT[:30], "reader")
    found = stop(harness)
    freed = [v for v in found if "verify_freed" in v["reasons"] and v["step"] == 0]
    was_owned = [v for v in freed if v["writer"]["forward"]]
    assert {v["writer"]["rid"] for v in was_owned} == {"before"}
    assert names(was_owned, "verify_freed") == {"not written since it was allocated"}
    assert {v["owner"] for v in was_owned} == {'request "reader"'}


def test_a_free_that_comes_too_early(model: Path) -> None:
    """Pages of a running request go back to the allocator: nobody owns them."""
    harness = serving(model)
    submit(harness, PROMPT, "victim")
    step(harness, 14)
    _, row = row_of(harness, "victim")
    harness.scheduler.cache.allocator.free(row[44:48].clone().long().cpu())
    found = stop(harness)
    freed = [v for v in found if v["owner"] == 'request "victim"']
    assert {v["position"] for v in freed} == {44, 45, 46, 47}
    assert names(freed, "verify_freed") == {"use after free"}


def test_an_early_free_of_a_slot_that_is_owned_again(model: Path) -> None:
    """By the host's records the reader has it; it was freed just now."""
    outcome = plant(model, "early_free", seed=1, page_size=4)
    assert names(outcome.violations, "verify_freed") == {"use after free"}


# -- writes ------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_wrong_write_slot(model: Path, page_size: int) -> None:
    """The table that attention reads is right: not it is to blame."""
    outcome = plant(model, "write_foreign", seed=1, page_size=page_size)
    assert names(outcome.violations, "write_foreign") == {"wrong write slot"}
    assert names(outcome.violations, "read_set") == {"wrong write slot"}


def test_a_wrong_table_is_still_called_one(model: Path) -> None:
    outcome = plant(model, "shift_view", seed=1, page_size=4)
    assert names(outcome.violations, "read_set") == {"wrong read table"}


def test_a_write_into_the_own_prefix(model: Path) -> None:
    outcome = plant(model, "write_own_prefix", seed=1, page_size=1)
    found = names(outcome.violations, "write_foreign")
    assert found == {"write into the request's own prefix"}


def test_a_padded_row_that_writes(model: Path, draft: Path) -> None:
    outcome = plant_in(
        "draft",
        "idle_row_write",
        seed=1,
        model=model,
        draft=draft,
        tree=(4, 4, 12),
        page_size=4,
    )
    found = names(outcome.violations, "write_foreign")
    assert found == {"write of a padded row outside of the scratch page"}


def test_a_free_that_the_canary_is_not_told_of(model: Path) -> None:
    """The slots' owner has ended, and their records say that it lives."""
    harness = serving(model, disable_radix_cache=True)
    harness.scheduler.cache.allocator._on_free.clear()
    submit(harness, PROMPT, "before")
    harness.run()
    submit(harness, PROMPT[::-1], "after")
    found = stop(harness)
    assert names(found, "write_foreign") == {"freed slot was not poisoned"}
    assert {(v["rid"], v["writer"]["rid"]) for v in found} == {("after", "before")}


def test_a_slot_that_two_requests_own(model: Path) -> None:
    """The same, but the owner still runs: the allocator gave its slots away."""
    harness = serving(model)
    submit(harness, PROMPT, "owner")
    step(harness, 14)
    allocator = harness.scheduler.cache.allocator
    allocator._on_free.clear()
    _, row = row_of(harness, "owner")
    slots = row[44:48].clone().long().cpu()
    allocator.free(slots)
    submit(harness, [999] * 60, "thief")
    found = [v for v in stop(harness) if v["slot"] in slots.tolist()]
    assert names(found, "write_foreign") == {"write into a slot of another owner"}


@pytest.mark.parametrize("with_tokens", [False, True])
def test_a_wrong_input(model: Path, with_tokens: bool) -> None:
    """The report has both tokens, or says that it withholds them."""
    harness = serving(model, kv_canary_report_tokens=with_tokens)
    submit(harness, PROMPT, "r")
    step(harness, 5)
    faults_of(harness).arm("input_token", seed=1)
    (found,) = stop(harness)
    assert (found["reasons"], found["diagnosis"]) == (
        ["write_token"],
        "wrong input of the forward",
    )
    req, _ = row_of(harness, "r")
    due = req.tokens[found["position"]]
    told = [f"token {token}" for token in (due, (due + 1) % VOCAB)]
    if not with_tokens:
        told = ["token withheld (--kv-canary-report-tokens shows it)"] * 2
    text = explain(canary_of(harness).reporter.incidents[0])
    place = f"position {found['position']}"
    assert f"   expected  {told[0]}, {place}, as published\n" in text
    assert f"   found     {told[1]}, {place}, in the forward's inputs\n" in text
    assert "never written" not in text


# -- tables of requests ------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_own_prefix_in_another_order(model: Path, page_size: int) -> None:
    """Its slots were written by the request that came first; the two share them."""
    harness = serving(model, page_size=page_size)
    submit(harness, PROMPT, "first")
    step(harness, 3)
    submit(harness, [*PROMPT, 7, 8, 9], "second")
    step(harness, 3)
    req, row = row_of(harness, "second")
    assert req.cached_tokens >= 36
    low, high = slice(8, 12), slice(24, 28)
    before = row.clone()
    row[low], row[high] = before[high], before[low]
    found = stop(harness)
    assert {v["rid"] for v in found} == {"second"}
    assert {v["writer"]["rid"] for v in found} == {"first"}
    assert names(found, "verify_position") == {"own prefix out of order"}


def test_another_request_s_slots(model: Path) -> None:
    harness = serving(model)
    submit(harness, PROMPT, "first")
    submit(harness, PROMPT[::-1], "second")
    step(harness, 14)
    (_, first), (_, second) = row_of(harness, "first"), row_of(harness, "second")
    second[44:48] = first[44:48]
    # The record after them is sound, but does not follow.
    found = [v for v in stop(harness) if v["position"] in range(44, 48)]
    assert names(found, "verify_lineage") == {"aliased with request first"}


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
