"""KV of adapters goes to another engine, which may draft from n-grams."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.environ import envs
from sglang.srt.utils.paths import bundled_demo_model_path
from sglang.test.adapters import write_adapter
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.engine_pairs import EnginePair
from sglang.test.harness import EngineHarness
from sglang.test.scale import sampled
from sglang.test.tier_traffic import tiers_of

register_cpu_ci(est_time=4, suite="cpu", full_time=8)

DRAFTS = [
    {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 6},
    {},
]


@pytest.mark.parametrize("drafts", sampled(DRAFTS, key=type, ci=1), ids=str)
def test_adapters_find_their_own_kv(tmp_path: Path, drafts: dict[str, Any]) -> None:
    model = bundled_demo_model_path()
    adapters = [
        f"{name}={write_adapter(tmp_path / name, model, seed=i, size=0.1)}"
        for i, name in enumerate("ab")
    ]
    usual = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "lora_paths": adapters,
        "max_total_tokens": 4096,
        "context_length": 512,
        "kv_canary": "raise",
    }
    plain = EngineHarness(model, disable_radix_cache=True, **usual)
    usual["disaggregation_transfer_backend"] = "tcp"
    # Few beats stay out on a busy machine.
    with envs.SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL.override(4.0):
        pair = EnginePair(
            EngineHarness(
                model,
                disaggregation_mode="prefill",
                disaggregation_bootstrap_port=0,
                hicache_ratio=2.0,
                **usual,
            ),
            EngineHarness(model, disaggregation_mode="decode", **usual, **drafts),
        )
    rng = random.Random(0)
    prompts = [rng.choices(range(1000), k=200) for _ in range(2)]
    options = {"max_new_tokens": 8, "ignore_eos": True}
    with closing(pair):
        for adapter in (None, "a", "b", "a"):
            for prompt in prompts:
                due = plain.generate(prompt, lora=adapter, **options).output_ids
                assert pair.generate(prompt, lora=adapter, **options).output_ids == due
        # Three whole units of each prompt, once under each adapter and without one.
        assert tiers_of(pair.decode).stats.loaded == 3 * 2 * 3 * 64
        assert not pair.scheduler.own_incidents()
        pair.settle()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
