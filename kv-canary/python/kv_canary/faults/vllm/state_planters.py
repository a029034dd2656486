"""Plants faults in the recurrent states of a running vLLM."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from kv_canary.engines.hooks import wrap_of
from kv_canary.faults.catalogue import by_host_name
from kv_canary.faults.fault import HostEngine, SlotGroup
from kv_canary.faults.vllm.host import BLOCK, VllmHost, random_tokens
from kv_canary.faults.vllm.planters import Outcome, Planted, Read, run_planted, running

if TYPE_CHECKING:
    from torch import Tensor

    from kv_canary.engines.block_ledger import LedgerRequest
    from kv_canary.engines.state_canary import StatePool
    from kv_canary.faults.vllm.runners import Undo

_STEPS = 4
_INDICES = (
    "non_spec_state_indices_tensor",
    "state_indices_tensor",
    "state_indices_tensor_d",
)
Bytes = list["Tensor"]
"""Of one state, by tensor of a layer."""


def run_state_fault(host: VllmHost, name: str, seed: int) -> Outcome:
    """See `planters.run_fault`."""
    return run_planted(host, PLANTERS[name], name, seed)


def _pool(host: VllmHost) -> StatePool:
    states = host.canary.states
    assert states is not None
    return states.pool


def _blocks(host: VllmHost, request: LedgerRequest) -> list[int]:
    """A request's blocks of the first group of states."""
    return request.blocks[_pool(host).groups[0].number]


