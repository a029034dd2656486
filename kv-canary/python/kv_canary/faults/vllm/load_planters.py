"""Plants faults in what a connector keeps and loads, in a running vLLM."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kv_canary.engines.hooks import wrap_of
from kv_canary.engines.unit_store import UnitStore
from kv_canary.faults.catalogue import by_host_name
from kv_canary.faults.fault import HostEngine, Planted
from kv_canary.faults.vllm.host import BLOCK, VllmHost, random_tokens
from kv_canary.faults.vllm.planters import Outcome, in_block, outcome_of

if TYPE_CHECKING:
    from torch import Tensor

    from kv_canary.engines.block_units import Load
    from kv_canary.faults.vllm.runners import Undo

Stored = list[tuple[Any, list["Tensor"]]]
"""(hash, a block of each layer) of a prompt's blocks, in order."""
Plant = Callable[[VllmHost, Stored, int, random.Random], "Undo"]
"""Damages what is stored of block number `index`, or how it is loaded."""
NUM_BLOCKS = 3


def run_load_fault(host: VllmHost, name: str, seed: int) -> Outcome:
    """Load a prompt whose blocks are damaged, and return what is reported about it. It
    only counts as named if the answer is right, too."""
    rng = random.Random(f"{name} {seed}")
    store = host.block_store
    prompt = random_tokens(rng, NUM_BLOCKS * BLOCK + rng.randrange(1, BLOCK))
    host.reset()
    store.BLOCKS.clear()
    first = host.add(prompt, new_tokens=8)
    host.drain()
    host.reset()
    # Longer than the prompt's full blocks, if an answer reached the end of one.
    stored = list(store.BLOCKS.items())[:NUM_BLOCKS]
    index = rng.randrange(NUM_BLOCKS)
    with torch.inference_mode():
        undo = PLANTERS[name](host, stored, index, rng)
    loads: list[Load] = []

    def expect(method: Any, expected: Sequence[Load]) -> None:
        loads.extend(expected)
        method(expected)

    stop = wrap_of(host.canary.units, "expect", expect)
    again = host.add(prompt, new_tokens=8)
    try:
        host.drain()
    finally:
        undo()
        stop()
    # vLLM may compute the tokens in other blocks.
    (load,) = loads
    due = in_block(host, load.rid, load.blocks[index], index)
    outcome = outcome_of(host, due)
    if host.outputs[again] != host.outputs[first]:
        lines = ["the answer is another one", *outcome.lines]
        return dataclasses.replace(outcome, named=False, lines=lines)
    return outcome


def _nothing() -> None:
    pass


def bit_of_a_stored_block(
    host: VllmHost, stored: Stored, index: int, rng: random.Random
) -> Undo:
    layer = rng.choice(stored[index][1]).view(torch.int32).view(-1)
    layer[rng.randrange(len(layer))] ^= 1 << rng.randrange(20)
    return _nothing


def block_that_is_not_loaded(
    host: VllmHost, stored: Stored, index: int, rng: random.Random
) -> Undo:
    """The device keeps what lay there before."""
    host.block_store.BLOCKS[stored[index][0]] = []
    for layer in host.canary.groups[0].group.layers:
        layer.zero_()  # no request runs
    return _nothing


def rows_cut_short(
    host: VllmHost, stored: Stored, index: int, rng: random.Random
) -> Undo:
    """The last value of each row stays behind."""
    for layer in stored[index][1]:
        layer[..., -1] = 0
    return _nothing


def layer_left_behind(
    host: VllmHost, stored: Stored, index: int, rng: random.Random
) -> Undo:
    stored[index][1][rng.randrange(len(stored[index][1]))].zero_()
    return _nothing


def swapped_blocks(
    host: VllmHost, stored: Stored, index: int, rng: random.Random
) -> Undo:
    other = (index + 1) % NUM_BLOCKS
    blocks = host.block_store.BLOCKS
    (one, its_bytes), (two, other_bytes) = stored[index], stored[other]
    blocks[one], blocks[two] = other_bytes, its_bytes
    return _nothing


def stored_block_of_another_request(
    host: VllmHost, stored: Stored, index: int, rng: random.Random
) -> Undo:
    host.add(random_tokens(rng, (index + 1) * BLOCK + 1), new_tokens=1)
    host.drain()
    host.reset()
    blocks = host.block_store.BLOCKS
    blocks[stored[index][0]] = list(blocks.values())[NUM_BLOCKS + index]
    return _nothing


def block_without_a_record(
    host: VllmHost, stored: Stored, index: int, rng: random.Random
) -> Undo:
    """It was stored by an engine with other weights, whose records do not count."""
    units = host.canary.units
    assert units is not None
    ours = units.store
    units.store = UnitStore(dataclasses.replace(ours.shape, digest=bytes(32)))

    def undo() -> None:
        units.store = ours

    return undo


PLANTERS: Mapping[str, Plant] = {
    name: globals()[name.replace(" ", "_")]
    for name, fault in by_host_name(HostEngine.VLLM).items()
    if fault.planted is Planted.TIER
}
"""By fault name, as in `planters.py`."""
