"""Draft heads of the mock model.

They compute its next token exactly and propose it with a rank drawn from a table of
probabilities. A wrong, stale or missing draft slot or hidden state changes their
proposals; `mock_draft_oracle` computes the correct accept lengths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from sglang.srt.layers.vocab_embedding import LMHead, VocabEmbedding
from sglang.srt.models import mock_draft_math, mock_math, mock_ops
from sglang.srt.models.draft import DraftModel, target_hidden_states
from sglang.srt.models.mock import MockAttention, load_codes
from sglang.srt.models.stack import StackOutput

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.forward.batch import ForwardBatch


class MockForCausalLMEagle(DraftModel):
    """EAGLE head of the mock model.

    The forward maps token p + 1 and the hidden state [T, 512] at position p, the
    target's or this model's own, to the logits of token p + 2 and the hidden state at
    position p + 1.

    A row at position p reads p + 1 slots, but its token is number p + 1, so its keys
    use that position, and the term of the target's position 0 does not depend on its
    token. A hidden state with values other than +1 and -1 corrupts the proposal.

    config.json: as for the target, and optionally `mock_draft_source` and
    `mock_acceptance` (see `mock_draft_math.DraftSettings`).
    """

    algorithm = "EAGLE"
    # The row at position p has token p + this.
    token_offset = 1

    def __init__(self, config: ModelConfig, *, rope_rows: int) -> None:
        super().__init__(config)
        mock_math.check_shape(config)
        if config.sliding_window is not None:
            raise ValueError(
                f"{config.file}: sliding_window "
                f"{config.sliding_window} is not possible in a mock draft; remove it"
            )
        self.settings = mock_draft_math.DraftSettings.from_config(config)
        self.attn = MockAttention()

    def fill_weights(self) -> None:
        """Fill this model's own tables; the others belong to the target."""

    def forward_stack(
        self, input_ids: Tensor, positions: Tensor, forward_batch: ForwardBatch
    ) -> StackOutput:
        embedded = self.embed(input_ids, forward_batch)
        before = self._folds_before(forward_batch)
        places, count = positions + self.token_offset, positions + 1
        x = mock_ops.embedded_keys(embedded, places)
        folds: list[Tensor] = []
        for layer in range(mock_math.NUM_LAYERS):
            if layer:
                x = mock_ops.next_keys(folds[0], places)
            mean = self.attn(x, layer, embedded.dtype, forward_batch)
            if self.settings.source == "attention":
                fold = mock_ops.fold(mean, count, layer)
                if self.token_offset:
                    fold = fold + mock_draft_math.first_terms()[layer]
            else:
                assert before is not None
                fold = mock_ops.fold_onto(before[layer], x, mean, count, layer)
            if before is not None:
                fold = mock_ops.keep_whole(fold, before[2])
            folds.append(fold)
        fold0, fold1 = folds
        hidden = mock_ops.proposed_state(
            fold0, fold1, places, self.settings, embedded.dtype
        )
        return StackOutput(hidden, [])

    def _folds_before(
        self, forward_batch: ForwardBatch
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return X_0 and X_1 of the preceding position and their validity, [T] each."""
        return mock_ops.read_folds(target_hidden_states(forward_batch))


class MockForCausalLMEagle3(MockForCausalLMEagle):
    """EAGLE3 head of the mock model.

    Reads all three captured states of the target, which must agree, or one state of its
    own.
    config.json: optionally `draft_vocab_size`; draft id i then means the target's id
    (i * odd) mod vocab_size.
    """

    algorithm = "EAGLE3"

    def __init__(self, config: ModelConfig, *, rope_rows: int) -> None:
        super().__init__(config, rope_rows=rope_rows)
        if self.settings.draft_vocab_size is not None:
            self.lm_head = LMHead(self.settings.draft_vocab_size, config.hidden_size)

    def fill_weights(self) -> None:
        hot = self.settings.hot_token_ids()
        if self.lm_head is not None and hot is not None:
            load_codes(self.lm_head, self.settings.head_codes())
            assert self.lm_head.weight is not None
            self.hot_token_ids = hot.to(self.lm_head.weight.device)


class MockForCausalLMDraft(MockForCausalLMEagle):
    """STANDALONE draft of the mock model: its own tables, no hidden states, and tokens
    at their own positions."""

    algorithm = "STANDALONE"
    token_offset = 0

    def __init__(self, config: ModelConfig, *, rope_rows: int) -> None:
        super().__init__(config, rope_rows=rope_rows)
        if self.settings.source != "attention":
            raise ValueError(
                f"{config.file}: mock_draft_source "
                f"{self.settings.source!r} is not possible in {type(self).__name__}, "
                "which is given no hidden states; remove it"
            )
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size)
        self.lm_head = LMHead(config.vocab_size, config.hidden_size)

    def fill_weights(self) -> None:
        for module in (self.embed_tokens, self.lm_head):
            assert module is not None
            load_codes(module, mock_math.token_codes(self.config.vocab_size))

    def _folds_before(
        self, forward_batch: ForwardBatch
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        return None
