"""Every injector is reported with the expected reason, at once, with its place."""

from __future__ import annotations

import pytest

from sglang.srt.kv_canary.kernels.records import reason_labels
from sglang.srt.kv_canary.perturb.injectors import INJECTORS
from sglang.test.canary_traffic import CONTEXT, VOCAB, plant
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.scale import count
from sglang.test.tiny_models import write_mock_model

register_cpu_ci(est_time=60, suite="cpu")
register_cuda_ci(est_time=60, suite="cuda")

SEEDS = range(count(ci=2, full=20))
# Found by the next sweep, or by the next hit, and not by the next forward.
LATER = {"real_kv_unused_cache", "phantom_prefix"}
ONE_SLOT_PAGES = {"move_without_records", "move_without_bytes"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_mock_model(
        tmp_path_factory.mktemp("mock"),
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
    )


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("name", sorted(INJECTORS))
def test_is_reported(model, name, page_size):
    if name in ONE_SLOT_PAGES and page_size > 1:
        pytest.skip("moves single slots")
    expected = INJECTORS[name]
    for seed in SEEDS:
        outcome = plant(
            model,
            name,
            seed=seed,
            page_size=page_size,
            kv_canary_sweep_interval=2 if name == "real_kv_unused_cache" else 0,
        )
        damage = outcome.planted.damage
        allowed = set(reason_labels(expected.reasons))
        fitting = [v for v in outcome.violations if allowed & set(v["reasons"])]
        assert fitting, (seed, outcome.text)
        if name not in LATER:
            assert outcome.forward == outcome.planted.clock, (seed, outcome.text)
        if damage.req_row and name != "recycle_row":
            assert any(v["request_row"] == damage.req_row for v in fitting), seed
        if expected.names_slot:
            places = {(v["slot"], v["position"]) for v in fitting}
            assert (damage.slot, damage.position) in places, (seed, places, damage)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
