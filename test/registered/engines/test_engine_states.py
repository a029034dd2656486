"""Recurrent states in an engine's blocks: prefixes, copies to the next block, bytes."""

from __future__ import annotations

import pytest
import torch
from engine_states import LAYERS, MORE_STATES, STATES, StateWorld

from kv_canary.engines.chosen import is_chosen
from kv_canary.records import Counter
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=4, suite="cpu")
register_cuda_ci(est_time=30, suite="cuda")


def start(world: StateWorld, rid: str = "A", count: int = 20) -> None:
    """A request of `count` tokens, prefilled in two chunks; its first two blocks and
    their states can be cached."""
    world.admit(rid, [world.random.randrange(1000) for _ in range(count)])
    assert world.forward({rid: 16}) == []
    assert world.forward({rid: count - 16}) == []


@pytest.mark.parametrize("is_one_block", [True, False])
@pytest.mark.parametrize("real_data", ["none", "partial", "rotate", "all"])
def test_states_that_move_on_are_silent(real_data: str, is_one_block: bool) -> None:
    """Through block after block; two requests, one ends, and its blocks are used."""
    world = StateWorld(real_data=real_data, is_one_block=is_one_block)
    start(world)
    world.admit("B", [1, 2, 3, 4, 5, 6, 7])
    assert world.forward({"B": 7, "A": 1}) == []
    for _ in range(7):
        assert world.forward({"B": 1, "A": 1}) == []
    if not is_one_block:
        world.admit("C", [*world.tokens["A"][:16], 1, 2, 3], world.cached("A", 2))
        assert world.forward({"C": 3, "A": 1}) == []
    world._free += [b for of_group in world.blocks.pop("B") for b in of_group if b]
    world.admit("D", [5, 6, 7])
    assert world.forward({"D": 3, "A": 1}, released=["B"]) == []
    assert world.forward({"D": 1, "A": 1}) == []
    # Two groups of one KV group: each state that is read counts as one slot.
    assert world.canary.counters()[Counter.VERIFIED_SLOTS] > 300


def test_a_cached_state_is_checked_for_its_prefix() -> None:
    """Another prefix's; one of a later token; one that holds nothing."""
    due = {
        "other prefix": "verify_lineage",
        "later": "verify_lineage+verify_position",
        "nothing": "verify_freed",
    }
    for case, reason in due.items():
        world = StateWorld()
        start(world)
        start(world, "B")
        cached = world.cached("A", 2)
        wrong = {
            "other prefix": world.blocks["B"][STATES][1],
            "later": world.block("A"),
            "nothing": world._free[0],
        }
        cached[STATES][1] = wrong[case]
        world.admit("C", [*world.tokens["A"][:16], 1, 2, 3], cached)
        found = world.forward({"C": 3})
        assert found == [("C", world.block("C"), 15, reason)], case


@pytest.mark.parametrize("group", LAYERS)
def test_layers_that_get_another_block_are_named(group: int) -> None:
    world = StateWorld()
    start(world)
    start(world, "B")
    foreign = world.given[group, "A"] = world.block("B", group)
    (found, *_) = world.forward({"A": 1})
    assert found[:3] == ("A", foreign, 19)
    assert {"read_set", "row_owner", "verify_lineage"} <= set(found[3].split("+"))
    (said, *_) = world.canary.reporter.incidents[-1]["violations"]
    assert said["diagnosis"] == "wrong state slot" and said["group"] == "state"
    # And what it left there, to whom it belongs.
    world.given.clear()
    (found, *_) = world.forward({"B": 1})
    assert found[:3] == ("B", foreign, 19) and "row_owner" in found[3]


@pytest.mark.parametrize("group", LAYERS)
def test_any_bit_of_a_state_is_named_with_its_layer(group: int) -> None:
    world = StateWorld()
    start(world)
    for number, layer in zip(LAYERS[group], world.parts[group], strict=True):
        for tensor in layer:
            words = tensor[world.block("A", group)].view(-1).view(torch.int32)
            words[world.random.randrange(len(words))] ^= 1 << 17
            due = ("A", world.block("A", group), world.computed["A"] - 1)
            assert world.forward({"A": 1}) == [(*due, "verify_real_kv")]
            (said,) = world.canary.reporter.incidents[-1]["violations"]
            assert said["layer"] == number
            assert said["owner"] == "request 'A'"


