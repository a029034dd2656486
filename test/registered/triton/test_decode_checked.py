"""Decode attention that compares the bytes it loads: interpreted, or compiled on a GPU.

The sums are those of the torch definition (`kv_canary.head_sums`); every finding must
be the one that a flipped bit predicts.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from dataclasses import dataclass

import pytest
import torch
from attention_problem import (
    DEVICE,
    DTYPES,
    ON_GPU,
    Problem,
    assert_same,
    head_cases,
    make_problem,
    on_hopper,
)
from torch import Tensor

from kv_canary.checks import Reason
from kv_canary.head_sums import head_sums
from kv_canary.kernels.triton.args import state_args
from kv_canary.records import (
    Counter,
    Launch,
    Record,
    Ring,
    WriterKind,
    pack_word0,
    pack_word3,
    ring_tag,
    unpack_place,
)
from kv_canary.state import CanaryState, create_state
from sglang.srt.layers.ops.attention.decode.launch import (
    ComparedLayer,
    decode_attention,
)
from sglang.srt.layers.ops.attention.decode_hopper import launch as decode_hopper
from sglang.srt.layers.ops.attention.decode_hopper.launch import HopperTile, StoredHead
from sglang.srt.layers.ops.attention.op import decode_attention_ref
from sglang.srt.layers.ops.attention.shared.args import ByteCheck, Compares
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.scale import count, sampled

register_cpu_ci(est_time=30, suite="cpu", full_time=200)
register_cuda_ci(est_time=60, suite="cuda")

# Dtype of queries; type of stored K and V, or None for the same.
STORED = [(dtype, None) for dtype in DTYPES] + [(DTYPES[-1], torch.float8_e4m3fn)]
LAYERS, LAYER = 3, 1
SERIAL = 70
TAG = ring_tag(Launch.ATTENTION, 255, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A problem, records of all its slots, and sums of their bytes in a layer."""

    problem: Problem
    state: CanaryState
    check: ByteCheck
    # Whose row a batch row is; 0: padded.
    req_rows: list[int]

    def decode(
        self,
        *,
        compares: Compares = Compares.ALWAYS,
        max_context: int = 256,
        window: int = -1,
    ) -> None:
        """One launch; its results must be those of the torch reference."""
        problem = self.problem
        q = problem.q[: len(problem.prefix_lens)]
        workspace = problem.decode_workspace(max_context)
        out, expected = torch.full_like(q, 7.0), torch.full_like(q, 7.0)
        common = {
            "page_table": problem.page_table,
            "row_index": problem.row_index,
            "read_lens": problem.prefix_lens + problem.new_lens,
            "page_size": problem.page_size,
            "sm_scale": problem.sm_scale,
            "window": window,
        }
        caches = (problem.k_cache, problem.v_cache)
        decode_attention_ref(q, *caches, **common, out=expected)
        compared = ComparedLayer(check=self.check, layer=LAYER, compares=compares)
        decode_attention(
            q, *caches, **common, out=out, workspace=workspace, compared=compared
        )
        assert_same(out, expected)
        assert not workspace.counters.any()

    def flip(self, row: int, element: int, *, bit: int, head: int, is_k: bool) -> int:
        """Flip a bit of a head's K or V; returns the slot."""
        cache = self.problem.k_cache if is_k else self.problem.v_cache
        slot = self.problem.slot(row, element)
        words = cache[slot, head].view(torch.uint8)
        words[bit // 8] ^= 1 << bit % 8
        return slot

    def take(self) -> list[dict[Ring, int]]:
        """The entries of the ring, by row and position; the ring is empty then."""
        count = int(self.state.ring_count)
        found = self.state.ring[:count].tolist()
        self.state.ring_count.zero_()
        named = [dict(zip(Ring, entry, strict=True)) for entry in found]
        return sorted(named, key=lambda e: (e[Ring.BATCH_ROW], e[Ring.POSITION]))


def make_checked(problem: Problem, *, req_rows: list[int] | None = None) -> Checked:
    rows = len(problem.prefix_lens)
    req_rows = req_rows or list(range(1, rows + 1))
    slots, heads = problem.k_cache.shape[:2]
    state = create_state(
        num_slots=slots, req_rows=rows + 1, ring_capacity=512, num_managers=1,
        device=DEVICE, pool=3,
    )  # fmt: skip
    for row, prefix in enumerate(problem.prefix_lens.tolist()):
        for element in range(prefix):
            for records in (state.head, state.tail):
                record = records[problem.slot(row, element)]
                record[Record.WORD0] = pack_word0(5, element)
                record[Record.LINEAGE] = 11 * element
                record[Record.WORD3] = pack_word3(0, WriterKind.EXTEND, SERIAL + row)
    sums = torch.randint(1 << 20, (slots, LAYERS, heads), device=DEVICE)
    sums = sums.to(torch.int32)
    sums[:, LAYER] = sums_of(problem)
    check = ByteCheck(
        state=state_args(state),
        sums=sums,
        slot_stride=sums.stride(0),
        layers=LAYERS,
        req_rows=torch.tensor(req_rows, device=DEVICE),
        serials=SERIAL + torch.arange(rows, device=DEVICE),
        prefix_lens=problem.prefix_lens,
        first_position=None,
        tag=TAG,
    )
    return Checked(problem=problem, state=state, check=check, req_rows=req_rows)


def sums_of(problem: Problem) -> Tensor:
    """int32 [slots, heads]."""
    k, v = (cache.view(torch.int64) for cache in (problem.k_cache, problem.v_cache))
    return head_sums(k, v)


def cases() -> list[tuple[torch.dtype, int, int]]:
    """Dtype, page size, window."""
    return sampled(
        itertools.product(DTYPES, [1, 4, 16], [-1, 70]),
        key=lambda case: case[:2],
        ci=2 if ON_GPU else 1,
    )


PREFIXES = [0, 64, 131, 16, 97]


@pytest.mark.parametrize(("dtype", "page_size", "window"), cases())
def test_whole_bytes_find_nothing(
    dtype: torch.dtype, page_size: int, window: int
) -> None:
    """In several splits and in one; with rows that read no prefix, and padded ones."""
    problem = make_problem(
        prefix_lens=PREFIXES, new_lens=[1] * 5, page_size=page_size, dtype=dtype
    )
    checked = make_checked(problem, req_rows=[1, 2, 3, 0, 5])
    # Bytes of a padded row, and those that a forward writes, are nobody's.
    checked.flip(3, 2, bit=9, head=0, is_k=True)
    checked.flip(2, PREFIXES[2], bit=9, head=0, is_k=False)
    for compares in (Compares.ALWAYS, Compares.IN_TURN):
        for max_context in (1, 256):
            checked.decode(compares=compares, max_context=max_context, window=window)
    assert checked.take() == []
    assert not checked.state.verdict.any()
    # Layer 1 counts where layers take turns: twice, and it is the turn of the clock's.
    compared = sum(
        min(prefix + 1, window) - 1 if window > 0 else prefix
        for row, prefix in enumerate(PREFIXES)
        if row != 3
    )
    counted = int(checked.state.counters[Counter.REHASHED_SLOTS])
    assert counted == 2 * compared and int(checked.state.clock) % LAYERS == LAYER


@pytest.mark.parametrize(("heads", "head_dim"), head_cases(64, 80, 96, 128, 192, 256))
def test_a_flipped_bit_is_named(heads: tuple[int, int], head_dim: int) -> None:
    """Any bit of any head of any element, with the layer, the head and both sums."""
    rng = random.Random(head_dim * heads[0])
    for dtype, kv in STORED:
        problem = make_problem(
            prefix_lens=[69, 2, 33],
            new_lens=[1] * 3,
            heads=heads,
            head_dim=head_dim,
            dtype=dtype,
            page_size=4,
        )
        problem = problem if kv is None else problem.stored_as(kv)
        checked = make_checked(problem)
        caches = (problem.k_cache, problem.v_cache)
        for _ in range(count(ci=6 if ON_GPU else 2, full=12)):
            row = rng.randrange(3)
            flip = {
                "element": rng.randrange(int(problem.prefix_lens[row])),
                "bit": rng.randrange(8 * head_dim * problem.k_cache.itemsize),
                "head": rng.randrange(heads[1]),
                "is_k": rng.random() < 0.5,
            }
            slot = checked.flip(row, **flip)
            if not bool(torch.stack(caches)[:, slot].float().isfinite().all()):
                checked.flip(row, **flip)
                continue
            checked.decode(max_context=rng.choice([1, 256]))
            (entry,) = checked.take()
            assert entry[Ring.REASONS] == Reason.VERIFY_REAL_KV
            assert entry[Ring.SLOT] == entry[Ring.EXPECTED_SLOT] == slot
            assert entry[Ring.POSITION] == flip["element"]
            assert entry[Ring.REQ_ROW] == row + 1 and entry[Ring.BATCH_ROW] == row
            assert entry[Ring.SERIAL] == SERIAL + row
            assert entry[Ring.FOUND_WORD0] == pack_word0(5, flip["element"])
            assert entry[Ring.FOUND_LINEAGE] == 11 * flip["element"]
            assert entry[Ring.CLOCK] == int(checked.state.clock)
            assert entry[Ring.TAG] == TAG
            kept = int(checked.check.sums[slot, LAYER, flip["head"]])
            now = int(sums_of(problem)[slot, flip["head"]])
            sums = (Ring.FOUND_FINGERPRINT, kept), (Ring.COMPUTED_FINGERPRINT, now)
            for column, value in sums:
                assert entry[column] & 0xFFFFFFFF == value & 0xFFFFFFFF
                assert unpack_place(entry[column]) == (LAYER, flip["head"])
            assert checked.state.verdict.tolist() == [
                Reason.VERIFY_REAL_KV * (i == row + 1) for i in range(4)
            ]
            checked.state.verdict.zero_()
            checked.state.clock.add_(1)
            checked.flip(row, **flip)
        checked.decode()
        assert checked.take() == []


HOPPER_TILES = [
    (compares, head, tile)
    for compares in (Compares.ALWAYS, Compares.IN_TURN)
    for head, tiles in decode_hopper.TILES[compares].items()
    for tile in tiles
]


@on_hopper
@pytest.mark.parametrize(("compares", "head", "tile"), HOPPER_TILES)
def test_every_tile_compares_all_bytes(
    monkeypatch: pytest.MonkeyPatch,
    compares: Compares,
    head: StoredHead,
    tile: HopperTile,
) -> None:
    """Each is what some number of rows gets; here few rows get it, in one split and in
    some."""
    monkeypatch.setattr(decode_hopper, "choose_tile", lambda **shape: tile)
    problem = make_problem(
        prefix_lens=[200, 65, 31],
        new_lens=[1] * 3,
        heads=(8, 2),
        head_dim=head.head_dim,
        dtype=torch.bfloat16,
    )
    if head.itemsize == 1:
        problem = problem.stored_as(torch.float8_e4m3fn)
    checked = make_checked(problem)
    checked.state.clock.fill_(LAYER)
    for max_context in (1, 256):
        checked.decode(compares=compares, max_context=max_context)
        assert checked.take() == []
        for element, is_k in itertools.product((0, 15, 16, 63, 199), (True, False)):
            flip = {"bit": element % 16, "head": element % 2, "is_k": is_k}
            slot = checked.flip(0, element, **flip)
            checked.decode(compares=compares, max_context=max_context)
            assert [entry[Ring.SLOT] for entry in checked.take()] == [slot]
            checked.state.verdict.zero_()
            checked.state.clock.add_(LAYERS)
            checked.flip(0, element, **flip)


@pytest.mark.parametrize("max_context", [1, 512])
def test_many_changes_are_named_once_each(max_context: int) -> None:
    """Of a row in several heads and tiles; once in a forward, again in the next; an
    even number of top bits; two slots that hold each other's bytes."""
    problem = make_problem(
        prefix_lens=[130, 65], new_lens=[1, 1], heads=(4, 2), page_size=4,
        dtype=torch.float16,
    )  # fmt: skip
    checked = make_checked(problem)
    bits = problem.q.shape[2] * 16
    for head in range(2):
        for element in (3, 64, 129):
            checked.flip(0, element, bit=7, head=head, is_k=True)
    for bit in (31, bits - 1):
        checked.flip(1, 20, bit=bit, head=1, is_k=False)
    one, other = problem.slot(1, 40), problem.slot(1, 61)
    for cache in (problem.k_cache, problem.v_cache):
        cache[[one, other]] = cache[[other, one]]
    named = [(0, 3), (0, 64), (0, 129), (1, 20), (1, 40), (1, 61)]
    for _ in range(2):
        for _ in range(2):
            checked.decode(max_context=max_context)
        found = [(e[Ring.BATCH_ROW], e[Ring.POSITION]) for e in checked.take()]
        # Programs that run at once may each be the first of a row.
        assert ON_GPU or len(found) == len(named)
        assert len(found) <= 2 * len(named)
        assert list(dict.fromkeys(found)) == named
        checked.state.clock.add_(1)


def test_rows_that_share_a_slot_are_all_flagged() -> None:
    problem = make_problem(
        prefix_lens=[40, 40, 40], new_lens=[1, 1, 1], heads=(4, 2), has_row_index=False
    )
    problem.page_table[1, :16] = problem.page_table[0, :16]
    checked = make_checked(problem)
    for element in (5, 9):
        for head in range(2):
            checked.flip(0, element, bit=7, head=head, is_k=True)
    for _ in range(2):
        checked.decode()
    assert (checked.state.verdict != 0).tolist() == [False, True, True, False]
    found = checked.take()
    assert len(found) <= 4 * (8 if ON_GPU else 1)
    assert {e[Ring.BATCH_ROW] for e in found} == {0, 1}
    assert {e[Ring.POSITION] for e in found} == {5, 9}


def test_layers_take_turns() -> None:
    problem = make_problem(prefix_lens=[20], new_lens=[1])
    checked = make_checked(problem)
    slot = checked.flip(0, 4, bit=3, head=0, is_k=True)
    for clock in range(2 * LAYERS):
        checked.state.clock.fill_(clock)
        checked.decode(compares=Compares.IN_TURN)
        found = [entry[Ring.SLOT] for entry in checked.take()]
        assert found == [slot] * (clock % LAYERS == LAYER)


def test_slots_without_a_record_are_left_to_verify() -> None:
    problem = make_problem(prefix_lens=[20], new_lens=[1])
    checked = make_checked(problem)
    slot = checked.flip(0, 4, bit=3, head=0, is_k=True)
    checked.state.tail[slot, Record.WORD0] = -1
    checked.decode()
    assert checked.take() == []


def test_elements_are_counted_from_the_first_position() -> None:
    problem = make_problem(prefix_lens=[20, 9], new_lens=[1, 1])
    checked = make_checked(problem)
    check = checked.check._replace(
        first_position=torch.tensor([1000, 64], device=DEVICE)
    )
    checked = dataclasses.replace(checked, check=check)
    checked.flip(1, 4, bit=3, head=0, is_k=True)
    checked.decode()
    assert [entry[Ring.POSITION] for entry in checked.take()] == [68]
