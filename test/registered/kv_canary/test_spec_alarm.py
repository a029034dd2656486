"""Damage of the draft's pool leaves the target's tokens right: the canary reports it
before acceptance falls, and in the mode `log` serving goes on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from kv_canary.explain import explain
from sglang.srt.managers.batch.forward_result import GenerationBatchResult
from sglang.srt.managers.batch.schedule_batch import ScheduleBatch
from sglang.srt.managers.worker.grammar_masks import GrammarMasks
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import Finished
from sglang.test.mock_oracle import next_tokens
from sglang.test.scale import count
from sglang.test.spec_canary_traffic import (
    VOCAB,
    WARM_STEPS,
    SpecTraffic,
    canaries_of,
    faults_of,
    logged,
    speculating,
    worker_of,
    write_mock_models,
)

register_cpu_ci(est_time=15, suite="cpu", full_time=200)

SEEDS = range(count(ci=1, full=20))
STEPS = 60
# Catalogue 36 and 41, and others that touch the draft's pool alone.
FAULTS = [
    "idle_row_write",
    "no_draft_prefix",
    "drop_draft_extend_rows",
    "skip_draft_extend",
]


@dataclass(frozen=True, kw_only=True)
class Run:
    """The accept lengths of a run, and the first report.

    Fields:
        accepted: by request, step by step; a prefill has none.
        reported: the step that reported first, or None.
    """

    accepted: list[dict[str, int]]
    reported: int | None
    answers: dict[str, Finished]
    asked: dict[str, list[int]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Here the draft's proposals come from what attention reads in its pool."""
    return write_mock_models(tmp_path_factory.mktemp("mock"), source="attention")


def serve(models: dict[str, Path], *, seed: int, fault: str | None) -> Run:
    harness = speculating(
        **models, tree=(1, 4, 5), page_size=4, kv_canary="log", dtype="float32"
    )
    manager = canaries_of(harness)["draft"]
    faults = faults_of(harness)["draft"]
    worker, traffic = worker_of(harness), SpecTraffic(harness, seed=seed)
    decode, accepted, reported = worker._decode, [], None

    def noted(
        batch: ScheduleBatch, masks: GrammarMasks | None
    ) -> GenerationBatchResult:
        result = decode(batch, masks)
        part = worker.draft_worker.workspace.rows(len(batch))
        lens = part.result.accept_lens.tolist()
        accepted[-1] = {r.rid: n for r, n in zip(batch.reqs, lens, strict=True)}
        return result

    worker._decode = noted  # type: ignore[method-assign, assignment]
    with logged(harness) as logs:
        for step in range(STEPS):
            traffic.on_step(step)
            if fault is not None and step == WARM_STEPS:
                faults.arm(fault, seed=seed)
            accepted.append({})
            harness.scheduler.step()
            if reported is None and manager.reporter.total:
                reported = step
    if fault is not None:
        (planted,) = faults.planted
        # Reported by the forward that read it first, under the draft's name.
        incident = manager.reporter.incidents[0]
        slots = [slot for slot, _ in planted.damage.places]
        first = next(
            f
            for f in logs["draft"].forwards
            if f.clock >= planted.clock
            and (fault == "idle_row_write" or any(map(f.reads, slots)))
        )
        assert incident["forward"] == first.clock
        workers = {
            v["worker"] for i in manager.reporter.incidents for v in i["violations"]
        }
        assert workers == {"draft"}
        text = explain(incident)
        assert "(draft pool, found by " in text
        if first.step is not None:
            branch = incident["violations"][0]["branch"]
            assert f"draft step {first.step}, branch {branch})" in text
    return Run(
        accepted=accepted,
        reported=reported,
        answers=harness.collect(),
        asked=traffic.asked,
    )


@pytest.mark.parametrize("fault", FAULTS[:: count(ci=2, full=1)])
def test_is_reported_before_acceptance_falls(
    models: dict[str, Path], fault: str
) -> None:
    fell = 0
    for seed in SEEDS:
        clean = serve(models, seed=seed, fault=None)
        assert clean.reported is None
        damaged = serve(models, seed=seed, fault=fault)
        assert damaged.reported is not None
        differs = [
            step
            for step in range(STEPS)
            if clean.accepted[step] != damaged.accepted[step]
        ]
        fell += bool(differs)
        # The report comes with the result of the first worse step at the latest.
        assert not differs or damaged.reported <= differs[0]
        for rid, answer in damaged.answers.items():
            prompt = damaged.asked[rid]
            predicted = next_tokens(prompt + answer.output_ids, vocab_size=VOCAB)
            assert answer.output_ids == predicted[len(prompt) - 1 : -1], rid
    # The damage lowers acceptance.
    assert fell


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
