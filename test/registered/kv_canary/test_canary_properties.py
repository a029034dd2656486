"""Random worlds, healthy and damaged: Triton == C++ == torch reference in state, ring
(as a set), verdicts and counters."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from canary_world import (
    REQ_ROWS,
    Backend,
    World,
    backends,
    entries,
    long,
)
from torch import Tensor

from kv_canary.findings import RING, STATUS_WORDS, parse_counters, parse_verdicts
from kv_canary.kernels.reference.rows import load_slots
from kv_canary.kernels.triton import grid
from kv_canary.layout import FingerprintMode
from kv_canary.records import WriterKind
from kv_canary.state import CanaryState
from kv_canary.view import ForwardView, KVReadView
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.scale import count

register_cpu_ci(est_time=21, suite="cpu")
register_cuda_ci(est_time=60, suite="cuda")

SEEDS = range(count(ci=6, full=50))
OTHERS = backends()[1:]


def assert_same(actual: CanaryState, expected: CanaryState) -> None:
    assert entries(actual) == entries(expected)
    for field in dataclasses.fields(expected):
        value = getattr(expected, field.name)
        if field.name not in ("ring", "arena", "next_lineage") and isinstance(
            value, Tensor
        ):
            found = getattr(actual, field.name)
            assert torch.equal(found, value), field.name


def world_of(rng: random.Random, seed: int) -> World:
    n = rng.randint(1, 5)
    top = rng.choice([3, 20, 150, 290])
    return World(
        lens=[rng.choice([0, 1, rng.randint(0, top)]) for _ in range(n)],
        page_size=rng.choice([1, 4, 16]),
        mode=rng.choice(list(FingerprintMode)),
        period=rng.choice([1, 3, 7]),
        draft=rng.random() < 0.3,
        seed=seed,
    )


def with_tree(rng: random.Random, rows: ForwardView, extends: list[int]) -> ForwardView:
    parents, start = [], 0
    positions = rows.positions.tolist()
    for prefix, extend in zip(rows.prefix_lens.tolist(), extends, strict=False):
        for j in range(extend):
            parent = -1 if j == 0 else start + rng.randrange(j)
            parents.append(parent)
            depth_of_parent = prefix - 1 if parent < 0 else positions[parent]
            positions[start + j] = depth_of_parent + 1
        start += extend
    parents += [-1] * (rows.num_tokens - start)
    return dataclasses.replace(
        rows, parent_index=long(parents), positions=long(positions), max_depth=6
    )


def counted(rng: random.Random, rows: ForwardView, table: KVReadView) -> KVReadView:
    """A table with prefixes and positions counted from its rows' first elements, some
    of them wrongly."""
    first = table.first_position
    if first is None:
        first = torch.zeros_like(rows.prefix_lens)
    row = torch.repeat_interleave(rows.extend_lens, output_size=rows.num_tokens)
    prefixes, positions = rows.prefix_lens - first, rows.positions - first[row]
    for counts in (prefixes, positions):
        if counts.numel() and rng.random() < 0.5:
            counts[rng.randrange(counts.numel())] += rng.choice([-3, 1, 70])
    return dataclasses.replace(
        table,
        prefix_lens=rng.choice([prefixes, None]),
        positions=rng.choice([positions, None]),
    )


def damage(
    rng: random.Random, world: World, rows: ForwardView, table: KVReadView
) -> None:
    """Spoil a few things in place; slots stay different from each other."""
    state = world.state
    entries_of = table.page_table if table.page_table is not None else None
    if entries_of is None:
        entries_of = table.slot_indices[None]  # type: ignore[index]
    for _ in range(rng.randint(0, 6)):
        slot = rng.randrange(world.num_slots)
        records = rng.choice([state.head, state.tail])
        kind = rng.randrange(9)
        if kind == 0:
            records[slot, rng.randrange(4)] += rng.choice([1, 1 << 32, -(1 << 40)])
        elif kind == 1:
            state.head[slot, 0] = -1
            if rng.random() < 0.5:
                state.tail[slot, 0] = -1
        elif kind == 2:
            world.req_to_token[rng.randrange(REQ_ROWS), rng.randrange(300)] = slot
        elif kind == 3 and entries_of.numel():
            wrong = rng.choice([slot, 0, -1, -7, world.num_slots, 1 << 30])
            at = rng.randrange(entries_of.shape[0]), rng.randrange(entries_of.shape[1])
            entries_of[at] = wrong
        elif kind == 4:
            state.expected_lineage[rng.randrange(REQ_ROWS)] += 1
        elif kind == 5:
            world.k[rng.randrange(3), slot, 1, 3] += 1.0
        elif kind == 6 and rows.num_tokens:
            wrong = rng.choice([0, -3, world.num_slots + 5, -1])
            rows.out_cache_loc[rng.randrange(rows.num_tokens)] = wrong
        elif kind == 7:
            table.read_lens[rng.randrange(rows.num_rows)] += rng.choice([-1, 1, -4, 40])
        elif kind == 8:
            rows.serials[rng.randrange(rows.num_rows)] ^= 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A damaged world and what is done to it."""

    world: World
    rows: ForwardView
    table: KVReadView
    is_tree: bool
    sweep: bool
    tokens: Tensor | None
    oracle: tuple[Tensor, Tensor] | None
    published: Tensor | None
    manager: int

    @property
    def kind(self) -> WriterKind:
        return WriterKind.VERIFY if self.is_tree else WriterKind.EXTEND


