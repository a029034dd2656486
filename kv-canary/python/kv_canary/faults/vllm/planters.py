"""Plants the faults of the catalogue in a running vLLM.

Each is memory-safe, and planted where the host keeps the thing that goes wrong: its
tables, its scheduler's messages, its metadata, its store, or the bytes themselves.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kv_canary.engines.hooks import wrap_of
from kv_canary.engines.vllm.pool import draft_layers
from kv_canary.faults.catalogue import by_host_name
from kv_canary.faults.fault import HostEngine, SlotGroup
from kv_canary.faults.fault import Planted as PlantedIn
from kv_canary.faults.vllm.host import NUM_PROPOSALS, VllmHost, random_tokens
from kv_canary.faults.vllm.runners import V2Runner
from kv_canary.records import Record

if TYPE_CHECKING:
    from kv_canary.engines.block_ledger import LedgerRequest
    from kv_canary.faults.vllm.runners import Inputs, Undo

Read = tuple[str, int, int]
"""(request, slot, position) that a report must name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """A planted fault.

    Fields:
        due: returns reads or writes, at least one of which must be named. It is called
            after they happened, because their blocks may be allocated late.
    """

    due: Callable[[], frozenset[Read]]
    undo: Undo = lambda: None


Plant = Callable[[VllmHost, random.Random], Planted]
"""Called while A and B run, each with three full blocks or more. C, with the prefix of
A, is added afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Fields: named: whether a due read was named; found: diagnoses, in order."""

    named: bool
    due: frozenset[Read]
    found: list[str]
    lines: list[str]


def run_fault(host: VllmHost, name: str, seed: int) -> Outcome:
    """Plant a fault in clean traffic and return what is reported about it.

    Raises:
        RuntimeError: something was reported earlier.
    """
    return run_planted(host, PLANTERS[name], name, seed)


def run_planted(host: VllmHost, plant: Plant, name: str, seed: int) -> Outcome:
    """See `run_fault`.

    Args:
        plant: plants the fault of this name.
    """
    rng = random.Random(f"{name} {seed}")
    host.reset()
    prefix = random_tokens(rng, 3 * host.block_size + rng.randrange(1, host.block_size))
    a = host.add(prefix + random_tokens(rng, 9), new_tokens=20)
    b = host.add(
        random_tokens(rng, 3 * host.block_size + rng.randrange(1, 20)), new_tokens=20
    )
    host.until(
        lambda: all(
            host.is_running(rid)
            and host.request(rid).computed > len(host.request(rid).tokens) - 2
            and len(host.request(rid).tokens) > 3 * host.block_size
            for rid in (a, b)
        )
    )
    for _ in range(rng.randrange(3)):
        host.step()
    if host.canary.reporter.incidents:
        raise RuntimeError(f"clean traffic was reported: {host.canary.reporter.counts}")
    _names[host] = (a, b, prefix)
    # The pool's tensors were made in inference mode.
    with torch.inference_mode():
        planted = plant(host, rng)
    try:
        for _ in range(3):
            host.step()
    finally:
        planted.undo()
    # Under asynchronous scheduling a later step reports what a forward has found.
    for _ in range(2):
        if host.is_busy:
            host.step()
    return outcome_of(host, planted.due())


def outcome_of(host: VllmHost, due: frozenset[Read]) -> Outcome:
    """Return what was reported, of which `due` must name one."""
    violations = [
        violation
        for incident in host.canary.reporter.incidents
        for violation in incident["violations"]
    ]
    named = {(v["rid"], v["slot"], v["position"]) for v in violations}
    return Outcome(
        named=bool(named & due),
        due=due,
        found=list(dict.fromkeys(v["diagnosis"] for v in violations)),
        lines=[
            f"{v['rid']} slot {v['slot']} position {v['position']} "
            f"{v['reasons']} {v['diagnosis']}"
            for v in violations
        ],
    )


_names: dict[VllmHost, tuple[str, str, list[int]]] = {}


def running(host: VllmHost) -> tuple[LedgerRequest, LedgerRequest, list[int]]:
    """Return A, B and the prefix of A."""
    return _a(host), _b(host), _names[host][2]


def _a(host: VllmHost) -> Any:
    return host.request(_names[host][0])


def _b(host: VllmHost) -> Any:
    return host.request(_names[host][1])


