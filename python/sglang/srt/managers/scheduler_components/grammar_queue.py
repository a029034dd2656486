"""Requests that wait for their grammar, and the masks of a batch."""

from __future__ import annotations

import torch

from sglang.srt.constrained.base_grammar import Grammar
from sglang.srt.constrained.grammar_manager import GrammarManager
from sglang.srt.constrained.tree_masks import fill_tree_masks
from sglang.srt.managers.io_struct import GrammarDecision
from sglang.srt.managers.req import Req
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.vocab_mask import mask_words
from sglang.srt.speculative.ops.buffers import DraftTree


class GrammarQueue:
    """Compiles beside the scheduler loop; a request is queued once its grammar is
    there.

    Args:
        decides: whether this rank says when a grammar is there (`decide`). One that
            does not is told (`apply`), and compiles only what another rank could.
        max_rows: of a batch.
    """

    def __init__(
        self,
        manager: GrammarManager,
        *,
        decides: bool,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._manager = manager
        self._decides = decides
        self._waiting: dict[str, Req] = {}
        # Decided and not applied yet.
        self._compiled: dict[str, Grammar] = {}
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

    def decide(self) -> list[GrammarDecision]:
        """Requests that need not wait longer; empty where another rank decides."""
        if not self._decides or not self._waiting:
            return []
        decisions = []
        for rid, outcome in self._manager.poll():
            if isinstance(outcome, ValueError):
                decisions.append(GrammarDecision(rid=rid, error=str(outcome)))
            else:
                self._compiled[rid] = outcome
                decisions.append(GrammarDecision(rid=rid))
        return decisions

    def apply(self, decisions: list[GrammarDecision]) -> tuple[list[Req], list[Req]]:
        """Carry out what `decide` returned, here or on another rank.

        Returns:
            Requests whose grammar is ready, and requests that ended with an error.

        Raises:
            ValueError: this rank cannot compile what another could.
        """
        ready: list[Req] = []
        failed: list[Req] = []
        for decision in decisions:
            req = self._waiting.pop(decision.rid)
            if decision.error is None:
                req.grammar = self._take(decision.rid)
                ready.append(req)
            else:
                self._manager.cancel(decision.rid)
                req.abort(decision.error, status_code=400)
                failed.append(req)
        return ready, failed

    def _take(self, rid: str) -> Grammar:
        if self._decides:
            return self._compiled.pop(rid)
        return self._manager.compile_now(rid)

    def cancel(self, rid: str) -> Req | None:
        """Stop waiting for the grammar of `rid`; the request, if it was here."""
        req = self._waiting.pop(rid, None)
        if req is not None:
            self._manager.cancel(rid)
        return req

    def with_masks(self, batch: ScheduleBatch) -> SamplingBatchInfo:
        """The batch's sampling info with the masks of this step."""
        failed = self._manager.fill_batch_mask(
            [req.grammar for req in batch.reqs], self._masks
        )
        for row, message in failed.items():
            batch.reqs[row].abort_message = f"constrained decoding failed: {message}"
        mask = self._masks[: len(batch)]
        return batch.sampling_info.with_vocab_mask(
            mask.to(self._device, non_blocking=True)
        )

    def tree_masks(self, batch: ScheduleBatch, tree: DraftTree) -> torch.Tensor:
        """Masks of the nodes of the batch's trees, int32 [b * D, words] on the device.

        Reads the trees on the host: whoever has a grammar waits for its draft.
        """
        links = torch.stack((tree.tokens, tree.next_token, tree.next_sibling)).cpu()
        nodes = tree.tokens.shape[1]
        masks = torch.full(
            (len(batch) * nodes, self._masks.shape[1]),
            -1,
            dtype=torch.int32,
            pin_memory=self._device.type == "cuda",
        )
        for row, req in enumerate(batch.reqs):
            if req.grammar is None:
                continue
            tokens, children, siblings = links[:, row].tolist()
            try:
                fill_tree_masks(
                    req.grammar,
                    tokens=tokens,
                    next_token=children,
                    next_sibling=siblings,
                    masks=masks[row * nodes : (row + 1) * nodes],
                )
            except RuntimeError as error:
                req.abort_message = f"constrained decoding failed: {error}"
        return masks.to(self._device, non_blocking=True)

    def shutdown(self) -> None:
        self._manager.shutdown()
