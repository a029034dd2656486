"""Every check of the canary has a case that fires exactly its reason, in the right
place, and a clean case that fires nothing; on every implementation that runs here."""

from __future__ import annotations

import dataclasses
import itertools
import random
from contextlib import nullcontext

import pytest
import torch
from canary_world import Backend, World, backends, entries, findings, long

from kv_canary import launches
from kv_canary.findings import counters_of, verdicts_of
from kv_canary.layout import (
    Fingerprint,
    FingerprintMode,
    LayerGroup,
    PoolLayout,
    create_fingerprint,
)
from kv_canary.op import force_reference
from kv_canary.records import (
    Counter,
    Launch,
    Phase,
    Reason,
    Ring,
    WriterKind,
    unpack_word0,
    unpack_word3,
)
from kv_canary.state import create_state
from kv_canary.view import ForwardView, KVReadView
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.scale import count, sampled

register_cpu_ci(est_time=60, suite="cpu")
register_cuda_ci(est_time=60, suite="cuda")

each_backend = pytest.mark.parametrize("backend", backends(), ids=lambda b: b.name)
LENS = [11, 6, 20]
ROTATIONS = 4 if torch.cuda.is_available() else count(ci=2, full=4)


def world(**options: object) -> World:
    return World(lens=LENS, **options)  # type: ignore[arg-type]


def decode(w: World) -> ForwardView:
    return w.rows(extends=[1] * len(w.lens), pad=1)


@each_backend
@pytest.mark.parametrize(
    ("page_size", "mode"),
    sampled(
        itertools.product([1, 4], FingerprintMode),
        key=lambda case: case[0],
        ci=len(FingerprintMode) if torch.cuda.is_available() else 2,
    ),
)
def test_a_healthy_run_fires_nothing(
    backend: Backend, mode: FingerprintMode, page_size: int
) -> None:
    w = world(mode=mode, page_size=page_size, draft=page_size == 4)
    clock = int(w.state.clock)
    for step, extends in enumerate(([1, 1, 1], [5, 0, 3], [1, 1, 1])):
        rows = w.rows(extends=extends, pad=1)
        table = w.table(rows, flat=step == 1)
        w.verify(backend, w.state, rows, table, tokens=w.tokens, manager=0)
        w.write(backend, w.state, rows, WriterKind.EXTEND, manager=0)
        w.advance(backend, w.state, rows)
        w.lens = [n + e for n, e in zip(w.lens, extends, strict=True)]
        for i, n in enumerate(w.lens):
            assert int(w.state.expected_lineage[i + 1]) == w.lineage(i, n)
    assert entries(w.state) == []
    assert not w.state.verdict.any() and not w.state.phase.any()
    assert int(w.state.clock) == clock + 3
    counters = w.state.counters.tolist()
    assert counters[Counter.VERIFY_LAUNCHES] == counters[Counter.TAIL_LAUNCHES] == 3
    assert counters[Counter.VERIFIED_SLOTS] == 37 + 40 + 48
    assert counters[Counter.HEAD_SLOTS] == counters[Counter.TAIL_SLOTS] == 14
    if mode is FingerprintMode.ALL:
        assert counters[Counter.REHASHED_SLOTS] == 37 + 40 + 48


@each_backend
def test_wrong_record_words_fire_their_reason(backend: Backend) -> None:
    """One word of both halves of the record at position 3 of request 0."""
    cases = {
        # (word, change): reasons at position 3; the successor sees a changed lineage
        (0, 1 << 32): {3: Reason.VERIFY_POSITION | Reason.VERIFY_LINEAGE},
        (0, 1): {3: Reason.VERIFY_LINEAGE},
        (1, 1): {3: Reason.VERIFY_LINEAGE, 4: Reason.VERIFY_LINEAGE},
        (3, 1): {},
    }
    for (word, change), due in cases.items():
        w = world()
        slot = w.slot(0, 3)
        for part in (w.state.head, w.state.tail):
            part[slot, word] += change
        w.verify(backend, w.state, decode(w), w.table(decode(w)))
        assert findings(w.state) == sorted(
            (reason, 1, w.slot(0, p), p) for p, reason in due.items()
        )
        verdict = 0
        for reason in due.values():
            verdict |= reason
        assert w.state.verdict.tolist() == [0, verdict] + [0] * 6