def _block(host: VllmHost, request: LedgerRequest) -> int:
    """The block of its newest state."""
    return _blocks(host, request)[(request.computed - 1) // BLOCK]


def _bytes(host: VllmHost, block: int) -> Bytes:
    layers = _pool(host).groups[0].layers
    return [tensor[block] for tensors in layers for tensor in tensors]


def _next_reads(
    host: VllmHost, request: LedgerRequest
) -> Callable[[], frozenset[Read]]:
    """Return a function that returns the next reads of a request's state."""
    first = request.computed - 1
    rid, blocks = request.rid, _blocks(host, request)

    def due() -> frozenset[Read]:
        reads = ((p, (p + 1) // BLOCK) for p in range(first, first + _STEPS))
        return frozenset((rid, blocks[i], p) for p, i in reads if i < len(blocks))

    return due


def _before_states_are_read(host: VllmHost, act: Callable[[Any], None]) -> Undo:
    """Let `act` change the metadata that layers of states get in each forward, when the
    states were copied to their blocks, and before anything is checked."""
    number = _pool(host).groups[0].number
    (group,) = host.runner.attn_groups[number]

    def build(method: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = method(*args, **kwargs)
        act(metadata)
        return metadata

    return wrap_of(group.get_metadata_builder(0), "build", build)


def state_of_another_request(host: VllmHost, rng: random.Random) -> Planted:
    """Point A's table to the state of B."""
    a, b, _ = running(host)
    number, index = _pool(host).groups[0].number, a.computed // BLOCK
    if index >= len(_blocks(host, a)):
        host.step()  # its next block
    foreign = _block(host, b)
    undo = host.planting.point_to(number, a.rid, index, foreign)
    due = frozenset((a.rid, foreign, a.computed - 1 + i) for i in range(_STEPS))
    return Planted(due=lambda: due, undo=undo)


def states_of_other_rows(host: VllmHost, rng: random.Random) -> Planted:
    """Turn the blocks of two decoding rows around."""
    a, b, _ = running(host)
    slots = [(a.rid, _block(host, b), a.computed - 1 + i) for i in range(_STEPS)] + [
        (b.rid, _block(host, a), b.computed - 1 + i) for i in range(_STEPS)
    ]

    def swap(metadata: Any) -> None:
        for name in _INDICES:
            found = getattr(metadata, name, None)
            if found is not None and len(found) > 1:
                found[:2] = found[:2].flip(0)
                return

    return Planted(
        due=lambda: frozenset(slots), undo=_before_states_are_read(host, swap)
    )


def bit_of_a_state(host: VllmHost, rng: random.Random) -> Planted:
    request = rng.choice(running(host)[:2])
    part = rng.choice(_bytes(host, _block(host, request)))
    words = part.view(-1).view(torch.int32)
    words[rng.randrange(len(words))] ^= 1 << rng.randrange(20)
    return Planted(due=_next_reads(host, request))


def state_of_the_step_before(host: VllmHost, rng: random.Random) -> Planted:
    request = rng.choice(running(host)[:2])
    while request.computed % BLOCK == 0:  # the next state will have another block
        host.step()
    block = _block(host, request)
    before = [part.clone() for part in _bytes(host, block)]
    host.step()
    for part, old in zip(_bytes(host, block), before, strict=True):
        part.copy_(old)
    return Planted(due=_next_reads(host, request))


def state_that_is_not_finite(host: VllmHost, rng: random.Random) -> Planted:
    """Let a layer leave an infinity in a state. It goes before the next forward reads
    it, so that no sampler meets it."""
    request = rng.choice(running(host)[:2])
    start, rid, blocks = request.computed, request.rid, _blocks(host, request)
    kept: list[tuple[Tensor, Tensor]] = []

    def restore() -> None:
        while kept:
            part, old = kept.pop()
            part.copy_(old)

    def attend(method: Any, *args: Any, **kwargs: Any) -> Any:
        found = method(*args, **kwargs)
        index = request.computed // BLOCK
        if not kept and host.planting.place(rid) is not None and index < len(blocks):
            part = _bytes(host, blocks[index])[0].view(-1)[:1]
            kept.append((part, part.clone()))
            part.fill_(float("inf"))
        return found

    def execute(method: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode():
            restore()
        return method(*args, **kwargs)

    name = host.canary.groups[0].group.number
    layers = host.runner.kv_cache_config.kv_cache_groups[name].layer_names
    modules = host.runner.vllm_config.compilation_config.static_forward_context
    undo = (
        wrap_of(modules[layers[-1]].impl, "forward", attend),
        wrap_of(host.runner, "execute_model", execute),
    )

    def undo_all() -> None:
        for one in undo:
            one()
        with torch.inference_mode():
            restore()

    def due() -> frozenset[Read]:
        ends = range(start, start + _STEPS)
        return frozenset(
            (rid, blocks[p // BLOCK], p) for p in ends if p // BLOCK < len(blocks)
        )

    return Planted(due=due, undo=undo_all)


def _with_message(
    host: VllmHost,
    rng: random.Random,
    change: Callable[[Any, list[int]], Iterator[Read]],
) -> Planted:
    """Let C share the prompt of A; `change` gets the scheduler's message about it, and
    its blocks of the first group of states."""
    number = _pool(host).groups[0].number
    due: set[Read] = set()

    def schedule(method: Any, *args: Any, **kwargs: Any) -> Any:
        output = method(*args, **kwargs)
        for request in output.scheduled_new_reqs:
            request.block_ids = tuple(list(ids) for ids in request.block_ids)
            due.update(change(request, request.block_ids[number]))
        return output

    undo = wrap_of(host.core.scheduler, "schedule", schedule)
    a = running(host)[0]
    host.add(a.tokens[: a.given] + random_tokens(rng, 5), new_tokens=4)
    host.step()
    undo()
    return Planted(due=lambda: frozenset(due))


def _instead_of_the_checkpoint(
    host: VllmHost, rng: random.Random, block: int
) -> Planted:
    """Let C begin with another block than its cached prefix has."""

    def change(request: Any, blocks: list[int]) -> Iterator[Read]:
        cached = request.num_computed_tokens
        if cached:
            blocks[cached // BLOCK - 1] = block
            yield request.req_id, blocks[-1], cached - 1

    return _with_message(host, rng, change)


def checkpoint_of_another_prefix(host: VllmHost, rng: random.Random) -> Planted:
    """The one of B at the same position."""
    _, b, _ = running(host)
    return _instead_of_the_checkpoint(host, rng, _blocks(host, b)[2])


def checkpoint_of_a_later_token(host: VllmHost, rng: random.Random) -> Planted:
    """The block that A goes on writing to."""
    a, _, _ = running(host)
    return _instead_of_the_checkpoint(host, rng, _block(host, a))


def checkpoint_without_its_convolutions(host: VllmHost, rng: random.Random) -> Planted:
    """C goes on without the inputs of the convolutions, which come first in a layer."""
    mine: list[int] = []

    def change(request: Any, blocks: list[int]) -> Iterator[Read]:
        mine.append(blocks[-1])
        yield request.req_id, blocks[-1], request.num_computed_tokens - 1

    def forget(metadata: Any) -> None:
        while mine:
            block = mine.pop()
            for inputs, *_ in _pool(host).groups[0].layers:
                inputs[block].zero_()

    undo = _before_states_are_read(host, forget)
    planted = _with_message(host, rng, change)
    undo()
    return planted


def state_that_is_given_away(host: VllmHost, rng: random.Random) -> Planted:
    """Give C the block of A's state as a new one."""
    a, _, _ = running(host)
    block, last, next_reads = _block(host, a), a.computed - 1, _next_reads(host, a)

    def change(request: Any, blocks: list[int]) -> Iterator[Read]:
        blocks[-1] = block
        yield from ((a.rid, block, last + i) for i in range(_STEPS))

    planted = _with_message(host, rng, change)
    # A may have moved on to its next block.
    return Planted(due=lambda: planted.due() | next_reads())


PLANTERS: Mapping[str, Callable[[VllmHost, random.Random], Planted]] = {
    name: globals()[name.replace(" ", "_")]
    for name, fault in by_host_name(HostEngine.VLLM).items()
    if fault.groups is SlotGroup.STATE
}
"""By fault name; the function's name has underscores."""
