"""How likely given tokens are after given texts: SGLang's `/v1/score`.

Shared by the route and `Engine.score`. Knows nothing about the model: a score is the
log probability of a token id that `/generate` would show.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from sglang.srt.entrypoints.neutral_fields import SCORE, with_neutral
from sglang.srt.managers.front.lora_registry import LoraRegistry
from sglang.srt.managers.front.prompt_request import PromptRequest
from sglang.srt.managers.front.request_state import Update
from sglang.srt.managers.messages.errors import BadRequest
from sglang.srt.sampling.sampling_params import SamplingParams

if TYPE_CHECKING:
    _Score = msgspec.Struct
else:
    _Score = with_neutral(msgspec.Struct, SCORE)

# The model's unmodified distribution, and no output token.
_PARAMS = SamplingParams(max_new_tokens=0, temperature=1.0)


class ScoreRequest(_Score, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/score`.

    Each item follows the query (precedes it with `item_first`); both are texts, or both
    are token ids. `apply_softmax` makes the scores of an item sum to 1.
    """

    query: str | list[int]
    items: str | list[str | list[int]]
    label_token_ids: list[int]
    apply_softmax: bool | None = False
    item_first: bool | None = False
    lora_path: str | None = None
    priority: int | None = None
    model: str | None = None

    def prompts(self, loras: LoraRegistry) -> list[PromptRequest]:
        """Return one prompt per item; `loras` are the adapters.

        Raises:
            BadRequest: names what is missing, or mixed.
        """
        if not self.label_token_ids:
            raise BadRequest(
                "label_token_ids is empty: name the token ids to score",
                param="label_token_ids",
            )
        lora = loras.asked(self.model, self.lora_path)
        items = [self.items] if isinstance(self.items, str) else self.items
        return [
            PromptRequest(
                prompt=self._joined(item),
                sampling_params=_PARAMS,
                return_logprob=True,
                token_ids_logprob=self.label_token_ids,
                lora=lora,
                priority=self.priority,
            )
            for item in items
        ]

    def _joined(self, item: str | list[int]) -> str | list[int]:
        first, last = (item, self.query) if self.item_first else (self.query, item)
        if isinstance(first, str) and isinstance(last, str):
            return first + last
        if isinstance(first, list) and isinstance(last, list):
            return first + last
        raise BadRequest(
            "query and items must be of one kind: texts, or token ids", param="items"
        )

    def scores(self, updates: Sequence[Update]) -> list[list[float]]:
        """Return the scores of each item, in the order of `label_token_ids`."""
        return [self._item_scores(update) for update in updates]

    def _item_scores(self, update: Update) -> list[float]:
        assert update.logprobs is not None
        (named,) = update.logprobs.output_named
        # None means impossible.
        logprobs = [-math.inf if lp is None else lp for lp, _ in named]
        likely = [math.exp(logprob) for logprob in logprobs]
        if not self.apply_softmax:
            return likely
        best = max(logprobs)
        if best == -math.inf:
            return [1 / len(likely)] * len(likely)
        shares = [math.exp(logprob - best) for logprob in logprobs]
        return [share / sum(shares) for share in shares]
