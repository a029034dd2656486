"""A forward in two groups of slots: one launch before the model and one after it leave
what two of each leave, on every implementation that runs here."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from canary_world import (
    Backend,
    World,
    backends,
    each_backend,
    entries,
    long,
    small_world,
)

from kv_canary.checks import GroupForward
from kv_canary.findings import STATUS_WORDS
from kv_canary.layout import FingerprintMode
from kv_canary.records import WriterKind
from kv_canary.state import ARENA_PARTS
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=20, suite="cpu")
register_cuda_ci(est_time=20, suite="cuda")

MODES = [FingerprintMode.NONE, FingerprintMode.PARTIAL, FingerprintMode.ROTATE]
# New tokens of each request, of a decode step and of a prefill.
EXTENDS = {"decode": [1, 1, 1], "extend": [2, 150, 1]}
# Rows that are read from their beginning, or from a window on.
WINDOW = 4


def forward_of(
    world: World, extends: list[int], *, window: int | None, is_damaged: bool
) -> GroupForward:
    """The next forward of a world; damage: a record, a slot to write, and bytes."""
    rows = world.rows(extends=extends, pad=1)
    view = dataclasses.replace(
        rows,
        reads=[world.table(rows, window=window)],
        writer_kind=WriterKind.EXTEND,
        manager=1,
    )
    if is_damaged:
        world.state.tail[world.slot(2, 18), 1] += 1
        world.k[:, world.slot(0, 9)] += 1
        # Nobody reads it in this forward, so that the schedule does not matter.
        view.out_cache_loc[1] = world.slot(2, 300)
    return GroupForward(world.state, view, world.checks(tokens=world.tokens))


def both(mode: FingerprintMode, kind: str, damaged: str) -> list[GroupForward]:
    """The full group and that of windows, whose contents have nothing in common."""
    worlds = [small_world(mode=mode, seed=seed) for seed in (1, 2)]
    return [
        forward_of(
            world, EXTENDS[kind], window=window, is_damaged=damaged in (name, "both")
        )
        for world, window, name in zip(
            worlds, (None, WINDOW), ("full", "windows"), strict=True
        )
    ]


@each_backend
@pytest.mark.parametrize("damaged", ["none", "full", "windows", "both"])
@pytest.mark.parametrize("kind", EXTENDS)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_two_groups_at_once(
    backend: Backend, mode: FingerprintMode, kind: str, damaged: str
) -> None:
    due, made = both(mode, kind, damaged), both(mode, kind, damaged)
    reference = backends()[0]
    size = STATUS_WORDS + len(EXTENDS[kind]) + 1
    expected = [long([0] * size) for _ in due]
    for group, findings in zip(due, expected, strict=True):
        reference.read.verify(*group, group.view.reads[0])
        reference.write.write_head(*group)
        reference.write.write_tail(*group, True, findings)
    found = [long([0] * size) for _ in made]
    first, other = made
    backend.write.before_both(*first, other)
    backend.write.tail_of_both(*first, True, found[0], other, found[1])
    for name, before, after, words, others in zip(
        ("full", "windows"), due, made, expected, found, strict=True
    ):
        assert entries(after.state) == entries(before.state)
        assert bool(entries(after.state)) == (damaged in (name, "both"))
        assert torch.equal(words, others)
        # Scratch, and the order of entries, may differ.
        for part in ARENA_PARTS.keys() - {"ring", "next_lineage"}:
            assert torch.equal(
                getattr(after.state, part), getattr(before.state, part)
            ), part


@each_backend
def test_groups_of_verifications_do_not_advance(backend: Backend) -> None:
    first, other = both(FingerprintMode.PARTIAL, "extend", "none")
    before = [group.state.expected_lineage.clone() for group in (first, other)]
    backend.write.before_both(*first, other)
    backend.write.tail_of_both(*first, False, None, other, None)
    for group, lineages in zip((first, other), before, strict=True):
        assert torch.equal(group.state.expected_lineage, lineages)
        assert entries(group.state) == []


def test_groups_that_differ_in_shape_are_refused() -> None:
    triton = [backend for backend in backends() if backend.name == "triton"]
    if not triton:
        pytest.skip("Triton's launches alone share numbers")
    first, _ = both(FingerprintMode.NONE, "decode", "none")
    _, other = both(FingerprintMode.NONE, "extend", "none")
    with pytest.raises(ValueError, match="in one and .* in the other"):
        triton[0].write.before_both(*first, other)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
