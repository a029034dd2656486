"""Mode `heal` in a stock vLLM: what a worker says of damage, what the scheduler does,
and what the canary does when requests come back. The engine itself: `test_vllm.py`.
"""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from paged_world import DEVICE, HALVED_PAGES, LAYOUTS, PAGE, PAGES, World

from kv_canary.engines.page_probe import page_axis
from kv_canary.engines.settings import Mode
from kv_canary.engines.vllm.healing import (
    MOST_HEALS,
    MOST_STEPS,
    AskedBack,
    taking_back,
    with_damage,
)
from kv_canary.engines.vllm.limits import refused_by
from kv_canary.engines.vllm.steps import read_step
from kv_canary.records import Record, WriterKind, unpack_word3
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=4, suite="cpu")
register_cuda_ci(est_time=20, suite="cuda")

ERROR = "finished with an error"


class Scheduler:
    """vLLM's scheduler, as far as its own preemptions go: A and B run, C waits."""

    def __init__(self, *, holds_blocks: bool = False) -> None:
        self.requests = {rid: request(rid) for rid in "ABC"}
        self.running = [self.requests["A"], self.requests["B"]]
        self.holds_blocks = holds_blocks
        self.evicted: set[int] = set()
        self.resets = 0
        self.kv_cache_manager = SimpleNamespace(
            evict_blocks=self.evicted.update,
            block_pool=SimpleNamespace(blocks=list(range(5))),
        )

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        assert reset_running_requests
        self.resets += 1
        while self.running:
            one = self.running.pop()
            one.drop_stale_output = True
            one.num_stale_output_tokens = one.num_in_flight_tokens
        if self.holds_blocks:
            raise RuntimeError("Failed to reset KV cache")
        return True

    def finish_requests(self, rids: list[str], status: str) -> list[Any]:
        assert status == ERROR
        return [self.requests.pop(rid) for rid in rids]

    def update_from_output(self, scheduled: Any, output: Any) -> dict[int, Any]:
        """As vLLM's: tokens in flight become known, and stale ones are dropped."""
        answers = {}
        for rid, count in scheduled.num_scheduled_tokens.items():
            if rid not in self.requests:
                continue
            one = self.requests[rid]
            one.num_in_flight_tokens -= count
            if one.num_stale_output_tokens > 0:
                one.num_stale_output_tokens -= count
                if one.drop_stale_output:
                    continue
            answers[rid] = output.sampled[rid]
        return {0: SimpleNamespace(outputs=[answers])}


def request(rid: str) -> Any:
    return SimpleNamespace(
        request_id=rid,
        client_index=1 if rid == "B" else 0,
        num_in_flight_tokens=0,
        num_stale_output_tokens=0,
        drop_stale_output=False,
        get_finished_reason=lambda: "error",
    )


def begin(scheduler: Scheduler, *rids: str) -> Any:
    """A step in which requests get a token each."""
    for rid in rids:
        scheduler.requests[rid].num_in_flight_tokens += 1
        if scheduler.requests[rid] not in scheduler.running:
            scheduler.running.append(scheduler.requests[rid])
    return SimpleNamespace(num_scheduled_tokens=dict.fromkeys(rids, 1))


def end(scheduler: Scheduler, step: Any, *damaged: str | None) -> list[Any]:
    output: Any = SimpleNamespace(sampled=dict.fromkeys("ABC", 7))
    if damaged:
        output = with_damage(output, [rid for rid in damaged if rid is not None])
    answers = taking_back(Scheduler.update_from_output, scheduler, step, output)
    return [one for each in answers.values() for one in each.outputs]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two modules of vLLM with which a request's end is told."""
    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.v1": {},
        "vllm.v1.request": {"RequestStatus": SimpleNamespace(FINISHED_ERROR=ERROR)},
        "vllm.v1.engine": {
            "EngineCoreOutput": SimpleNamespace,
            "EngineCoreOutputs": SimpleNamespace,
        },
    }
    for name, attributes in modules.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)


def test_without_damage_nothing_is_taken_back() -> None:
    scheduler = Scheduler()
    assert end(scheduler, begin(scheduler, "A", "B")) == [{"A": 7, "B": 7}]
    assert scheduler.resets == 0 and len(scheduler.running) == 2


def test_a_damaged_step_gives_no_token_and_all_requests_begin_again() -> None:
    scheduler = Scheduler()
    assert end(scheduler, begin(scheduler, "A", "B"), "A") == [{}]
    assert scheduler.resets == 1 and scheduler.running == []
    assert end(scheduler, begin(scheduler, "A", "B")) == [{"A": 7, "B": 7}]


