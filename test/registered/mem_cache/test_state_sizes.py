"""How many states a model gets, and which flags cannot be met."""

from __future__ import annotations

import json

import pytest
import torch

from kv_canary.state import create_state
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.state_config import DeltaShape
from sglang.srt.kv_canary.api import watcher_bytes
from sglang.srt.kv_canary.config import CanaryConfig
from sglang.srt.kv_canary.state_group import create_state_group
from sglang.srt.mem_cache.state_pool import StatePool, StateShape
from sglang.srt.model_executor.state_memory import (
    plan_states,
    rows_with_states,
    state_shape,
)
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness
from sglang.test.hybrid_models import write_hybrid_model
from sglang.test.tiny_models import (
    MOCK_STATE,
    write_mock_draft,
    write_mock_model,
)

register_cpu_ci(est_time=8, suite="cpu")

SHAPE = StateShape(
    layers=(0, 2),
    conv_channels=64,
    conv_inputs=3,
    delta=DeltaShape(heads=4, key_heads=2, d_k=16, d_v=16),
    dtype=torch.bfloat16,
    matrix_dtype=torch.float32,
)
SLOT = SHAPE.bytes_per_slot
ALL_BYTES = {"kv_canary": "log", "kv_canary_real_data": "all"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_mock_model(tmp_path_factory.mktemp("mock"), **MOCK_STATE)


def args(model, **options) -> ServerArgs:
    return ServerArgs(model_path=str(model), device="cpu", **options)


def test_bytes_of_a_slot() -> None:
    assert SLOT == 2 * (64 * 3 * 2 + 4 * 16 * 16 * 4 + 2 * 4)


def test_memory_is_divided_by_the_ratio(model) -> None:
    given = args(model, mamba_full_memory_ratio=0.25)
    sizes = plan_states(SHAPE, given, rows=8, available=100 * SLOT)
    # A fifth, of which scratch takes one.
    assert (sizes.rows, sizes.checkpoints) == (8, 11)
    assert sizes.nbytes == 20 * SLOT
    assert rows_with_states(SHAPE, given, available=100 * SLOT) == 10
    asked = args(model, max_mamba_cache_size=30)
    sizes = plan_states(SHAPE, asked, rows=8, available=100 * SLOT)
    assert (sizes.checkpoints, sizes.slots) == (22, 30)
    # The pool of a CPU is not larger than of use.
    sizes = plan_states(SHAPE, args(model), rows=8, available=10_000 * SLOT)
    assert sizes.checkpoints == 16
    plain = args(model, disable_radix_cache=True)
    assert plan_states(SHAPE, plain, rows=8, available=100 * SLOT).checkpoints == 0


@pytest.mark.parametrize(
    ("options", "available", "message"),
    [
        (
            {"max_mamba_cache_size": 8},
            100,
            "--max-mamba-cache-size 8: 8 running requests and one checkpoint need 9 "
            "states; raise it, or lower --max-running-requests to 7",
        ),
        (
            {"max_mamba_cache_size": 7, "disable_radix_cache": True},
            100,
            "--max-mamba-cache-size 7: 8 running requests need 8 states; raise it, or "
            "lower --max-running-requests to 7",
        ),
        (
            {"mamba_full_memory_ratio": 0.1},
            55,
            "--mamba-full-memory-ratio 0.1 leaves .* 8 running requests and one "
            "checkpoint need 9: raise it to 0.223, or lower "
            "--max-running-requests to 3",
        ),
        (
            {"mamba_full_memory_ratio": 0.9},
            10,
            "one checkpoint need 9: lower --max-running-requests to 2",
        ),
        (
            {"max_mamba_cache_size": 30},
            20,
            "--max-mamba-cache-size 30 needs .* are free; use at most 19",
        ),
        (
            {"max_mamba_cache_size": 30, "disable_radix_cache": True},
            100,
            "--max-mamba-cache-size 30 asks for 22 cached states beside those of 8 "
            "running requests, which --disable-radix-cache rules out; use 8, or raise "
            "--max-running-requests to 30",
        ),
    ],
)
def test_too_few_states(model, options, available, message) -> None:
    with pytest.raises(ValueError, match=message):
        plan_states(SHAPE, args(model, **options), rows=8, available=available * SLOT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mamba_full_memory_ratio": 0.0}, "ratio 0.0: must be above 0"),
        (
            {"mamba_track_interval": 24, "page_size": 16},
            "--mamba-track-interval 24 must be a multiple of --page-size 16",
        ),
        (
            {
                "disable_radix_cache": True,
                "mamba_radix_cache_strategy": "extra_buffer",
            },
            "asks for cached states, which --disable-radix-cache rules out",
        ),
        (
            {"disable_radix_cache": True, "mamba_track_interval": 64},
            "--mamba-track-interval 64 asks for cached states, which "
            "--disable-radix-cache rules out",
        ),
        (
            {"mamba_radix_cache_strategy": "no_buffer", "mamba_track_interval": 64},
            "--mamba-track-interval 64 has no effect with "
            "--mamba-radix-cache-strategy no_buffer",
        ),
        ({"mamba_ssm_dtype": "float8"}, "float8"),
    ],
)
def test_flags_that_contradict(model, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        args(model, **options)


def test_an_unknown_dtype_of_a_checkpoint_is_named(tmp_path) -> None:
    path = write_hybrid_model(tmp_path, "Qwen3_5ForCausalLM")
    file = path / "config.json"
    raw = json.loads(file.read_text()) | {"mamba_ssm_dtype": "float8"}
    file.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="mamba_ssm_dtype 'float8' is not supported"):
        state_shape(ModelConfig.from_path(path), args(path), dtype=torch.bfloat16)


