"""Faults that changed tokens unseen before are named before a wrong token is sent, and
do send wrong tokens where nobody looks; without speculation."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from kv_canary.faults.catalogue import STEP_FAULTS, in_serving
from kv_canary.faults.fault import Serving
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.hole_traffic import Engine, check_named, does_damage, stop_by
from sglang.test.scale import count, sampled
from sglang.test.spec_canary_traffic import CONTEXT, VOCAB
from sglang.test.tiny_models import write_mock_model

register_cpu_ci(est_time=15, suite="cpu", full_time=140)

SEEDS = range(count(ci=1, full=20))
ENGINES = [
    Engine(page_size=page_size, overlap=overlap)
    for page_size in (1, 4, 16)
    for overlap in (False, True)
]
NAMES = in_serving(STEP_FAULTS, Serving.PLAIN)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("mock")
    model = write_mock_model(folder, vocab_size=VOCAB, max_position_embeddings=CONTEXT)
    return {"model": model, "draft": folder}


@pytest.mark.parametrize(
    ("name", "engine"),
    sampled(itertools.product(NAMES, ENGINES), key=lambda case: case[0], ci=2),
    ids=str,
)
def test_is_named_before_a_wrong_token_is_sent(
    models: dict[str, Path], name: str, engine: Engine
) -> None:
    for seed in SEEDS:
        check_named(name, stop_by(name, engine, models, seed=seed))


@pytest.mark.parametrize("name", NAMES)
def test_does_its_damage_where_nobody_looks(models: dict[str, Path], name: str) -> None:
    assert any(does_damage(name, ENGINES[0], models, seed=seed) for seed in range(20))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
