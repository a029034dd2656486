"""Every fault of units that move is named, and every answer is that of an undamaged
engine."""

from __future__ import annotations

import json
import random

import pytest

from kv_canary.checks import Reason, reason_labels
from kv_canary.faults.catalogue import TIER_FAULTS
from sglang.faults.tiers import IN_FILES, PLANTERS, TierScene
from sglang.srt.kv_tiers.unit import first_key, unit_keys
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.mock_oracle import next_tokens
from sglang.test.scale import is_full, sampled
from sglang.test.tier_traffic import KINDS, VOCAB, tiered, tiers_of, windows_of

register_cpu_ci(est_time=20, suite="cpu", full_time=900)
register_cuda_ci(est_time=200, suite="cuda")

SEEDS = range(20) if is_full() else range(1)
UNITS = 4
GROUP_NAMES = {"window": ("full", "swa"), "state": ("full", "state")}
TIER_REASONS = Reason.TIER_BYTES | Reason.TIER_IDENTITY | Reason.TIER_INCOMPLETE


def groups_of(kind: str) -> tuple[str, ...]:
    return GROUP_NAMES.get(kind, ("full",))


def cases():
    for name, kind in ((name, kind) for name in PLANTERS for kind in KINDS):
        for group in range(len(groups_of(kind))):
            # Only primary slots are taken for a load.
            if name != "double_load" or group == 0:
                yield name, kind, group


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "kind", "group"),
    sampled(cases(), key=lambda case: case[0], ci=1),
    ids=str,
)
def test_fault_is_named_and_answers_are_exact(tmp_path, name, kind, group, seed):
    rng = random.Random(f"{name} {kind} {group} {seed}")
    options = {}
    if name in IN_FILES:
        options = {
            "hicache_storage_backend": "file",
            "hicache_storage_prefetch_policy": "wait_complete",
            "hicache_storage_backend_extra_config": json.dumps(
                {"dir": str(tmp_path / "kv")}
            ),
        }
    harness = tiered(tmp_path / "model", kind, kv_canary="heal", **options)
    tiers, cache = tiers_of(harness), harness.scheduler.cache
    # All states that a request may need are kept only for the end of a prompt.
    length = UNITS * tiers.unit + 2
    prompt, other = ([rng.randrange(VOCAB) for _ in range(length)] for _ in range(2))
    for tokens in (prompt, other):
        harness.generate(tokens, max_new_tokens=4, ignore_eos=True)
    if tiers.storage is not None:
        tiers.storage.wait_for_writes()
    cache.reset()
    # A run that stays on the device.
    third = [rng.randrange(VOCAB) for _ in range(length)]
    harness.generate(third, max_new_tokens=4, ignore_eos=True)

    keys, others = (sequence_keys(tiers, cache, tokens) for tokens in (prompt, other))
    last = UNITS - 1
    scene = TierScene(
        tiers=tiers,
        keys=keys,
        others=others,
        # Of a window and a state, only the last one is read.
        unit=last if group else rng.randrange(UNITS),
        group=group,
        rng=rng,
    )
    fault = TIER_FAULTS[name]
    undo = PLANTERS[name](scene)
    for tokens in (prompt, third):
        check_answer(harness, kind, tokens)
    undo()
    incidents = harness.scheduler.own_incidents()
    found = [v for incident in incidents for v in incident["violations"]]
    assert found, "the fault was not found"
    labels = {label for violation in found for label in violation["reasons"]}
    due = set(reason_labels(fault.reasons))
    assert labels <= due, found
    if fault.reasons & TIER_REASONS:
        name = groups_of(kind)[group]
        check_report(next(v for v in found if v["group"] == name), scene)
    # What was dropped is stored again, and nothing is wrong with it.
    cache.reset()
    check_answer(harness, kind, prompt)
    assert harness.scheduler.own_incidents() == incidents


def sequence_keys(tiers, cache, tokens):
    elements = cache.key(tokens).elements()
    return unit_keys(first_key(tiers.identity, None), elements, tiers.unit)


def check_report(violation, scene):
    assert violation["unit"] in {key.hex() for key in scene.keys}
    if violation["position"] >= 0:
        assert violation["position"] // scene.tiers.unit < UNITS
    assert violation["rid"] is not None
    assert violation["launch"] == "tier"


def check_answer(harness, kind, tokens):
    answer = harness.generate(tokens, max_new_tokens=4, ignore_eos=True)
    predicted = next_tokens(
        tokens + answer.output_ids, vocab_size=VOCAB, windows=windows_of(kind)
    )
    assert answer.output_ids == predicted[len(tokens) - 1 : -1]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