@each_backend
def test_position_alone(backend: Backend) -> None:
    """A window that starts one position late in every table: the history is true, but
    each record stands one position earlier than it is read."""
    w = world()
    slots = w.req_to_token[2, 0:6].clone()
    w.req_to_token[2, 1:7] = slots
    # The record before the window is unreadable, so that its history says nothing.
    w.req_to_token[2, 0] = -1
    w.state.expected_lineage[2] = w.lineage(1, 5)
    w.lens = [5, 6, 5]
    rows = w.rows(extends=[0, 0, 0])
    rows = dataclasses.replace(rows, req_rows=long([0, 2, 0]))
    table = KVReadView(
        read_lens=long([0, 5, 0]),
        indptr=long([0, 0, 5, 5]),
        slot_indices=slots[:5],
        first_position=long([1, 1, 1]),
    )
    w.verify(backend, w.state, rows, table)
    assert findings(w.state) == sorted(
        (Reason.VERIFY_POSITION, 2, int(slots[p - 1]), p) for p in range(1, 6)
    )


@each_backend
def test_a_row_of_another_request_is_wrong_history(backend: Backend) -> None:
    """Wholly consistent records of another request with the same salt: only the last
    element, compared with what the host knows, tells."""
    w = world()
    rows = decode(w)
    w.req_to_token[2, :6] = w.req_to_token[3, :6]
    w.salts[1] = w.salts[2]
    rows = decode(w)
    w.verify(backend, w.state, rows, w.table(rows))
    assert findings(w.state) == [(Reason.VERIFY_TOKEN, 2, w.slot(2, 5), 5)]
    (entry,) = entries(w.state)
    assert entry[Ring.EXPECTED_LINEAGE] == int(w.state.expected_lineage[2])
    assert entry[Ring.SERIAL] == w.serials[1] and entry[Ring.BATCH_ROW] == 1
    written_by = unpack_word3(entry[Ring.FOUND_WORD3])
    assert written_by.serial == w.serials[2] % 2**24
    assert written_by.kind is WriterKind.EXTEND and written_by.clock == 1
    assert entry[Ring.TAG] == Launch.VERIFY | 255 << 8 | 3 << 16


@each_backend
def test_known_tokens_name_the_position(backend: Backend) -> None:
    w = world(draft=True)
    rows = decode(w)
    told = w.tokens.clone()
    told[1, 5] += 1  # held by the draft pool at position 4
    told[2, 3] = -1  # not known
    w.verify(backend, w.state, rows, w.table(rows), tokens=told)
    assert findings(w.state) == [(Reason.VERIFY_TOKEN, 1, w.slot(0, 4), 4)]
    (entry,) = entries(w.state)
    assert unpack_word0(entry[Ring.EXPECTED_WORD0]) == (int(told[1, 5]), 4)


@each_backend
def test_torn_and_freed(backend: Backend) -> None:
    w = world()
    rows, table = decode(w), None
    torn, half, freed = w.slot(0, 2), w.slot(1, 4), w.slot(2, 10)
    w.state.head[torn, 3] += 1 << 40
    w.state.tail[half, 0] = -1
    backend.write.poison(w.state, long([freed, freed, -1]), None)
    assert unpack_word3(int(w.state.tail[freed, 3])) == (
        int(w.state.clock),
        WriterKind.POISON,
        w.serials[2] % 2**24,
    )
    table = w.table(rows)
    w.verify(backend, w.state, rows, table)
    assert findings(w.state) == sorted(
        [
            (Reason.VERIFY_TORN, 1, torn, 2),
            (Reason.VERIFY_TORN, 2, half, 4),
            (Reason.VERIFY_FREED, 3, freed, 10),
        ]
    )