def case_of(rng: random.Random, seed: int) -> Case:
    world = world_of(rng, seed)
    decode = rng.random() < 0.4
    room = min(90, 300 - max(world.lens))
    extends = [
        1 if decode else rng.choice([0, 1, rng.randint(0, 25), room])
        for _ in world.lens
    ]
    rows = world.rows(extends=extends, pad=rng.choice([0, 0, 2]))
    is_tree = not decode and rng.random() < 0.3
    if is_tree:
        rows = with_tree(rng, rows, extends)
    flat = rng.random() < 0.4
    window = rng.choice([None, None, 5, 40])
    sweep = rng.random() < 0.15
    table = world.table(rows, flat=flat, window=window, with_new=rng.random() < 0.7)
    if rng.random() < 0.4:
        table = counted(rng, rows, table)
    if sweep:
        previous = [rng.choice([-1, world.slot(0, 0)]) for _ in range(rows.num_rows)]
        table = dataclasses.replace(table, prev_slots=long(previous))
    if rng.random() < 0.2:
        away = long([rng.randint(0, 30) for _ in range(rows.num_rows)])
        each = rng.choice([1, 1, 2, 5])
        shift = long([rng.choice([0, 3, 500]) for _ in range(rows.num_rows * each)])
        rows = dataclasses.replace(rows, shift_from=away, column_shift=shift)
    if rng.random() < 0.2:
        other = rows.req_rows.flip(0)
        rows = dataclasses.replace(rows, lineage_rows=other)
    rows = as_draft(rng, rows)
    damage(rng, world, rows, table)
    tokens = world.tokens if rng.random() < 0.5 else None
    oracle = None
    if rng.random() < 0.3 and rows.num_tokens:
        oracle = rows.input_ids.clone(), rows.positions.clone()
        oracle[rng.randrange(2)][rng.randrange(rows.num_tokens)] += 1
        oracle[rng.randrange(2)][rng.randrange(rows.num_tokens)] = -1
    published = None
    if rng.random() < 0.5:
        published = world.published()
        if rng.random() < 0.5:
            published = published.clone()
            published.add_(torch.randint_like(published, -1, 2))
            published[:, rng.randrange(90) :: 3] = -1
    manager = rng.choice([-1, 0, 1])
    world.state.phase[1] = rng.choice([0, 2])
    return Case(
        world=world,
        rows=rows,
        table=table,
        is_tree=is_tree,
        sweep=sweep,
        tokens=tokens,
        oracle=oracle,
        published=published,
        manager=manager,
    )


