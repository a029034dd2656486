"""Slots of adapters: which one leaves, who waits, and who passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.lora.pool import AdapterPool
from sglang.test.adapters import write_adapter
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness
from sglang.test.scale import count
from sglang.test.tiny_models import write_tiny_model

register_cpu_ci(est_time=4, suite="cpu")

NAMES = "abcdef"


class NamesOnly(AdapterPool[str]):
    """A pool whose memory is what its slots hold."""

    def __init__(self, num_slots: int, *, evicts_oldest: bool) -> None:
        layout: Any = None
        super().__init__(layout, num_slots=num_slots, evicts_oldest=evicts_oldest)
        self.memory: dict[int, str] = {}
        self._loaded = {name: name for name in NAMES}

    def _prepare(self, adapter: Any) -> str:
        raise NotImplementedError

    def _load(self, slot: int, adapter: str) -> None:
        assert slot not in self.memory, "not cleared before"
        self.memory[slot] = adapter

    def _clear(self, slot: int) -> None:
        del self.memory[slot]


@settings(max_examples=count(ci=60, full=3000), deadline=None)
@given(
    num_slots=st.integers(1, 4),
    is_fifo=st.booleans(),
    steps=st.lists(st.sets(st.sampled_from(NAMES), max_size=4), max_size=20),
)
def test_the_right_adapter_leaves(
    num_slots: int, is_fifo: bool, steps: list[set[str]]
) -> None:
    """A simple model: a list, the next to leave first."""
    pool = NamesOnly(num_slots, evicts_oldest=is_fifo)
    order: list[str] = []
    for wanted in steps:
        if len(wanted) > num_slots:
            with pytest.raises(RuntimeError, match="--max-loras-per-batch is"):
                pool.hold(wanted)
            return
        for name in sorted(wanted):
            if name in order and is_fifo:
                continue
            if name in order:
                order.remove(name)
            elif len(order) == num_slots:
                order.remove(next(n for n in order if n not in wanted))
            order.append(name)
        pool.hold(wanted)
        assert sorted(pool.memory.values()) == sorted(order)
        slots = pool.slots_of([None, *sorted(wanted)])
        assert slots[0] == 0
        held = [pool.memory[slot] for slot in slots[1:].tolist()]
        assert held == sorted(wanted)
        assert pool.revisions_in(slots) == [None, *held]


def test_a_request_that_waits_for_a_slot_is_not_passed(tmp_path: Path) -> None:
    """By adapters that have one; the base model goes on."""
    model = write_tiny_model(tmp_path / "m", "LlamaForCausalLM")
    adapters = [
        f"{name}={write_adapter(tmp_path / name, model, seed=i)}"
        for i, name in enumerate("ab")
    ]
    harness = EngineHarness(
        model,
        skip_tokenizer_init=True,
        lora_paths=adapters,
        max_loras_per_batch=1,
        kv_canary="raise",
    )
    ended: list[str] = []
    streamer = harness.scheduler._streamer
    send = streamer.send

    def sent(reqs: Any) -> None:
        ended.extend(req.rid for req in reqs if req.is_finished)
        send(reqs)

    streamer.send = sent  # type: ignore[method-assign]
    for rid, lora, length in (
        ("a1", "a", 30),
        ("b1", "b", 4),
        ("a2", "a", 4),
        ("base", None, 4),
        ("b2", "b", 4),
    ):
        harness.submit(
            [len(rid)] * 8, rid=rid, lora=lora, max_new_tokens=length, ignore_eos=True
        )
    harness.run()
    assert ended == ["base", "a1", "b1", "a2", "b2"]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
