"""Whole launches of the canary: healthy runs, phases, the ring, moves, refusals; on
every implementation that runs here."""

from __future__ import annotations

import dataclasses
import itertools
from contextlib import nullcontext

import pytest
import torch
from canary_world import (
    Backend,
    backends,
    decode,
    each_backend,
    entries,
    findings,
    long,
    small_world,
)
from torch import Tensor

from kv_canary import launches
from kv_canary.checks import Reason
from kv_canary.findings import parse_counters, parse_verdicts
from kv_canary.layout import (
    Fingerprint,
    FingerprintMode,
    LayerGroup,
    PoolLayout,
    create_fingerprint,
    scattered_fingerprint,
)
from kv_canary.op import force_reference
from kv_canary.records import Counter, Launch, Phase, Ring, WriterKind
from kv_canary.state import create_state
from kv_canary.view import ROW_FIELDS, KVReadView
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.scale import sampled

register_cpu_ci(est_time=20, suite="cpu")
register_cuda_ci(est_time=20, suite="cuda")


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
    w = small_world(mode=mode, page_size=page_size, draft=page_size == 4)
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


def scatter(layers: Tensor) -> list[Tensor]:
    """The same layers [layers, slots, ...] in one memory, at distances that differ, out
    of order."""
    memory = layers.new_zeros((2 * len(layers) + 3) * layers[0].numel())
    places = [3 * i * i % 7 * layers[0].numel() + 8 * i for i in range(len(layers))]
    found = [
        memory[place:][: layer.numel()].view_as(layer).copy_(layer)
        for place, layer in zip(places, layers, strict=True)
    ]
    assert len({b.data_ptr() - a.data_ptr() for a, b in itertools.pairwise(found)}) > 1
    return found