def as_draft(rng: random.Random, rows: ForwardView) -> ForwardView:
    """Sometimes with seeds by request, lineages published elsewhere, and accepted
    tokens."""
    chosen: dict[str, Tensor] = {}
    if rows.seeds is not None and rng.random() < 0.5:
        table = long([rng.getrandbits(60) for _ in range(REQ_ROWS)])
        table[rows.req_rows] = rows.seeds
        rows = dataclasses.replace(rows, seeds=None)
        chosen["seed_table"] = table
    unread = sorted(set(range(REQ_ROWS)) - set(rows.req_rows.tolist()))
    if rng.random() < 0.6 and len(unread) >= rows.num_rows:
        chosen["publish_rows"] = long(rng.sample(unread, rows.num_rows))
    if rng.random() < 0.4:
        chosen["stay_lens"] = long([rng.randint(0, 3) for _ in range(rows.num_rows)])
    return dataclasses.replace(rows, **chosen)


def small_blocks(
    backend: Backend, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also programs that take several blocks, and rows of many programs."""
    if backend.name == "triton":
        monkeypatch.setattr(grid, "BLOCK_TOKENS", rng.choice([16, 64, 128]))
        monkeypatch.setattr(grid, "TARGET_PROGRAMS", rng.choice([1, 9, 2048]))


@pytest.mark.parametrize("backend", OTHERS, ids=lambda b: b.name)
@pytest.mark.parametrize("seed", SEEDS)
def test_equals_the_reference(
    backend: Backend, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    small_blocks(backend, rng, monkeypatch)
    case = case_of(rng, seed)
    world, rows = case.world, case.rows
    # Rows of the verdicts that are taken must differ, those of lineages too.
    advance = not case.is_tree and rows.lineage_rows is None
    has_findings = advance and seed % 3 > 0

    def run(one: Backend) -> tuple[list[CanaryState], Tensor]:
        state, seen = world.state.clone(), []
        findings = long([7] * (STATUS_WORDS + rows.num_rows + 3))
        world.verify(
            one,
            state,
            rows,
            case.table,
            tokens=case.tokens,
            manager=case.manager,
            sweep=case.sweep,
        )
        seen.append(state.clone())
        kind, manager = case.kind, case.manager
        world.head(
            one,
            state,
            rows,
            kind,
            manager=manager,
            oracle=case.oracle,
            published=case.published,
        )
        seen.append(state.clone())
        state.head[world.num_slots // 2, 3] += 1
        given = findings if has_findings else None
        world.tail(
            one, state, rows, kind, manager=manager, advance=advance, findings=given
        )
        seen.append(state)
        return seen, findings

    (found, ended), (due, ends) = run(backend), run(backends()[0])
    for actual, expected in zip(found, due, strict=True):
        assert_same(actual, expected)
    assert torch.equal(ended, ends)
    assert ends.tolist()[-3:] == [7] * 3


def reads_what_it_writes(case: Case) -> bool:
    """Whether a new token's slot is in some row's prefix: the one thing that depends on
    the schedule where both checks are one launch."""
    table, rows = case.table, case.rows
    lens = table.read_lens.clamp(min=0) * (rows.req_rows != 0)
    row = torch.repeat_interleave(lens)
    element = torch.arange(len(row), device=row.device) - (lens.cumsum(0) - lens)[row]
    first = 0 if table.first_position is None else table.first_position[row]
    old = first + element < rows.prefix_lens[row]
    read = set(load_slots(table, row, element)[old].tolist())
    return bool(read & set(rows.out_cache_loc.tolist()))


@pytest.mark.parametrize("backend", OTHERS, ids=lambda b: b.name)
@pytest.mark.parametrize("seed", SEEDS)
def test_before_model_equals_the_reference(
    backend: Backend, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    small_blocks(backend, rng, monkeypatch)
    case = case_of(rng, seed)
    if case.sweep or reads_what_it_writes(case):
        return
    world, rows, manager = case.world, case.rows, case.manager
    state, due = world.state.clone(), world.state.clone()
    view = dataclasses.replace(
        rows,
        reads=[case.table],
        writer_kind=case.kind,
        manager=manager,
        oracle=case.oracle,
    )
    checks = world.checks(tokens=case.tokens, published=case.published)
    backend.launch.before_model(state, view, checks)
    first = backends()[0]
    world.verify(first, due, rows, case.table, tokens=case.tokens, manager=manager)
    world.head(
        first,
        due,
        rows,
        case.kind,
        manager=manager,
        oracle=case.oracle,
        published=case.published,
    )
    assert_same(state, due)


def test_most_cases_of_before_model_are_compared() -> None:
    cases = [case_of(random.Random(seed), seed) for seed in SEEDS]
    skipped = sum(case.sweep or reads_what_it_writes(case) for case in cases)
    assert skipped < len(cases) / 2


@pytest.mark.parametrize("backend", OTHERS, ids=lambda b: b.name)
@pytest.mark.parametrize("seed", range(6))
def test_ends_and_moves_equal_the_reference(backend: Backend, seed: int) -> None:
    rng = random.Random(seed)
    world = world_of(rng, seed)
    rows = world.rows(extends=[rng.randint(0, 9) for _ in world.lens], pad=1)
    slots = long([rng.randrange(-2, world.num_slots + 3) for _ in range(60)])
    some = torch.randperm(world.num_slots)[:40].to(slots.device)
    req_rows = long([1, 0, 4, 0, 2])
    others = as_draft(rng, world.rows(extends=[2] * len(world.lens), pad=2))
    world.state.verdict.add_(torch.arange(REQ_ROWS, device=slots.device))

    def run(one: Backend) -> tuple[CanaryState, Tensor, Tensor]:
        state = world.state.clone()
        out = long([99] * (STATUS_WORDS + 5))
        ended = long([99] * (STATUS_WORDS + others.num_rows + 1))
        one.launch.poison(state, slots, long([rng_live]))
        moving = one if one.name == "triton" else backends()[0]
        moving.launch.move_records(state, some[:23], some[17:])
        one.launch.gather_findings(state, req_rows, out)
        world.advance(one, state, rows)
        one.launch.finish_step(state, others, ended)
        one.launch.poison(state, slots, None)
        return state, out, ended

    rng_live = rng.randint(0, 60)
    actual, *found = run(backend)
    expected, *due = run(backends()[0])
    assert_same(actual, expected)
    for one, other in zip(found, due, strict=True):
        assert torch.equal(one, other)
    taken, ended = due
    assert taken[STATUS_WORDS:].tolist() == [1, 0, 4, 0, 2]
    assert ended[STATUS_WORDS:].tolist()[-3:] == [0, 0, 99]


@pytest.mark.parametrize("backend", backends(), ids=lambda b: b.name)
@pytest.mark.parametrize("extend", [1, 0, 6, 90])
def test_the_tail_ends_the_forward(
    backend: Backend, extend: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status and verdicts of the rows, which are cleared; lineages as `finish_step`
    leaves them. Where a row has many programs, all of them start from the old one."""
    if backend.name == "triton":
        monkeypatch.setattr(grid, "BLOCK_TOKENS", 16)
    world = World(lens=[0, 11, 6])
    rows = world.rows(extends=[extend] * 3, pad=2)
    state, apart = world.state.clone(), world.state.clone()
    for one in (state, apart):
        one.verdict.add_(torch.arange(10, 10 + REQ_ROWS, device=one.verdict.device))
        world.head(backends()[0], one, rows)
    findings = long([7] * (STATUS_WORDS + rows.num_rows))
    world.tail(backend, state, rows, advance=True, findings=findings)
    world.tail(backend, apart, rows)
    assert torch.equal(world.advance(backend, apart, rows), findings)
    assert_same(state, apart)
    assert state.verdict.tolist() == [10, 0, 0, 0, 14, 15, 16, 17]
    words = findings.tolist()
    assert parse_verdicts(words) == [11, 12, 13, 0, 0]
    assert words[RING] == 0
    assert parse_counters(words) == apart.counters.tolist()
    if extend:
        ends = [world.lineage(i, n + extend) for i, n in enumerate(world.lens)]
        assert state.expected_lineage[1:4].tolist() == ends


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