def in_block(host: VllmHost, rid: str, block: int, index: int) -> frozenset[Read]:
    """Return reads of a whole block, number `index` of a request."""
    size = host.block_size
    return frozenset((rid, block * size + i, index * size + i) for i in range(size))


def _layers(host: VllmHost) -> list[torch.Tensor]:
    return list(host.canary.groups[0].group.layers)


def overwritten_block(host: VllmHost, rng: random.Random) -> Planted:
    request, index = _a(host), rng.randrange(3)
    block = request.blocks[0][index]
    for layer in _layers(host):
        layer[block].uniform_(-1, 1)
    return Planted(due=lambda: in_block(host, request.rid, block, index))


def flipped_byte(host: VllmHost, rng: random.Random) -> Planted:
    request = rng.choice((_a(host), _b(host)))
    position = rng.randrange(3 * host.block_size)
    slot = _slot(host, request, position)
    canary = host.canary.groups[0]
    assert canary.bytes is not None
    lineage = int(canary.state.tail[slot, Record.LINEAGE])
    if canary.bytes.covers_all:
        lineage = rng.getrandbits(62)  # anywhere, not only in the sample
    canary.bytes.flip(slot, lineage)
    return Planted(due=lambda: frozenset({(request.rid, slot, position)}))


def block_over_another_one(host: VllmHost, rng: random.Random) -> Planted:
    """Copy a whole block of B over one of A, whose records stay."""
    request, index = _a(host), rng.randrange(3)
    block, source = request.blocks[0][index], _b(host).blocks[0][rng.randrange(3)]
    for layer in _layers(host):
        layer[block].copy_(layer[source])
    return Planted(due=lambda: in_block(host, request.rid, block, index))


def swapped_table_entry(host: VllmHost, rng: random.Random) -> Planted:
    request, index = _a(host), rng.randrange(3)
    other = _b(host).blocks[0][rng.randrange(3)]
    undo = host.planting.point_to(0, request.rid, index, other)
    return Planted(due=lambda: in_block(host, request.rid, other, index), undo=undo)


def block_of_another_group(host: VllmHost, rng: random.Random) -> Planted:
    request = _a(host)
    groups = host.canary.groups
    (number,) = (i for i, g in enumerate(groups) if g.group.window is None)
    index = rng.randrange(3)
    foreign = request.blocks[1 - number][-1]
    undo = host.planting.point_to(number, request.rid, index, foreign)
    return Planted(due=lambda: in_block(host, request.rid, foreign, index), undo=undo)


def wrong_slot_mapping(host: VllmHost, rng: random.Random) -> Planted:
    request = _a(host)
    wrong = request.blocks[0][rng.randrange(2)] * host.block_size + rng.randrange(
        host.block_size
    )
    due = frozenset((request.rid, wrong, position) for position in _next(request))

    def change(inputs: Inputs) -> None:
        inputs.slots[inputs.place(request.rid)] = wrong

    return Planted(
        due=lambda: due, undo=host.planting.with_inputs(lambda: [request.rid], change)
    )


def skipped_store(host: VllmHost, rng: random.Random) -> Planted:
    request = _a(host)
    modules = host.runner.vllm_config.compilation_config.static_forward_context
    undo = []

    def store(method: Any, *args: Any) -> Any:
        given = inspect.signature(method).bind(*args)
        place = host.planting.place(request.rid)
        if place is not None:
            slots = given.arguments["slot_mapping"].clone()
            slots[place] = -1
            given.arguments["slot_mapping"] = slots
        return method(*given.args)

    layers = host.runner.kv_cache_config.kv_cache_groups[0].layer_names
    for name in sorted(set(layers) - draft_layers(host.runner)):
        undo.append(wrap_of(modules[name].impl, "do_kv_cache_update", store))
    start = request.computed

    def undo_all() -> None:
        for one in undo:
            one()

    return Planted(due=lambda: _writes(host, request, start), undo=undo_all)


def _writes(
    host: VllmHost, request: Any, start: int, *, shift: int = 0
) -> frozenset[Read]:
    """Return a decoding request's next writes, at positions that are `shift` too
    high."""
    end = len(request.blocks[0]) * host.block_size
    positions = (p for p in _next(request, start) if p < end)
    slots = ((_slot(host, request, p), p) for p in positions)
    return frozenset((request.rid, slot, p + shift) for slot, p in slots)