@each_backend
@pytest.mark.parametrize("mode", list(FingerprintMode)[1:], ids=lambda mode: mode.name)
def test_flipped_bytes(backend: Backend, mode: FingerprintMode) -> None:
    """A slot overwritten whole shows at once; with `rotate` within one rotation."""
    w = world(mode=mode, period=5)
    slot = w.slot(2, 7)
    w.v[:, slot] = torch.randn_like(w.v[:, slot])
    for _ in range(5 if mode is FingerprintMode.ROTATE else 1):
        step(backend, w, decode(w))
    assert findings(w.state) == [(Reason.VERIFY_REAL_KV, 3, slot, 7)]
    (entry,) = entries(w.state)
    found, computed = (
        entry[Ring.FOUND_FINGERPRINT],
        entry[Ring.COMPUTED_FINGERPRINT],
    )
    assert found % 2**32 == computed % 2**32 and found >> 32 != computed >> 32


def step(backend: Backend, w: World, rows: ForwardView) -> None:
    """A forward whose new tokens all stay."""
    w.verify(backend, w.state, rows, w.table(rows))
    w.write(backend, w.state, rows)
    w.advance(backend, w.state, rows)
    extends = rows.extend_lens.tolist()
    w.lens = [n + e for n, e in zip(w.lens, extends, strict=False)]


@each_backend
@pytest.mark.parametrize("seed", range(ROTATIONS))
def test_a_rotation_takes_every_slot_once(backend: Backend, seed: int) -> None:
    """While a row grows by a period, in steps of any size, each slot of its prefix is
    looked at once: none is passed over, none is hashed twice."""
    rng, period = random.Random(seed), 12
    w = world(mode=FingerprintMode.ROTATE, period=period)
    start = list(w.lens)
    slots = [w.slot(i, p) for i, n in enumerate(start) for p in range(n)]
    w.k[1, slots] += 1.0
    left = [period] * 3
    while any(left):
        extends = [min(n, rng.choice([0, 1, 1, 2, 5, 20])) for n in left]
        rows = dataclasses.replace(w.rows(extends=extends), serials=long([1, 2, 3]))
        if rows.qo_indptr is None:
            continue
        step(backend, w, rows)
        left = [n - e for n, e in zip(left, extends, strict=True)]
    found = [f for f in findings(w.state) if f[3] < start[f[1] - 1]]
    assert found == sorted(
        (Reason.VERIFY_REAL_KV, i + 1, w.slot(i, p), p)
        for i, n in enumerate(start)
        for p in range(n)
    )


@each_backend
def test_a_rotation_looks_ahead_over_a_tree(backend: Backend) -> None:
    """As far as its longest path, of which any number may be accepted."""
    w = world(mode=FingerprintMode.ROTATE, period=12)
    rows = w.rows(extends=[4, 1, 1])
    rows = dataclasses.replace(
        rows,
        parent_index=long([-1, 0, 0, 0, -1, -1]),
        positions=long([11, 12, 12, 12, 6, 20]),
        max_depth=1,
    )
    w.verify(backend, w.state, rows, w.table(rows))
    due = {
        i: [p for p in range(n) if -(w.slot(i, p) + n) % 12 < (2 if i == 0 else 1)]
        for i, n in enumerate(LENS)
    }
    assert findings(w.state) == []
    expected = sum(map(len, due.values()))
    assert int(w.state.counters[Counter.REHASHED_SLOTS]) == expected > 0


@each_backend
def test_read_set(backend: Backend) -> None:
    """A wrong slot with a true record, unreadable ids, and a wrong new token."""
    w = world()
    rows = decode(w)
    pages = w.req_to_token.clone()
    twin = w.slot(2, 40)
    for part in (w.state.head, w.state.tail):
        part[twin] = part[w.slot(0, 5)]
    pages[1, 5] = twin
    pages[2, 0] = w.num_slots
    pages[2, 2] = -5
    pages[3, 20] = twin
    table = dataclasses.replace(w.table(rows), page_table=pages)
    w.verify(backend, w.state, rows, table)
    assert findings(w.state) == sorted(
        [
            (Reason.READ_SET, 1, twin, 5),
            (Reason.READ_SET, 2, w.num_slots, 0),
            (Reason.READ_SET, 2, -1, 2),
            (Reason.READ_SET, 3, twin, 20),
        ]
    )
    expected = {
        entry[Ring.SLOT]: entry[Ring.EXPECTED_SLOT] for entry in entries(w.state)
    }
    assert expected[w.num_slots] == w.slot(1, 0)


