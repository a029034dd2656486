"""A healthy server under the canary: everything is checked, nothing is reported."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from canary_server import Server, greedy

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.mock_oracle import next_tokens
from sglang.test.scale import count, is_full
from sglang.test.tiny_models import write_mock_model

register_cpu_ci(est_time=10, suite="cpu")
register_cuda_ci(est_time=40, suite="cuda")

VOCAB = 257
CONTEXT = 512
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def metrics_of(server: Server) -> dict[str, float]:
    """Values of the canary's metrics, summed over labels, without the prefix."""
    values: dict[str, float] = {}
    for line in server.get("/metrics").text.splitlines():
        if line.startswith("sglang:kv_canary_"):
            name, value = line.removeprefix("sglang:kv_canary_").rsplit(" ", 1)
            name = name.split("{")[0]
            values[name] = values.get(name, 0.0) + float(value)
    return values


def canary_flags() -> tuple[str, ...]:
    flags = (
        f"--device {DEVICE} --kv-canary raise --kv-canary-real-data all "
        "--kv-canary-sweep-interval 4 --enable-metrics --max-total-tokens 4096 "
        "--chunked-prefill-size 64 --max-running-requests 16"
    )
    return tuple(flags.split())


@pytest.fixture(scope="class")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """One per class, with its model and flags."""
    model = write_mock_model(
        tmp_path_factory.mktemp("model") / "mock",
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
        **request.cls.model_config,
    )
    with patch.dict(os.environ, request.cls.environment):
        running = Server(model, (*canary_flags(), *request.cls.flags))
    try:
        yield running.wait_ready()
    finally:
        running.stop()


class _BaselineBase:
    """Mixed traffic: cached prefixes, chunked prompts, streams, many at once."""

    model_config: ClassVar[dict[str, Any]] = {}
    flags: ClassVar[tuple[str, ...]] = ()
    environment: ClassVar[dict[str, str]] = {}
    windows: ClassVar[tuple[int | None, int | None]] = (None, None)

    def test_no_violation(self, server: Server) -> None:
        rng = random.Random(1)
        stems = [[rng.randrange(VOCAB) for _ in range(120)] for _ in range(3)]
        prompts = [
            rng.choice(stems)[: rng.randrange(121)]
            + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 100))]
            for _ in range(count(ci=24, full=400))
        ]

        def ask(prompt: list[int]) -> list[int]:
            length = 1 + sum(prompt) % 40
            output: list[int] = server.generate(prompt, max_new_tokens=length)[
                "output_ids"
            ]
            assert len(output) == length
            return output

        with ThreadPoolExecutor(8) as pool:
            outputs = list(pool.map(ask, prompts))
        for prompt, output in zip(prompts, outputs, strict=True):
            predicted = next_tokens(
                prompt + output, vocab_size=VOCAB, windows=self.windows
            )
            assert output == predicted[len(prompt) - 1 : -1]
        server.wait_idle()
        assert "violation:" not in server.log(), server.log()
        assert server.get("/canary/incidents").json() == {
            "mode": "raise",
            "incidents": [],
        }

    def test_numbers_advance(self, server: Server) -> None:
        server.generate([9] * 50, max_new_tokens=2)  # sweeps need something cached
        before = metrics_of(server)
        answer = server.generate([7] * 50, max_new_tokens=12)
        after = metrics_of(server)
        assert set(after) == {
            "protected_tokens_total",
            "swept_tokens_total",
            "sweep_passes_total",
            "violations_total",
            "healed_tokens_total",
            "quarantined_pages",
            "quarantined_share",
            "degraded",
            "heals_total",
            "recovery_seconds_bucket",
            "recovery_seconds_count",
            "recovery_seconds_sum",
            "mode",
        }
        assert after["mode"] == 1
        for name in ("violations_total", "healed_tokens_total", "degraded"):
            assert after[name] == 0
        # Decode steps read 50, 51, ... tokens; the cached part of the prompt is read
        # by the prefill. A GPU runs one step more before it knows the end.
        cached = answer["meta_info"]["cached_tokens"]
        expected = cached + sum(range(50, 61))
        read = after["protected_tokens_total"] - before["protected_tokens_total"]
        assert read in (expected, expected + 61 * (DEVICE == "cuda"))
        assert after["sweep_passes_total"] > before["sweep_passes_total"]
        assert after["swept_tokens_total"] > before["swept_tokens_total"]

    def test_stats_line(self, server: Server) -> None:
        while not any("[canary] step=" in line for line in server.lines):
            server.generate("more", max_new_tokens=50)
        (line, *_) = [line for line in server.lines if "[canary] step=" in line]
        assert "violations=0 launch_tags_active=verify,head,tail" in line
        assert line.endswith(" pool=target")


class TestBaselineMha(_BaselineBase):
    """Grouped-query attention in the plain pool."""


class TestBaselineMhaPaged(_BaselineBase):
    """The same in pages of 16."""

    flags: ClassVar[tuple[str, ...]] = ("--page-size", "16")


class TestBaselineSwa(_BaselineBase):
    """A full and a sliding layer, with window slots; and windows are at work."""

    model_config: ClassVar[dict[str, Any]] = {
        "sliding_window": 40,
        "layer_types": ["full_attention", "sliding_attention"],
    }
    flags: ClassVar[tuple[str, ...]] = ("--swa-full-tokens-ratio", "0.3")
    environment: ClassVar[dict[str, str]] = {
        "SGLANG_KV_CANARY_SWA_DIVERGENCE_STATS_INTERVAL": "10"
    }
    windows: ClassVar[tuple[int | None, int | None]] = (None, 40)

    def test_windows_diverge(self, server: Server) -> None:
        # The first window pages are those of the first pages, until some are free.
        for _ in range(3):
            server.generate([5] * 200, max_new_tokens=80)
            server.generate([6] * 300, max_new_tokens=80)
        lines = [line for line in server.lines if "kv_canary_swa_divergence=" in line]
        reports = [json.loads(line.split("divergence=")[1]) for line in lines]
        assert len(reports) > 5
        assert sum(report["outside_window"] for report in reports) > 0
        assert sum(report["differing_slots"] for report in reports) > 0
        assert {report["stale_mappings"] for report in reports} == {0}


@pytest.mark.skipif(not is_full(), reason="one page size of windows is enough in CI")
class TestBaselineSwaPaged(TestBaselineSwa):
    """The same in pages of 16."""

    flags: ClassVar[tuple[str, ...]] = (*TestBaselineSwa.flags, "--page-size", "16")


def test_off_is_404(tmp_path: Path) -> None:
    model = write_mock_model(tmp_path / "mock", vocab_size=VOCAB)
    server = Server(model, ("--kv-canary", "none", "--device", DEVICE))
    try:
        server.wait_ready()
        answer = server.get("/canary/incidents")
        assert answer.status_code == 404
        assert "--kv-canary log, raise or heal" in answer.json()["error"]["message"]
        body = {"text": "x", "sampling_params": greedy()}
        assert server.post("/generate", body).status_code == 200
        assert "kv_canary" not in server.log()
    finally:
        server.stop()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