def _next(request: Any, start: int | None = None) -> range:
    """Return the positions of a request's next three tokens, of which the first has
    position `start` at most. The host may count proposals that are rejected."""
    start = request.computed if start is None else start
    return range(start - NUM_PROPOSALS * request.is_estimated, start + 3)


def _slot(host: VllmHost, request: Any, position: int) -> int:
    index, offset = divmod(position, host.block_size)
    return int(request.blocks[0][index] * host.block_size + offset)


def truncated_table(host: VllmHost, rng: random.Random) -> Planted:
    request, missing = _b(host), rng.randrange(2, 3 * host.block_size)
    due = frozenset((request.rid, -1, p + 1 - missing) for p in _next(request))

    def change(inputs: Inputs) -> None:
        # Attention cannot read less than the forward's own tokens.
        if host.canary.ledger[request.rid].computed > missing:
            inputs.seq_lens[inputs.row(request.rid)] -= missing

    return Planted(
        due=lambda: due, undo=host.planting.with_inputs(lambda: [request.rid], change)
    )


def _with_new_request(
    host: VllmHost, rng: random.Random, change: Callable[[Any], Read | None]
) -> Planted:
    """Let C share the prefix of A; `change` gets the scheduler's message about it."""
    _, _, prefix = _names[host]
    due: set[Read] = set()

    def schedule(method: Any, *args: Any, **kwargs: Any) -> Any:
        output = method(*args, **kwargs)
        for request in output.scheduled_new_reqs:
            found = change(request)
            if found is not None:
                rid, block, index = found
                due.update(in_block(host, rid, block, index))
        return output

    undo = wrap_of(host.core.scheduler, "schedule", schedule)
    host.add(prefix + random_tokens(rng, 5), new_tokens=4)
    host.step()
    undo()
    return Planted(due=lambda: frozenset(due))


