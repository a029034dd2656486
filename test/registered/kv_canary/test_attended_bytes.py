"""Engines whose decode attention compares the bytes that it loads: every byte it reads,
in that forward, or, where layers take turns, within as many steps as there are layers.

On a GPU with the engine's own kernels and graphs; elsewhere the kernels are interpreted
and the canary's launches run their references.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kv_canary.checks import Reason
from kv_canary.op import force_reference
from kv_canary.records import Counter
from sglang.srt.configs.attention_backends import AttentionBackendCapabilities
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.ops.attention.op import extend_attention_ref
from sglang.test.canary_traffic import CONTEXT, VOCAB, Outcome, canary_of, plant
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.harness import EngineHarness, Finished
from sglang.test.heal_traffic import check_exact, run_healing
from sglang.test.hole_traffic import Engine
from sglang.test.mock_traffic import Traffic, check
from sglang.test.scale import count, is_full
from sglang.test.spec_canary_traffic import write_mock_models
from sglang.test.tiny_models import write_mock_model

register_cpu_ci(est_time=30, suite="cpu", full_time=1200)
register_cuda_ci(est_time=60, suite="cuda")

ON_GPU = torch.cuda.is_available()
SEEDS = range(count(ci=4 if ON_GPU else 1, full=20))
LAYERS = 2
PAGE_SIZES = [1, 4, 16] if ON_GPU or is_full() else [4]
each_page_size = pytest.mark.parametrize("page_size", PAGE_SIZES)


class InterpretedBackend(TritonAttnBackend):
    """Decodes with the kernels of the GPU, interpreted; extends with the reference."""

    extend_op = staticmethod(extend_attention_ref)

    @property
    def capabilities(self) -> AttentionBackendCapabilities:
        return replace(
            super().capabilities, supports_cuda_graph=False, captures_prefill=False
        )

    def _extend_call(self, *of: Any) -> tuple[Any, dict[str, Any]]:
        return self.extend_op, {}

    def _reads_new(self, forward_batch: Any) -> bool:
        return False


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Server arguments with which decode attention compares bytes."""
    if ON_GPU:
        yield {"attention_backend": "triton"}
        return
    backends = attention_registry._BACKENDS
    monkeypatch.setitem(backends, "torch_native", lambda: InterpretedBackend)
    with force_reference():
        # The interpreter gets bfloat16 wrong.
        yield {"attention_backend": "torch_native", "dtype": "float32"}


def turn(forward: int) -> int:
    """The layer that a forward compares where they take turns."""
    return forward % LAYERS


def named_places(outcome: Outcome) -> set[tuple[int, int]]:
    """(slot, position) of what the forward named that found the damage."""
    reason = Reason.VERIFY_REAL_KV.name
    assert reason is not None
    found = [v for v in outcome.violations if v["forward"] == outcome.forward]
    assert all(v["reasons"] == [reason.lower()] for v in found), outcome.text
    return {(v["slot"], v["position"]) for v in found}


@each_page_size
@pytest.mark.parametrize("overlap", [False, True], ids=["in-order", "overlap"])
def test_a_flipped_bit_is_named_by_the_forward_that_reads_it(
    model: Path, backend: dict[str, Any], page_size: int, overlap: bool
) -> None:
    """Any bit of K or V in any layer, head and slot that is read."""
    launches = set()
    for seed in SEEDS:
        outcome = plant(
            model,
            "real_kv_used",
            seed=2 * seed + overlap,
            page_size=page_size,
            kv_canary_real_data="all",
            disable_overlap_schedule=not overlap,
            **backend,
        )
        damage = outcome.planted.damage
        forward = next(f for f in outcome.since_planted() if f.reads({damage.slot}))
        assert outcome.forward == forward.clock, (seed, outcome.text)
        assert named_places(outcome) == {(damage.slot, damage.position)}
        for violation in outcome.violations:
            is_attended = violation["launch"] == "attention"
            assert is_attended == forward.is_decode
            assert ("layer" in violation) == is_attended
            launches.add(violation["launch"])
    assert "attention" in launches or not ON_GPU