def test_damage_that_no_request_has_read_empties_the_cache_too() -> None:
    scheduler = Scheduler()
    assert end(scheduler, begin(scheduler, "A", "B"), None) == [{}]
    assert scheduler.resets == 1


def test_the_output_that_is_shared_by_all_idle_steps_is_not_marked() -> None:
    shared = SimpleNamespace(sampled={})
    assert vars(with_damage(shared, ["A"])) != vars(shared) == {"sampled": {}}


def test_a_step_that_had_begun_is_discarded_and_names_nothing_new() -> None:
    scheduler = Scheduler()
    first, second = begin(scheduler, "A", "B"), begin(scheduler, "A", "B")
    assert end(scheduler, first, "A") == [{}]
    third = begin(scheduler, "A", "B")
    assert end(scheduler, second, "A") == [{}]
    assert scheduler.resets == 1
    # What it computes counts again, and so does what it finds.
    assert end(scheduler, third, "A") == [{}]
    assert scheduler.resets == 2


def test_blocks_of_waiting_requests_are_found_by_nobody() -> None:
    scheduler = Scheduler(holds_blocks=True)
    end(scheduler, begin(scheduler, "A", "B"), "A")
    assert scheduler.evicted == {1, 2, 3, 4} and scheduler.running == []


@pytest.mark.usefixtures("vllm")
def test_a_request_that_stays_damaged_ends_with_an_error() -> None:
    scheduler = Scheduler()
    for _ in range(MOST_HEALS):
        assert end(scheduler, begin(scheduler, "A", "B"), "B") == [{}]
    answer, error = end(scheduler, begin(scheduler, "A", "B"), "B")
    assert answer == {}
    assert (error.request_id, error.finish_reason) == ("B", "error")
    assert error.new_token_ids == []
    assert scheduler.requests.keys() == {"A", "C"}
    assert end(scheduler, begin(scheduler, "A")) == [{"A": 7}]


def heard(*rids: str, preempted: set[str] | None = None) -> Any:
    return SimpleNamespace(
        finished_req_ids=set(),
        preempted_req_ids=preempted,
        num_scheduled_tokens=dict.fromkeys(rids, 1),
    )


def test_a_request_that_is_not_taken_back_is_an_error() -> None:
    asked = AskedBack()
    asked.ask(["A"], 10)
    for step in range(11, 11 + MOST_STEPS):
        asked.hear(heard("A", "B"), step)
    with pytest.raises(RuntimeError, match="did not take back request 'A'"):
        asked.hear(heard("A", "B"), 11 + MOST_STEPS)


@pytest.mark.parametrize("how", ["finished_req_ids", "preempted_req_ids"])
def test_a_request_that_is_taken_back_is_not_waited_for(how: str) -> None:
    asked = AskedBack()
    asked.ask(["A"], 10)
    gone = heard("A", "B")
    setattr(gone, how, {"A"})
    asked.hear(gone, 11)
    asked.hear(heard("A", "B"), 100)


def test_tensor_parallel_ranks_are_refused() -> None:
    config = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=2))
    assert refused_by(config) == []
    (why,) = refused_by(config, heals=True)
    assert "KV_CANARY=heal with tensor_parallel_size > 1" in why


def test_a_request_that_comes_back_in_one_step_is_a_new_one() -> None:
    """The second runner gets it as new, with the word that it was preempted."""
    message = SimpleNamespace(
        req_id="A",
        prompt_token_ids=[1, 2],
        prefill_token_ids=[1, 2, 3],
        block_ids=([4],),
        num_computed_tokens=0,
        lora_request=None,
        kv_canary_cache_salt=None,
    )
    nothing = SimpleNamespace(
        req_ids=[], num_computed_tokens=[], new_block_ids=[], resumed_req_ids=set()
    )
    output = SimpleNamespace(
        scheduled_new_reqs=[message],
        scheduled_cached_reqs=nothing,
        scheduled_spec_decode_tokens={},
        finished_req_ids=set(),
        preempted_req_ids={"A"},
        kv_cache_block_copies=None,
        num_scheduled_tokens={"A": 3},
    )
    ledger: Any = {"A": object()}
    step = read_step(output, ledger)
    assert step.released == ["A"] and not step.admitted[0].goes_on
    output.preempted_req_ids = set()
    assert read_step(output, ledger).admitted[0].goes_on


# -- the canary ------------------------------------------------------------------------


