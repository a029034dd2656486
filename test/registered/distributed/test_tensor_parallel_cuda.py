"""Tensor parallelism on two GPUs, graphs and overlap on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import sglang
from sglang.srt.utils.devices import cuda_device_count
from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.hybrid_models import write_text_model
from sglang.test.mock_oracle import next_tokens
from sglang.test.scale import count
from sglang.test.tiny_models import write_mock_model, write_tiny_model

register_cuda_ci(est_time=240, suite="cuda-serial")

pytestmark = pytest.mark.skipif(
    cuda_device_count() < 2, reason="needs two GPUs for --tp-size 2"
)
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 48}


def answers_of(tp_size: int, model: Path, **options: Any) -> list[dict[str, Any]]:
    rng = random.Random(5)
    stem = [rng.randrange(256) for _ in range(100)]
    prompts = [
        stem[: rng.randrange(101)]
        + [rng.randrange(256) for _ in range(rng.randrange(1, 80))]
        for _ in range(40)
    ]
    with sglang.Engine(
        model_path=str(model),
        tp_size=tp_size,
        device="cuda",
        dtype="float32",
        max_total_tokens=4096,
        max_running_requests=24,
        chunked_prefill_size=128,
        **options,
    ) as engine:
        answers: list[dict[str, Any]] = []
        for _ in range(2):  # the second time from the prefix cache
            answers += engine.generate(
                input_ids=prompts, sampling_params=GREEDY, return_logprob=True
            )
    return answers


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "in-order"])
@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3NextForCausalLM"],
)
def test_two_gpus_equal_one(tmp_path: Path, architecture: str, overlap: bool) -> None:
    """float32 without TF32, which torch leaves off; decode steps are graphs."""
    model = write_text_model(tmp_path, architecture, vocab_size=265)
    options = {"disable_overlap_schedule": not overlap}
    one = answers_of(1, model, **options)
    two = answers_of(2, model, **options)
    for a, b in zip(one, two, strict=True):
        assert a["output_ids"] == b["output_ids"]
        scores = [
            [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
            for answer in (a, b)
        ]
        assert scores[0] == pytest.approx(scores[1], abs=1e-3)
    assert sum(answer["meta_info"]["cached_tokens"] for answer in two) > 0


def test_drawn_tokens_do_not_diverge(tmp_path: Path) -> None:
    """Ranks that disagreed about one token would be told apart at the next step."""
    model = write_tiny_model(tmp_path, "Qwen3ForCausalLM")
    drawn = {"temperature": 1.0, "top_p": 0.95, "top_k": 50, "max_new_tokens": 100}
    with sglang.Engine(model_path=str(model), tp_size=2, device="cuda") as engine:
        answers = engine.generate(["text"] * 200, drawn | {"ignore_eos": True})
    assert all(len(answer["output_ids"]) == 100 for answer in answers)


@pytest.mark.parametrize("page_size", [1, 16])
def test_oracle(tmp_path: Path, page_size: int) -> None:
    model = write_mock_model(tmp_path, vocab_size=1000, max_position_embeddings=512)
    rng = random.Random(page_size)
    number = count(ci=500, full=2000)
    stems = [[rng.randrange(1000) for _ in range(200)] for _ in range(4)]
    prompts = [
        rng.choice(stems)[: rng.randrange(201)]
        + [rng.randrange(1000) for _ in range(rng.randrange(1, 90))]
        for _ in range(number)
    ]
    lengths = [rng.choice((1, 5, 40, 150)) for _ in range(number)]
    with sglang.Engine(
        model_path=str(model),
        tp_size=2,
        device="cuda",
        dtype="bfloat16",
        page_size=page_size,
        max_total_tokens=3200,
        chunked_prefill_size=128,
        max_running_requests=24,
        schedule_conservativeness=0.3,
    ) as engine:
        answers = engine.generate(
            input_ids=prompts,
            sampling_params=[GREEDY | {"max_new_tokens": n} for n in lengths],
        )
        (stats,) = engine.get_server_info()["internal_states"]
        assert stats["num_used_tokens"] == stats["num_running_reqs"] == 0
        assert engine.flush_cache()
    for prompt, wanted, answer in zip(prompts, lengths, answers, strict=True):
        output = answer["output_ids"]
        assert len(output) == wanted
        assert (
            output
            == next_tokens(prompt + output, vocab_size=1000)[len(prompt) - 1 : -1]
        )


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
