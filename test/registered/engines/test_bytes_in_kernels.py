"""Samples of bytes that the kernels of the canary take in an engine's pages, against
`SlotBytes`. Interpreted, or compiled on a GPU."""

from __future__ import annotations

import pytest
import torch
from paged_world import DEVICE, DIM, HALVED_PAGES, HEADS, HEADS_FIRST, LAYERS, World

from kv_canary import launches
from kv_canary.engines import group_canary
from kv_canary.kernels.triton import verify as triton_verify
from kv_canary.kernels.triton import write as triton_write
from kv_canary.layout import FingerprintMode
from kv_canary.records import Record
from kv_canary.slot_places import PageLayout, paged_fingerprint
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=20, suite="cpu")
register_cuda_ci(est_time=20, suite="cuda")

RUNS = ("K before V", "one allocation", HALVED_PAGES, HEADS_FIRST)
"""Layouts in which K and V of a slot are runs of whole chunks."""


def by_slot_bytes(monkeypatch: pytest.MonkeyPatch, layout: str) -> World:
    with monkeypatch.context() as patch:
        patch.setattr(group_canary, "_bytes_in_kernels", lambda *_: None)
        return World(layout, real_data="partial")


def by_kernels(monkeypatch: pytest.MonkeyPatch, layout: str) -> World:
    monkeypatch.setattr(
        group_canary,
        "_bytes_in_kernels",
        lambda group, mode: paged_fingerprint(mode, group.layers, group.pages),
    )
    monkeypatch.setattr(launches, "verify", triton_verify.verify)
    monkeypatch.setattr(launches, "write_head", triton_write.write_head)
    monkeypatch.setattr(launches, "_write_tail", triton_write.write_tail)
    world = World(layout, real_data="partial")
    assert world.canary.groups[0].bytes is None
    return world


def damaged(world: World) -> list[list[tuple[str, int, int, str]]]:
    """Findings of steps in which a row reads what another one writes, and of a read
    after a slot was overwritten."""
    tokens = list(range(100, 120))
    blocks = world.blocks(4)
    a = world.admission("A", tokens, blocks)
    b = world.admission("B", [*tokens[:16], 7, 8], blocks[:2] + world.blocks(2), 16)
    found = [world.forward({"A": 20, "B": 2}, admitted=[a, b])]
    found.append(world.forward({"B": 1, "A": 1}))
    slot = world.slot("A", 5)
    for kv in world.pool.layers:
        keys = torch.full((1, HEADS, DIM), 3.0).to(kv)
        world.pool.store(kv, keys, keys, torch.tensor([slot]))
    found.append(world.forward({"B": 1, "A": 1}))
    return found


@pytest.mark.parametrize("layout", RUNS)
def test_they_find_and_record_what_slot_bytes_does(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = by_slot_bytes(monkeypatch, layout)
    due = damaged(plain)
    kernels = by_kernels(monkeypatch, layout)
    found = damaged(kernels)
    assert [sorted(step) for step in found] == [sorted(step) for step in due]
    slot = plain.slot("A", 5)
    assert due[:2] == [[], []] and ("A", slot, 5, "verify_real_kv") in due[2]
    theirs, ours = (world.canary.groups[0].state for world in (plain, kernels))
    written = theirs.tail[:, Record.FINGERPRINT] != 0
    assert int(written.sum()) == 26
    assert torch.equal(ours.tail, theirs.tail)


def test_slots_that_are_no_runs_are_left_to_slot_bytes() -> None:
    layers = [torch.zeros(4, 2, 8, 2, 16, device=DEVICE) for _ in range(LAYERS)]
    offset = torch.arange(8)[:, None]

    def pages(k: torch.Tensor, v: torch.Tensor) -> PageLayout:
        return PageLayout(page_stride=512, k=k, v=v)

    def made(layout: PageLayout) -> bool:
        return paged_fingerprint(FingerprintMode.PARTIAL, layers, layout) is not None

    runs = offset * 32 + torch.arange(32)
    assert made(pages(runs, runs + 256))
    heads = torch.arange(32) + torch.arange(32) // 16 * 112
    assert made(pages(offset * 32 + heads, offset * 32 + heads + 16))
    scattered = offset * 32 + torch.arange(32).flip(0)
    assert not made(pages(runs, scattered + 256))
    assert not made(pages(runs, offset * 16 + torch.arange(16) + 256))
    assert not made(pages(runs, offset * 32 + heads))
    # Four bytes of padding in each slot: chunks are not aligned.
    odd = offset * 33 + torch.arange(32)
    assert not made(pages(odd, odd + 256))
    halves = torch.arange(32) // 2 * 4 + torch.arange(32) % 2
    assert not made(pages(offset * 64 + halves, offset * 64 + halves + 2))
