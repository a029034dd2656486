"""Fault points: each is refused, by name, where it cannot fire, and accepted elsewhere;
engines built beside it are sound. Tests that checks see them: `test_spec_injectors.py`,
`test_early_free.py`, `test_e2e_spec_faults.py`, `test_branch_lists.py`."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang.faults.fault_points import (
    EARLY_FREE,
    EARLY_POSITIONS,
    FAULT_POINTS,
    NARROW_ROWS,
    PROMPT_TAIL,
    SAMPLED_TAIL,
    SHORT_BRANCH_TABLE,
    SMALL_INDEX_BUFFER,
    FaultPoint,
    open_fault_point,
)
from sglang.srt.configs.attention_backends import ATTENTION_BACKENDS
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.environ import envs
from sglang.srt.kv_canary.perturb import drivers_of
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import ServerArgs
from sglang.test.canary_traffic import CONTEXT, VOCAB
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness
from sglang.test.tiny_models import write_mock_draft, write_mock_model

register_cpu_ci(est_time=10, suite="cpu")

VARIABLE = "SGLANG_DEBUG_REVERT_PR"
# (topk, steps, nodes); a chain of one step takes its first level from the extend alone.
CHAIN, STEP, TREE = (1, 3, 4), (1, 1, 2), (4, 3, 12)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("mock")
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
    write_mock_model(folder / "target", **sizes)
    write_mock_draft(folder / "draft", kind="EAGLE", source="hidden", **sizes)
    return {"model": str(folder / "target"), "draft": str(folder / "draft")}


def plain(**flags: Any) -> dict[str, Any]:
    return {"kv_canary": "raise"} | flags


def drafts(tree: tuple[int, int, int], **flags: Any) -> dict[str, Any]:
    topk, steps, nodes = tree
    return {
        "speculative_algorithm": "EAGLE",
        "speculative_eagle_topk": topk,
        "speculative_num_steps": steps,
        "speculative_num_draft_tokens": nodes,
    } | flags


def resolved(models: dict[str, str], flags: dict[str, Any]) -> ServerArgs:
    options = {"device": "cpu", "kv_canary": "none"} | flags
    if "speculative_algorithm" in flags:
        options["speculative_draft_model_path"] = models["draft"]
    return ServerArgs(model_path=models["model"], **options)


@pytest.fixture(autouse=True)
def flashinfer_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its flags are resolved here, and no backend is built."""
    known = ATTENTION_BACKENDS["flashinfer"]
    anywhere = replace(known, devices=known.devices | {"cpu"})
    monkeypatch.setitem(ATTENTION_BACKENDS, "flashinfer", anywhere)


FLASHINFER = {"attention_backend": "flashinfer"}
PREFILL = {
    "disaggregation_mode": "prefill",
    "disaggregation_transfer_backend": "tcp",
    "disaggregation_bootstrap_port": 0,
}
FIRES = [
    (EARLY_FREE, plain()),
    (EARLY_FREE, plain(kv_canary="log", disable_radix_cache=True)),
    (EARLY_POSITIONS, drafts(CHAIN)),
    (EARLY_POSITIONS, drafts((1, 2, 3))),
    (EARLY_POSITIONS, drafts(TREE)),
    (SAMPLED_TAIL, drafts(CHAIN)),
    (SAMPLED_TAIL, drafts(STEP, chunked_prefill_size=32)),
    (SAMPLED_TAIL, drafts(TREE, **PREFILL)),
    (NARROW_ROWS, drafts(TREE, page_size=4)),
    (NARROW_ROWS, drafts(CHAIN, page_size=16)),
    (NARROW_ROWS, drafts((1, 4, 5))),
    (SMALL_INDEX_BUFFER, drafts(TREE, **FLASHINFER)),
    (SHORT_BRANCH_TABLE, drafts(TREE)),
    (SHORT_BRANCH_TABLE, drafts(CHAIN, **FLASHINFER)),
    (PROMPT_TAIL, drafts(CHAIN)),
    (PROMPT_TAIL, drafts(TREE, max_running_requests=2)),
]
REFUSED = [
    (EARLY_FREE, plain(kv_canary="none"), "--kv-canary log, raise or heal"),
    (EARLY_FREE, drafts(CHAIN, kv_canary="raise"), "no --speculative-algorithm"),
    (EARLY_FREE, plain(**PREFILL), "no --disaggregation-mode prefill"),
    (EARLY_POSITIONS, plain(), "--speculative-algorithm"),
    (EARLY_POSITIONS, drafts(STEP), "--speculative-num-steps 2 or more"),
    (EARLY_POSITIONS, drafts(CHAIN, **PREFILL), "no --disaggregation-mode prefill"),
    (SAMPLED_TAIL, plain(), "--speculative-algorithm"),
    (
        SAMPLED_TAIL,
        drafts(CHAIN, chunked_prefill_size=-1),
        "--chunked-prefill-size above 0",
    ),
    (
        SAMPLED_TAIL,
        drafts(CHAIN, speculative_algorithm="STANDALONE"),
        "--speculative-algorithm EAGLE, EAGLE3 or NEXTN",
    ),
    (
        PROMPT_TAIL,
        drafts(TREE, speculative_algorithm="STANDALONE"),
        "--speculative-algorithm EAGLE, EAGLE3 or NEXTN",
    ),
    (NARROW_ROWS, plain(), "--speculative-algorithm"),
    # A reserve of 8 and headroom for 4 + 4; of 16 and 4 + 12.
    (NARROW_ROWS, drafts(CHAIN), "take a larger --page-size"),
    (NARROW_ROWS, drafts(TREE), "take a larger --page-size"),
    (NARROW_ROWS, drafts(TREE, **PREFILL), "no --disaggregation-mode prefill"),
    (SMALL_INDEX_BUFFER, plain(), "--speculative-algorithm"),
    (SMALL_INDEX_BUFFER, drafts(TREE), "--attention-backend flashinfer"),
    (
        SMALL_INDEX_BUFFER,
        drafts(CHAIN, **FLASHINFER),
        "--speculative-eagle-topk 2 or more",
    ),
    (
        SMALL_INDEX_BUFFER,
        drafts((4, 1, 5), **FLASHINFER),
        "--speculative-num-steps 2 or more",
    ),
    (SHORT_BRANCH_TABLE, plain(), "--speculative-algorithm"),
    (
        SHORT_BRANCH_TABLE,
        drafts(CHAIN),
        "--speculative-eagle-topk 2 or more, or --attention-backend flashinfer",
    ),
    (SHORT_BRANCH_TABLE, drafts((4, 1, 5)), "--speculative-num-steps 2 or more"),
    (PROMPT_TAIL, plain(), "--speculative-algorithm"),
    (
        PROMPT_TAIL,
        drafts(CHAIN, chunked_prefill_size=-1),
        "--chunked-prefill-size above 0",
    ),
    (
        PROMPT_TAIL,
        drafts(CHAIN, max_running_requests=1),
        "--max-running-requests 2 or more",
    ),
]


