"""A pool of three groups, a full one and two of window slots: each is checked, and a
report names the one that was damaged."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from forward_world import canary_of, decode_batch, findings, prefilled

from kv_canary.faults.pool import flip_bytes
from kv_canary.findings import RING
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.kv_canary.groups import WindowGroup
from sglang.srt.kv_canary.pool_patcher import api as pool_patcher
from sglang.srt.kv_canary.runner.step_end import StepEnd
from sglang.srt.mem_cache.groups.slots import PagedSlots
from sglang.srt.mem_cache.groups.window_slots import WindowSlots
from sglang.srt.model_executor import kv_groups
from sglang.srt.model_executor.kv_groups import SlotPlan
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.forward_harness import ForwardHarness
from sglang.test.spec_world import TINY
from sglang.test.tiny_models import write_tiny_model

register_cpu_ci(est_time=5, suite="cpu")

# Reports know three names of groups.
NAMES = ("full", "swa", "latent")
SLIDING = (1, 2)


class OtherSlots(WindowSlots):
    name = NAMES[2]


class _OneLayer(kv_groups.WindowGroup):
    """Window slots of one of the sliding layers."""

    def __init__(self, slots: type[WindowSlots], layer: int) -> None:
        self.name = slots.name
        self._slots = slots
        self._layer = layer

    def layers(
        self, config: ModelConfig, slots: PagedSlots | None = None
    ) -> tuple[int, ...]:
        return (self._layer,)

    def create_slots(
        self, config: ModelConfig, args: ServerArgs, plan: SlotPlan
    ) -> PagedSlots:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kv_groups, "WindowSlots", self._slots)
            return super().create_slots(config, args, plan)


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ForwardHarness:
    kinds = [
        _OneLayer(slots, layer)
        for slots, layer in zip((WindowSlots, OtherSlots), SLIDING, strict=True)
    ]
    monkeypatch.setattr(kv_groups, "SECONDARY", {kind.name: kind for kind in kinds})
    # The one line that a new kind of group is.
    monkeypatch.setitem(pool_patcher._KINDS, OtherSlots, WindowGroup)
    folder = tmp_path / "model"
    write_tiny_model(
        folder,
        TINY["gemma3"],
        seed=11,
        max_position_embeddings=256,
        vocab_size=1024,
        num_hidden_layers=3,
        sliding_window=8,
        layer_types=["full_attention", *["sliding_attention"] * len(SLIDING)],
    )
    return ForwardHarness(folder, slots=512, kv_canary="log", page_size=4)


def slot_of(harness: ForwardHarness, row: int, position: int, group: str) -> int:
    """The group's slot of a token of a row."""
    own = canary_of(harness).target.group(group)
    assert own is not None
    slots = harness.pool.row_slots(row, position, position + 1).numpy()
    (slot,) = own.kv.on_host(slots).tolist()
    assert slot
    return int(slot)


def test_groups_are_those_of_the_pool(harness: ForwardHarness) -> None:
    groups = canary_of(harness).target.groups
    assert tuple(group.name for group in groups) == NAMES
    assert tuple(g.kv for g in groups) == harness.runner.token_to_kv_pool.groups


@pytest.mark.parametrize("name", NAMES)
def test_changed_bytes_are_found_in_their_group(
    harness: ForwardHarness, name: str
) -> None:
    rows = prefilled(harness, 30, 9)
    group = canary_of(harness).target.group(name)
    assert group is not None
    slot = slot_of(harness, rows[0], 27, name)
    fingerprint, layer = group.buffers.fingerprint, group.buffers.layout.groups[0]
    flip_bytes(group.state, fingerprint, layer, slot, random.Random(1))
    (found,) = findings(harness, decode_batch(harness, *rows))
    assert found["reasons"] == ["verify_real_kv"]
    assert (found["group"], found["slot"], found["position"]) == (name, slot, 27)
    harness.append(rows[1], 3)
    assert findings(harness, decode_batch(harness, rows[1])) == []


@pytest.mark.parametrize("name", NAMES)
def test_freed_slots_are_found_in_their_group(
    harness: ForwardHarness, name: str
) -> None:
    rows = prefilled(harness, 30, 9)
    group = canary_of(harness).target.group(name)
    assert group is not None
    slot = slot_of(harness, rows[0], 27, name)
    group.free(torch.tensor([slot]))
    (found,) = findings(harness, decode_batch(harness, *rows))
    assert "verify_freed" in found["reasons"]
    assert (found["group"], found["slot"]) == (name, slot)


@pytest.mark.parametrize("name", NAMES)
def test_findings_of_all_groups_are_united(harness: ForwardHarness, name: str) -> None:
    """In the words that travel with the tokens, whoever sends them."""
    rows = prefilled(harness, 30, 9)
    manager = canary_of(harness)
    group = manager.target.group(name)
    assert group is not None
    slot = slot_of(harness, rows[1], 8, name)
    fingerprint, layer = group.buffers.fingerprint, group.buffers.layout.groups[0]
    flip_bytes(group.state, fingerprint, layer, slot, random.Random(2))
    batch = decode_batch(harness, *rows)
    harness.runner.forward(batch)
    by_group = manager._managers[0].findings(batch)
    is_found = [bool(words[RING:].any()) for words in by_group]
    assert is_found == [other == name for other in NAMES]
    words = StepEnd(
        manager.target,
        last=manager._managers[0],
        draws=None,
    ).finish_step(batch)
    # Verdicts of the rows, in the order of the batch.
    assert words[-2:].ne(0).tolist() == [False, True]


def test_records_of_all_groups_move_with_their_bytes(harness: ForwardHarness) -> None:
    rows = prefilled(harness, 30, 9)
    for group in canary_of(harness).target.groups:
        src = slot_of(harness, rows[0], 27, group.name)
        dst = slot_of(harness, rows[1], 8, group.name)
        places = [torch.tensor([slot]) for slot in (dst, src)]
        group.kv.tensors.move_kv_cache(*places)
        assert torch.equal(group.state.tail[dst], group.state.tail[src])


def test_kinds_of_slots_that_nobody_knows_are_refused(
    harness: ForwardHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(pool_patcher._KINDS, OtherSlots)
    kv = harness.runner.token_to_kv_pool.groups[2]
    with pytest.raises(ValueError, match="cannot check a OtherSlots; it knows"):
        pool_patcher._layout_of(kv, canary_of(harness).config)
    assert np.array_equal(kv.on_host(np.array([0])), [0])
