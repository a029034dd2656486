"""The masks of a batch's grammars, for the rows that a worker samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.constrained.tree_masks import fill_tree_masks
from sglang.srt.sampling.vocab_mask import mask_words

if TYPE_CHECKING:
    from sglang.srt.constrained.grammar_manager import GrammarManager
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.speculative.ops.buffers import DraftTree


class GrammarMasks:
    """Fills the masks; a grammar that fails ends its request, not the batch.

    Args:
        max_batch_size: requests of a batch at most.
    """

    def __init__(
        self,
        manager: GrammarManager,
        *,
        max_batch_size: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._manager = manager
        self._device = device
        self._masks = torch.empty(
            (max_batch_size, mask_words(vocab_size)),
            dtype=torch.int32,
            pin_memory=device.type == "cuda",
        )

    def for_requests(self, batch: ScheduleBatch) -> SamplingBatchInfo:
        """The batch's sampling info with a mask per request."""
        failed = self._manager.fill_batch_mask(
            [req.grammar for req in batch.reqs], self._masks
        )
        for i, message in failed.items():
            batch.reqs[i].abort_message = f"constrained decoding failed: {message}"
        return self._with_masks(batch, self._masks[: len(batch)])

    def for_nodes(self, batch: ScheduleBatch, tree: DraftTree) -> SamplingBatchInfo:
        """The batch's sampling info with a mask per node of its draft trees, [b * D,
        words].

        Reads the trees on the host: a request with a grammar waits for its draft.
        """
        links = torch.stack((tree.tokens, tree.next_token, tree.next_sibling)).cpu()
        nodes = tree.tokens.shape[1]
        masks = torch.full(
            (len(batch) * nodes, self._masks.shape[1]),
            -1,
            dtype=torch.int32,
            pin_memory=self._device.type == "cuda",
        )
        for i, req in enumerate(batch.reqs):
            if req.grammar is None:
                continue
            tokens, children, siblings = links[:, i].tolist()
            try:
                fill_tree_masks(
                    req.grammar,
                    tokens=tokens,
                    next_token=children,
                    next_sibling=siblings,
                    masks=masks[i * nodes : (i + 1) * nodes],
                )
            except RuntimeError as error:
                req.abort_message = f"constrained decoding failed: {error}"
        return self._with_masks(batch, masks)

    def _with_masks(
        self, batch: ScheduleBatch, masks: torch.Tensor
    ) -> SamplingBatchInfo:
        return batch.sampling_info.with_vocab_mask(
            masks.to(self._device, non_blocking=True)
        )