@each_backend
@pytest.mark.parametrize("window", [None, 8])
def test_a_shortened_row_reads_too_little(backend: Backend, window: int | None) -> None:
    w = world()
    rows = decode(w)
    table = w.table(rows, window=window, with_new=False)
    table.read_lens[0] -= 2
    w.verify(backend, w.state, rows, table)
    assert findings(w.state) == [(Reason.READ_SET, 1, -1, 9)]
    assert w.state.verdict.tolist()[1] == Reason.READ_SET


@each_backend
def test_a_row_that_ends_among_its_new_tokens(backend: Backend) -> None:
    """Prefix-only and complete views are right, anything between is not."""
    w = world()
    rows = w.rows(extends=[2, 3, 2])
    table = w.table(rows)
    table.read_lens[0] -= 2
    table.read_lens[1] -= 2
    table.read_lens[2] -= 1
    w.verify(backend, w.state, rows, table)
    assert findings(w.state) == [
        (Reason.READ_SET, 2, -1, 7),
        (Reason.READ_SET, 3, -1, 21),
    ]


@each_backend
def test_scratch(backend: Backend) -> None:
    w = world(page_size=4)
    w.req_to_token[2, 4:8] = torch.arange(4)
    rows = decode(w)
    w.verify(backend, w.state, rows, w.table(rows))
    w.write(backend, w.state, rows)
    assert findings(w.state) == sorted(
        [
            (Reason.READ_SCRATCH, 2, 0, 4),
            (Reason.READ_SCRATCH, 2, 1, 5),
            (Reason.WRITE_SCRATCH, 2, 2, 6),
        ]
    )
    assert (w.state.head[:4, 0] == -1).all() and (w.state.tail[:4, 0] == -1).all()


@each_backend
def test_write_foreign(backend: Backend) -> None:
    """A live record of another request, a slot that is not the column's, an id that is
    no slot, a slot of the row's own prefix; an own stale record is none."""
    for case in range(5):
        w = world()
        rows = decode(w)
        slot = w.slot(0, 11)
        due = [(Reason.WRITE_FOREIGN, 1, slot, 11)]
        if case == 0:
            w.state.head[slot] = w.state.head[w.slot(1, 2)]
        elif case == 1:
            rows.out_cache_loc[0] = w.slot(0, 12)
            due = [(Reason.WRITE_FOREIGN, 1, w.slot(0, 12), 11)]
        elif case == 2:
            rows.out_cache_loc[0] = w.num_slots
            due = [(Reason.WRITE_FOREIGN, 1, w.num_slots, 11)]
        elif case == 3:
            w.req_to_token[1, 11] = w.slot(0, 2)
            rows = decode(w)
            due = [(Reason.WRITE_FOREIGN, 1, w.slot(0, 2), 11)]
        else:
            w.state.head[slot] = w.state.head[w.slot(0, 2)]
            due = []
        w.write(backend, w.state, rows)
        assert findings(w.state) == due
        if case in (0, 1, 3):
            (entry,) = entries(w.state)
            assert entry[Ring.TAG] & 255 == Launch.HEAD
            written = due[0][2]
            assert unpack_word0(int(w.state.head[written, 0]))[1] == 11


@each_backend
def test_a_padded_row_may_write_scratch_only(backend: Backend) -> None:
    for slot in (0, 3, 4, 17, -1):
        w = world(page_size=4)
        rows = decode(w)
        rows.out_cache_loc[-1] = slot
        w.write(backend, w.state, rows)
        is_scratch = 0 <= slot < 4
        due = [] if is_scratch else [(Reason.WRITE_FOREIGN, 0, slot, 0)]
        assert findings(w.state) == due
        assert int(w.state.verdict[0]) == (0 if is_scratch else Reason.WRITE_FOREIGN)