def test_a_rotation_names_what_lies_in_its_run() -> None:
    """A state that is overwritten at once, a bit where it is the run's turn."""
    world = StateWorld(real_data="rotate")
    start(world)
    assert world.canary.states is not None and world.canary.states.parts is not None
    (run, *_), turn = world.canary.states.parts.runs[STATES][1:], 3
    assert run < 1600
    found = []
    for _ in range(2 * -(-1600 // run)):
        world.parts[STATES][0][1][world.block("A")].view(-1)[turn * run] += 1
        found += world.forward({"A": 1})
    # Twice in two rotations; and where a block ended, whose sum is over all bytes.
    assert 2 <= len(found) <= 4
    for tensor in world.tensors():
        tensor[world.block("A")].normal_()
    assert len(world.forward({"A": 1})) == 1


@pytest.mark.parametrize("part", [0, 1])
def test_a_state_that_was_not_copied_to_its_next_block_is_named(part: int) -> None:
    world = StateWorld()
    start(world)
    world.admit("C", [*world.tokens["A"][:16], 1, 2, 3], world.cached("A", 2))

    def forget() -> None:
        for layer in world.parts[STATES]:
            layer[part][world.blocks["C"][STATES][2]] = 0

    world.before_read = forget
    due = ("C", world.blocks["A"], 15, "verify_real_kv")
    (found,) = world.forward({"C": 3})
    assert (found[0], *found[2:]) == (due[0], *due[2:])
    assert found[1] == world.block("C")
    (said,) = world.canary.reporter.incidents[-1]["violations"]
    assert said["diagnosis"] == "bytes of a copied state differ"


def test_a_state_that_is_given_away_is_named() -> None:
    world = StateWorld(is_one_block=True)
    start(world)
    mine = world.block("A")
    world._free.append(mine)
    world.admit("B", [1, 2, 3])
    # B takes blocks from the end of the list, one per group: its state is A's.
    found = world.forward({"B": 3, "A": 1})
    assert ("A", mine, 19, "verify_freed") in found


def test_a_state_that_is_not_finite_is_named() -> None:
    world = StateWorld(real_data="all")
    start(world)
    world.wild.add("A")
    found = world.forward({"A": 1})
    assert found == [("A", world.block("A", g), 20, "state_not_finite") for g in LAYERS]
    for said, (layer, *_) in zip(
        world.canary.reporter.incidents[-1]["violations"], LAYERS.values(), strict=True
    ):
        assert said["layer"] == layer
        assert said["diagnosis"] == "state that is not finite"


def test_requests_outside_of_the_sample_are_not_verified() -> None:
    names = [f"r{i}" for i in range(40)]
    chosen = next(name for name in names if is_chosen(name, 0.5))
    other = next(name for name in names if not is_chosen(name, 0.5))
    world = StateWorld(real_data="all", sample=0.5)
    for rid in (chosen, other):
        start(world, rid)
        for tensor in world.tensors(MORE_STATES):
            tensor[world.block(rid, MORE_STATES)] += 1
    found = world.forward({other: 1, chosen: 1})
    assert [entry[0] for entry in found] == [chosen]


@pytest.mark.parametrize("group", LAYERS)
def test_a_sweep_finds_damage_to_a_state_that_nobody_reads(group: int) -> None:
    """All bytes of it, also with `rotate`; and a row that goes on is left alone."""
    world = StateWorld(real_data="rotate", sweep_interval=1)
    start(world)
    start(world, "B", 17)
    cached = world.blocks["A"][group][1]
    assert world.forward({"B": 1}, released=["A"]) == []
    world.parts[group][0][1][cached].view(-1)[-1] += 1
    assert world.forward({"B": 1}) == [(None, cached, 15, "verify_real_kv")]
    (said,) = world.canary.reporter.incidents[-1]["violations"]
    assert (said["group"], said["launch"]) == ("state", "sweep")