def wounded(**how: Any) -> tuple[World, list[int]]:
    """A world in mode `heal` in which A has read a block that was overwritten."""
    world = World(mode=Mode.HEAL, **how)
    blocks = world.start("A", 20)
    world.start("B", 9)
    world.forward({"A": 1, "B": 1})
    assert world.canary.damage.take(world.canary.forwards) is None
    block(world, 0, blocks[0]).fill_(float("nan"))
    assert world.forward({"A": 1, "B": 1}) != []
    return world, blocks


def block(world: World, layer: int, number: int) -> torch.Tensor:
    kv = world.pool.layers[layer]
    return kv.select(page_axis(kv, PAGES, "layer"), number)


def test_damage_names_its_request_once_and_stops_nothing() -> None:
    world, _ = wounded(real_data="all")
    now = world.canary.forwards
    assert world.canary.damage.take(now) == ["A"]
    assert world.canary.damage.take(now) is None


def test_what_a_later_forward_found_is_named_with_its_own_tokens_too() -> None:
    """The rings hold findings of forwards whose output nobody asked for yet."""
    world, _ = wounded(real_data="all")
    now = world.canary.forwards
    assert world.canary.damage.take(now - 1) == ["A"]
    assert world.canary.damage.take(now) == ["A"]
    assert world.canary.damage.take(now) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("layout", [*LAYOUTS, HALVED_PAGES])
def test_blocks_of_a_damaged_request_are_cleared_when_it_is_gone(
    layout: str, dtype: torch.dtype
) -> None:
    world = World(layout, mode=Mode.HEAL, dtype=dtype)
    if dtype is torch.uint8:
        (group,) = world.canary.groups
        eighths = [layer.view(torch.float8_e4m3fn) for layer in group.group.layers]
        group.group = dataclasses.replace(group.group, layers=eighths)
    blocks = world.start("A", 20)
    other = world.start("B", 9)
    kept = [block(world, layer, other[0]).clone() for layer in range(3)]
    world.canary.damage.ask(["A"])
    world.forward({"B": 1}, released=["A"])
    for layer in range(3):
        for number in blocks:
            assert not block(world, layer, number).view(torch.uint8).any()
        assert torch.equal(
            block(world, layer, other[0]).view(torch.uint8),
            kept[layer].view(torch.uint8),
        )
    state = world.canary.groups[0].state
    for number in blocks:
        word = int(state.tail[number * PAGE, Record.WORD3])
        assert unpack_word3(word).kind is WriterKind.POISON


def test_a_block_that_another_request_holds_is_not_cleared() -> None:
    world = World(mode=Mode.HEAL)
    blocks = world.start("A", 20)
    shared = world.admission(
        "B", world.tokens["A"][:17], [*blocks[:2], *world.blocks(2)], computed=16
    )
    assert world.forward({"A": 1, "B": 1}, admitted=[shared]) == []
    world.canary.damage.ask(["A"])
    assert world.forward({"B": 1}, released=["A"]) == []
    assert block(world, 0, blocks[0]).any() and not block(world, 0, blocks[2]).any()


def test_tokens_of_a_step_before_a_request_came_back_are_not_its_own() -> None:
    world = World(mode=Mode.HEAL)
    world.start("A", 20)
    world.forward({"A": 1})
    canary, step = world.canary, world.canary.steps
    assert canary.is_since("A", step)
    tokens = list(world.tokens["A"])
    again = world.admission("A", tokens, world.blocks(4))
    assert world.forward({"A": 21}, released=["A"], admitted=[again]) == []
    assert not canary.is_since("A", step) and canary.is_since("A", canary.steps)
    before = list(canary.ledger["A"].tokens)
    canary.note_tokens("A", [5], step=step)
    assert canary.ledger["A"].tokens == before
    assert world.forward({"A": 1}) == []


def test_a_healed_request_is_read_in_silence() -> None:
    world, blocks = wounded(real_data="all")
    canary = world.canary
    assert canary.damage.take(canary.forwards) == ["A"]
    canary.damage.ask(["A"])
    tokens = world.tokens["A"]
    again = world.admission("A", tokens, [*blocks[::-1], *world.blocks(1)])
    count = len(tokens)
    assert world.forward({"A": count, "B": 1}, released=["A"], admitted=[again]) == []
    assert world.forward({"A": 1, "B": 1}) == []
    assert canary.damage.take(canary.forwards) is None
    assert canary.healed() == 1 and World().canary.healed() is None
    assert torch.isfinite(block(world, 0, blocks[0])).all()
    assert str(world.pool.layers[0].device).startswith(DEVICE)