@each_page_size
def test_layers_take_turns(
    model: Path, backend: dict[str, Any], page_size: int
) -> None:
    """Named by the first decode step that reads the slot in its layer's turn."""
    for seed in SEEDS:
        outcome = plant(
            model,
            "real_kv_used",
            seed=seed,
            page_size=page_size,
            kv_canary_real_data="rotate",
            **backend,
        )
        damage = outcome.planted.damage
        reading = [f for f in outcome.since_planted() if f.reads({damage.slot})]
        (violation, *_) = (
            v for v in outcome.violations if v["forward"] == outcome.forward
        )
        assert named_places(outcome) == {(damage.slot, damage.position)}
        until = [f for f in reading if f.clock <= outcome.forward]
        assert until[-1].clock == outcome.forward
        if violation["launch"] == "attention":
            layer = violation["layer"]
            turns = [f for f in until if f.is_decode and turn(f.clock) == layer]
            assert [f.clock for f in turns] == [outcome.forward], outcome.text
        else:
            # An extend had the slot's turn.
            assert violation["launch"] == "verify" and not until[-1].is_decode


@each_page_size
def test_window_slots_too(
    tmp_path: Path, backend: dict[str, Any], page_size: int
) -> None:
    """Of a sliding layer, which counts positions from the begin of its window."""
    model = write_mock_model(
        tmp_path / "mock",
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
        sliding_window=40,
        layer_types=["full_attention", "sliding_attention"],
    )
    for seed in SEEDS:
        outcome = plant(
            model,
            "real_kv_used",
            seed=seed,
            group="swa",
            page_size=page_size,
            kv_canary_real_data="all",
            **backend,
        )
        damage, planted = outcome.planted.damage, outcome.since_planted()[0]
        assert outcome.forward == planted.clock, (seed, outcome.text)
        assert named_places(outcome) == {(damage.slot, damage.position)}
        for violation in outcome.violations:
            assert violation["group"] == "swa"
            assert (violation["launch"] == "attention") == planted.is_decode
            assert violation.get("layer", 0) == 0


@pytest.mark.skipif(not ON_GPU and not is_full(), reason="a minute, interpreted")
def test_what_attention_found_is_healed(
    tmp_path: Path, backend: dict[str, Any]
) -> None:
    """Every request ends with the tokens that it has without the damage."""
    models = write_mock_models(tmp_path)
    engine = Engine(page_size=4, overlap=True)
    found = set()
    for seed in SEEDS:
        run = run_healing(
            "real_kv_used",
            engine,
            models,
            seed=seed,
            kv_canary_real_data="all",
            **backend,
        )
        check_exact(run, engine, models, seed=seed)
        found |= {v["launch"] for i in run.incidents for v in i["violations"]}
    assert "attention" in found


# On a CPU the kernels are interpreted, which takes half a minute each.
HEALTHY = [("all", True)]
if ON_GPU or is_full():
    HEALTHY += [("rotate", False), ("all", False), ("rotate", True)]


@pytest.mark.parametrize(("real_data", "overlap"), HEALTHY)
def test_healthy_traffic_is_silent(
    model: Path, backend: dict[str, Any], real_data: str, overlap: bool
) -> None:
    """With chunks, hits, retractions and a small pool; every read is compared."""
    harness = EngineHarness(
        model,
        overlap=overlap,
        max_total_tokens=800,
        page_size=4,
        chunked_prefill_size=48,
        schedule_conservativeness=0.3,
        skip_tokenizer_init=True,
        kv_canary="raise",
        kv_canary_real_data=real_data,
        kv_canary_sweep_interval=4,
        **backend,
    )
    manager = canary_of(harness)
    state = manager.target.buffers.state
    assert manager.target.buffers.fingerprint.sums is not None
    before = state.counters.tolist()
    size = count(ci=10 if ON_GPU else 2, full=200 if ON_GPU else 10)
    traffic = Traffic(harness, random.Random(2 - overlap), size)
    answers: dict[str, Finished] = {}
    while traffic.left:
        answers |= harness.run(on_step=traffic.on_step)
    check(traffic.expected, answers, vocab_size=VOCAB)
    assert manager.reporter.total == 0
    assert int(state.ring_count) == 0 and not state.verdict.any()
    ran = [a - b for a, b in zip(state.counters.tolist(), before, strict=True)]
    assert ran[Counter.VERIFIED_SLOTS] > 1000
    if real_data == "all":
        compared = ran[Counter.VERIFIED_SLOTS] + ran[Counter.SWEPT_SLOTS]
        assert ran[Counter.REHASHED_SLOTS] == compared > 0
    else:
        assert ran[Counter.REHASHED_SLOTS] > 0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
