"""One request while the scheduler holds it: tokens, memory, finish, and its parts."""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from sglang.srt.managers.batch.req_parts import (
    Heals,
    PromptEmbeds,
    ReqHiddenStates,
    ReqLogprobs,
    Sent,
    Verifications,
)
from sglang.srt.managers.messages.io_struct import FinishReason, GenerateReq, LoraRef
from sglang.srt.managers.messages.output_digest import first_digest
from sglang.srt.sampling.sampling_batch_info import SamplingRow
from sglang.srt.utils.hashing import hash_string
from sglang.srt.utils.salt_chain import Namespace, lineage_salt

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar import Grammar
    from sglang.srt.mem_cache.groups.slots import GroupHold
    from sglang.srt.mem_cache.page_ledger import IntArray
    from sglang.srt.mem_cache.tree_node import TreeNode
    from sglang.srt.utils.stop_matcher import EndMatcher

_serials = itertools.count(1)


def namespace_of(tenant: str | None, lora: LoraRef | None) -> Namespace:
    """Return the namespace of a tenant's requests with an adapter, or without one."""
    if lora is None:
        return Namespace(tenant)
    return Namespace(tenant, lora.name, lora.revision)


# A request whose grammar reaches its limits continues with another one, but only if the
# last one lasted at least this many tokens.
MIN_TOKENS_PER_GRAMMAR = 32


