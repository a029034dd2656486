"""Draft branches in a region of the draft's pool and in whole pages after the prefix:
the same outputs, every byte checked, and what requests reserve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kv_canary.records import POISON_WORD
from kv_canary.reporter import CanaryViolation
from sglang.srt.arg_groups.draft_slots import decode_reserve
from sglang.srt.configs.attention_backends import ATTENTION_BACKENDS
from sglang.srt.managers.scheduler.slot_owners import SlotOwners
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.harness import EngineHarness
from sglang.test.scale import count
from sglang.test.spec_canary_traffic import canaries_of, worker_of
from sglang.test.spec_matrix import SpecConfig
from sglang.test.spec_parity import live_requests
from sglang.test.spec_world import (
    ModelFolders,
    References,
    device,
    run_configuration,
    spec_engine,
)

register_cpu_ci(est_time=60, suite="cpu")
register_cuda_ci(est_time=120, suite="cuda")

BACKENDS = {"cpu": ("cpu_native", "torch_native"), "cuda": ("triton", "triton")}
LAYOUTS = ("region", "paged")


def config(
    model: str, algorithm: str, tree: tuple[int, int, str], page: int, place: int
) -> SpecConfig:
    topk, steps, nodes = tree
    return SpecConfig(
        algorithm=algorithm,
        topk=topk,
        page_size=page,
        num_steps=steps,
        nodes=nodes,
        backend=BACKENDS[device()][place % 2],
        overlap=place % 2 == 0,
        model=model,
        variant=None,
    ).canonical()


CONFIGURATIONS = [
    config(*numbers, place)
    for place, numbers in enumerate(
        [
            ("mock", "EAGLE", (8, 5, "max"), 64),
            ("mock", "STANDALONE", (4, 4, "middle"), 4),
            ("llama", "EAGLE3", (8, 3, "max"), 16),
            ("qwen3", "STANDALONE", (2, 6, "middle"), 64),
            # Sliding windows, of target and draft.
            ("gemma3", "EAGLE3", (4, 4, "max"), 4),
            ("gpt_oss", "STANDALONE", (3, 5, "middle"), 16),
            ("gemma3", "STANDALONE", (2, 3, "min"), 1),
        ]
    )
]
CANARY = {
    "kv_canary": "raise",
    "kv_canary_real_data": "all",
    "kv_canary_sweep_interval": 3,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> ModelFolders:
    return ModelFolders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def references(folders: ModelFolders) -> References:
    return References(folders, requests=count(ci=16, full=100))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_answers_are_those_without_speculation(
    folders: ModelFolders,
    references: References,
    configuration: SpecConfig,
    layout: str,
) -> None:
    """Random arrivals, aborts and retractions, graphs on a GPU; the canary compares
    every byte that is read with what was written."""
    options = {"cuda_graph_bs": [1, 2, 4, 8]} if device() == "cuda" else {}
    engine = run_configuration(
        folders,
        references,
        configuration,
        speculative_draft_layout=layout,
        **CANARY,
        **options,
    )
    pool = engine.scheduler.cache.req_to_token_pool
    assert (pool.region is not None) == (layout == "region")
    columns = pool.req_to_token.shape[1] - pool.row_width
    exact = configuration.topk * configuration.num_steps
    assert columns == (exact if layout == "region" else 0)
    for manager in canaries_of(engine).values():
        assert manager.reporter.total == 0 and manager.clock > 10


@pytest.mark.skipif(device() == "cuda", reason="the Triton backend does so anyway")
@pytest.mark.parametrize("configuration", CONFIGURATIONS[::2], ids=str)
def test_pages_as_lists_of_slots(
    folders: ModelFolders,
    references: References,
    configuration: SpecConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Branches after the prefix on the CPU, for a backend that reads their slots and
    not their pages: no copies of tails."""
    for name in BACKENDS["cpu"]:
        known = replace(ATTENTION_BACKENDS[name], needs_paged_draft_rows=False)
        monkeypatch.setitem(ATTENTION_BACKENDS, name, known)
    engine = run_configuration(
        folders,
        references,
        configuration,
        speculative_draft_layout="paged",
        **CANARY,
    )
    for manager in canaries_of(engine).values():
        assert manager.reporter.total == 0 and manager.clock > 10


def reserved(engine: EngineHarness) -> Iterator[int]:
    """Columns that each running request holds beyond its committed tokens, by step."""
    while engine.scheduler.step() or engine.scheduler.has_work():
        for req in live_requests(engine.scheduler):
            if req.req_pool_idx and req.allocated_len > req.committed_len:
                yield req.allocated_len - req.committed_len


