"""Prefill and decode engines of two ranks each: rank r sends to rank r. With whole
counts, because six processes share the machine."""

from __future__ import annotations

import random
import threading

import pytest

import sglang
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fleet_gateway import free_port
from sglang.test.mock_oracle import next_tokens
from sglang.test.scale import is_full
from sglang.test.tiny_models import write_mock_model

register_cpu_ci(est_time=1, suite="cpu", full_time=120)

VOCAB = 1000
REQUESTS = 100


@pytest.mark.skipif(not is_full(), reason="runs with SGLANG_TEST_FULL=1")
def test_two_ranks_on_both_sides(tmp_path):
    model = write_mock_model(tmp_path, vocab_size=VOCAB, max_position_embeddings=400)
    rng = random.Random(0)
    stems = [[rng.randrange(VOCAB) for _ in range(200)] for _ in range(6)]
    prompts = [
        rng.choice(stems)[: rng.randrange(201)]
        + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 100))]
        for _ in range(REQUESTS)
    ]
    port = free_port()
    common = {
        "model_path": str(model),
        "tp_size": 2,
        "max_total_tokens": 2000,
        "chunked_prefill_size": 64,
        "max_running_requests": 16,
        "kv_canary": "raise",
        "disaggregation_transfer_backend": "tcp",
        "disaggregation_bootstrap_port": port,
    }
    asked = {
        "input_ids": prompts,
        "sampling_params": {
            "temperature": 0.0,
            "ignore_eos": True,
            "max_new_tokens": 16,
        },
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": port,
        "bootstrap_room": list(range(REQUESTS)),
    }
    with (
        sglang.Engine(**common, disaggregation_mode="prefill") as prefill,
        sglang.Engine(**common, disaggregation_mode="decode") as decode,
    ):
        beside = threading.Thread(target=prefill.generate, kwargs=asked)
        beside.start()
        answers = decode.generate(**asked)
        beside.join()
        (stats,) = decode.get_server_info()["internal_states"]
        assert stats["kv_transfer_received_bytes_total"] > 0
        assert stats["hicache_loaded_tokens_total"] > 0
        assert stats["hicache_damaged_units_total"] == 0
        assert not any(stats["kv_canary_violations_total"].values())
    for prompt, answer in zip(prompts, answers, strict=True):
        output = answer["output_ids"]
        predicted = next_tokens(prompt + output, vocab_size=VOCAB)
        assert output == predicted[len(prompt) - 1 : -1]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
