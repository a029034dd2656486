"""Faults between the last hidden state and the token: rows of the head's input and of
its logits."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

if TYPE_CHECKING:
    from sglang.faults.steps.site import Fault, FaultSite
    from sglang.srt.forward.batch import ForwardBatch


def head_rows_swapped(site: FaultSite) -> None:
    """Let the head read two requests' hidden states in each other's place."""

    def fault(
        original: Fault,
        processor: LogitsProcessor,
        hidden: Tensor,
        head: Fault,
        batch: ForwardBatch,
        **options: Any,
    ) -> Any:
        is_target = processor is vars(site.target.model).get("logits_processor")
        pairs = site.pairs() if is_target else []
        if pairs:
            site.harm(*pairs[0])
            rows = batch.logits_rows
            if rows is None:
                rows = torch.arange(len(hidden), device=hidden.device)
            rows = _swapped(rows, pairs[0], count=batch.batch_size)
            batch = dataclasses.replace(batch, logits_rows=rows)
        return original(processor, hidden, head, batch, **options)

    site.wrap(LogitsProcessor, "__call__", fault)


def logits_swapped(site: FaultSite) -> None:
    """Choose two requests' tokens by each other's logits."""

    def swap(logits: Tensor, count: int) -> Tensor:
        first = logits.view(count, -1, logits.shape[1])[:, 0].argmax(dim=-1).tolist()
        for pair in site.pairs():
            if first[pair[0]] != first[pair[1]]:
                site.harm(*pair)
                return _swapped(logits, pair, count=count)
        return logits

    def sample(original: Fault, batch: Any, forward_batch: Any, logits: Tensor) -> Any:
        return original(batch, forward_batch, swap(logits, len(batch)))

    def verify(
        original: Fault, live: Any, logits: Tensor, *args: Any, **options: Any
    ) -> Any:
        return original(live, swap(logits, live.bs), *args, **options)

    worker: Any = site.scheduler.worker
    if isinstance(worker, EAGLEWorkerV2):
        site.wrap(worker, "verify", verify)
        worker = worker.target_worker
    site.wrap(worker, "sample", sample)


def _swapped(values: Tensor, pair: tuple[int, int], *, count: int) -> Tensor:
    """Swap the values of two of `count` requests, which have equally many each."""
    order = list(range(count))
    order[pair[0]], order[pair[1]] = pair[1], pair[0]
    grouped = values.view(count, -1, *values.shape[1:])
    return grouped[order].reshape(values.shape)