@each_backend
def test_padded_rows_of_an_extend_may_write_scratch_only(backend: Backend) -> None:
    w = world(page_size=4)
    w.lens = [5, 6, 20]
    rows = w.rows(extends=[3, 3, 3], pad=2)
    # Three tokens each, as a verification pads them.
    rows = dataclasses.replace(
        rows,
        qo_indptr=long([0, 3, 6, 9, 12, 15]),
        **{
            name: torch.cat([getattr(rows, name), long([0] * 4)])
            for name in ("input_ids", "positions", "out_cache_loc")
        },
    )
    w.state.expected_lineage[1] = w.lineage(0, 5)
    rows.out_cache_loc[10] = w.slot(1, 2)
    rows.out_cache_loc[14] = w.num_slots
    w.write(backend, w.state, rows)
    assert findings(w.state) == sorted(
        [
            (Reason.WRITE_FOREIGN, 0, w.slot(1, 2), 0),
            (Reason.WRITE_FOREIGN, 0, w.num_slots, 0),
        ]
    )
    assert sorted(entry[Ring.BATCH_ROW] for entry in entries(w.state)) == [3, 4]


@each_backend
def test_inputs_are_what_was_published(backend: Backend) -> None:
    w = world()
    rows = decode(w)
    published = w.published().clone()
    published[1, 11] += 1
    published[2, 6] = -1
    rows.positions[2] += 1
    rows.input_ids[1] += 1
    w.write(backend, w.state, rows, published=published)
    assert findings(w.state) == sorted(
        [
            (Reason.WRITE_TOKEN, 1, w.slot(0, 11), 11),
            (Reason.WRITE_POSITION, 3, w.slot(2, 20), 21),
        ]
    )
    expected = {e[Ring.REQ_ROW]: e[Ring.EXPECTED_WORD0] for e in entries(w.state)}
    assert unpack_word0(expected[1]) == (int(published[1, 11]), 11)
    assert unpack_word0(expected[3]) == (int(published[3, 20]), 20)


