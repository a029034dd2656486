"""Records of recurrent state: every form of the launches against a plain model."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from canary_world import DEVICE, Backend, backends, entries, long

from kv_canary.checks import Reason
from kv_canary.layout import (
    FingerprintMode,
    LayerGroup,
    PoolLayout,
    create_fingerprint,
)
from kv_canary.records import (
    NO_HEAD,
    TAG_LAUNCH_MASK,
    Counter,
    Launch,
    Ring,
    WriterKind,
    unpack_place,
    unpack_word3,
)
from kv_canary.state import CanaryState, create_state
from kv_canary.state_rows import StateRows
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.scale import count

register_cpu_ci(est_time=15, suite="cpu")
register_cuda_ci(est_time=20, suite="cuda")

SLOTS, LAYERS, ROWS = 12, 3, 5
# All bytes are summed by the layers, which mark the slots.
MODES = [FingerprintMode.NONE, FingerprintMode.PARTIAL]
# There is no native form.
FORMS = [form for form in backends() if form.launch.note_states is not None]
each_form = pytest.mark.parametrize("backend", FORMS, ids=lambda form: form.name)


class World:
    """States of random bytes, and the records over them."""

    def __init__(self, seed: int, mode: FingerprintMode) -> None:
        self.random = torch.Generator().manual_seed(seed)
        # Slots before layers, as in the pool.
        self.conv = self.bytes(SLOTS, LAYERS, 24)
        self.matrix = self.bytes(SLOTS, LAYERS, 2, 8, 8)
        layers = LayerGroup(
            name="state",
            k=self.conv.transpose(0, 1),
            v=self.matrix.transpose(0, 1).flatten(2),
        )
        self.source = create_fingerprint(mode, PoolLayout(groups=[layers]))
        self.state = create_state(
            num_slots=SLOTS, req_rows=9, ring_capacity=64, num_managers=1, device=DEVICE
        )
        self.folded = torch.zeros(SLOTS, 2 * LAYERS, dtype=torch.int32, device=DEVICE)
        self.marks = torch.zeros(SLOTS, LAYERS, dtype=torch.int32, device=DEVICE)
        self.lineages = self.numbers(9)

    def bytes(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random).to(DEVICE)

    def numbers(self, size: int) -> torch.Tensor:
        drawn = torch.randint(-(2**62), 2**62, (size,), generator=self.random)
        return drawn.to(DEVICE)

    def rows(self, lengths: list[int]) -> StateRows:
        """Requests in rows 1, 2, ...; a row of length -1 is padding."""
        req_rows = [i + 1 if n >= 0 else 0 for i, n in enumerate(lengths)]
        rows = long(req_rows)
        return StateRows(
            slots=rows,
            due_slots=rows.clone(),
            req_rows=rows.clone(),
            serials=long([100 + i for i in range(len(lengths))]),
            lengths=long([max(n, 0) for n in lengths]),
            lineages=self.lineages,
            folded=self.folded,
            marks=self.marks,
        )

    def fold(self, rows: StateRows) -> None:
        self.folded[rows.slots] = rows.lengths.to(torch.int32)[:, None]

    def note(self, backend: Backend, rows: StateRows, **options) -> None:
        self.fold(rows)
        backend.launch.note_states(
            self.state,
            rows,
            self.source,
            options.get("kind", WriterKind.DECODE),
            options.get("ends_forward", True),
        )

    def found(self, backend: Backend, rows: StateRows) -> list[tuple[int, int, int]]:
        """(reasons, slot, batch row) of what `check_states` reports."""
        backend.launch.check_states(self.state, rows, self.source)
        return taken(self.state)


def taken(state: CanaryState) -> list[tuple[int, int, int]]:
    found = [(e[Ring.REASONS], e[Ring.SLOT], e[Ring.BATCH_ROW]) for e in entries(state)]
    state.ring_count.zero_()
    return sorted(found, key=lambda entry: entry[2])


@each_form
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name.lower())
def test_sound_states_pass_and_damage_is_named(backend: Backend, mode) -> None:
    world = World(1, mode)
    rows = world.rows([7, 3, -1, 0, 300])
    world.note(backend, rows)
    assert world.found(backend, rows) == []
    assert int(world.state.clock) == 2
    record = world.state.tail[1].tolist()
    assert record[0] >> 32 == 6 and record[1] == int(world.lineages[1])
    writer = unpack_word3(record[3])
    assert (writer.kind, writer.serial, writer.clock) == (WriterKind.DECODE, 100, 1)
    assert torch.equal(world.state.head, world.state.tail)

    swapped = dataclasses.replace(rows, slots=long([2, 1, 0, 4, 5]))
    every = Reason.READ_SET | Reason.VERIFY_POSITION
    every |= Reason.VERIFY_LINEAGE | Reason.ROW_OWNER
    assert world.found(backend, swapped) == [(every, 2, 0), (every, 1, 1)]
    ahead = dataclasses.replace(rows, lengths=rows.lengths + (rows.lengths == 3))
    assert world.found(backend, ahead) == [(Reason.VERIFY_POSITION, 2, 1)]
    other = dataclasses.replace(rows, serials=rows.serials + (rows.lengths == 3))
    assert world.found(backend, other) == [(Reason.ROW_OWNER, 2, 1)]
    never = dataclasses.replace(rows, lengths=rows.lengths.clamp(min=1))
    assert (Reason.VERIFY_FREED, 4, 3) in world.found(backend, never)
    stray = dataclasses.replace(rows, slots=long([1, 99, 0, 4, 5]))
    assert world.found(backend, stray) == [(Reason.READ_SET, 99, 1)]
    world.lineages[5] += 1
    assert world.found(backend, rows) == [(Reason.VERIFY_LINEAGE, 5, 4)]


@each_form
@pytest.mark.parametrize("part", ["conv", "matrix"])
def test_changed_samples_are_named(backend: Backend, part: str) -> None:
    """The lineage chooses the place, within few forwards."""
    world, seen = World(2, FingerprintMode.PARTIAL), 0
    for turn in range(120):
        rows = world.rows([turn + 1, 5])
        world.lineages[1] = world.numbers(1)[0]
        world.note(backend, rows)
        where = world.numbers(2).remainder(97).tolist()
        flat = getattr(world, part)[1].view(-1)
        cell = where[0] % len(flat)
        flat[cell] *= -1
        found = world.found(backend, rows)
        flat[cell] *= -1
        assert found in ([], [(Reason.VERIFY_REAL_KV, 1, 0)])
        seen += bool(found)
    assert seen


@each_form
@pytest.mark.parametrize("noted", [False, True], ids=["check", "note"])
def test_marks_are_named_once(backend: Backend, noted: bool) -> None:
    """By whichever launch comes next, with the record that the layers have read; not
    those of a row whose slot was freed, or that nobody has."""
    world = World(5, FingerprintMode.NONE)
    rows = world.rows([8, 9, -1, 30])
    world.note(backend, rows)
    read = world.state.tail[2].tolist()
    poisoned = long([4])
    backend.launch.poison(world.state, poisoned, None)
    world.marks[2, 1:] = world.marks[4, 0] = world.marks[7, 1] = 1
    ahead = dataclasses.replace(rows, lengths=rows.lengths + (rows.lengths > 0))
    for _ in range(2):
        if noted:
            world.note(backend, ahead)
        else:
            backend.launch.check_states(world.state, rows, world.source)
        found = [e for e in entries(world.state) if e[Ring.SLOT] == 2]
        world.state.ring_count.zero_()
        if not read:
            assert not found
            continue
        (entry,) = found
        assert entry[Ring.REASONS] == Reason.VERIFY_REAL_KV
        assert entry[Ring.TAG] & 255 == Launch.ATTENTION
        assert entry[Ring.POSITION] == entry[Ring.FOUND_WORD0] >> 32 == 8
        assert entry[Ring.FOUND_WORD3] == read[3]
        assert entry[Ring.BATCH_ROW] == 1
        assert unpack_place(entry[Ring.FOUND_FINGERPRINT]) == (1, NO_HEAD)
        read = []
    assert world.marks.nonzero().tolist() == [[7, 1]]


@pytest.mark.parametrize("mode", [FingerprintMode.ROTATE, FingerprintMode.ALL])
@each_form
def test_all_bytes_are_not_hashed_here(backend: Backend, mode: FingerprintMode) -> None:
    world = World(6, mode)
    with pytest.raises(ValueError, match="only samples are hashed"):
        backend.launch.check_states(world.state, world.rows([3]), world.source)


@each_form
def test_a_layer_that_folds_too_little_or_twice_is_named(backend: Backend) -> None:
    world = World(3, FingerprintMode.PARTIAL)
    for change, layer in ((-1, 0), (1, 4), (1, 5)):
        rows = world.rows([8, 9, -1])
        world.fold(rows)
        world.folded[2, layer] += change
        backend.launch.note_states(
            world.state, rows, world.source, WriterKind.EXTEND, True
        )
        (entry,) = entries(world.state)
        assert entry[Ring.REASONS] == Reason.STATE_FOLDS
        assert entry[Ring.FOUND_FINGERPRINT] == layer
        assert entry[Ring.FOUND_WORD0] >> 32 == 8 + change
        assert entry[Ring.TAG] & 255 == Launch.TAIL
        assert entry[Ring.BATCH_ROW] == 1
        world.state.ring_count.zero_()


@each_form
def test_a_checkpoint_is_noted_beside_the_rows(backend: Backend) -> None:
    """With lineages of its own, and without the end of a forward; slot 0 is none."""
    world = World(4, FingerprintMode.PARTIAL)
    own = long([5, 6, 7])
    rows = StateRows(
        slots=long([9, 0, 10]),
        due_slots=long([9, 0, 10]),
        req_rows=long([1, 1, 2]),
        serials=long([100, 100, 101]),
        lengths=long([64, 0, 128]),
        lineages=own,
        lineage_rows=long([0, 1, 2]),
        folded=world.folded,
    )
    world.note(backend, rows, ends_forward=False, kind=WriterKind.EXTEND)
    assert int(world.state.clock) == 1 and not taken(world.state)
    assert world.state.tail[[9, 10], 1].tolist() == [5, 7]
    assert (world.state.tail[[9, 10], 0] >> 32).tolist() == [63, 127]
    both = dataclasses.replace(
        rows,
        **{
            name: getattr(rows, name)[[0, 2]].contiguous()
            for name in ("slots", "due_slots", "req_rows", "serials", "lengths")
        },
        lineage_rows=long([0, 2]),
    )
    assert world.found(backend, both) == []


@each_form
def test_a_sweep_asks_for_no_owner_and_names_no_request(backend: Backend) -> None:
    world = World(3, FingerprintMode.NONE)
    rows = world.rows([7, 3, -1, 300])
    world.note(backend, rows)
    nobody = dataclasses.replace(rows, serials=torch.zeros_like(rows.serials))

    def sweep() -> None:
        backend.launch.check_states(world.state, nobody, world.source, Launch.SWEEP)

    sweep()
    assert entries(world.state) == []
    counters = world.state.counters.tolist()
    assert (counters[Counter.SWEPT_SLOTS], counters[Counter.SWEEP_LAUNCHES]) == (3, 1)
    assert counters[Counter.VERIFIED_SLOTS] == counters[Counter.VERIFY_LAUNCHES] == 0
    world.marks[2, 1] = 1
    sweep()
    (found,) = entries(world.state)
    assert found[Ring.REASONS] == Reason.VERIFY_REAL_KV
    assert (found[Ring.SLOT], found[Ring.POSITION]) == (2, 2)
    assert found[Ring.REQ_ROW] == found[Ring.SERIAL] == 0
    assert found[Ring.TAG] & TAG_LAUNCH_MASK == Launch.SWEEP
    assert world.state.verdict[1:].count_nonzero() == 0


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name.lower())
def test_all_forms_write_the_same(mode: FingerprintMode) -> None:
    for seed in range(count(ci=6, full=60)):
        worlds = [World(seed, mode) for _ in FORMS]
        for step in range(4):
            draw = torch.Generator().manual_seed(100 * seed + step)
            lengths = (torch.randint(0, 50, (ROWS,), generator=draw) - 5).tolist()
            for form, world in zip(FORMS, worlds, strict=True):
                rows = world.rows(lengths)
                world.note(form, rows)
                world.matrix[3, 1, 0, 0, 0] += 1
                world.marks[lengths[0] % SLOTS, step % LAYERS] = 1
                form.launch.check_states(
                    world.state,
                    dataclasses.replace(rows, lengths=rows.lengths + step % 2),
                    world.source,
                    Launch.SWEEP if step > 1 else Launch.VERIFY,
                )
        first = worlds[0].state
        for world in worlds[1:]:
            assert torch.equal(first.tail, world.state.tail)
            assert torch.equal(first.counters, world.state.counters)
            assert torch.equal(first.verdict, world.state.verdict)
            assert entries(first) == entries(world.state)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
