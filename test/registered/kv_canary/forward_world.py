"""Forwards under a canary in mode `log`, one at a time, and the findings of each."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch

from kv_canary.state import CanaryState
from sglang.srt.forward.batch import ForwardBatch, ForwardMode, HostLens
from sglang.srt.kv_canary.runner.canary_manager import (
    CanaryManager,
)
from sglang.test.forward_harness import ForwardHarness

EXTEND, DECODE = ForwardMode.EXTEND, ForwardMode.DECODE


def canary_of(harness: ForwardHarness) -> CanaryManager:
    manager = harness.canary
    assert manager is not None
    return manager


def findings(harness: ForwardHarness, batch: ForwardBatch) -> list[dict[str, Any]]:
    """Run a forward; returns its violations as incident documents."""
    reporter = canary_of(harness).reporter
    before = len(reporter.incidents)
    harness.run(batch)
    new = list(reporter.incidents)[before:]
    return [found for incident in new for found in incident["violations"]]


def reasons(harness: ForwardHarness, batch: ForwardBatch) -> set[str]:
    return {r for found in findings(harness, batch) for r in found["reasons"]}


def prefilled(harness: ForwardHarness, *lengths: int) -> list[int]:
    """Rows of these lengths, one token of each still to be decoded."""
    rng = random.Random(sum(lengths))
    rows = [
        harness.new_row([rng.randrange(1000) for _ in range(length + 1)])
        for length in lengths
    ]
    batch = harness.prepare(EXTEND, list(zip(rows, lengths, strict=True)))
    assert findings(harness, batch) == []
    return rows


def finish(manager: CanaryManager, batch: ForwardBatch) -> list[int]:
    """End a step; returns its findings on the host."""
    return manager.finish_step(batch).tolist()


def decode_batch(harness: ForwardHarness, *rows: int) -> ForwardBatch:
    """One more token of each row."""
    return harness.prepare(DECODE, [(row, None) for row in rows])


def with_padded_row(batch: ForwardBatch, device: str) -> ForwardBatch:
    """A decode batch and one row as graphs pad it."""
    padding = {"extend_lens": 1, "seq_lens": 1}
    names = (
        "input_ids",
        "positions",
        "out_cache_loc",
        "req_pool_indices",
        "prefix_lens",
        "extend_lens",
        "seq_lens",
        "req_serial",
        "salt",
        "rids_int",
    )
    padded: dict[str, Any] = {
        name: torch.cat(
            (
                getattr(batch, name),
                torch.tensor([padding.get(name, 0)], device=device),
            )
        )
        for name in names
    }
    lens = batch.lens_cpu
    assert lens is not None
    lens = HostLens(
        prefix_lens=[*lens.prefix_lens, 0], extend_lens=[*lens.extend_lens, 1]
    )
    return dataclasses.replace(batch, lens_cpu=lens, **padded)


def phases(state: CanaryState) -> list[int]:
    """The phase words, once the launches beside the model are through."""
    if state.phase.is_cuda:
        torch.cuda.synchronize()
    found: list[int] = state.phase.tolist()
    return found
