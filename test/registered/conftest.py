"""State of the process that every test finds as if it were the first; Triton's
interpreter where there is no GPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest
import torch

# Before the first import of triton, which may be that of a file of another folder.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from sglang.srt.utils.logging import ROOTS  # noqa: E402
from sglang.test.forked_process import forking  # noqa: E402
from sglang.test.interpreter import make_cheaper  # noqa: E402
from sglang.test.lazy_memory import take_memory_when_written  # noqa: E402
from sglang.test.scale import is_full  # noqa: E402

# Files that take longest, by their paths' beginnings. In CI their tests run with as few
# variants as have every value of every parameter, and at most so many; all with whole
# counts. Triton's interpreter, where there is no GPU, is thousands of times slower.
EVERY_VALUE = 1000
THINNED = {
    "triton/": 6,
    "spec/test_tree_ops": 8,
    **dict.fromkeys(
        (
            "attention/test_flashinfer_spec",
            "disaggregation/test_engine_pairs",
            "distributed/test_shards",
            "front/test_context_overflow",
            "front/test_lenient_bodies",
            "front/test_template_limits",
            "function_call/test_hostile_texts",
            "graph/test_breakable_graph_runner",
            "graph/test_prefill_graph_engine",
            "kernels/test_cpu_attention",
            "kernels/test_cpu_pointwise",
            "kv_canary/test_canary_carried",
            "kv_canary/test_canary_drawn",
            "kv_canary/test_canary_kernels",
            "kv_canary/test_canary_properties",
            "kv_canary/test_canary_reads",
            "kv_canary/test_canary_requests",
            "kv_canary/test_draws",
            "kv_canary/test_early_free",
            "kv_canary/test_head_sums",
            "kv_canary/test_heal_cases",
            "kv_canary/test_heal_host",
            "kv_canary/test_heal_states",
            "kv_canary/test_heal_windows",
            "kv_canary/test_injectors",
            "kv_canary/test_replay",
            "kv_canary/test_spec_hole_injectors",
            "kv_canary/test_spec_injectors",
            "kv_canary/test_spec_oracle",
            "kv_canary/test_state_canary",
            "kv_canary/test_state_records",
            "kv_canary/test_window_canary",
            "lora/test_lora_parity",
            "mock_model/test_canary_soak",
            "mock_model/test_heal_canary_soak",
            "mock_model/test_mock_draft",
            "mock_model/test_mock_unit",
            "mock_model/test_spec_canary_soak",
            "mock_model/test_state_soak",
            "mock_model/test_window_soak",
            "models/test_deepseek",
            "models/test_hf_parity",
            "models/test_nextn_heads",
            "models/test_shallow_stacks",
            "models/test_whole_stack",
            "models/test_window_models",
            "models/test_window_parity",
            "quantization/test_every_class",
            "sampling/test_sampling_distribution",
            "scheduler/test_chunk_abort",
            "scheduler/test_chunk_retraction",
            "scheduler/test_input_embeds",
            "scheduler/test_stall_check",
            "scheduler/test_warm_up",
            "scheduler/test_wasted_step",
            "spec/test_draft_region",
            "spec/test_spec_features",
            "spec/test_spec_nextn",
            "spec/test_spec_ngram",
            "spec/test_spec_parity_tiny",
            "spec/test_spec_sampling",
        ),
        EVERY_VALUE,
    ),
}


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    if torch.cuda.is_available() or is_full():
        return
    for prefix, variants in THINNED.items():
        start = str(Path(__file__).parent / prefix)
        own = [item for item in items if str(item.path).startswith(start)]
        tests: dict[str, list[pytest.Item]] = {}
        for item in own:
            tests.setdefault(item.nodeid.split("[")[0], []).append(item)
        kept = {
            id(item)
            for test in tests.values()
            for item in _covering(test, at_most=variants)
        }
        dropped = [item for item in own if id(item) not in kept]
        config.hook.pytest_deselected(items=dropped)
        gone = {id(item) for item in dropped}
        items[:] = [item for item in items if id(item) not in gone]


def pytest_collection_finish() -> None:
    make_cheaper()
    take_memory_when_written()


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """The workers of a suite start hundreds of servers."""
    if session.config.getoption("forks", 0) < 2:
        return (yield)
    with forking():
        return (yield)


def _covering(variants: Sequence[pytest.Item], *, at_most: int) -> list[pytest.Item]:
    """Variants that together have every value of every parameter, each time the first
    that adds most."""
    missing = set().union(*map(_values, variants))
    chosen = [variants[0]]
    missing -= _values(variants[0])
    while missing and len(chosen) < at_most:
        chosen.append(max(variants, key=lambda v: len(_values(v) & missing)))
        missing -= _values(chosen[-1])
    return chosen


def _values(item: pytest.Item) -> set[tuple[str, str]]:
    """The value of each parameter."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    return {(name, repr(value)) for name, value in given.items()}


@pytest.fixture(autouse=True)
def logging_reaches_pytest() -> None:
    """An engine in an earlier test sent the log to stderr, past pytest's capture."""
    for name in ROOTS:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.NOTSET)
