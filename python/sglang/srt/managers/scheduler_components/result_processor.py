"""Takes the result of a forward back to the requests."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from sglang.srt.managers.req import Req
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.mem_cache.common import release_req

logger = logging.getLogger(__name__)


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

    def process(self, batch: ScheduleBatch, result: GenerationBatchResult) -> int:
        """Returns the number of new tokens."""
        result.wait()
        tokens = result.tokens.tolist()
        accept_lens = (
            None if result.accept_lens is None else result.accept_lens.tolist()
        )
        if (
            result.logprobs is not None
            or result.input_logprobs
            or result.hidden is not None
        ):
            self._store_extras(batch, result)
        generated = 0
        with self._cache.allocator.free_group():
            for i, req in enumerate(batch.reqs):
                count = 1 if accept_lens is None else accept_lens[i]
                new = tokens[i * result.stride : i * result.stride + count]
                generated += self._take_tokens(req, new, batch)
        return generated

    def _take_tokens(
        self, req: Req, new_tokens: list[int], batch: ScheduleBatch
    ) -> int:
        """Give `req` its tokens; returns how many count."""
        before = req.output_len
        if req.finish_if_aborted():
            self._release(req)
            return 0
        if req.is_chunked:
            self._cache.cache_unfinished_req(req)
            return 0
        if req.params.max_new_tokens == 0:
            req.finish_by_length()
        else:
            req.append(new_tokens)
            if req.grammar is not None:
                self._advance_grammar(req, new_tokens[: req.output_len - before])
        if req.is_finished:
            self._release(req)
        elif not batch.forward_mode.is_decode:
            self._cache.cache_unfinished_req(req)
        return req.output_len - before

    def _release(self, req: Req) -> None:
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
    def _store_extras(batch: ScheduleBatch, result: GenerationBatchResult) -> None:
        """Logprobs and hidden states, for the rows that asked."""
        is_decode = batch.forward_mode.is_decode
        if result.logprobs is not None:
            entries = result.logprobs.to_host()
            for req, entry in zip(batch.logprob_reqs, entries, strict=True):
                if not req.is_chunked and req.params.max_new_tokens > 0:
                    req.output_logprobs.append(entry)
        if not is_decode:
            for row, scored in result.input_logprobs.items():
                batch.reqs[row].input_logprobs += scored.to_host()
            for req in batch.reqs:
                req.advance_scoring()
        if result.hidden is not None:
            rows = torch.split(result.hidden.float(), batch.extend_lens())
            for req, start, states in zip(
                batch.reqs, batch.prefix_lens(), rows, strict=True
            ):
                if req.return_hidden_states:
                    req.store_hidden_states(start, states)