@each_backend
@pytest.mark.parametrize("indptr_dtype", [torch.int32, torch.int64])
def test_page_numbers_read_as_a_page_table_does(
    backend: Backend, indptr_dtype: torch.dtype
) -> None:
    for is_damaged in (False, True):
        found = []
        for as_numbers in (False, True):
            w = world(page_size=4)
            rows = decode(w)
            table = w.table(rows)
            if as_numbers:
                counts = [-(-n // 4) for n in table.read_lens.tolist()]
                first = w.req_to_token[:, ::4]
                numbers = [
                    first[row, :count] // 4
                    for row, count in zip(rows.req_rows.tolist(), counts, strict=True)
                ]
                table = KVReadView(
                    read_lens=table.read_lens,
                    page_size=4,
                    indptr=long([sum(counts[:i]) for i in range(len(counts) + 1)]).to(
                        indptr_dtype
                    ),
                    page_indices=torch.cat(numbers),
                )
            if is_damaged:
                w.state.tail[w.slot(2, 9), 0] += 1 << 32
                w.req_to_token[1, 5] += 1
            w.verify(backend, w.state, rows, table)
            found.append(findings(w.state))
        assert found[0] == found[1]
        assert bool(found[0]) == is_damaged


@each_backend
def test_write_alias(backend: Backend) -> None:
    """Two rows that write one slot: the one whose head record is gone says so."""
    w = world()
    rows = decode(w)
    w.req_to_token[2, 6] = w.slot(0, 11)
    rows = decode(w)
    w.write(backend, w.state, rows)
    (found,) = findings(w.state)
    reason, row, slot, _ = found
    assert (reason, slot) == (Reason.WRITE_ALIAS, w.slot(0, 11)) and row in (1, 2)
    (entry,) = entries(w.state)
    other = unpack_word3(entry[Ring.FOUND_WORD3]).serial
    assert other == w.serials[2 - row] % 2**24


@each_backend
def test_head_overwritten_during_the_model(backend: Backend) -> None:
    w = world()
    rows = decode(w)
    w.head(backend, w.state, rows)
    w.state.head[w.slot(1, 6)] = w.state.head[w.slot(0, 0)]
    w.tail(backend, w.state, rows)
    assert findings(w.state) == [(Reason.WRITE_ALIAS, 2, w.slot(1, 6), 6)]


@each_backend
def test_oracle(backend: Backend) -> None:
    w = world()
    rows = decode(w)
    tokens, positions = rows.input_ids.clone(), rows.positions.clone()
    tokens[0] += 1
    tokens[1] = -1
    positions[2] += 1
    w.write(backend, w.state, rows, oracle=(tokens, positions))
    assert findings(w.state) == sorted(
        [
            (Reason.WRITE_TOKEN, 1, w.slot(0, 11), 11),
            (Reason.WRITE_POSITION, 3, w.slot(2, 20), 20),
        ]
    )


def test_both_checks_before_the_model_in_one_call() -> None:
    """`before_model` leaves what `verify` and `write_head` leave, faults included."""
    for is_damaged in (False, True):
        states = []
        for joint in (False, True):
            w = world(mode=FingerprintMode.PARTIAL, page_size=4)
            rows, oracle = decode(w), None
            if is_damaged:
                w.state.tail[w.slot(2, 9), 1] += 1
                rows.out_cache_loc[1] = w.slot(0, 2)
                oracle = (rows.input_ids + 1, rows.positions)
            view = dataclasses.replace(
                rows,
                reads=[w.table(rows)],
                manager=1,
                writer_kind=WriterKind.DECODE,
                oracle=oracle,
            )
            checks = w.checks(tokens=w.tokens)
            if joint:
                launches.before_model(w.state, view, checks)
            else:
                launches.verify(w.state, view, checks, view.reads[0])
                launches.write_head(w.state, view, checks)
            states.append(w.state)
        first, second = states
        assert entries(first) == entries(second)
        assert bool(entries(first)) == is_damaged
        for name in ("head", "tail", "verdict", "counters", "phase"):
            assert torch.equal(getattr(first, name), getattr(second, name)), name


@each_backend
def test_phases(backend: Backend) -> None:
    """A launch out of order is reported, repaired, and stops nothing."""
    w = world()
    rows = decode(w)
    w.head(backend, w.state, rows, manager=1)
    assert w.state.phase.tolist() == [0, Phase.AFTER_HEAD]
    w.tail(backend, w.state, rows, manager=1)
    assert w.state.phase.tolist() == [0, 0]
    assert findings(w.state) == [(Reason.PHASE, 0, -1, -1)]
    (entry,) = entries(w.state)
    assert entry[Ring.EXPECTED_WORD0] == Phase.AFTER_VERIFY
    assert entry[Ring.FOUND_WORD0] == Phase.IDLE
    assert entry[Ring.TAG] == Launch.HEAD | 1 << 8 | 3 << 16
    assert w.state.verdict.tolist() == [Reason.PHASE] + [0] * 7


@each_backend
def test_tree_nodes_have_their_ancestors_lineage(backend: Backend) -> None:
    w = world()
    w.lens = [5, 0, 20]
    rows = w.rows(extends=[4, 0, 2])
    #  0 - 1 - 3     4 - 5
    #   \- 2
    rows = dataclasses.replace(
        rows,
        parent_index=long([-1, 0, 0, 1, -1, 4]),
        positions=long([5, 6, 6, 7, 20, 21]),
        max_depth=4,
    )
    w.state.expected_lineage[1] = w.lineage(0, 5)
    w.write(backend, w.state, rows, WriterKind.VERIFY)
    assert findings(w.state) == []
    lineages = [int(w.state.tail[int(s), 1]) for s in rows.out_cache_loc]
    chain = dataclasses.replace(rows, parent_index=None)
    for path, node in (((0, 1, 3), 3), ((0, 2), 2), ((0,), 0)):
        picked = long(list(path))
        one = ForwardView(
            req_rows=chain.req_rows[:1],
            prefix_lens=chain.prefix_lens[:1],
            extend_lens=long([len(path)]),
            qo_indptr=long([0, len(path)]),
            input_ids=rows.input_ids[picked],
            positions=rows.positions[picked],
            out_cache_loc=rows.out_cache_loc[picked],
            serials=rows.serials[:1],
            salts=rows.salts[:1],
        )
        w.state.expected_lineage[1] = w.lineage(0, 5)
        w.advance(backend, w.state, one)
        assert int(w.state.expected_lineage[1]) == lineages[node]


def tree(w: World) -> ForwardView:
    """Two children of a root, and a child of each, both with one token.

    0 - 1 - 3
     +- 2 - 4
    """
    w.lens = [5, 0, 0]
    w.state.expected_lineage[1] = w.lineage(0, 5)
    rows = w.rows(extends=[5, 0, 0])
    rows.input_ids[4] = rows.input_ids[3]
    return dataclasses.replace(
        rows,
        parent_index=long([-1, 0, 0, 1, 2]),
        positions=long([5, 6, 6, 7, 7]),
        max_depth=2,
    )


@each_backend
def test_nodes_stand_in_their_columns(backend: Backend) -> None:
    """A node in a slot of the row's own prefix, and one in a slot of no column."""
    for slot in (2, 50):
        w = world()
        rows = tree(w)
        rows.out_cache_loc[2] = w.slot(0, slot)
        w.write(backend, w.state, rows, WriterKind.VERIFY)
        due = (Reason.WRITE_FOREIGN, 1, w.slot(0, slot), 6)
        assert findings(w.state) == [due]
        (entry,) = entries(w.state)
        assert entry[Ring.EXPECTED_SLOT] == w.slot(0, 7)


@each_backend
def test_cousins_in_one_slot(backend: Backend) -> None:
    """Alike in token, position and writer: only their histories differ."""
    w = world()
    rows = tree(w)
    w.req_to_token[1, 9] = w.slot(0, 8)
    rows.out_cache_loc[4] = w.slot(0, 8)
    w.write(backend, w.state, rows, WriterKind.VERIFY)
    assert findings(w.state) == [(Reason.WRITE_ALIAS, 1, w.slot(0, 8), 7)]


@each_backend
def test_a_deep_tree_has_the_lineages_of_its_path(backend: Backend) -> None:
    w = world()
    w.lens = [5, 0, 0]
    w.state.expected_lineage[1] = w.lineage(0, 5)
    path = w.rows(extends=[45, 0, 0])
    parents = long([-1, *range(44)])
    deep = dataclasses.replace(path, parent_index=parents, max_depth=44)
    w.write(backend, w.state, deep, WriterKind.VERIFY)
    slots = path.out_cache_loc
    assert w.state.tail[slots, 1].tolist() == [w.lineage(0, n) for n in range(6, 51)]
    assert findings(w.state) == []


@each_backend
def test_of_a_tree_the_root_was_published(backend: Backend) -> None:
    w = world()
    rows = tree(w)
    rows.input_ids[[0, 3]] += 1
    w.write(backend, w.state, rows, WriterKind.VERIFY, published=w.published())
    assert findings(w.state) == [(Reason.WRITE_TOKEN, 1, w.slot(0, 5), 5)]


@each_backend
def test_sweep(backend: Backend) -> None:
    """Paths that no request holds: records only, on counters of their own."""
    w = world(mode=FingerprintMode.ALL)
    rows = w.rows(extends=[0, 0, 0])
    slots = [w.slot(0, p) for p in range(4, 9)]
    w.k[1, slots[2], 0, 0] += 1
    w.req_to_token.zero_()
    w.state.expected_lineage.zero_()
    one = ForwardView(
        req_rows=long([1]),
        prefix_lens=long([9]),
        extend_lens=long([0]),
        input_ids=long([]),
        positions=long([]),
        out_cache_loc=long([]),
        serials=rows.serials[:1],
        salts=rows.salts[:1],
        qo_indptr=long([0, 0]),
    )
    table = KVReadView(
        read_lens=long([5]),
        indptr=long([0, 5]),
        slot_indices=long(slots),
        first_position=long([4]),
        prev_slots=long([-1]),
    )
    w.verify(backend, w.state, one, table, sweep=True)
    assert findings(w.state) == [(Reason.VERIFY_REAL_KV, 0, slots[2], 6)]
    assert int(w.state.counters[Counter.SWEPT_SLOTS]) == 5
    assert int(w.state.counters[Counter.VERIFIED_SLOTS]) == 0


@each_backend
def test_the_ring_fills_once_and_counts_on(backend: Backend) -> None:
    w = world(ring_capacity=4)
    w.state.tail[:, 3] += 1
    rows = decode(w)
    w.verify(backend, w.state, rows, w.table(rows))
    assert int(w.state.ring_count) == 37
    assert all(reason == Reason.VERIFY_TORN for reason, *_ in findings(w.state))


@each_backend
def test_moves_keep_a_row_healthy(backend: Backend) -> None:
    """Records and bytes of overlapping slots move; fingerprints stay true."""
    w = world(mode=FingerprintMode.PARTIAL)
    src = w.req_to_token[3, 3:12].long()
    dst = torch.cat([src[4:], w.req_to_token[3, 60:64].long()])
    for buffer in (w.k, w.v):
        buffer[:, dst] = buffer[:, src].clone()
    w.req_to_token[3, 3:12] = dst.int()
    write = backend.write if backend.name == "triton" else backends()[0].write
    write.move_records(w.state, dst, src)
    rows = decode(w)
    w.verify(backend, w.state, rows, w.table(rows))
    assert findings(w.state) == []


def test_launches_dispatch_and_refuse() -> None:
    w = world()
    rows = decode(w)
    for force in (False, True):
        with force_reference() if force else nullcontext():
            view = dataclasses.replace(rows, manager=0, writer_kind=WriterKind.DECODE)
            checks = w.checks()
            launches.verify(w.state, view, checks, w.table(rows))
            launches.write_head(w.state, view, checks)
            launches.write_tail(w.state, view, checks)
    assert findings(w.state) == [] and not w.state.phase.any()
    launches.set_lineage(w.state, long([2, 3]), long([7, 8]))
    assert w.state.expected_lineage[2:4].tolist() == [7, 8]
    w.state.verdict[2] = 5
    found = launches.gather_findings(w.state, long([0, 2, 0])).cpu()
    assert verdicts_of(found.tolist()) == [0, 5, 0]
    assert not w.state.verdict.any()
    found = launches.finish_step(w.state, rows).cpu()
    assert counters_of(found.tolist()) == w.state.counters.tolist()
    launches.poison(w.state, long([w.slot(0, 0), 3]), n_live=long([1]))
    launches.move_records(w.state, dst=long([5]), src=long([w.slot(0, 0)]))
    assert w.state.tail[5, 0] == -1
    with pytest.raises(ValueError, match="a tree without max_depth"):
        dataclasses.replace(rows, parent_index=rows.positions)
    with pytest.raises(ValueError, match="parent_index"):
        tree = dataclasses.replace(rows, parent_index=rows.positions, max_depth=1)
        launches.finish_step(w.state, tree)
    with pytest.raises(ValueError, match="lineages of a tree"):
        launches.write_tail(w.state, tree, checks, advance=True)
    with pytest.raises(ValueError, match="advances"):
        out = rows.positions
        launches.write_tail(w.state, rows, checks, findings=out)
    with pytest.raises(ValueError, match="either seeds or seed_table"):
        one = rows.positions
        dataclasses.replace(rows, seeds=one, seed_table=one)
    with pytest.raises(ValueError, match="positions is .* strides"):
        odd = torch.zeros(8, dtype=torch.int64)[::2]
        dataclasses.replace(rows, positions=odd).check_layout()
    with pytest.raises(ValueError, match="read_lens is torch.int32"):
        lens = rows.positions.int()
        KVReadView(read_lens=lens, page_table=w.req_to_token).check_layout()
    with pytest.raises(ValueError, match="16"):
        odd = torch.zeros(2, 5, 3)
        layout = PoolLayout(groups=(LayerGroup(name="full", k=odd, v=odd),))
        create_fingerprint(FingerprintMode.ALL, layout)
    with pytest.raises(ValueError, match="page_table"):
        KVReadView(read_lens=long([1]))
    with pytest.raises(ValueError, match="ring_capacity"):
        create_state(
            num_slots=4, req_rows=2, ring_capacity=0, num_managers=1, device="cpu"
        )
    assert Fingerprint().mode is FingerprintMode.NONE


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