@pytest.mark.parametrize(
    ("layout", "reserve", "most"), [("region", 70, 133), ("paged", 1030, 1093)]
)
def test_what_a_request_reserves(
    folders: ModelFolders, layout: str, reserve: int, most: int
) -> None:
    """Top-k 8, 5 steps, 64 nodes, pages of 64: the nodes and what the iteration before
    may still gain, in whole pages."""
    shape = config("mock", "EAGLE", (8, 5, "max"), 64, 0)
    engine = spec_engine(
        folders, shape, speculative_draft_layout=layout, max_total_tokens=1 << 14
    )
    assert shape.num_draft_tokens == 64
    assert decode_reserve(engine.server_args) == reserve
    for i in range(4):
        engine.submit(list(range(20 + 17 * i)), max_new_tokens=130, ignore_eos=True)
    held = list(reserved(engine))
    assert held and reserve < max(held) <= most


def test_a_region_has_owners_and_is_poisoned_when_they_end(
    folders: ModelFolders,
) -> None:
    engine = spec_engine(
        folders, config("mock", "EAGLE", (4, 4, "middle"), 4, 0), **CANARY
    )
    pool, cache = engine.scheduler.cache.req_to_token_pool, engine.scheduler.cache
    region = pool.region
    assert region is not None
    rid = engine.submit(list(range(30)), max_new_tokens=40, ignore_eos=True)
    (req,) = (engine.scheduler.step(), live_requests(engine.scheduler))[1]
    for _ in range(6):
        engine.scheduler.step()
    row = req.req_pool_idx
    slots = region.rows_to_slots([row])
    assert pool.req_to_token[row, pool.row_width :].tolist() == slots.tolist()
    draft = worker_of(engine).draft_worker
    assert draft.canary is not None
    heads = draft.canary.target.buffers.state.head
    written = draft.workspace.rows(1).draft_slots[: draft.workspace.shape.num_steps - 1]
    assert set(written.flatten().tolist()) <= set(slots.tolist())
    words = heads[written.flatten(), 0].cpu()
    assert not bool((words == POISON_WORD).any())

    def owner(slot: int) -> str:
        owners = SlotOwners(cache, lambda: live_requests(engine.scheduler))
        return owners.owner_of(slot).text

    assert owner(int(slots[0])) == f'request "{rid}" (draft region)'
    assert owner(region.first_slot + region.size) == "outside the pool"
    engine.run()
    assert owner(int(slots[0])) == "free (draft region)"
    engine.submit(list(range(5)), max_new_tokens=1)
    engine.run()
    freed = torch.from_numpy(slots).to(heads.device)
    assert bool((heads[freed, 0] == POISON_WORD).all())


def test_a_row_with_the_region_of_another_is_named(folders: ModelFolders) -> None:
    """Two requests whose branches would write to the same slots."""
    engine = spec_engine(
        folders, config("mock", "EAGLE", (4, 4, "middle"), 4, 0), **CANARY
    )
    pool = engine.scheduler.cache.req_to_token_pool
    for i in range(2):
        engine.submit([i, *range(30)], rid=f"r{i}", max_new_tokens=60, ignore_eos=True)
    for _ in range(5):
        engine.scheduler.step()
    first, second = (req.req_pool_idx for req in live_requests(engine.scheduler))
    columns = pool.req_to_token[:, pool.row_width :]
    columns[second] = columns[first]
    with pytest.raises(CanaryViolation, match=r"launch_tag=draft"):
        engine.run()
    # Rows run at once: either is first, and one may read what the other wrote.
    (incident,) = canaries_of(engine)["draft"].reporter.incidents
    named = {violation["diagnosis"] for violation in incident["violations"]}
    collisions = {"aliased with request r0", "write into a slot of another owner"}
    assert named & collisions, named


def test_only_the_draft_has_slots_of_a_region(folders: ModelFolders) -> None:
    shape = config("gemma3", "STANDALONE", (2, 3, "min"), 4, 0)
    engine = spec_engine(folders, shape)
    target, draft = worker_of(engine).model_runner, worker_of(engine).draft_worker
    region = target.req_to_token_pool.region
    assert region is not None
    size = target.allocator.size
    assert region.first_slot == size + 4
    assert target.token_to_kv_pool.size == size
    assert draft.draft_runner.token_to_kv_pool.size == size + region.size


def test_a_chain_has_no_region(folders: ModelFolders) -> None:
    shape = config("mock", "EAGLE", (1, 3, "min"), 4, 0)
    engine = spec_engine(folders, shape)
    assert engine.scheduler.cache.req_to_token_pool.region is None


def test_a_layout_without_speculation_is_refused() -> None:
    message = "--speculative-draft-layout paged has no effect without"
    with pytest.raises(ValueError, match=message):
        ServerArgs(speculative_draft_layout="paged")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
