"""Takes the result of a forward back to the requests."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

from sglang.srt.managers.req import Req
from sglang.srt.managers.schedule_batch import LaunchRecord
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.mem_cache.common import release_req

logger = logging.getLogger(__name__)


class ProcessedBatch(NamedTuple):
    """`reqs`: those that the result was about; a request that had ended while its
    forward was in flight is not among them."""

    reqs: list[Req]
    num_generated: int


class BatchResultProcessor:
    """Appends tokens, finishes requests and gives their memory back.

    Args:
        cache: where finished and prefilled requests leave their KV.
        on_finish: called for each request that ended, after its memory is released.
    """

    def __init__(
        self, cache: BasePrefixCache, *, on_finish: Callable[[Req], None]
    ) -> None:
        self._cache = cache
        self._on_finish = on_finish

    def process(
        self, launched: LaunchRecord, result: GenerationBatchResult
    ) -> ProcessedBatch:
        """Take one result back; frees are batched."""
        result.wait()
        live = [i for i, req in enumerate(launched.reqs) if not req.is_finished]
        tokens = result.tokens.tolist()
        accept_lens = (
            None if result.accept_lens is None else result.accept_lens.tolist()
        )
        self._store_extras(launched, result)
        generated = 0
        with self._cache.allocator.free_group():
            for i in live:
                count = 1 if accept_lens is None else accept_lens[i]
                new = tokens[i * result.stride : i * result.stride + count]
                generated += self._take_tokens(launched, i, new)
        return ProcessedBatch(
            reqs=[launched.reqs[i] for i in live], num_generated=generated
        )

    def _take_tokens(
        self, launched: LaunchRecord, row: int, new_tokens: list[int]
    ) -> int:
        """Give the request of `row` its tokens; returns how many count."""
        req = launched.reqs[row]
        if launched.is_chunked[row]:
            # An abort between two chunks is the scheduler's to carry out.
            self._cache.cache_unfinished_req(req)
            return 0
        before = req.output_len
        if req.finish_if_aborted():
            self._release(req)
            return 0
        if req.params.max_new_tokens == 0:
            req.finish_by_length()
        else:
            req.append(new_tokens)
            if req.grammar is not None:
                self._advance_grammar(req, new_tokens[: req.output_len - before])
        if req.is_finished:
            self._release(req)
        elif not launched.is_decode:
            self._cache.cache_unfinished_req(req)
        return req.output_len - before

    def _release(self, req: Req) -> None:
        # The forward in flight may hold one more slot than there are tokens.
        req.committed_len = min(req.committed_len, len(req.tokens))
        release_req(req, cache=self._cache)
        self._on_finish(req)

    @staticmethod
    def _advance_grammar(req: Req, new_tokens: list[int]) -> None:
        assert req.grammar is not None
        try:
            for token in new_tokens:
                req.grammar.accept(token)
        except RuntimeError as error:
            logger.error("Request %s left its grammar: %s", req.rid, error)
            req.abort(f"constrained decoding failed: {error}", status_code=500)
            return
        if not req.is_finished and req.grammar.is_terminated():
            req.finish_by_grammar()

    @staticmethod
    def _store_extras(launched: LaunchRecord, result: GenerationBatchResult) -> None:
        """Logprobs and hidden states, for the rows that asked."""
        if result.logprobs is not None:
            entries = result.logprobs.to_host()
            chunked = {
                req.serial
                for req, is_chunked in zip(
                    launched.reqs, launched.is_chunked, strict=True
                )
                if is_chunked
            }
            for req, entry in zip(launched.logprob_reqs, entries, strict=True):
                is_counted = req.params.max_new_tokens > 0 and not req.is_finished
                if is_counted and req.serial not in chunked:
                    req.output_logprobs.append(entry)
        if not launched.is_decode:
            for row, scored in result.input_logprobs.items():
                launched.reqs[row].input_logprobs += scored.to_host()
            for req, end in zip(launched.reqs, launched.ends.tolist(), strict=True):
                req.advance_scoring(end)
        if result.hidden is not None:
            starts = launched.starts.tolist()
            counts = (launched.ends - launched.starts).tolist()
            rows = torch.split(result.hidden.float(), counts)
            for req, start, states in zip(launched.reqs, starts, rows, strict=True):
                if req.return_hidden_states and not req.is_finished:
                    req.store_hidden_states(start, states)
