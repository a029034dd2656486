"""Applies the result of a forward to its requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang.srt.constrained.base_grammar import (
    EosInsideGrammarError,
    GrammarLimitError,
)
from sglang.srt.mem_cache.common import release_req

if TYPE_CHECKING:
    from sglang.srt.managers.batch.forward_result import GenerationBatchResult
    from sglang.srt.managers.batch.req import Req
    from sglang.srt.managers.batch.schedule_batch import LaunchRecord
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.sampling.logprobs import HostLogprob

logger = logging.getLogger(__name__)


class ProcessedBatch(NamedTuple):
    """The requests of a processed result.

    Fields:
        reqs: the requests, except ones that had ended while the forward was in flight.
        num_generated: number of output tokens that count.
    """

    reqs: list[Req]
    num_generated: int


class BatchResultProcessor:
    """Appends tokens, finishes requests and gives their memory back.

    Args:
        cache: prefix cache that receives the KV of finished and prefilled requests.
        on_finish: called for each finished request, after its memory is released.
        on_lost_grammar: called for each request that needs another grammar and can
            continue; takes it out of the batches.
        on_verified: called with the number of output tokens of each verified draft, and
            of its tokens that were accepted.
    """

    def __init__(
        self,
        cache: BasePrefixCache,
        *,
        on_finish: Callable[[Req], None],
        on_lost_grammar: Callable[[Req], None],
        on_verified: Callable[[int, int], None],
    ) -> None:
        self._cache = cache
        self._on_finish = on_finish
        self._on_lost_grammar = on_lost_grammar
        self._on_verified = on_verified

    def process(
        self,
        launched: LaunchRecord,
        result: GenerationBatchResult,
        rows: Sequence[int] | None = None,
        *,
        on_error: Callable[[int, Exception], None] | None = None,
    ) -> ProcessedBatch:
        """Give the tokens of a result to their requests; frees are batched.

        Args:
            rows: of live requests, each in one call. Defaults to all of them.
            on_error: called with a row and its error, so that the other rows go on. By
                default the first error ends the call.
        """
        result.wait()
        live = launched.live_rows() if rows is None else list(rows)
        tokens, accept_lens = result.tokens, result.accept_lens
        self._store_extras(launched, result, live)
        generated = 0
        with self._cache.allocator.free_group():
            for i in live:
                count = 1 if accept_lens is None else accept_lens[i]
                new = tokens[i * result.stride : i * result.stride + count]
                try:
                    generated += self._take_tokens(launched, i, new)
                except Exception as error:
                    if on_error is None:
                        raise
                    on_error(i, error)
        return ProcessedBatch(
            reqs=[launched.reqs[i] for i in live], num_generated=generated
        )

    def end(self, req: Req, message: str) -> None:
        """End a request with an error of the server; its KV is not cached."""
        req.no_cache = True
        req.abort(message, status_code=500)
        with self._cache.allocator.free_group():
            self._release(req)

    def _take_tokens(
        self, launched: LaunchRecord, index: int, new_tokens: list[int]
    ) -> int:
        """Give request `index` of the batch its tokens; returns the number that
        count.
        """
        req = launched.reqs[index]
        if launched.is_chunked[index]:
            # The scheduler carries out an abort between two chunks.
            self._cache.cache_unfinished_req(req)
            return 0
        before = req.output_len
        if req.finish_if_aborted():
            self._release(req)
            return 0
        if req.params.max_new_tokens == 0:
            req.finish_by_length()
        elif req.grammar is not None:
            self._append_by_grammar(req, new_tokens)
        else:
            req.append(new_tokens)
        if launched.is_speculative:
            req.committed_len += len(new_tokens)
            if self._cache.checkpoints is not None:
                self._cache.checkpoints.on_verified(req.holds, req.committed_len)
        if launched.shape is not None:
            req.verifications.count += 1
            req.verifications.accepted_tokens += req.output_len - before
            self._on_verified(req.output_len - before, len(new_tokens) - 1)
        if req.grammar_failure is not None and not req.is_finished:
            req.lose_grammar()
        if req.first_token_at is None and req.output_len:
            req.first_token_at = time.monotonic()
        if req.is_finished:
            self._release(req)
        elif req.grammar_failure is not None:
            self._on_lost_grammar(req)
        elif not launched.is_decode:
            self._cache.cache_unfinished_req(req)
        return req.output_len - before

    def _release(self, req: Req) -> None:
        # The forward in flight may hold one slot more than there are tokens, and a
        # finish inside an accepted run leaves KV for tokens that are dropped.
        req.committed_len = min(req.committed_len, len(req.tokens))
        release_req(req, cache=self._cache)
        self._on_finish(req)

    @staticmethod
    def _append_by_grammar(req: Req, new_tokens: list[int]) -> None:
        """Append one by one, because the grammar may end or fail inside an accepted
        run.
        """
        grammar = req.grammar
        assert grammar is not None
        if req.grammar_failure is not None:
            return  # its mask failed
        for token in new_tokens:
            req.append([token])
            try:
                grammar.accept(token)
            except GrammarLimitError as error:
                # The mask allowed the token.
                req.grammar_failure = str(error)
            except EosInsideGrammarError as error:
                req.abort(str(error), status_code=400)
            except RuntimeError as error:
                logger.error("Request %s left its grammar: %s", req.rid, error)
                req.abort(f"constrained decoding failed: {error}", status_code=500)
            else:
                if not req.is_finished and grammar.is_terminated():
                    req.finish_by_grammar()
            if req.is_finished or req.grammar_failure is not None:
                return

    @staticmethod
    def _store_extras(
        launched: LaunchRecord, result: GenerationBatchResult, rows: Sequence[int]
    ) -> None:
        """Store logprobs and hidden states of these rows, for requests that asked for
        them.
        """
        if result.logprobs is not None:
            _store_logprobs(launched, result, result.logprobs.to_host(), rows)
        if not launched.is_decode:
            ends = launched.ends.tolist()
            for row in rows:
                req = launched.reqs[row]
                scored = result.input_logprobs.get(row)
                if scored is not None:
                    req.logprobs.input += scored.to_host()
                req.logprobs.on_scored(ends[row], prompt_len=req.prompt_len)
        if result.hidden is not None:
            _store_hidden_states(launched, result, result.hidden.float(), rows)


def _store_hidden_states(
    launched: LaunchRecord,
    result: GenerationBatchResult,
    hidden: torch.Tensor,
    rows: Sequence[int],
) -> None:
    """Store the hidden states of the tokens that the forward read, except rejected
    drafts.
    """
    accept_lens = result.accept_lens
    if accept_lens is None and not launched.is_speculative:
        counts = (launched.ends - launched.starts).tolist()
        by_row = torch.split(hidden, counts)
        starts = launched.starts.tolist()
    else:
        by_row = torch.split(hidden, result.stride)
        counts = accept_lens or [1] * result.bs
        # Another verification may have been in flight at launch.
        starts = [req.committed_len for req in launched.reqs]
    for row in rows:
        req = launched.reqs[row]
        if req.hidden.are_wanted:
            req.hidden.store(
                starts[row],
                by_row[row][: counts[row]],
                newest=len(req.tokens) - 1,
            )


def _store_logprobs(
    launched: LaunchRecord,
    result: GenerationBatchResult,
    entries: list[HostLogprob],
    rows: Sequence[int],
) -> None:
    """Store one of `entries` per token that each request of these rows got; there are
    `result.stride` for each request that asked.
    """
    accept_lens = result.accept_lens
    live = {launched.reqs[row].serial: row for row in rows}
    for i, req in enumerate(launched.logprob_reqs):
        row = live.get(req.serial)
        if row is None or launched.is_chunked[row]:
            continue
        count = 1 if accept_lens is None else accept_lens[row]
        first = i * result.stride
        req.logprobs.output += entries[first : first + count]
