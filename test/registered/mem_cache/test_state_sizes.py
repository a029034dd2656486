"""How many states a model gets, and which flags cannot be met."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.configs.state_config import DeltaShape
from sglang.srt.mem_cache.state_pool import StateShape
from sglang.srt.model_executor.state_memory import plan_states, rows_with_states
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness
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


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_mock_model(tmp_path_factory.mktemp("mock"), **MOCK_STATE)


def args(model, **options) -> ServerArgs:
    return ServerArgs(model_path=str(model), device="cpu", **options)


def test_bytes_of_a_slot() -> None:
    assert SLOT == 2 * (64 * 3 * 2 + 4 * 16 * 16 * 4)


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
        ({"mamba_ssm_dtype": "float8"}, "float8"),
    ],
)
def test_flags_that_contradict(model, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        args(model, **options)


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
