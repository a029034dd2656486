"""The masks of a batch's grammars, for the rows that a worker samples.

A row is the bits of the allowed ids, then words that say whose mask it is
(`kv_canary.drawn.MaskWord`), which the canary compares where the mask is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kv_canary.drawn import MASK_WORDS, SERIAL_WORD_MASK, MaskWord
from sglang.srt.constrained.base_grammar import GrammarLimitError
from sglang.srt.constrained.tree_masks import fill_tree_masks
from sglang.srt.sampling.vocab_mask import mask_words

if TYPE_CHECKING:
    import numpy.typing as npt

    from sglang.srt.draft_trees.buffers import DraftTree
    from sglang.srt.managers.batch.req import Req
    from sglang.srt.managers.batch.schedule_batch import ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    IntArray = npt.NDArray[np.int32]


# In place of the number of accepted tokens.
_FAILED = -1


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
        self._num_words = mask_words(vocab_size)
        self._masks = self._allocate(max_batch_size)

    def _allocate(self, rows: int) -> torch.Tensor:
        """Allocate masks that allow everything, of requests without a grammar."""
        masks = torch.full(
            (rows, self._num_words + MASK_WORDS),
            -1,
            dtype=torch.int32,
            pin_memory=self._device.type == "cuda",
        )
        masks[:, self._num_words :] = 0
        return masks

    def _split(self, masks: torch.Tensor) -> tuple[torch.Tensor, IntArray]:
        """Return the bits and the words of one mask or of several."""
        return masks[..., : self._num_words], masks.numpy()[..., self._num_words :]

    def for_requests(self, batch: ScheduleBatch) -> SamplingBatchInfo:
        """Return the batch's sampling info with one mask per request."""
        masks = self._masks[: len(batch)]
        for req, mask in zip(batch.reqs, masks, strict=True):
            self._fill(req, mask)
        return self._with_masks(batch, masks)

    def _fill(self, req: Req, mask: torch.Tensor) -> None:
        # One row for both: bits in another row than their words would look right.
        bits, words = self._split(mask)
        if req.grammar is None:
            bits.fill_(-1)
            words[:] = 0
            return
        words[MaskWord.SERIAL] = req.serial & SERIAL_WORD_MASK
        try:
            req.grammar.fill_mask(bits)
            words[MaskWord.ACCEPTED] = req.grammar.num_accepted
        except GrammarLimitError as error:
            bits.fill_(-1)
            words[MaskWord.ACCEPTED] = _FAILED
            req.grammar_failure = str(error)

    def for_nodes(self, batch: ScheduleBatch, tree: DraftTree) -> SamplingBatchInfo:
        """Return the batch's sampling info with one mask per draft-tree node, [b * D,
        words].

        Reads the trees on the host, so a request with a grammar waits for its draft.
        """
        links = torch.stack((tree.tokens, tree.next_token, tree.next_sibling)).cpu()
        nodes = tree.tokens.shape[1]
        masks = self._allocate(len(batch) * nodes)
        for i, (req, own) in enumerate(
            zip(batch.reqs, masks.split(nodes), strict=True)
        ):
            if req.grammar is None:
                continue
            tokens, children, siblings = links[:, i].tolist()
            bits, words = self._split(own)
            words[:, MaskWord.SERIAL] = req.serial & SERIAL_WORD_MASK
            try:
                fill_tree_masks(
                    req.grammar,
                    tokens=tokens,
                    next_token=children,
                    next_sibling=siblings,
                    masks=bits,
                    accepted=words[:, MaskWord.ACCEPTED],
                )
            except GrammarLimitError as error:
                bits.fill_(-1)
                words[:, MaskWord.ACCEPTED] = _FAILED
                req.grammar_failure = str(error)
        return self._with_masks(batch, masks)

    def _with_masks(
        self, batch: ScheduleBatch, masks: torch.Tensor
    ) -> SamplingBatchInfo:
        return batch.sampling_info.with_vocab_mask(
            masks.to(self._device, non_blocking=True)
        )
