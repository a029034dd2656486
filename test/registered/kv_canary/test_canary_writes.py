"""Every check of the new tokens' slots and inputs has a case that fires exactly its
reason, in the right place; on every implementation that runs here."""

from __future__ import annotations

import dataclasses

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
)

from kv_canary.checks import Reason
from kv_canary.records import Launch, Ring, unpack_word0, unpack_word3
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=6, suite="cpu")
register_cuda_ci(est_time=20, suite="cuda")


@each_backend
def test_scratch(backend: Backend) -> None:
    w = small_world(page_size=4)
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
        w = small_world()
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
        w = small_world(page_size=4)
        rows = decode(w)
        rows.out_cache_loc[-1] = slot
        w.write(backend, w.state, rows)
        is_scratch = 0 <= slot < 4
        due = [] if is_scratch else [(Reason.WRITE_FOREIGN, 0, slot, 0)]
        assert findings(w.state) == due
        assert int(w.state.verdict[0]) == (0 if is_scratch else Reason.WRITE_FOREIGN)


@each_backend
def test_padded_rows_of_an_extend_may_write_scratch_only(backend: Backend) -> None:
    w = small_world(page_size=4)
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
    w = small_world()
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
def test_write_alias(backend: Backend) -> None:
    """Two rows that write one slot: the one whose head record is gone says so."""
    w = small_world()
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
    w = small_world()
    rows = decode(w)
    w.head(backend, w.state, rows)
    w.state.head[w.slot(1, 6)] = w.state.head[w.slot(0, 0)]
    w.tail(backend, w.state, rows)
    assert findings(w.state) == [(Reason.WRITE_ALIAS, 2, w.slot(1, 6), 6)]


@each_backend
def test_oracle(backend: Backend) -> None:
    w = small_world()
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


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
