"""A speculating server end to end on the mock model, the canary on both KV pools: all
answers are right, everything is checked, nothing is reported."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.mock_oracle import next_tokens
from sglang.test.scale import count
from sglang.test.tiny_models import write_mock_draft, write_mock_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "http"))

from live_server import Server  # noqa: E402

register_cpu_ci(est_time=14, suite="cpu")
register_cuda_ci(est_time=90, suite="cuda")

VOCAB = 257
CONTEXT = 512
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLAGS = (
    f"--device {DEVICE} --kv-canary raise --kv-canary-real-data all "
    "--kv-canary-sweep-interval 4 --enable-metrics --chunked-prefill-size 64 "
    "--max-running-requests 12 --max-total-tokens 16384 --dtype float32"
)


@pytest.fixture(scope="class")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """One per class, with its flags."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
    model = write_mock_model(folder / "mock", **sizes)
    draft = write_mock_draft(
        folder / "draft", kind="EAGLE", source=request.cls.source, **sizes
    )
    flags = f"--speculative-draft-model-path {draft} {request.cls.flags} {FLAGS}"
    running = Server(model, ("--speculative-algorithm", "EAGLE", *flags.split()))
    try:
        yield running.wait_ready()
    finally:
        running.stop()


def value_of(server: Server, metric: str) -> float:
    """A metric summed over its labels."""
    values = [
        float(line.rsplit(" ", 1)[1])
        for line in server.get("/metrics").text.splitlines()
        if line.startswith(f"sglang:{metric}")
    ]
    return sum(values)


class TestE2ESpeculativeEagle:
    """Chains: cached prefixes, chunked prompts, many at once."""

    flags: ClassVar[str] = (
        "--speculative-num-steps 4 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 5"
    )
    source: ClassVar[str] = "attention"

    def test_spec_eagle_no_canary_violation(self, server: Server) -> None:
        rng = random.Random(1)
        stems = [[rng.randrange(VOCAB) for _ in range(120)] for _ in range(3)]
        prompts = [
            rng.choice(stems)[: rng.randrange(121)]
            + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 100))]
            for _ in range(count(ci=24, full=400))
        ]

        def ask(prompt: list[int]) -> list[int]:
            length = 1 + sum(prompt) % 40
            answer = server.generate(prompt, max_new_tokens=length)
            output: list[int] = answer["output_ids"]
            assert len(output) == length
            return output

        with ThreadPoolExecutor(8) as pool:
            outputs = list(pool.map(ask, prompts))
        for prompt, output in zip(prompts, outputs, strict=True):
            predicted = next_tokens(prompt + output, vocab_size=VOCAB)
            assert output == predicted[len(prompt) - 1 : -1]
        server.wait_idle()
        assert "violation:" not in server.log(), server.log()
        assert server.get("/canary/incidents").json() == {
            "mode": "raise",
            "incidents": [],
        }
        # It speculated, and with success.
        assert server.stats()["spec_accept_length"] > 1.3

    def test_both_pools_are_protected(self, server: Server) -> None:
        """A chain of one request alone: the target reads L tokens per iteration, the
        draft L more in its extend, and its inner steps theirs."""
        # Something in the cache that nobody uses: only that is swept.
        server.generate([8] * 100, max_new_tokens=1)
        before = value_of(server, "kv_canary_protected_tokens_total")
        swept = value_of(server, "kv_canary_swept_tokens_total")
        server.generate([7] * 50, max_new_tokens=30)
        read = value_of(server, "kv_canary_protected_tokens_total") - before
        iterations = 30 // 5
        assert read > iterations * 50 * 5
        assert value_of(server, "kv_canary_swept_tokens_total") > swept
        assert value_of(server, "kv_canary_violations_total") == 0


class TestE2ESpeculativeEaglePage64Topk8(TestE2ESpeculativeEagle):
    """Trees whose branches own whole pages: holes, copied tails, moved paths."""

    flags: ClassVar[str] = (
        "--speculative-num-steps 5 --speculative-eagle-topk 8 "
        "--speculative-num-draft-tokens 32 --page-size 64"
    )
    source: ClassVar[str] = "hidden"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
