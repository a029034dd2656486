"""Faults in window slots: each is reported by the first forward (or sweep pass) that
reads it, in the group `swa`, under the right request, slot and position."""

from __future__ import annotations

import json
import logging
import random
import re
from pathlib import Path

import pytest
import torch

from kv_canary.checks import reason_labels
from kv_canary.faults.catalogue import WINDOW_FAULTS, in_serving
from kv_canary.faults.fault import Serving
from sglang.srt.kv_canary.runner.swa_divergence import MARK
from sglang.test.canary_traffic import CONTEXT, VOCAB, Outcome, plant
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.harness import EngineHarness
from sglang.test.mock_traffic import Traffic
from sglang.test.scale import count
from sglang.test.spec_canary_traffic import plant_in, write_mock_models
from sglang.test.tiny_models import write_mock_model

register_cpu_ci(est_time=7, suite="cpu")
register_cuda_ci(est_time=60, suite="cuda")

SEEDS = range(count(ci=1, full=20))
WINDOW = 40
# Shorter than every prompt, by a page of the largest size.
TREE_WINDOW = 12
LAYERS = ["full_attention", "sliding_attention"]
PLAIN = in_serving(WINDOW_FAULTS, Serving.PLAIN)
OF_TREES = sorted(set(WINDOW_FAULTS) - set(PLAIN))
CACHED, LATER = "real_kv_unused_cache", "real_kv_post_forward"
DIVERGENCE = "SGLANG_KV_CANARY_SWA_DIVERGENCE_STATS_INTERVAL"
TARGET_GROUP = "SGLANG_KV_CANARY_PERTURB_TARGET_GROUP"

each_page_size = pytest.mark.parametrize("page_size", [1, 4, 16])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mock_model(
        tmp_path_factory.mktemp("mock"),
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
        sliding_window=WINDOW,
        layer_types=LAYERS,
    )


def check_report(outcome: Outcome, name: str) -> None:
    """One of the expected reasons, at the fault's own places, in the group."""
    damage = outcome.planted.damage
    allowed = set(reason_labels(WINDOW_FAULTS[name].reasons))
    found = [v for v in outcome.violations if allowed & set(v["reasons"])]
    assert found, outcome.text
    assert {v["group"] for v in outcome.violations} == {"swa"}, outcome.text
    places = {(v["slot"], v["position"]) for v in found}
    anywhere = {position for slot, position in damage.places if slot < 0}
    stray = {p for p in places - damage.places if p[1] not in anywhere}
    assert not stray, (stray, damage)
    assert (damage.slot, damage.position) in places
    if damage.serial:
        assert outcome.rids[damage.serial] in {v["rid"] for v in found}


@each_page_size
@pytest.mark.parametrize("name", sorted(set(PLAIN) - {CACHED, LATER}))
def test_is_reported_at_once(model: Path, name: str, page_size: int) -> None:
    for seed in SEEDS:
        outcome = plant(model, name, seed=seed, group="swa", page_size=page_size)
        assert outcome.forward == outcome.planted.clock, (seed, outcome.text)
        check_report(outcome, name)


@each_page_size
def test_bytes_that_change_after_the_write(model: Path, page_size: int) -> None:
    for seed in SEEDS:
        outcome = plant(model, LATER, seed=seed, group="swa", page_size=page_size)
        victim = outcome.rids[outcome.planted.damage.serial]
        since = outcome.since_planted()
        due = next(f for f in since if any(row.rid == victim for row in f.rows))
        assert outcome.forward == due.clock, (seed, outcome.text)
        check_report(outcome, LATER)


@each_page_size
def test_bytes_that_only_the_cache_holds(model: Path, page_size: int) -> None:
    """The sweep that reaches them, or a hit before that."""
    for seed in SEEDS:
        outcome = plant(
            model,
            CACHED,
            seed=seed,
            group="swa",
            page_size=page_size,
            kv_canary_sweep_interval=2,
        )
        assert len(outcome.since_planted()) < 40
        check_report(outcome, CACHED)


