"""The requests with which an engine warms up: one scene for each kind of work."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from sglang.srt.managers.io_struct import GenerateReq
from sglang.srt.sampling.sampling_params import SamplingParams

# New tokens of one prompt: a prefill graph with attention inside it, one in segments;
# the kernel of long prompts, with a graph and padded too much for one.
PROMPTS = (5, 200, 300, 1100, 2100, 4200)
# Prompts that are prefilled together, and the tokens of each. Attention chooses tiles
# and splits by both; test_warm_shapes.py proves that none is left out.
SHAPES = (
    *((1, n) for n in (1, 4, 6, 12, 28, 40, 56, 64)),
    *((2, n) for n in (28, 40, 56, 63, 64)),
    *((3, n) for n in (1, 28, 48, 56, 63)),
    *((4, 28), (4, 48), (8, 28), (9, 1), (12, 28), (16, 1)),
    *((17, 1), (17, 4), (17, 5), (17, 56), (17, 64), (20, 17), (32, 17), (33, 1)),
)
# The same for prompts that continue a cached one of `PREFIX` tokens.
CONTINUED = ((1, 1), (1, 40), (3, 17), (17, 5), (17, 64), (48, 1))
PREFIX = 96
# Wishes of a batch, each alone: a batch with all of them takes one path of many.
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.7, "min_p": 0.1},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.1},
    {"temperature": 0.7, "frequency_penalty": 0.1, "presence_penalty": 0.1},
    {"repetition_penalty": 1.1},
    {"logit_bias": {1: 1.0}},
    {"min_new_tokens": 2, "stop_token_ids": [1]},
    {"temperature": 0.7, "min_new_tokens": 2, "repetition_penalty": 1.1},
)
LOGPROBS: tuple[dict[str, Any], ...] = (
    {"return_logprob": True},
    {"return_logprob": True, "top_logprobs_num": 3},
    {"return_logprob": True, "top_logprobs_num": 3, "logprob_start_len": 0},
)
# The prefill yields one, and one step the second.
STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The bounds of an engine.

    Fields:
        rows: requests at a time.
        slots: KV slots.
        context: tokens of a request.
        batch_tokens: new tokens of a prefill; has_chunks: whether a longer prompt is
            cut.
        graph_rows: rows of the largest decode graph.
        is_prefill_only: a request yields one token.
        has_grammars, has_hidden_states: whether requests may ask for them.
    """

    rows: int
    slots: int
    context: int
    batch_tokens: int
    has_chunks: bool
    vocab_size: int
    graph_rows: int
    is_prefill_only: bool
    has_grammars: bool
    has_hidden_states: bool


def scenes(limits: Limits) -> Iterator[list[GenerateReq]]:
    """Requests that are sent together, each list once the one before is answered."""
    return iter(_Writer(limits).scenes())


class _Writer:
    """Writes the requests, all in the bounds of `limits`."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._rng = random.Random(0)
        self._ids = count()
        # A prompt's end and its first output fit, too, and half of the slots stay for
        # what a request reserves.
        self._longest = min(limits.context, limits.slots // 2) - 2 * STEPS

    def scenes(self) -> Iterator[list[GenerateReq]]:
        if self._longest < STEPS:
            return
        yield from self._alone()
        yield from self._together()
        yield from self._options()
        yield from self._decoding()

    def _alone(self) -> Iterator[list[GenerateReq]]:
        """One prompt, fresh, found in the cache, and continued."""
        limits = self._limits
        lengths = [n for n in PROMPTS if n <= limits.batch_tokens]
        if limits.has_chunks:
            lengths.append(limits.batch_tokens + 40)
        for length in lengths:
            if PREFIX + length <= self._longest:
                prompt, key = self._tokens(length), f"warm-up-{length}"
                yield [self._request(prompt, key=key)]
                yield [self._request(prompt, key=key)]
                more = self._tokens(min(length, PREFIX))
                yield [self._request(prompt + more, key=key)]

    def _together(self) -> Iterator[list[GenerateReq]]:
        """Several prompts: fresh ones, then such as continue a cached one."""
        for rows, length in self._fitting(SHAPES, prefix=0):
            yield [self._request(self._tokens(length)) for _ in range(rows)]
        prefix = self._tokens(PREFIX)
        for rows, length in self._fitting(CONTINUED, prefix=PREFIX):
            key = f"warm-up-{rows}-{length}"
            yield [self._request(prefix, key=key)]
            tails = [self._tokens(length) for _ in range(rows)]
            yield [self._request(prefix + tail, key=key) for tail in tails]

    def _fitting(
        self, shapes: Sequence[tuple[int, int]], *, prefix: int
    ) -> Iterator[tuple[int, int]]:
        """`shapes`, with as many rows as there may be."""
        limits = self._limits
        for rows, length in dict.fromkeys((min(n, limits.rows), k) for n, k in shapes):
            is_short = prefix + length <= self._longest
            fits = prefix + rows * (length + 1) <= limits.slots // 2
            if is_short and fits and rows * length <= limits.batch_tokens:
                yield rows, length

    def _options(self) -> Iterator[list[GenerateReq]]:
        """Everything that a request may ask of the sampler."""
        # The launch that chooses tokens is another one for more than 8 rows.
        for rows in dict.fromkeys((1, min(9, self._limits.rows))):
            for params in OPTIONS:
                yield self._batch(rows, {}, params)
            for options in LOGPROBS:
                yield self._batch(rows, options, {})
            if self._limits.has_hidden_states:
                yield self._batch(rows, {"return_hidden_states": True}, {})
            # Of a batch in which not all ask.
            yield [*self._batch(rows, {}, {}), *self._batch(1, {}, OPTIONS[0])]
        if self._limits.has_grammars:
            yield self._batch(1, {}, {"regex": "(a|b)*"})

    def _decoding(self) -> Iterator[list[GenerateReq]]:
        """Steps of more rows than the largest graph has; whatever is chosen by rows is
        chosen anew at a power of two, or after it."""
        limits = self._limits
        counts = {limits.graph_rows + 1, limits.rows}
        counts.update(1 << power for power in range(limits.rows.bit_length()))
        for rows in sorted(counts):
            fits = rows <= limits.rows and rows * 4 * STEPS <= limits.slots
            if rows > limits.graph_rows and fits:
                yield self._batch(rows, {}, {})

    def _batch(
        self, rows: int, options: dict[str, Any], params: dict[str, Any]
    ) -> list[GenerateReq]:
        length = min(5, self._longest)
        return [
            self._request(self._tokens(length), STEPS, options, params)
            for _ in range(rows)
        ]

    def _tokens(self, length: int) -> list[int]:
        return [self._rng.randrange(self._limits.vocab_size) for _ in range(length)]

    def _request(
        self,
        prompt: Sequence[int],
        steps: int = 1,
        options: dict[str, Any] | None = None,
        params: dict[str, Any] | None = None,
        *,
        key: str | None = None,
    ) -> GenerateReq:
        """`key`: of the prompts that it may share a prefix with; None: of no other."""
        rid = f"warm-up-{next(self._ids)}"
        greedy = {"temperature": 0.0, "ignore_eos": True}
        steps = 1 if self._limits.is_prefill_only else steps
        return GenerateReq(
            rid=rid,
            extra_key=key or rid,
            input_ids=list(prompt),
            sampling_params=SamplingParams(
                **{**greedy, "max_new_tokens": steps, **(params or {})}
            ),
            **(options or {}),
        )
