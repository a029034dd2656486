"""The masks of a batch's grammars, for the rows that a worker samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.constrained.base_grammar import GrammarLimitError
from sglang.srt.constrained.tree_masks import fill_tree_masks
from sglang.srt.sampling.vocab_mask import mask_words

if TYPE_CHECKING:
    from sglang.srt.draft_trees.buffers import DraftTree
    from sglang.srt.managers.batch.schedule_batch import ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


class GrammarMasks:
    """Fills the masks. A request whose grammar fails is sampled without a mask in this
    step, because it discards the result (`Req.grammar_failure`).

    Args:
        max_batch_size: maximum number of requests in a batch.
    """

    def __init__(
        self,
        *,
        max_batch_size: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._device = device
        self._masks = torch.empty(
            (max_batch_size, mask_words(vocab_size)),
            dtype=torch.int32,
            pin_memory=device.type == "cuda",
        )

    def for_requests(self, batch: ScheduleBatch) -> SamplingBatchInfo:
        """Return the batch's sampling info with one mask per request."""
        for req, row in zip(batch.reqs, self._masks, strict=False):
            if req.grammar is None:
                row.fill_(-1)
                continue
            try:
                req.grammar.fill_mask(row)
            except GrammarLimitError as error:
                row.fill_(-1)
                req.grammar_failure = str(error)
        return self._with_masks(batch, self._masks[: len(batch)])

    def for_nodes(self, batch: ScheduleBatch, tree: DraftTree) -> SamplingBatchInfo:
        """Return the batch's sampling info with one mask per draft-tree node, [b * D,
        words].

        Reads the trees on the host, so a request with a grammar waits for its draft.
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
            own = masks[i * nodes : (i + 1) * nodes]
            try:
                fill_tree_masks(
                    req.grammar,
                    tokens=tokens,
                    next_token=children,
                    next_sibling=siblings,
                    masks=own,
                )
            except GrammarLimitError as error:
                own.fill_(-1)
                req.grammar_failure = str(error)
        return self._with_masks(batch, masks)

    def _with_masks(
        self, batch: ScheduleBatch, masks: torch.Tensor
    ) -> SamplingBatchInfo:
        return batch.sampling_info.with_vocab_mask(
            masks.to(self._device, non_blocking=True)
        )
