"""The canary of an engine's worker: clean steps are silent, faults are named; rows that
share blocks within a forward; blocks that change hands."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from paged_world import DIM, LATENT, LAYERS, LAYOUTS, PAGE, PAGES, World

from kv_canary import launches
from kv_canary.engines.chosen import is_chosen
from kv_canary.engines.settings import Mode
from kv_canary.engines.step import RowStep, Step
from kv_canary.op import force_reference
from kv_canary.pool_checks import PoolChecks
from kv_canary.records import Counter
from kv_canary.reporter import CanaryViolation
from kv_canary.state import ARENA_PARTS, CanaryState
from kv_canary.view import ForwardView
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=4, suite="cpu")
register_cuda_ci(est_time=30, suite="cuda")

each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def share_in_one_forward(world: World) -> list[object]:
    """A and B begin in one step; B's first two blocks are A's, which A writes now."""
    tokens = list(range(100, 120))
    blocks = world.blocks(4)
    a = world.admission("A", tokens, blocks)
    own = world.blocks(2)
    b = world.admission("B", [*tokens[:16], 7, 8], blocks[:2] + own, computed=16)
    return list(world.forward({"A": 20, "B": 2}, admitted=[a, b]))


@each_layout
@pytest.mark.parametrize("real_data", ["none", "partial", "rotate", "all"])
def test_rows_that_share_blocks_are_silent(layout: str, real_data: str) -> None:
    world = World(layout, real_data=real_data, dtype=torch.bfloat16)
    assert share_in_one_forward(world) == []
    for _ in range(5):
        assert world.forward({"B": 1, "A": 1}) == []
    verified = world.canary.counters()[Counter.VERIFIED_SLOTS]
    assert verified == 16 + sum(18 + i + 20 + i for i in range(5))


@pytest.mark.parametrize("real_data", ["partial", "rotate", "all"])
def test_a_latent_is_compared_as_k_and_v_are(real_data: str) -> None:
    """Its two parts have other sizes than its halves, which take the places of K and
    V."""
    world = World(LATENT, real_data=real_data, dtype=torch.bfloat16)
    assert share_in_one_forward(world) == []
    for _ in range(LAYERS):
        assert world.forward({"B": 1, "A": 1}) == []
    slot = world.slot("A", 3)
    for kv in world.pool.layers:
        kv[slot // PAGE, slot % PAGE, -1] += 1  # of what is rotated
    if real_data != "partial":
        assert {found[:3] for found in world.forward({"A": 1})} == {("A", slot, 3)}
    missing = world.computed["B"]
    found = world.forward({"B": 1}, skipped=[("B", missing)])
    if real_data == "partial" and torch.cuda.is_available():
        # The kernels that verify sample the bytes, and see no skipped store.
        assert found == [("B", slot, 3, "verify_real_kv")]
    else:
        assert ("B", world.slot("B", missing), missing, "write_missing") in found


def test_verifying_before_the_stamp_would_alarm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the order is for: without it, B reads blocks that nobody has written."""
    stamp = launches.stamp
    world = World()
    monkeypatch.setattr(launches, "stamp", lambda *_: None)
    write_tail = launches.write_tail

    def late(state, view, checks, **how):  # type: ignore[no-untyped-def]
        stamp(state, view, checks)
        write_tail(state, view, checks, **how)

    monkeypatch.setattr(launches, "write_tail", late)
    found = share_in_one_forward(world)
    assert ("B", PAGE, 0, "verify_freed") in found


def test_a_device_and_the_reference_agree() -> None:
    """The same steps, a fault among them: the same records and findings."""
    states, found = [], []
    for is_reference in (False, True):
        with force_reference() if is_reference else nullcontext():
            world = World()
            share_in_one_forward(world)
            world.tables["A"][0], world.tables["A"][1] = 2, 1
            found.append(world.forward({"A": 1, "B": 1}))
            states.append(world.canary.groups[0].state)
    assert found[0] == found[1] != []
    # The lineages that a forward makes are the Triton kernels' own.
    for name in ARENA_PARTS.keys() - {"next_lineage"}:
        ours, theirs = (getattr(state, name).tolist() for state in states)
        if name == "ring":
            # Programs of a GPU that run at once report in any order.
            ours, theirs = sorted(ours), sorted(theirs)
        assert ours == theirs, name


