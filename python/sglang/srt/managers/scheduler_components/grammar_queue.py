"""Requests that wait for their grammar, and the masks of a batch."""

from __future__ import annotations

import torch

from sglang.srt.constrained.grammar_manager import GrammarManager
from sglang.srt.constrained.vocab_mask import mask_words
from sglang.srt.managers.req import Req
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


class GrammarQueue:
    """Compiles beside the scheduler loop; a request is queued once its grammar is
    there."""

    def __init__(
        self,
        manager: GrammarManager,
        *,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._manager = manager
        self._waiting: dict[str, Req] = {}
        self._device = device
        self._masks = torch.empty(
            (max_rows, mask_words(vocab_size)),
            dtype=torch.int32,
            pin_memory=device.type == "cuda",
        )

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, req: Req, kind: str, source: str) -> None:
        self._waiting[req.rid] = req
        self._manager.submit(req.rid, kind, source)

    def poll(self) -> tuple[list[Req], list[Req]]:
        """(requests whose grammar is ready, requests that ended with an error)."""
        ready: list[Req] = []
        failed: list[Req] = []
        for rid, outcome in self._manager.poll():
            req = self._waiting.pop(rid)
            if isinstance(outcome, ValueError):
                req.abort(str(outcome), status_code=400)
                failed.append(req)
            else:
                req.grammar = outcome
                ready.append(req)
        return ready, failed

    def cancel(self, rid: str) -> Req | None:
        """Stop waiting for the grammar of `rid`; the request, if it was here."""
        req = self._waiting.pop(rid, None)
        if req is not None:
            self._manager.cancel(rid)
        return req

    def with_masks(self, batch: ScheduleBatch) -> SamplingBatchInfo:
        """The batch's sampling info with the masks of this step."""
        if not batch.has_grammar:
            return batch.sampling_info
        failed = self._manager.fill_batch_mask(
            [req.grammar for req in batch.reqs], self._masks
        )
        for row, message in failed.items():
            batch.reqs[row].abort_message = f"constrained decoding failed: {message}"
        mask = self._masks[: len(batch)]
        return batch.sampling_info.with_vocab_mask(
            mask.to(self._device, non_blocking=True)
        )

    def shutdown(self) -> None:
        self._manager.shutdown()