@pytest.mark.skipif("triton" not in {b.name for b in backends()}, reason="no Triton")
@pytest.mark.parametrize(
    "mode", [FingerprintMode.PARTIAL, FingerprintMode.ROTATE, FingerprintMode.ALL]
)
@pytest.mark.parametrize("is_damaged", [False, True])
def test_layers_at_distances_that_differ(
    mode: FingerprintMode, is_damaged: bool
) -> None:
    """The same states, findings and bytes as of equal distances."""
    triton = backends()[-1]
    states, filled_of = [], []
    for is_scattered in (False, True):
        w = small_world(mode=mode, page_size=4, period=1)
        k, v = list(w.k), list(w.v)
        if is_scattered:
            k, v = scatter(w.k), scatter(w.v)
            w.fingerprint = dataclasses.replace(
                scattered_fingerprint(mode, [k, v], 4, "full"), rotation_period=1
            )
        if is_damaged:
            for half in (k, v):
                for layer in half:
                    layer.view(torch.int32)[w.slot(2, 7)] ^= 1
        kept = [layer.clone() for layer in (*k, *v)]
        rows = decode(w)
        w.verify(triton, w.state, rows, w.table(rows), tokens=w.tokens, manager=0)
        view = dataclasses.replace(rows, writer_kind=WriterKind.DECODE, manager=0)
        triton.launch.write_head(w.state, view, w.checks())
        filled_of.append(torch.stack([*k, *v]))
        # The model stores what the world already holds.
        for layer, values in zip((*k, *v), kept, strict=True):
            layer.copy_(values)
        w.tail(triton, w.state, rows, manager=0)
        states.append(w.state)
    first, second = states
    assert entries(first) == entries(second)
    damaged = [(Reason.VERIFY_REAL_KV, 3, w.slot(2, 7), 7)]
    assert findings(first) == (damaged if is_damaged else [])
    for name in ("head", "tail", "verdict", "counters"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name
    filled = [memory.view(torch.int32) for memory in filled_of]
    assert torch.equal(*filled)


def test_layers_at_distances_that_differ_are_refused_elsewhere() -> None:
    w = small_world(mode=FingerprintMode.PARTIAL)
    w.fingerprint = scattered_fingerprint(w.mode, [list(w.k), list(w.v)], 1, "full")
    for backend in backends():
        if backend.name == "triton":
            continue
        rows = decode(w)
        with pytest.raises(ValueError, match="Triton's kernels alone"):
            w.verify(backend, w.state, rows, w.table(rows))
    odd = torch.zeros(99, dtype=torch.int8)
    layers = [odd[:64].view(2, 32), odd[33:97].view(2, 32)]
    with pytest.raises(ValueError, match="33 bytes apart"):
        scattered_fingerprint(w.mode, [layers, layers], 1, "full")


def test_both_checks_before_the_model_in_one_call() -> None:
    """`before_model` leaves what `verify` and `write_head` leave, faults included."""
    for is_damaged in (False, True):
        states = []
        for joint in (False, True):
            w = small_world(mode=FingerprintMode.PARTIAL, page_size=4)
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
    w = small_world()
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
def test_the_ring_fills_once_and_counts_on(backend: Backend) -> None:
    w = small_world(ring_capacity=4)
    w.state.tail[:, 3] += 1
    rows = decode(w)
    w.verify(backend, w.state, rows, w.table(rows))
    assert int(w.state.ring_count) == 37
    assert all(reason == Reason.VERIFY_TORN for reason, *_ in findings(w.state))


@each_backend
def test_moves_keep_a_row_healthy(backend: Backend) -> None:
    """Records and bytes of overlapping slots move; fingerprints stay true."""
    w = small_world(mode=FingerprintMode.PARTIAL)
    src = w.req_to_token[3, 3:12].long()
    dst = torch.cat([src[4:], w.req_to_token[3, 60:64].long()])
    for buffer in (w.k, w.v):
        buffer[:, dst] = buffer[:, src].clone()
    w.req_to_token[3, 3:12] = dst.int()
    moving = backend if backend.name == "triton" else backends()[0]
    moving.launch.move_records(w.state, dst, src)
    rows = decode(w)
    w.verify(backend, w.state, rows, w.table(rows))
    assert findings(w.state) == []


@each_backend
@pytest.mark.parametrize("count", [1, 3, 130])
def test_heads_are_announced_in_one_launch(backend: Backend, count: int) -> None:
    """Slots outside the pool, and repeated ones, change nothing else."""
    w = small_world()
    rng = torch.Generator().manual_seed(count)
    w.state.head.copy_(torch.randint(1 << 40, w.state.head.shape, generator=rng))
    slots = torch.randint(-3, w.state.num_slots + 3, (count,), generator=rng)
    slots = slots.to(w.state.head.device)
    due = w.state.tail.clone()
    for slot in slots.tolist():
        if 0 < slot < w.state.num_slots:
            due[slot] = w.state.head[slot]
    w.state.head[0] = due[0] = w.state.tail[0]  # scratch
    announcing = backend if backend.name == "triton" else backends()[0]
    announcing.launch.announce_heads(w.state, slots)
    assert torch.equal(w.state.tail, due)


def test_launches_dispatch_and_refuse() -> None:
    w = small_world()
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
    assert parse_verdicts(found.tolist()) == [0, 5, 0]
    assert not w.state.verdict.any()
    found = launches.finish_step(w.state, rows).cpu()
    assert parse_counters(found.tolist()) == w.state.counters.tolist()
    launches.poison(w.state, long([w.slot(0, 0), 3]), n_live=long([1]))
    launches.move_records(w.state, dst=long([5]), src=long([w.slot(0, 0)]))
    assert w.state.tail[5, 0] == -1
    with pytest.raises(ValueError, match="a tree needs max_depth"):
        dataclasses.replace(rows, parent_index=rows.positions)
    with pytest.raises(ValueError, match="parent_index"):
        tree = dataclasses.replace(rows, parent_index=rows.positions, max_depth=1)
        launches.finish_step(w.state, tree)
    with pytest.raises(ValueError, match="a tree's lineages"):
        launches.write_tail(w.state, tree, checks, advance=True)
    with pytest.raises(ValueError, match="advances"):
        out = rows.positions
        launches.write_tail(w.state, rows, checks, findings=out)
    with pytest.raises(ValueError, match="either seeds or seed_table"):
        one = rows.positions
        dataclasses.replace(rows, seeds=one, seed_table=one)
    odd = torch.zeros(8, dtype=torch.int64)[::2]
    for name in (f.name for f in ROW_FIELDS if getattr(rows, f.name) is not None):
        with pytest.raises(ValueError, match=f"{name} is .* strides"):
            dataclasses.replace(rows, **{name: odd}).check_layout()
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
