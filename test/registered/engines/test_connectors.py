"""What a connector loads is compared with what was computed, before it is read."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from paged_world import LAYERS, LAYOUTS, PAGE, PAGES, World

from kv_canary.checks import Reason
from kv_canary.engines import unit_store
from kv_canary.engines.block_units import BlockUnits, Load
from kv_canary.engines.page_probe import page_axis
from kv_canary.engines.step import Step
from kv_canary.engines.unit_store import REVISIONS, UnitShape, UnitStore
from kv_canary.engines.vllm.connectors import SchedulerLoads, WorkerLoads
from kv_canary.engines.vllm.turned_back import (
    NewRequests,
    discarding_steps,
    forget_sampled,
)
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=3, suite="cpu")
register_cuda_ci(est_time=30, suite="cuda")

SHAPE = UnitShape(slots=PAGE, layers=LAYERS, digest=bytes(range(32)), rank=0)
COUNT = 2
"""Full blocks of request A."""


class Loading:
    """A World whose request A has two full blocks, of which B loads a copy."""

    def __init__(self, layout: str = LAYOUTS[0], dtype: Any = torch.float32) -> None:
        self.world = World(layout, dtype=dtype)
        (group,) = self.world.canary.groups
        self.units = BlockUnits(group, UnitStore(SHAPE))
        self.world.canary.units = self.units
        self.source = self.world.start("A", COUNT * PAGE + 4)
        assert self.world.forward({"A": 1}) == []
        self.blocks = self.world.blocks(COUNT)
        self.load = Load(
            rid="B",
            tokens=np.array(self.world.tokens["A"][: COUNT * PAGE]),
            salt=0,
            start=0,
            computed=COUNT * PAGE,
            blocks=self.blocks,
            is_ahead=True,
        )

    def take_noted(self) -> None:
        """Keep the units that are on their way to the host."""
        while self.units._noted:
            self.units._take_noted()

    def block(self, layer: int, number: int) -> torch.Tensor:
        kv = self.world.pool.layers[layer]
        return kv.select(page_axis(kv, PAGES, "layer"), number)

    def copy(self, source: int, target: int) -> None:
        for layer in range(LAYERS):
            self.block(layer, target).copy_(self.block(layer, source))

    def copy_all(self) -> None:
        for source, target in zip(self.source, self.blocks, strict=False):
            self.copy(source, target)

    def damages(self) -> list[tuple[Reason, int, int, int]]:
        self.units.expect([self.load])
        self.copy_all()
        return self.compared()

    def compared(self) -> list[tuple[Reason, int, int, int]]:
        found = self.units.collect(self.units.arrive(self.load))
        return [(d.reason, d.slot, d.position, d.layer) for d in found]

    def run_b(self, computed: int = COUNT * PAGE, *, more: int = 3) -> list[Any]:
        """B's first step, as the scheduler orders it, with more tokens than loaded."""
        tokens = [*self.load.tokens.tolist(), *range(5, 5 + more)]
        blocks = [*self.blocks, *self.world.blocks(2)]
        new = self.world.admission("B", tokens, blocks, computed=computed)
        rows = {"B": len(tokens) - computed}
        return list(self.world.forward(rows, admitted=[new]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_intact_load_is_read_without_an_alarm(layout: str, dtype: Any) -> None:
    loading = Loading(layout, dtype)
    assert loading.damages() == []
    assert loading.run_b() == []
    for _ in range(LAYERS):
        assert loading.world.forward({"B": 1, "A": 1}) == []


def test_the_last_token_of_a_request_is_computed_again() -> None:
    """A prompt of whole blocks, of which all are loaded."""
    loading = Loading()
    computed = COUNT * PAGE - 1
    loading.load = dataclasses.replace(loading.load, computed=computed)
    assert loading.damages() == []
    assert loading.run_b(computed, more=0) == []
    for _ in range(LAYERS):
        assert loading.world.forward({"B": 1, "A": 1}) == []


def test_what_is_being_loaded_cannot_be_read() -> None:
    loading = Loading()
    loading.units.expect([loading.load])
    loading.copy_all()
    found = loading.run_b()
    assert {(rid, reason) for rid, _, _, reason in found} == {("B", "verify_freed")}
    assert {slot for _, slot, _, _ in found} == {
        block * PAGE + i for block in loading.blocks for i in range(PAGE)
    }


def flip(loading: Loading) -> None:
    loading.block(1, loading.blocks[1]).flatten()[0] += 1


def leave_layer(loading: Loading) -> None:
    loading.block(2, loading.blocks[0]).zero_()


def load_nothing(loading: Loading) -> None:
    for layer in range(LAYERS):
        loading.block(layer, loading.blocks[0]).zero_()


def swap(loading: Loading) -> None:
    loading.copy(loading.source[0], loading.blocks[1])
    loading.copy(loading.source[1], loading.blocks[0])


def forget(loading: Loading) -> None:
    loading.take_noted()
    loading.units.store = UnitStore(SHAPE)


FAULTS: dict[Callable[[Loading], None], list[tuple[Reason, int, int]]] = {
    flip: [(Reason.TIER_BYTES, 1, 1)],
    leave_layer: [(Reason.TIER_BYTES, 0, 2)],
    load_nothing: [(Reason.TIER_BYTES, 0, 0)],
    swap: [(Reason.TIER_IDENTITY, 0, -1), (Reason.TIER_IDENTITY, 1, -1)],
    forget: [(Reason.TIER_INCOMPLETE, 0, -1), (Reason.TIER_INCOMPLETE, 1, -1)],
}
"""Reason, number of the block and layer that are due."""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_each_damage_is_named(fault: Callable[[Loading], None]) -> None:
    loading = Loading()
    loading.units.expect([loading.load])
    loading.copy_all()
    fault(loading)
    found = loading.compared()
    due = [
        (reason, loading.blocks[number] * PAGE, number * PAGE, layer)
        for reason, number, layer in FAULTS[fault]
    ]
    assert found == due
    assert loading.units.compared == COUNT and loading.units.damaged == len(due)
    # A forward that was begun with them anyway reports nothing more.
    assert loading.run_b() == []


def test_a_block_in_part_has_no_record() -> None:
    loading = Loading()
    tokens = loading.load.tokens[:-3]
    loading.load = dataclasses.replace(
        loading.load, tokens=tokens, computed=len(tokens)
    )
    reason, *_ = (each[0] for each in loading.damages())
    assert reason is Reason.TIER_INCOMPLETE


def test_other_rounding_of_the_same_tokens_is_also_intact() -> None:
    """The engine's store keeps what it got first; the same tokens computed again have
    other bytes."""
    loading = Loading()
    tokens = loading.world.tokens["A"][:20]
    blocks = loading.world.blocks(3)
    for rid in "CDEFGH"[: REVISIONS + 2]:
        new = loading.world.admission(rid, tokens, blocks)
        assert loading.world.forward({rid: 20}, admitted=[new]) == []
        loading.world.forward({"A": 1}, released=[rid])
    assert loading.damages() == []


def test_what_a_preempted_request_filled_is_recorded_at_once() -> None:
    """vLLM's first runner hears of a preemption when the request comes back, and its
    blocks have other owners by then."""
    loading = Loading()
    world, units = loading.world, loading.units
    loading.take_noted()
    known = set(units.store._units)
    for _ in range(3):
        assert world.forward({"A": 1}) == []
    # A has filled its third block.
    third = world.tables["A"][2]
    world.canary.plan(Step())  # no forward
    loading.take_noted()
    (key,) = units.store._units.keys() - known
    # Another request fills a part of that block, and A comes back.
    new = world.admission("C", [1, 2, 3], [third])
    assert world.forward({"C": 3}, admitted=[new]) == []
    tokens = world.tokens["A"]
    again = world.admission("A", tokens, world.blocks(5), computed=0)
    assert world.forward({"A": len(tokens)}, admitted=[again]) == []
    assert len(units.store.get(key)) == 1
    assert world.forward({"A": 1}) == []
    loading.take_noted()
    assert len(units.store.get(key)) == 2  # computed twice


def turn_back(loading: Loading, *, by: int) -> list[Any]:
    """The scheduler lowers B's computed tokens to those of `by` blocks."""
    world = loading.world
    world.computed["B"] = by * PAGE
    del world.tokens["B"][COUNT * PAGE + 3 :]
    return list(world.forward({"B": len(world.tokens["B"]) - by * PAGE}))


@pytest.mark.parametrize("is_late", [False, True])
def test_a_damaged_load_is_computed_again(is_late: bool) -> None:
    """B was scheduled with blocks that turn out damaged, and once more before the
    scheduler heard of that."""
    loading = Loading()
    loading.units.expect([loading.load])
    loading.copy_all()
    flip(loading)
    arrived = loading.units.arrive(loading.load)
    assert loading.run_b() == []
    (damage,) = loading.units.collect(arrived)
    canary = loading.world.canary
    canary.ledger.doubt([damage.block])
    step = canary.steps
    if is_late:
        for _ in range(PAGE):
            assert loading.world.forward({"B": 1}) == []
    loading.take_noted()
    stored = dict(loading.units.store._units)
    assert turn_back(loading, by=1) == []
    loading.take_noted()
    # What B computed from the damaged block is not recorded as its tokens' KV.
    assert loading.units.store._units.keys() == stored.keys()
    # A result of a step before arrives late, and is not a token of B.
    known = list(canary.ledger["B"].tokens)
    canary.note_tokens("B", [3], step=step)
    assert canary.ledger["B"].tokens == known
    for _ in range(PAGE):
        assert loading.world.forward({"B": 1, "A": 1}) == []
    loading.take_noted()
    assert loading.units.store._units.keys() > stored.keys()


# -- the store -------------------------------------------------------------------------


def words(number: int) -> Any:
    return np.arange(SHAPE.words, dtype=np.int64) + number


def test_files_are_read_by_other_processes(tmp_path: Path) -> None:
    one, two = UnitStore(SHAPE, tmp_path), UnitStore(SHAPE, tmp_path)
    one.put([(7, words(1)), (-8, words(2))])
    assert [list(w) for w in two.get(-8)] == [list(words(2))]
    one.put([(9, words(3))])
    assert len(two.get(9)) == 1 and len(two.get(7)) == 1
    assert two.get(10) == () and two.key_of(words(3)) == 9
    other = UnitStore(dataclasses.replace(SHAPE, digest=bytes(32)), tmp_path)
    assert other.get(7) == () and other.others() == 1
    assert UnitStore(dataclasses.replace(SHAPE, rank=1), tmp_path).get(7) == ()


def test_damaged_files_are_no_records(tmp_path: Path) -> None:
    UnitStore(SHAPE, tmp_path).put([(1, words(1)), (2, words(2)), (3, words(3))])
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    size = 8 * (SHAPE.words + 2)
    data[-2 * size + 20] ^= 1
    path.write_bytes(data[:-3])
    store = UnitStore(SHAPE, tmp_path)
    assert len(store.get(1)) == 1
    assert store.get(2) == () and store.get(3) == ()
    # The rest of it comes later.
    with path.open("ab") as file:
        file.write(data[-3:])
    assert len(store.get(3)) == 1
    path.write_bytes(struct.pack("<q", 0) + data[8:])
    assert UnitStore(SHAPE, tmp_path).get(1) == ()


def test_a_full_disk_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "gone"
    store = UnitStore(SHAPE, folder)
    for number in range(3):
        store.put([(number, words(number))])
    assert len(store.get(2)) == 1
    assert caplog.text.count("no longer written to KV_CANARY_UNITS_DIR") == 1


def test_the_oldest_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_store, "MAX_UNITS", 4)
    store = UnitStore(SHAPE, tmp_path)
    for number in range(13):
        store.put([(number, words(number))])
    assert store.get(12) and store.get(9)
    assert len(list(tmp_path.iterdir())) == 2
    for number in range(20, 20 + REVISIONS + 1):
        store.put([(12, words(number))])
    revisions = [int(w[0]) for w in store.get(12)]
    assert revisions == [12, *range(22, 25)]


# -- vLLM's two objects ----------------------------------------------------------------


class Connector:
    """A connector without vLLM; `loads` is what `start_load_kv` does."""

    def __init__(self, *, ahead: bool, loads: Callable[[], None]) -> None:
        self.ahead, self.loads = ahead, loads
        self.waited: list[str] = []
        self.failed: set[int] = set()
        self.ended: set[str] = set()

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        return COUNT * PAGE, self.ahead

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        return

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return SimpleNamespace()

    def register_kv_caches(self, kv_caches: Any) -> None:
        return

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        return

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.loads()
        self.ended = {"B"} if self.ahead else set()

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.waited.append(layer_name)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        ended, self.ended = self.ended, set()
        return SimpleNamespace(finished_recving=ended)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self.failed = self.failed, set()
        return {77, *failed}


class Transfer:
    """A connector's two halves around a Loading."""

    def __init__(self, *, ahead: bool) -> None:
        self.loading = Loading()
        self.connector = Connector(ahead=ahead, loads=self.loading.copy_all)
        SchedulerLoads(self.connector, PAGE)
        self.worker = WorkerLoads(self.connector)
        self.worker.canary = self.loading.world.canary
        self.connector.register_kv_caches({"layer 0": None, "layer 1": None})
        self.request = SimpleNamespace(
            request_id="B",
            all_token_ids=[*self.loading.load.tokens.tolist(), 5, 6, 7],
            lora_request=None,
            cache_salt=None,
            num_preemptions=0,
        )

    def plan(self) -> Any:
        request = self.request
        numbers = [*self.loading.blocks, 20]
        blocks = SimpleNamespace(get_block_ids=lambda: (numbers,))
        found, _ = self.connector.get_num_new_matched_tokens(request, 0)
        self.connector.update_state_after_alloc(request, blocks, found)
        self.connector.update_state_after_alloc(request, blocks, 0)
        return self.connector.build_connector_meta(None)

    def results(self, finished: set[str] | None = None) -> tuple[set[str], set[int]]:
        """Of two calls, because a GPU may have compared nothing at the first."""
        recving, damaged = set(), set()
        for _ in range(2):
            results = self.connector.get_transfer_results(finished or set())
            recving |= results.finished_recving
            damaged |= self.connector.get_block_ids_with_load_errors()
            finished = None
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        return recving, damaged


def test_loads_for_this_forward() -> None:
    transfer = Transfer(ahead=False)
    transfer.connector.bind_connector_metadata(transfer.plan())
    transfer.connector.start_load_kv(None)
    # They are waited for before they are compared, and layers do not wait again.
    assert transfer.connector.waited == ["layer 0", "layer 1"]
    transfer.connector.wait_for_layer_load("layer 1")
    assert transfer.connector.waited == ["layer 0", "layer 1"]
    assert transfer.loading.run_b() == []
    assert transfer.results() == (set(), {77})
    assert transfer.loading.units.compared == COUNT


@pytest.mark.parametrize("ahead", [False, True])
def test_a_damaged_block_is_taken_back(ahead: bool) -> None:
    transfer = Transfer(ahead=ahead)
    loading, connector = transfer.loading, transfer.connector

    def damaged() -> None:
        loading.copy_all()
        flip(loading)

    connector.loads = damaged
    connector.bind_connector_metadata(transfer.plan())
    connector.start_load_kv(None)
    recving, invalid = transfer.results()
    assert recving == ({"B"} if ahead else set())
    assert invalid == {loading.blocks[1], 77}
    (incident,) = loading.world.canary.reporter.incidents
    (violation,) = incident["violations"]
    assert violation["rid"] == "B" and violation["reasons"] == ["tier_bytes"]
    assert violation["slot"] == loading.blocks[1] * PAGE
    assert violation["sender"].endswith("1 slots differ, first in layer 1")
    connector.bind_connector_metadata(connector.build_connector_meta(None))
    assert transfer.results() == (set(), {77})


@pytest.mark.parametrize("ahead", [False, True])
def test_what_the_connector_knows_to_have_failed_is_no_damage(ahead: bool) -> None:
    transfer = Transfer(ahead=ahead)
    connector, loading = transfer.connector, transfer.loading
    connector.loads = lambda: None
    connector.failed = set(loading.blocks)
    connector.bind_connector_metadata(transfer.plan())
    connector.start_load_kv(None)
    recving, invalid = transfer.results()
    assert invalid == {*loading.blocks, 77} and recving == ({"B"} if ahead else set())
    assert not loading.world.canary.reporter.incidents


def with_late_results(
    transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> list[bool]:
    """Let comparisons arrive when the one flag that is returned is set."""
    arrive, is_there = transfer.loading.units.arrive, [False]
    event = SimpleNamespace(query=lambda: is_there[0], synchronize=lambda: None)

    def late(load: Load) -> Any:
        arrived = arrive(load)
        arrived.sent.array()  # waits; the event that is asked is another one
        return arrived._replace(sent=arrived.sent._replace(event=event))

    monkeypatch.setattr(transfer.loading.units, "arrive", late)
    return is_there


def test_a_known_failure_is_no_damage_when_it_is_compared_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A connector names what failed only once, before the device has compared it."""
    transfer = Transfer(ahead=True)
    connector, loading = transfer.connector, transfer.loading
    is_there = with_late_results(transfer, monkeypatch)
    connector.loads = lambda: None
    connector.failed = set(loading.blocks)
    connector.bind_connector_metadata(transfer.plan())
    connector.start_load_kv(None)
    assert transfer.results() == (set(), {*loading.blocks, 77})
    is_there[0] = True
    assert transfer.results()[0] == {"B"}
    assert not loading.world.canary.reporter.incidents


def test_a_request_waits_until_its_blocks_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transfer = Transfer(ahead=True)
    connector = transfer.connector
    is_there = with_late_results(transfer, monkeypatch)
    connector.bind_connector_metadata(transfer.plan())
    connector.start_load_kv(None)
    assert transfer.results()[0] == set()
    is_there[0] = True
    assert transfer.results()[0] == {"B"}
    assert transfer.results()[0] == set()


def test_an_aborted_request_is_not_waited_for() -> None:
    transfer = Transfer(ahead=True)
    connector = transfer.connector
    connector.bind_connector_metadata(transfer.plan())
    connector.start_load_kv(None)
    assert transfer.results({"B"})[0] == {"B"}
    assert transfer.loading.units.compared == 0


def test_a_load_that_failed_is_not_tried_again() -> None:
    """vLLM asks again if not even the first block was intact."""
    transfer = Transfer(ahead=True)
    transfer.plan()
    ask = transfer.connector.get_num_new_matched_tokens
    assert ask(transfer.request, 0) == (0, False)
    assert ask(transfer.request, PAGE) == (COUNT * PAGE, True)
    transfer.request.num_preemptions = 1
    assert ask(transfer.request, 0) == (COUNT * PAGE, True)


def test_a_scheduler_without_the_plugin_is_an_error() -> None:
    worker = Transfer(ahead=False).connector
    with pytest.raises(RuntimeError, match=r"the scheduler's process does not load"):
        worker.bind_connector_metadata(SimpleNamespace())


@dataclasses.dataclass
class Message:
    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


@dataclasses.dataclass
class Output:
    scheduled_new_reqs: list[Message]
    scheduled_cached_reqs: Any = None
    finished_req_ids: set[str] = dataclasses.field(default_factory=set)
    preempted_req_ids: set[str] | None = None


def test_the_second_runner_gets_a_request_again() -> None:
    requests = NewRequests()
    requests.note(Output([Message("B", ([4, 5],), 16)]))
    cached = SimpleNamespace(req_ids=["A", "B"], new_block_ids=[None, ([9],)])
    request: Any = SimpleNamespace(rid="B", blocks=[[4, 5, 9]], computed=8)
    output = Output([], cached)
    assert requests.again(output, []) is output
    again = requests.again(output, [request])
    assert again.scheduled_new_reqs == [Message("B", ([4, 5],), 8)]
    requests.note(Output([], finished_req_ids={"B"}))
    assert requests._messages == {}


def test_steps_that_run_do_not_count_for_a_request_that_is_turned_back() -> None:
    """Else vLLM takes the token of the next step for the one that it computes again."""

    def request() -> SimpleNamespace:
        return SimpleNamespace(
            drop_stale_output=False,
            num_stale_output_tokens=0,
            num_in_flight_tokens=14,
            num_output_placeholders=2,
        )

    for recomputes in (True, False):
        both = {"A": request(), "B": request()}
        scheduler = SimpleNamespace(
            requests=both, recompute_kv_load_failures=recomputes
        )
        assert discarding_steps(lambda *_: {"B"}, scheduler, {7}, {}) == {"B"}
        assert both["A"] == request()
        turned_back = SimpleNamespace(
            drop_stale_output=True,
            num_stale_output_tokens=14,
            num_in_flight_tokens=14,
            num_output_placeholders=0,
        )
        # Others end with an error.
        assert both["B"] == (turned_back if recomputes else request())


@pytest.mark.parametrize("places", [None, {}, {"A": 0, "B": 1}])
def test_the_first_runner_takes_no_token_of_a_discarded_step(
    places: dict[str, int] | None,
) -> None:
    runner = SimpleNamespace(input_batch=SimpleNamespace(prev_req_id_to_index=places))
    before = dict(places or {})
    forget_sampled(runner, [])
    assert (places or {}) == before
    turned_back: Any = [SimpleNamespace(rid="B"), SimpleNamespace(rid="C")]
    forget_sampled(runner, turned_back)
    assert (places or {}) == {rid: at for rid, at in before.items() if rid == "A"}