class Req:
    """A request in the scheduler; also the `CacheableReq` of the prefix cache.

    Token positions, half-open:
    ```
    0 ............ prompt_len ............ committed_len .... len(tokens)
    |  prompt       |  output, KV written   |  sampled, no KV yet (at most one)
    ```
    Under speculation a result moves `committed_len`; without, the launch does.
    While its prompt is prefilled in chunks, `committed_len` moves through the prompt.
    After a retraction all of `tokens` is prefilled again.

    Args:
        tokens: `request.input_ids`; the request appends to it.

    Attributes:
        serial: number of the request in this process, never reused.
        arrived: when this process took it, in seconds of the monotonic clock.
        finished_len: number of output tokens that count; set with `finish_reason`.
        adapter: revision of its adapter, or None.
        stop_ids: tokens that end the output; one set for all copies of a prompt.
        max_total_len: maximum of prompt plus output tokens.
        input_embeds: embeddings in place of the first tokens, or None; these tokens are
            then their `content_ids`.
        behind: tokens that the draft's KV lacks once the launched forwards have run; a
            draft with a lead (`DraftKind.lead`) should also have the newest one.
            Beyond `BatchEnvironment.max_behind` it has lapsed.
        is_chunked: whether the current prefill stops before the end of `tokens`.
        grammar_failure: why the request lost its grammar, until it has another one. Of
            the step in which that happened it keeps nothing, or the first tokens.
    """

    def __init__(
        self,
        request: GenerateReq,
        *,
        tokens: array[int],
        stop_ids: frozenset[int],
        seed: int,
        max_total_len: int,
        stop_matcher: EndMatcher | None,
        input_embeds: PromptEmbeds | None = None,
    ) -> None:
        params = request.sampling_params
        self.rid = request.rid
        self.serial = next(_serials)
        self.arrived = time.monotonic()
        self.params = params
        self.tokens = tokens
        self.prompt_len = len(self.tokens)
        self.input_embeds = input_embeds
        self.stream = request.stream
        self.max_total_len = min(self.prompt_len + params.max_new_tokens, max_total_len)
        self.stop_ids = stop_ids
        self.stop_matcher = stop_matcher
        self.grammar: Grammar | None = None
        self.grammar_failure: str | None = None
        self._grammar_lost_at: int | None = None
        self.client = request.client
        self.priority = request.priority
        self.bootstrap = request.bootstrap
        self.sampling_row = SamplingRow(
            params=params,
            seed=seed,
            prompt_len=self.prompt_len,
            stop_ids=stop_ids,
        )
        self.rid_hash = hash_string(self.rid)
        lora = request.lora
        self.adapter = None if lora is None else lora.revision
        self.namespace = namespace_of(request.extra_key, lora).name

        self.salt = lineage_salt(self.namespace)

        # Read and written by the prefix cache (see CacheableReq).
        self.req_pool_idx = 0
        self.no_cache = False
        self.committed_len = 0
        self.allocated_len = 0
        self.behind = self.unready_len = 0
        self.cache_protected_len = 0
        self.branch_len = 0
        self.prefix_slots = torch.empty(0, dtype=torch.int64)
        self.last_node: TreeNode | None = None
        self.holds: tuple[GroupHold, ...] = ()

        # Prefill.
        self.is_chunked = False
        self.was_admitted = False
        self.cached_tokens = 0
        self.num_restarts = 0
        # Seconds of the monotonic clock; only shown.
        self.first_token_at: float | None = None

        # Finish.
        self.finish_reason: FinishReason | None = None
        self.finished_len: int | None = None
        self.abort_message: str | None = None

        self.logprobs = ReqLogprobs(request, prompt_len=self.prompt_len)
        self.hidden = ReqHiddenStates(request)
        self.heals = Heals()
        self.verifications = Verifications()
        self.sent = Sent(digest=first_digest(self.rid))

    def fill_ids(self) -> Sequence[int]:
        """All tokens so far."""
        return self.tokens

    def device_tokens(self, start: int, end: int) -> IntArray:
        """Tokens [start, end) as the device has them, int64."""
        tokens: IntArray = np.array(self.tokens[start:end], dtype=np.int64)
        if self.input_embeds is not None:
            given = self.input_embeds.ids[start:end]
            tokens[: len(given)] = given
        return tokens

    def output_tokens(self) -> list[int]:
        """The sampled tokens so far."""
        return self.tokens[self.prompt_len :].tolist()

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def running_adapter(self) -> str | None:
        """Its adapter, or None once it has finished and needs no slot for it."""
        return None if self.is_finished else self.adapter

    @property
    def decodes_on(self) -> bool:
        """Whether it needs another forward after those already prepared."""
        return not self.is_finished and self.committed_len + 1 < self.max_total_len

    @property
    def output_len(self) -> int:
        """Number of output tokens that count: all, or up to the finish."""
        if self.finished_len is not None:
            return self.finished_len
        return len(self.tokens) - self.prompt_len

    @property
    def remaining_new_tokens(self) -> int:
        """Number of tokens that it may still sample."""
        return max(self.max_total_len - len(self.tokens), 0)

    def cacheable_prefix_len(self) -> int:
        """Number of tokens that a prefix match may cover.

        Excludes the last token, because its logits are needed, and any token whose
        logits score a prompt token or whose hidden state is still owed.
        """
        limits = (
            len(self.tokens) - 1,
            self.hidden.cacheable_until,
            self.logprobs.score_from,
        )
        return min(limit for limit in limits if limit is not None)

    def append(self, new_tokens: Sequence[int]) -> None:
        """Take sampled tokens and finish if one of them ends the request."""
        before = len(self.tokens) - self.prompt_len
        self.tokens.extend(new_tokens)
        self._check_finished(before, new_tokens)

    def finish(self, reason: FinishReason, *, at: int) -> None:
        """End the request with `at` output tokens."""
        self.finish_reason = reason
        self.finished_len = at

    def finish_if_aborted(self) -> bool:
        """Turn a pending abort into the finish; returns whether there was one."""
        if self.abort_message is None or self.is_finished:
            return False
        self.abort(self.abort_message, status_code=499)
        return True

    def take_grammar(self, grammar: Grammar) -> None:
        self.grammar, self.grammar_failure = grammar, None

    def lose_grammar(self) -> bool:
        """Drop a grammar that has failed. Returns False if the request fails with it,
        because the previous grammar failed at almost the same token.
        """
        assert self.grammar_failure is not None
        before, self._grammar_lost_at = self._grammar_lost_at, self.output_len
        self.grammar = None
        del self.logprobs.output[self.output_len :]
        self.hidden.drop(len(self.tokens))
        if before is None or self.output_len - before >= MIN_TOKENS_PER_GRAMMAR:
            return True
        self.abort(
            f"constrained decoding failed: {self.grammar_failure}", status_code=500
        )
        return False

    def abort(self, message: str, *, status_code: int) -> None:
        reason = FinishReason(type="abort", message=message, status_code=status_code)
        self.finish(reason, at=len(self.tokens) - self.prompt_len)

    def finish_by_length(self) -> None:
        """End at the length limit."""
        at = self.max_total_len - self.prompt_len
        self.finish(FinishReason(type="length", length=at), at=at)

    def finish_by_grammar(self) -> None:
        """End because the grammar allows nothing more; no token is trimmed."""
        self.finish(FinishReason(type="stop"), at=len(self.tokens) - self.prompt_len)

    @property
    def hidden_end(self) -> int:
        """End of the positions whose hidden states count: the prompt and all tokens but
        the newest.
        """
        return self.prompt_len + max(self.output_len - 1, 0)

    def _check_finished(self, before: int, new_tokens: Sequence[int]) -> None:
        """Check the length first, then stop ids and stop strings token by token."""
        is_long_enough = len(self.tokens) >= self.max_total_len
        for i, token in enumerate(new_tokens):
            at = before + i + 1
            if self.prompt_len + at > self.max_total_len:
                break
            if token in self.stop_ids:
                self.finish(FinishReason(type="stop", matched=token), at=at)
                return
            if self.stop_matcher is not None:
                matched = self.stop_matcher.push(token)
                if matched is not None and at >= self.params.min_new_tokens:
                    self.finish(FinishReason(type="stop", matched=matched), at=at)
                    return
        if is_long_enough:
            self.finish_by_length()

    def prepare_again(self) -> None:
        """Prepare for another prefill after its memory was released; nothing is sent
        twice.
        """
        self.num_restarts += 1
        self.is_chunked = False
        self.no_cache = False

    def set_behind(self, tokens: int, *, lead: int) -> None:
        """Note that the draft's KV lacks this many tokens, of which `lead` have none in
        the target's pool either."""
        self.behind, self.unready_len = tokens, max(tokens - lead, 0)

    @property
    def is_healed_in_vain(self) -> bool:
        """Whether it has gained no token since it was healed."""
        return self.heals.are_in_vain(len(self.tokens))

    def rewind(self, num_tokens: int) -> None:
        """Forget all tokens after the first `num_tokens`, and an end that followed.

        A grammar cannot be rewound past its end, so it is dropped and compiled again.
        """
        del self.tokens[num_tokens:]
        self.finish_reason = self.finished_len = None
        kept = num_tokens - self.prompt_len
        del self.logprobs.output[kept:]
        self.hidden.drop(num_tokens)
        if self.stop_matcher is not None:
            self.stop_matcher = self.stop_matcher.at(self.tokens[self.prompt_len :])
        if self.grammar is not None:
            self.grammar = None
            self.grammar_failure = "tokens were taken back"
