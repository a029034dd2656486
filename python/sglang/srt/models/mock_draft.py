"""Draft heads of the mock model.

They compute its next token exactly and propose it with a rank drawn from a table of
probabilities. A wrong, stale or missing draft slot or hidden state changes their
proposals; `mock_draft_oracle` computes the correct accept lengths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from kv_canary.hashing import mix64
from sglang.srt.layers.vocab_embedding import LMHead, VocabEmbedding
from sglang.srt.models import mock_draft_math, mock_math
from sglang.srt.models.draft import DraftModel, target_hidden_states
from sglang.srt.models.mock import MockAttention, load_codes
from sglang.srt.models.stack import StackOutput

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

_SPOILT = 0x5BAD


class MockForCausalLMEagle(DraftModel):
    """EAGLE head of the mock model.

    Forward: token p + 1 and the hidden state [T, 512] of position p, the target's or
    one that this model returned -> logits of token p + 2, and the hidden state of
    position p + 1.

    A row has position p and reads p + 1 slots, but its token is number p + 1: its keys
    use that position, and the term of the target's position 0 does not depend on its
    token. A hidden state that does not consist of +1 and -1 corrupts the proposal.

    config.json: as the target's, and optionally `mock_draft_source` and
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
        """Fill this model's own tables; the others are the target's."""

    def forward_stack(
        self, input_ids: Tensor, positions: Tensor, forward_batch: ForwardBatch
    ) -> StackOutput:
        embedded = self.embed(input_ids)
        tokens = mock_math.decode_token(embedded)
        before = self._folds_before(forward_batch)
        places, count = positions + self.token_offset, positions + 1
        x = mock_math.key_layer0(tokens, places)
        folds: list[Tensor] = []
        for layer in range(mock_math.NUM_LAYERS):
            mean = self.attn(x, layer, embedded.dtype, forward_batch)
            if self.settings.source == "attention":
                fold = mock_math.fold(mean, count, layer)
                if self.token_offset:
                    fold = fold + mock_draft_math.first_terms()[layer]
            else:
                assert before is not None
                term = mock_math.term(x, layer)
                fold = _spoil(before[layer] + term, ~_is_plausible(mean, count))
            folds.append(fold if before is None else _spoil(fold, ~before[2]))
            x = mock_math.key_layer1(folds[0], places)
        fold0, fold1 = folds
        code, weights = mock_draft_math.proposal(fold0, fold1, places, self.settings)
        hidden = mock_draft_math.hidden_state(code, weights, fold0, fold1)
        return StackOutput(hidden.to(embedded.dtype), [])

    def _folds_before(
        self, forward_batch: ForwardBatch
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return X_0 and X_1 of the preceding position and their validity, [T] each."""
        return mock_math.read_folds(target_hidden_states(forward_batch))


class MockForCausalLMEagle3(MockForCausalLMEagle):
    """EAGLE3 head of the mock model.

    Reads all three captured states of the target, which must agree, or one state that
    this model returned. config.json: optionally `draft_vocab_size`, with which draft
    id i means the target's id (i * odd) mod vocab_size.
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

    def _folds_before(
        self, forward_batch: ForwardBatch
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        hidden = target_hidden_states(forward_batch)
        if hidden.shape[-1] == mock_math.HIDDEN_SIZE:
            return mock_math.read_folds(hidden)
        states = hidden.split(mock_math.HIDDEN_SIZE, dim=-1)
        assert len(states) == mock_math.NUM_LAYERS + 1, hidden.shape
        fold0, fold1, is_whole = mock_math.read_folds(states[0])
        for i, state in enumerate(states):
            other0, other1, is_other_whole = mock_math.read_folds(
                mock_math.aux_origin(state, i)
            )
            agrees = (other0 == fold0) & (other1 == fold1)
            is_whole = is_whole & is_other_whole & agrees
        return fold0, fold1, is_whole


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


def _is_plausible(mean: Tensor, count: Tensor) -> Tensor:
    """Whether attention read written slots only, judged by its mean: bool [T].

    A slot never written outweighs all others and leaves a mean of zero; sums of
    signatures are zero in every channel of every head with a chance below 2^-40.
    """
    sums = (mean.float() * count[:, None]).round()
    return sums.sum(-1).isfinite() & (sums != 0).any(-1)


def _spoil(fold: Tensor, is_bad: Tensor) -> Tensor:
    """Replace `fold` where `is_bad` by a number that no oracle predicts."""
    return fold.where(~is_bad, mix64(fold ^ _SPOILT))