def test_the_ratio_that_is_named_fits(model) -> None:
    for available in (11, 20, 55, 300):
        with pytest.raises(ValueError, match="raise it to ") as error:
            least = args(model, mamba_full_memory_ratio=0.001)
            plan_states(SHAPE, least, rows=8, available=available * SLOT)
        ratio = float(str(error.value).split("raise it to ")[1].split(",")[0])
        named = args(model, mamba_full_memory_ratio=ratio)
        sizes = plan_states(SHAPE, named, rows=8, available=available * SLOT)
        assert sizes.checkpoints >= 1


def test_the_default_interval_is_whole_pages(model) -> None:
    assert args(model).mamba_track_interval == 256
    assert args(model, page_size=48).mamba_track_interval == 288
    assert args(model, disable_radix_cache=True).mamba_track_interval is None


def test_all_given_states_run_without_a_prefix_cache(model) -> None:
    """With one, half of them are checkpoints."""
    for options, rows in (({}, 15), ({"disable_radix_cache": True}, 30)):
        given = args(model, max_mamba_cache_size=30, **options)
        assert rows_with_states(SHAPE, given, available=0) == rows


def test_what_the_canary_keeps_of_states_is_planned(model) -> None:
    """Its sums and records, as large as they are then."""
    for options in ({}, {"kv_canary": "log"}, ALL_BYTES):
        given = args(model, mamba_full_memory_ratio=1.0, **options)
        kept = watcher_bytes(given).state(SHAPE)
        pool = StatePool(SHAPE, size=7, device="cpu")
        assert pool.nbytes == 8 * SLOT
        state = None
        if options:
            config = CanaryConfig.from_server_args(given)
            primary = create_state(
                num_slots=8, req_rows=4, ring_capacity=8, num_managers=1, device="cpu"
            )
            group = create_state_group(pool, config, req_rows=4, primary=primary)
            state, marks = group.state, pool.marks
            records = state.head.nbytes + state.tail.nbytes
            sums = pool.nbytes - 8 * SLOT + (0 if marks is None else marks.nbytes)
            assert 8 * kept == records + sums
        assert (kept > 0) == (state is not None)
        sizes = plan_states(
            SHAPE, given, rows=8, available=200 * (SLOT + kept), watched=kept
        )
        assert sizes.bytes_per_slot == SLOT + kept
        assert sizes.slots == 24


def test_a_draft_must_not_keep_a_state(model, tmp_path) -> None:
    draft = write_mock_draft(tmp_path, kind="STANDALONE", **MOCK_STATE)
    with pytest.raises(ValueError, match="draft"):
        EngineHarness(
            model,
            speculative_algorithm="STANDALONE",
            speculative_draft_model_path=str(draft),
        )


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