def flip_bit(world: World, slot: int, layer: int) -> None:
    """A bit of V of a slot in one layer."""
    kv = world.pool.layers[layer].view(torch.int32)
    index = {
        "one allocation": (slot // PAGE, slot % PAGE, 1, DIM + 3),
        "K before V": (1, slot // PAGE, slot % PAGE, 0, 9),
        "K transposed": (slot // PAGE, 1, 1, slot % PAGE * DIM + 4),
    }[world.pool.layout]
    kv[index] ^= 1 << 30


@each_layout
@pytest.mark.parametrize("layer", range(LAYERS))
def test_any_flipped_bit_is_named_within_a_rotation(layout: str, layer: int) -> None:
    """In the layer's turn, and with the layer."""
    world = World(layout)
    world.start()
    slot = world.slot("A", 5)
    flip_bit(world, slot, layer)
    found = [world.forward({"A": 1}) for _ in range(LAYERS)]
    assert sorted(found) == [[], [], [("A", slot, 5, "verify_real_kv")]]
    (said,) = world.canary.reporter.incidents[-1]["violations"]
    assert said["layer"] == layer and "kv_head" not in said
    assert said["diagnosis"] == "bytes changed in place"


@pytest.mark.parametrize("in_pass", [True, False])
def test_damage_by_an_earlier_layer_of_the_same_pass(in_pass: bool) -> None:
    """Named before its tokens leave if bytes are compared as attention reads them; else
    by the next forward."""
    world = World(real_data="all", in_pass=in_pass)
    world.start()
    slot = world.slot("A", 5)
    world.in_attention[0] = lambda: flip_bit(world, slot, 2)
    due = [("A", slot, 5, "verify_real_kv")]
    assert world.forward({"A": 1}) == (due if in_pass else [])
    world.in_attention.clear()
    assert world.forward({"A": 1}) == ([] if in_pass else due)


def test_a_layer_without_attention_is_compared_all_the_same() -> None:
    world = World(real_data="all", in_pass=True)
    world.start()
    flip_bit(world, world.slot("A", 5), 1)
    group = world.canary.groups[0]
    attend, group.attend = group.attend, lambda layer: None  # type: ignore[method-assign]
    assert len(world.forward({"A": 1})) == 1
    group.attend = attend  # type: ignore[method-assign]


@each_layout
def test_bytes_of_another_block_are_named_as_moved(layout: str) -> None:
    """A whole block is copied over another one, whose records stay."""
    world = World(layout)
    a, b = world.start("A"), world.start("B")
    for kv in world.pool.layers:
        axis = list(kv.shape).index(PAGES)
        kv.select(axis, a[1]).copy_(kv.select(axis, b[0]))
    found = world.forward({"A": 1})
    assert [entry[:3] for entry in found] == [
        ("A", a[1] * PAGE + i, PAGE + i) for i in range(PAGE)
    ]
    for i, said in enumerate(world.canary.reporter.incidents[-1]["violations"]):
        assert said["diagnosis"] == "moved without its record"
        assert said["found"]["bytes_of_slot"] == b[0] * PAGE + i


def test_bytes_that_became_zero_are_not_named_as_moved() -> None:
    world = World()
    blocks = world.start()
    for kv in world.pool.layers:
        kv[blocks[0]] = 0
    assert len(world.forward({"A": 1})) == PAGE
    (said, *_) = world.canary.reporter.incidents[-1]["violations"]
    assert said["diagnosis"] == "bytes changed in place"


@each_layout
def test_an_overwritten_block_is_named(layout: str) -> None:
    world = World(layout)
    blocks = world.start()
    kv = world.pool.layers[1]
    for kv in world.pool.layers:
        axis = list(kv.shape).index(24)
        kv.select(axis, blocks[1]).uniform_(-1, 1)
    due = [("A", blocks[1] * PAGE + i, PAGE + i, "verify_real_kv") for i in range(PAGE)]
    assert world.forward({"A": 1}) == due
    # Nothing but the bytes is in doubt.
    for found in world.canary.reporter.incidents[-1]["violations"]:
        assert found["expected"]["lineage"] == found["found"]["lineage"]


@each_layout
def test_any_flipped_bit_is_named_under_all(layout: str) -> None:
    for layer in range(3):
        world = World(layout, real_data="all")
        world.start()
        slot = world.slot("A", 5)
        kv = world.pool.layers[layer].view(torch.int32)
        index = {
            "one allocation": (slot // PAGE, slot % PAGE, 1, 3),
            "K before V": (1, slot // PAGE, slot % PAGE, 0, 9),
            "K transposed": (slot // PAGE, 1, 0, slot % PAGE + 4 * PAGE),
        }[layout]
        kv[index] ^= 1 << 9
        assert world.forward({"A": 1}) == [("A", slot, 5, "verify_real_kv")]


def test_a_wrong_table_is_named() -> None:
    world = World()
    world.start("A")
    other = world.start("B")
    world.tables["A"][1] = other[1]
    found = world.forward({"A": 1, "B": 1})
    assert {rid for rid, *_ in found} == {"A"}
    assert ("A", other[1] * PAGE, PAGE) in {entry[:3] for entry in found}
    assert all("read_set" in entry[3] for entry in found if entry[2] < 2 * PAGE)


def test_a_short_table_is_named() -> None:
    world = World()
    world.start()
    assert world.forward({"A": 1}, seq_lens={"A": 15}) == [("A", -1, 15, "read_set")]


def test_a_wrong_slot_is_named() -> None:
    world = World()
    world.start()
    found = world.forward({"A": 1}, slots={("A", 20): world.slot("A", 3)})
    assert ("A", world.slot("A", 3), 20, "write_foreign") in found


@each_layout
def test_a_store_that_does_not_happen_is_named(layout: str) -> None:
    world = World(layout)
    world.start()
    found = world.forward({"A": 2}, skipped=[("A", 21)])
    assert found == [("A", world.slot("A", 21), 21, "write_missing")]


def test_a_copy_that_is_announced_takes_its_records_along() -> None:
    for is_announced in (True, False):
        world = World()
        blocks = world.start()
        (copy,) = world.blocks(1)
        for kv in world.pool.layers:
            kv[copy].copy_(kv[blocks[0]])
        table = [copy, *blocks[1:2], *world.blocks(2)]
        b = world.admission("B", [*world.tokens["A"][:16], 5], table, computed=16)
        copies = [(blocks[0], copy)] if is_announced else []
        found = world.forward({"B": 1}, admitted=[b], copies=copies)
        slots = [("B", copy * PAGE + i, i) for i in range(PAGE)]
        assert [entry[:3] for entry in found] == ([] if is_announced else slots)


def test_a_block_with_two_owners_is_named_by_the_first() -> None:
    world = World()
    blocks = world.start()
    b = world.admission("B", [1, 2, 3], [blocks[1]])
    found = world.forward({"A": 1, "B": 3}, admitted=[b])
    assert ("A", blocks[1] * PAGE + 5, PAGE + 5) in {entry[:3] for entry in found}


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_read_of_freed_blocks(is_cached: bool) -> None:
    """Full blocks may stay in the prefix cache; the last one may not."""
    world = World(is_cached=is_cached)
    blocks = world.start()
    b = world.admission("B", [*world.tokens["A"][:16], 5], [*blocks[:2], 9], 16)
    found = world.forward({"B": 1}, released=["A"], admitted=[b])
    assert bool(found) is not is_cached
    assert all(reasons == "verify_freed" for *_, reasons in found)
    tail = world.admission("C", world.tokens["A"][:20], blocks[:3], 19)
    found = world.forward({"C": 1}, admitted=[tail])
    assert ("C", blocks[2] * PAGE, 16, "verify_freed") in found


def test_a_request_that_comes_back_is_silent() -> None:
    """Preempted and resumed: new blocks, a part of the old ones as cached prefix."""
    world = World()
    blocks = world.start()
    world.forward({"A": 1})
    tokens = world.tokens["A"]
    again = world.admission("A", tokens, [*blocks[:2], *world.blocks(2)], computed=16)
    assert world.forward({"A": 5}, admitted=[again]) == []
    assert world.forward({"A": 1}) == []


def test_blocks_that_left_the_window_may_be_anybodys() -> None:
    world = World(window=10)
    blocks = world.start("A", 28)
    b = world.admission("B", list(range(9)), [blocks[1], blocks[0]])
    assert world.forward({"A": 1, "B": 9}, admitted=[b]) == []
    assert world.forward({"A": 1, "B": 1}) == []
    # The request's own, too.
    world.tables["A"].append(blocks[0])
    assert world.forward({"A": 9}, grown=[("A", [[blocks[0]]])]) == []
    assert world.forward({"A": 2}) == []
    # One that has not is read.
    c = world.admission("C", list(range(3)), [blocks[4]])
    found = world.forward({"A": 1, "C": 3}, admitted=[c])
    assert ("A", blocks[4] * PAGE, 32) in {entry[:3] for entry in found}


def test_raise_ends_the_step() -> None:
    world = World(mode=Mode.RAISE)
    world.start()
    with pytest.raises(CanaryViolation, match=r'rid="A" slot_idx=-1 position=4'):
        world.forward({"A": 1}, seq_lens={"A": 4})


def test_a_forward_that_went_past_the_canary_is_an_error() -> None:
    world = World()
    world.start()
    row = RowStep(rid="A", computed=world.computed["A"], scheduled=1)
    world.canary.plan(Step(rows=[row]))
    with pytest.raises(RuntimeError, match="a forward ran unchecked"):
        world.canary.finish()


@pytest.mark.parametrize("real_data", ["rotate", "all"])
def test_a_sweep_finds_damage_that_nobody_reads(real_data: str) -> None:
    world = World(real_data=real_data)
    blocks = world.start()
    world.start("B")
    world.forward({"B": 1}, released=["A"])
    for kv in world.pool.layers:
        kv[blocks[0]].fill_(3.0)
    canary = world.canary.groups[0]
    finding = canary.sweep(4096, world.canary.ledger.held(0))
    assert finding is not None and int(finding.count) == PAGE


def chosen_and_not(probability: float) -> tuple[str, str]:
    """A request that is verified at this probability, and one that is not."""
    rids = [f"request {number}" for number in range(100)]
    chosen = next(rid for rid in rids if is_chosen(rid, probability))
    return chosen, next(rid for rid in rids if not is_chosen(rid, probability))


@pytest.mark.parametrize("real_data", ["none", "rotate", "all"])
def test_a_sample_of_requests_is_verified_and_all_are_recorded(real_data: str) -> None:
    """A request that is not verified is silent when it is damaged; what it stored is
    verified by one that shares it."""
    chosen, other = chosen_and_not(0.5)
    world = World(sample=0.5, real_data=real_data)
    tokens = list(range(100, 120))
    blocks = world.blocks(4)
    first = world.admission(other, tokens, blocks)
    assert world.forward({other: 20}, admitted=[first]) == []
    own = world.blocks(2)
    shared = [*tokens[:16], 7, 8]
    second = world.admission(chosen, shared, blocks[:2] + own, computed=16)
    assert world.forward({other: 1, chosen: 2}, admitted=[second]) == []
    assert world.canary.counters()[Counter.VERIFIED_SLOTS] == 16
    assert world.canary.requests() == (2, 1)
    for rid in (other, chosen):
        world.tables[rid][0], world.tables[rid][1] = 2, 1
    assert world.forward({other: 1}) == []
    found = world.forward({other: 1, chosen: 1})
    assert {rid for rid, *_ in found} == {chosen}
    assert (chosen, 2 * PAGE, 0) in {(rid, slot, at) for rid, slot, at, _ in found}


def test_the_sample_has_its_size_and_grows_with_it() -> None:
    """Each request by itself, and those of a smaller sample are in a larger one."""
    rids = [f"chatcmpl-{number}" for number in range(20_000)]
    smaller: set[str] = set()
    for probability in (0.001, 0.02, 0.5, 1.0):
        taken = {rid for rid in rids if is_chosen(rid, probability)}
        deviation = (len(rids) * probability * (1 - probability)) ** 0.5
        assert abs(len(taken) - len(rids) * probability) <= 4 * deviation
        assert smaller <= taken
        smaller = taken


@pytest.mark.parametrize("real_data", ["none", "partial", "all"])
@pytest.mark.parametrize("window", [None, 16])
def test_a_warm_up_records_and_finds_nothing(
    real_data: str, window: int | None
) -> None:
    fresh, warm = (World(real_data=real_data, window=window) for _ in range(2))
    warm.canary.warm_up()
    states = [world.canary.groups[0].state for world in (fresh, warm)]
    for name in ("head", "tail", "ring_count"):
        assert torch.equal(*(getattr(state, name) for state in states)), name
    for name in ("requests", "expected_lineage"):  # row 0 is padding
        assert torch.equal(*(getattr(state, name)[1:] for state in states)), name
    counters = [world.canary.counters() for world in (fresh, warm)]
    for kind in (Counter.VERIFIED_SLOTS, Counter.TAIL_SLOTS):
        assert counters[0][kind] == counters[1][kind] == 0
    assert warm.canary.forwards == 0
    layers = [torch.stack(list(world.pool.layers)) for world in (fresh, warm)]
    assert torch.equal(layers[0][:, 1:], layers[1][:, 1:])
    warm.start()
    assert warm.forward({"A": 1}) == []


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_vectors_of_a_forward_are_aligned(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton compiles a kernel again for pointers that are not multiples of 16, so for
    any number of rows they are."""
    world, write_head = World(), launches.write_head
    seen: list[int] = []

    def noted(state: CanaryState, view: ForwardView, checks: PoolChecks) -> None:
        seen.extend(t.data_ptr() % 16 for t in view.tensors if t is not None)
        write_head(state, view, checks)

    monkeypatch.setattr(launches, "write_head", noted)
    new = [
        world.admission(f"request {n}", list(range(5)), world.blocks(2))
        for n in range(rows)
    ]
    assert world.forward({each.rid: 5 for each in new}, admitted=new) == []
    assert world.forward({each.rid: 1 for each in new}) == []
    assert len(seen) >= 16 and set(seen) == {0}