@pytest.mark.skipif(torch.cuda.is_available(), reason="graphs replay past the faults")
@each_page_size
@pytest.mark.parametrize("name", ["late_window", "window_prefix_short", *OF_TREES])
def test_trees_over_windows(
    tmp_path_factory: pytest.TempPathFactory, name: str, page_size: int
) -> None:
    """A verification counts prefix and nodes of each row from its window."""
    models = write_mock_models(
        tmp_path_factory.mktemp("spec"), sliding_window=TREE_WINDOW, layer_types=LAYERS
    )
    for seed in SEEDS:
        outcome = plant_in(
            "target",
            name,
            seed=seed,
            **models,
            tree=(4, 4, 12),
            page_size=page_size,
            group="swa",
        )
        damage, rid = (
            outcome.planted.damage,
            outcome.victim(outcome.planted.damage.serial),
        )
        found = {(v["rid"], v["slot"], v["position"]) for v in outcome.violations}
        assert found == {(rid, -1, damage.position)}, outcome.text
        assert {v["group"] for v in outcome.violations} == {"swa"}
        assert {v["forward"] for v in outcome.violations} == {outcome.planted.clock}
        assert {tuple(v["reasons"]) for v in outcome.violations} == {("read_set",)}
        assert outcome.last_messages == 0


def test_a_report_says_which_group(model: Path) -> None:
    outcome = plant(model, "stale_mapping", seed=1, group="swa")
    line = r"launch_tag=target\.verify group=swa fail_reason=\S*read_set "
    assert re.search(line, outcome.text)


def test_a_fault_of_another_group_is_refused_by_name(model: Path) -> None:
    with pytest.raises(ValueError, match=r"group swa is called 'alias_row'.*stale_map"):
        plant(model, "alias_row", seed=1, group="swa")


def engine(model: Path, **options: object) -> EngineHarness:
    return EngineHarness(
        model,
        max_total_tokens=1500,
        skip_tokenizer_init=True,
        kv_canary="raise",
        **options,
    )


def reports(caplog: pytest.LogCaptureFixture) -> list[dict[str, int]]:
    lines = (re.search(MARK + "(.*)", record.message) for record in caplog.records)
    return [json.loads(line[1]) for line in lines if line]


@each_page_size
def test_divergence_report_is_not_vacuous(
    model: Path, page_size: int, monkeypatch, caplog
) -> None:
    monkeypatch.setenv(DIVERGENCE, "4")
    caplog.set_level(logging.INFO)
    harness = engine(model, page_size=page_size, chunked_prefill_size=64)
    traffic = Traffic(harness, random.Random(5), 12)
    while traffic.left:
        harness.run(on_step=traffic.on_step)
    found = reports(caplog)
    assert len(found) > 5
    for name in ("outside_window", "inside_window", "differing_slots"):
        assert sum(report[name] for report in found) > 0, name
    assert {report["stale_mappings"] for report in found} == {0}
    assert 0 < found[-1]["swa_elements"] < found[-1]["full_elements"]


def test_a_stale_mapping_is_counted(model: Path, monkeypatch, caplog) -> None:
    """An entry that nobody reads: of a token that left its window."""
    monkeypatch.setenv(DIVERGENCE, "1")
    caplog.set_level(logging.INFO)
    harness = engine(model)
    (swa,) = harness.scheduler.cache.allocator.secondary
    harness.generate(list(range(60)), max_new_tokens=60, ignore_eos=True)
    assert reports(caplog)[-1]["stale_mappings"] == 0
    # Slot 62 is that of the second output token, whose window slot is gone; those of
    # the prompt are in the cache.
    assert int(swa.mapping[62]) == 0
    swa.mapping[62] = 5
    harness.generate([7] * 20, max_new_tokens=4)
    assert reports(caplog)[-1]["stale_mappings"] == 1


@pytest.mark.parametrize(("name", "value"), [(DIVERGENCE, "5"), (TARGET_GROUP, "swa")])
def test_variables_of_windows_need_windows(
    model: Path, name: str, value: str, monkeypatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name}={value}.*window slots.*unset"):
        engine(model, disable_hybrid_swa_memory=True)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