def stale_block_after_free(host: VllmHost, rng: random.Random) -> Planted:
    """Hand out a finished request's old block as a cached one."""
    name = host.add(random_tokens(rng, host.block_size // 2), new_tokens=2)
    host.until(lambda: host.is_running(name))
    stale = host.request(name).blocks[0][0]
    host.until(lambda: not host.is_running(name))
    return _with_new_request(host, rng, _replace_cached(host, stale, rng.randrange(2)))


def _replace_cached(
    host: VllmHost, block: int, index: int
) -> Callable[[Any], Read | None]:
    """Return a function that points a new request's cached block `index` to `block`."""

    def change(request: Any) -> Read | None:
        if request.num_computed_tokens < (index + 1) * host.block_size:
            return None
        request.block_ids = tuple(list(ids) for ids in request.block_ids)
        request.block_ids[0][index] = block
        return request.req_id, block, index

    return change


def copied_block_without_its_record(host: VllmHost, rng: random.Random) -> Planted:
    """Move a cached block to a free one, unseen by the worker's ledger."""
    index = rng.randrange(2)
    held = host.canary.ledger.held(0)
    total = host.canary.groups[0].group.num_blocks
    free = next(block for block in range(total - 1, 0, -1) if block not in held)
    source = _a(host).blocks[0][index]
    for layer in _layers(host):
        layer[free].copy_(layer[source])

    return _with_new_request(host, rng, _replace_cached(host, free, index))


def block_of_another_tenant(host: VllmHost, rng: random.Random) -> Planted:
    """Let the prefix cache forget that C has a salt."""
    victim, (_, _, prefix) = _a(host), _names[host]

    def without_salt(method: Any, request: Any) -> Any:
        salt, request.cache_salt = request.cache_salt, None
        try:
            return method(request)
        finally:
            request.cache_salt = salt

    undo = wrap_of(host.core, "request_block_hasher", without_salt)
    name = host.add(prefix + random_tokens(rng, 5), new_tokens=4, salt="tenant")
    undo()
    host.step()
    index = rng.randrange(2)
    due = in_block(host, host.request(name).rid, victim.blocks[0][index], index)
    return Planted(due=lambda: due)


def two_rows_with_one_block(host: VllmHost, rng: random.Random) -> Planted:
    """Give C a block of A as a new one."""
    victim = _a(host)

    def change(request: Any) -> Read | None:
        fresh = request.num_computed_tokens // host.block_size
        # At its own place C would write what A has there: the prefix is the same.
        index = rng.choice([index for index in (1, 2) if index != fresh])
        block = victim.blocks[0][index]
        request.block_ids = tuple(list(ids) for ids in request.block_ids)
        request.block_ids[0][fresh] = block
        return victim.rid, block, index

    return _with_new_request(host, rng, change)


def wrong_positions(host: VllmHost, rng: random.Random) -> Planted:
    """Make positions one too high for one row."""
    request = _b(host)
    start = request.computed

    def change(inputs: Inputs) -> None:
        inputs.positions[inputs.place(request.rid)] += 1

    undo = host.planting.with_inputs(lambda: [request.rid], change)
    return Planted(due=lambda: _writes(host, request, start, shift=1), undo=undo)


def wrong_input_token(host: VllmHost, rng: random.Random) -> Planted:
    request = rng.choice((_a(host), _b(host)))
    start = request.computed

    def change(inputs: Inputs) -> None:
        inputs.ids[inputs.place(request.rid)] ^= 1

    undo = host.planting.with_inputs(lambda: [request.rid], change)
    return Planted(due=lambda: _writes(host, request, start), undo=undo)


def swapped_input_tokens(host: VllmHost, rng: random.Random) -> Planted:
    a, b = _a(host), _b(host)
    starts = (a.computed, b.computed)

    def change(inputs: Inputs) -> None:
        both = torch.tensor([inputs.place(a.rid), inputs.place(b.rid)])
        inputs.ids[both] = inputs.ids[both.flip(0)]

    undo = host.planting.with_inputs(lambda: [a.rid, b.rid], change)
    return Planted(
        due=lambda: _writes(host, a, starts[0]) | _writes(host, b, starts[1]), undo=undo
    )


def changed_prompt_token(host: VllmHost, rng: random.Random) -> Planted:
    _, _, prefix = _names[host]
    name = host.add(prefix + random_tokens(rng, 5), new_tokens=4)
    changed: set[Read] = set()

    def change(inputs: Inputs) -> None:
        rid = host.request(name).rid
        place = inputs.place(rid)
        inputs.ids[place] ^= 1
        # How much of the prefix is cached is vLLM's choice.
        changed.add((rid, int(inputs.slots[place]), int(inputs.positions[place])))

    undo = host.planting.with_inputs(lambda: [host.request(name).rid], change)
    host.step()
    undo()
    return Planted(due=lambda: frozenset(changed))


def rejected_token_that_counts(host: VllmHost, rng: random.Random) -> Planted:
    """Let the second runner count one proposal less as rejected."""
    request = rng.choice((_a(host), _b(host)))
    start, rid = request.computed - 1, request.rid

    def accept(rejected: torch.Tensor) -> None:
        rejected -= (rejected > 0).to(rejected.dtype)

    def due() -> frozenset[Read]:
        num_slots = len(request.blocks[0]) * host.block_size
        ends = range(start, min(start + 4 * host.block_size, num_slots))
        return frozenset((rid, _slot(host, request, p), p) for p in ends)

    planting = host.planting
    assert isinstance(planting, V2Runner)
    return Planted(due=due, undo=planting.with_rejected(rid, accept))


PLANTERS: Mapping[str, Plant] = {
    name: globals()[name.replace(" ", "_")]
    for name, fault in by_host_name(HostEngine.VLLM).items()
    if fault.planted is not PlantedIn.TIER and fault.groups is not SlotGroup.STATE
}
"""By fault name; the function's name has underscores."""

IN_HYBRID = ("block of another group",)
JUDGED_AHEAD = ("rejected token that counts",)
IN_CACHED_PREFIX = (
    "stale block after free",
    "copied block without its record",
    "block of another tenant",
)


def faults_of(host: VllmHost, kind: str) -> list[str]:
    """Return the faults that are planted in a model: those that need two groups of
    layers in the hybrid one, the others elsewhere, some only beside a draft, and some
    only where vLLM reuses prefixes."""
    if kind == "hybrid":
        return list(IN_HYBRID)
    left_out = set(IN_HYBRID)
    if kind != "eagle-v2":
        left_out.update(JUDGED_AHEAD)
    if not host.reuses_prefixes:
        left_out.update(IN_CACHED_PREFIX)
    return [name for name in PLANTERS if name not in left_out]