def id_of(value: object) -> str:
    return value.name if isinstance(value, FaultPoint) else ""


@pytest.mark.parametrize(("point", "flags"), FIRES, ids=id_of)
def test_is_accepted_where_it_fires(
    models: dict[str, str], point: FaultPoint, flags: dict[str, Any]
) -> None:
    args = resolved(models, flags)
    for name in (point.name, *point.aliases, "0"):
        with envs.SGLANG_DEBUG_REVERT_PR.override(name), open_fault_point(args):
            pass


@pytest.mark.parametrize(("point", "flags", "needed"), REFUSED, ids=id_of)
def test_is_refused_where_it_cannot_fire(
    models: dict[str, str], point: FaultPoint, flags: dict[str, Any], needed: str
) -> None:
    """The error names the variable, its value, and all that it needs."""
    args = resolved(models, flags)
    with (
        envs.SGLANG_DEBUG_REVERT_PR.override(point.name),
        pytest.raises(ValueError, match="cannot fire in this configuration") as error,
    ):
        open_fault_point(args)
    message = str(error.value)
    assert message.startswith(f"{VARIABLE}={point.name!r} ")
    assert needed in message
    assert all(need.text in message for need in point.needs)


def test_every_fault_point_is_tried_both_ways() -> None:
    assert {point.name for point, *_ in FIRES} == set(FAULT_POINTS)
    assert {point.name for point, *_ in REFUSED} == set(FAULT_POINTS)
    assert FAULT_POINTS["27338"].aliases == ("27460",)


@pytest.mark.parametrize("name", ["1", "early_free"])
def test_an_unknown_name_is_refused_at_start(
    models: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, name)
    with pytest.raises(ValueError, match=f"{VARIABLE}='{name}' names no") as error:
        EngineHarness(Path(models["model"]), skip_tokenizer_init=True)
    assert all(point in str(error.value) for point in FAULT_POINTS)


def test_an_engine_that_it_cannot_fire_in_does_not_start(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, EARLY_FREE.name)
    with pytest.raises(ValueError, match=f"{VARIABLE}='EARLY_FREE' cannot fire"):
        EngineHarness(Path(models["model"]), skip_tokenizer_init=True, kv_canary="none")


def test_what_is_built_without_it_is_sound(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process may hold engines with and without the fault."""
    options = drafts(TREE, page_size=4, speculative_draft_model_path=models["draft"])
    engines = {}
    for name in (NARROW_ROWS.name, ""):
        monkeypatch.setenv(VARIABLE, name)
        engines[name] = EngineHarness(
            Path(models["model"]), skip_tokenizer_init=True, **options
        )
    monkeypatch.delenv(VARIABLE)
    narrow, whole = (
        engine.scheduler.cache.req_to_token_pool.row_width
        for engine in engines.values()
    )
    assert narrow == CONTEXT + 4 + 12 < whole
    runners = [e.scheduler.worker.model_runner for e in engines.values()]
    assert [runner.row_width() for runner in runners] == [narrow, whole]


def test_an_engine_with_planted_faults_gives_its_memory_back(
    models: dict[str, str],
) -> None:
    """Processes build many: 90 MB of each stayed."""
    engine = EngineHarness(
        Path(models["model"]), skip_tokenizer_init=True, kv_canary="raise"
    )
    drivers = drivers_of(engine.scheduler)
    assert drivers == drivers_of(engine.scheduler)
    left = [weakref.ref(engine.scheduler), *map(weakref.ref, drivers)]
    del engine, drivers
    gc.collect()
    assert [one() for one in left] == [None] * 2


@pytest.mark.parametrize("page_size", [1, 2, 4, 16, 64])
@pytest.mark.parametrize("tree", [STEP, CHAIN, (1, 4, 5), (2, 1, 3), (4, 1, 5), TREE])
def test_narrow_rows_fire_exactly_where_rows_are_narrower(
    models: dict[str, str],
    tree: tuple[int, int, int],
    page_size: int,
) -> None:
    args = resolved(models, drafts(tree, page_size=page_size))
    config = ModelConfig.from_path(Path(models["model"]))
    whole = ModelRunner(server_args=args, model_config=config)
    with NARROW_ROWS.opened():
        narrow = ModelRunner(server_args=args, model_config=config)
    is_narrower = narrow.row_width() < whole.row_width()
    assert NARROW_ROWS.can_fire(args) is is_narrower


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
