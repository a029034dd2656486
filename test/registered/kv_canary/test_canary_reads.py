"""Every check of the slots that attention reads has a case that fires exactly its
reason, in the right place; on every implementation that runs here."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from canary_world import (
    Backend,
    decode,
    each_backend,
    entries,
    findings,
    long,
    small_world,
    step,
)

from kv_canary.checks import Reason
from kv_canary.layout import (
    FingerprintMode,
)
from kv_canary.records import (
    Counter,
    Launch,
    Ring,
    WriterKind,
    unpack_word0,
    unpack_word3,
)
from kv_canary.view import ANY_REACH, ForwardView, KVReadView
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.scale import count

register_cpu_ci(est_time=25, suite="cpu")
register_cuda_ci(est_time=25, suite="cuda")

ROTATIONS = 4 if torch.cuda.is_available() else count(ci=2, full=4)


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
        w = small_world()
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
    each record is of one position earlier than it is read."""
    w = small_world()
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
    w = small_world()
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
    w = small_world(draft=True)
    rows = decode(w)
    known = w.tokens.clone()
    known[1, 5] += 1  # held by the draft pool at position 4
    known[2, 3] = -1  # not known
    w.verify(backend, w.state, rows, w.table(rows), tokens=known)
    assert findings(w.state) == [(Reason.VERIFY_TOKEN, 1, w.slot(0, 4), 4)]
    (entry,) = entries(w.state)
    assert unpack_word0(entry[Ring.EXPECTED_WORD0]) == (int(known[1, 5]), 4)


@each_backend
def test_torn_and_freed(backend: Backend) -> None:
    w = small_world()
    rows, table = decode(w), None
    torn, half, freed = w.slot(0, 2), w.slot(1, 4), w.slot(2, 10)
    w.state.head[torn, 3] += 1 << 40
    w.state.tail[half, 0] = -1
    backend.launch.poison(w.state, long([freed, freed, -1]), None)
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
    w = small_world(mode=mode, period=5)
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


@each_backend
@pytest.mark.parametrize("seed", range(ROTATIONS))
def test_a_rotation_takes_every_slot_once(backend: Backend, seed: int) -> None:
    """While a row grows by a period, in steps of any size, each slot of its prefix is
    looked at once: none is passed over, none is hashed twice."""
    rng, period = random.Random(seed), 12
    w = small_world(mode=FingerprintMode.ROTATE, period=period)
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
def test_read_set(backend: Backend) -> None:
    """A wrong slot with a true record, unreadable ids, and a wrong new token."""
    w = small_world()
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
    w = small_world()
    rows = decode(w)
    table = w.table(rows, window=window, with_new=False)
    table.read_lens[0] -= 2
    w.verify(backend, w.state, rows, table)
    assert findings(w.state) == [(Reason.READ_SET, 1, -1, 9)]
    assert w.state.verdict.tolist()[1] == Reason.READ_SET


@each_backend
@pytest.mark.parametrize("reach", [7, 8, 9, ANY_REACH])
def test_a_window_that_begins_too_late(backend: Backend, reach: int) -> None:
    """Each row reads the last 8 tokens of its prefix, or all of them."""
    w = small_world()
    rows = decode(w)
    table = dataclasses.replace(w.table(rows, window=8), reach=reach)
    prefixes = rows.prefix_lens.tolist()
    assert min(prefixes) < 8 < max(prefixes)
    w.verify(backend, w.state, rows, table)
    late = [
        (Reason.READ_SET, int(req), -1, prefix - reach)
        for req, prefix in zip(rows.req_rows, prefixes, strict=True)
        if prefix > 8 and reach == 9
    ]
    assert findings(w.state) == sorted(late)
    assert reach != 9 or late


COUNTS = {
    # (prefix too long, change of positions by new token): the first due position
    "as the forward does": (0, {}, None),
    "prefix": (-1, {}, 20),
    "all": (3, {0: 4, 7: 4}, 20),
    "a node": (0, {4: -8}, 24),
    "two nodes": (0, {90: 1, 65: 1}, 85),
}


@each_backend
@pytest.mark.parametrize("name", COUNTS)
def test_what_attention_counts_from_a_window(backend: Backend, name: str) -> None:
    """Of the last row, beside rows that are counted rightly and a padded one."""
    longer, moved, due = COUNTS[name]
    w = small_world()
    rows = w.rows(extends=[0, 70, 95], pad=1)
    first = (rows.prefix_lens - 8).clamp(min=0)
    row = torch.repeat_interleave(rows.extend_lens)
    table = dataclasses.replace(
        w.table(rows, window=8),
        prefix_lens=rows.prefix_lens - first,
        positions=rows.positions - first[row],
    )
    assert table.prefix_lens is not None and table.positions is not None
    table.prefix_lens[2] += longer
    for token, change in moved.items():
        table.positions[70 + token] += change
    table.prefix_lens[3] += 5
    table.positions[-1] += 5
    w.verify(backend, w.state, rows, table)
    assert findings(w.state) == ([] if due is None else [(Reason.READ_SET, 3, -1, due)])


@each_backend
def test_a_row_that_ends_among_its_new_tokens(backend: Backend) -> None:
    """A view that takes new tokens is complete; another may also end at the prefix."""
    w = small_world()
    rows = w.rows(extends=[2, 3, 2])
    table = w.table(rows)
    table.read_lens[0] -= 2
    table.read_lens[1] -= 2
    table.read_lens[2] -= 1
    w.verify(backend, w.state, rows, table)
    among = [(Reason.READ_SET, 2, -1, 7), (Reason.READ_SET, 3, -1, 21)]
    assert findings(w.state) == [(Reason.READ_SET, 1, -1, 11), *among]
    w.state.ring_count.zero_()
    w.verify(backend, w.state, rows, dataclasses.replace(table, takes_new=False))
    assert findings(w.state) == among


@each_backend
@pytest.mark.parametrize("indptr_dtype", [torch.int32, torch.int64])
def test_page_numbers_read_as_a_page_table_does(
    backend: Backend, indptr_dtype: torch.dtype
) -> None:
    for is_damaged in (False, True):
        found = []
        for as_numbers in (False, True):
            w = small_world(page_size=4)
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
def test_sweep(backend: Backend) -> None:
    """Paths that no request holds: records only, on counters of their own."""
    w = small_world(mode=FingerprintMode.ALL)
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


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
