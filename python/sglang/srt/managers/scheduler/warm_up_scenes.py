"""The requests that warm up an engine: one scene for each kind of work."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from sglang.srt.managers.messages.io_struct import GenerateReq, LoraRef
from sglang.srt.mem_cache.memory_pool import WRITE_AT_ONCE
from sglang.srt.sampling.sampling_params import SamplingParams

# New tokens of one prompt: a prefill graph that includes attention, one in segments;
# the kernel for long prompts, with a graph and with too much padding for one.
PROMPTS = (5, 200, 300, 1100, 2100, 4200)
# Prompts that are prefilled together, and the tokens of all of them. Attention chooses
# tiles and splits by both; test_warm_shapes.py proves that none is left out. A single
# row is scored, because otherwise it replays a graph, which contains the launches of
# its padded tokens.
SHAPES = (
    *((1, n) for n in (1, 2, 4, 6, 12, 28, 40, 56, 64)),
    *((2, n) for n in (56, 80, 112, 126, 127, 128)),
    *((3, n) for n in (3, 84, 109, 144, 168, 189)),
    *((4, 112), (4, 192), (8, 224), (9, 9), (12, 336), (16, 16)),
    *((17, n) for n in (17, 68, 85, 137, 952, 1088)),
    *((8, 508), (18, 657), (20, 340), (22, 46), (26, 53), (26, 117)),
    *((29, 939), (32, 544), (33, 33), (65, 2081)),
)
# The same for prompts that continue a cached one of `PREFIX` tokens.
CONTINUED = ((1, 1), (1, 40), (3, 51), (17, 85), (17, 1088), (48, 48))
PREFIX = 96
# A prompt that is split in two has this many tokens more than a prefill.
BEYOND = 40
# Scored prompts run without a prefill graph. K and V of this many tokens in short rows
# are stored by a launch that one-row graphs do not capture.
SCORED = (3, 128)
# New tokens of a scored prompt with an adapter, which runs without a graph and
# multiplies otherwise than one without: gate and up are not one launch with their
# activation. One for each choice made by the number of tokens.
ADAPTED = (1, 12, 28, 40, 56, 200)
# The same of prompts that are not scored: prefill graphs with adapters are fewer.
ADAPTED_GRAPHS = (5, 300, 1100)
# Options of a batch, one at a time: a batch with all of them takes only one of many
# paths.
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
SCORE = LOGPROBS[-1]
# An output with pauses between drafts of all lengths.
LONG_OUTPUT = 64
# The prefill yields the first token, and one step the second.
STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SceneLimits:
    """The bounds of an engine.

    Fields:
        rows: maximum number of requests at a time.
        slots: number of KV slots.
        context: maximum tokens of a request.
        batch_tokens: maximum new tokens of a prefill. has_chunks: whether longer
            prompts are split.
        graph_rows: rows of the largest decode graph.
        is_prefill_only: a request yields one token.
        has_prefix_cache: whether prompts are looked up in a cache. has_grammars,
        has_hidden_states: whether requests may ask for them.
        lora: an adapter that requests may have, or None.
    """

    rows: int
    slots: int
    context: int
    batch_tokens: int
    has_chunks: bool
    vocab_size: int
    graph_rows: int
    is_prefill_only: bool
    has_prefix_cache: bool
    has_grammars: bool
    has_hidden_states: bool
    lora: LoraRef | None = None


def scenes(
    limits: SceneLimits, *, only_kernels: bool = False
) -> Iterator[list[GenerateReq]]:
    """Yield lists of requests to send together, each after the previous list is
    answered.

    Args:
        only_kernels: leave out those that only allocate memory, thousands of requests
            where as many may run.
    """
    return iter(_Writer(limits).scenes(only_kernels=only_kernels))


def decoding_scenes(limits: SceneLimits) -> Iterator[list[GenerateReq]]:
    """Yield, like `scenes`, the lists whose decode steps depend on the drafts."""
    writer = _Writer(limits)
    if not writer.is_too_small:
        yield from writer.decoding()


def long_scenes(limits: SceneLimits) -> Iterator[list[GenerateReq]]:
    """Yield a request with more tokens than any draft catches up at once."""
    writer = _Writer(limits)
    if not writer.is_too_small:
        yield writer.long_request()


class _Writer:
    """Writes the requests, all within `limits`."""

    def __init__(self, limits: SceneLimits) -> None:
        self._limits = limits
        self._rng = random.Random(0)
        self._ids = count()
        # A prompt's end and its first output also fit, and half of the slots are left
        # for the requests' reserves.
        self._longest = min(limits.context, limits.slots // 2) - 2 * STEPS

    @property
    def is_too_small(self) -> bool:
        """Whether no prompt fits."""
        return self._longest < STEPS

    def scenes(self, *, only_kernels: bool) -> Iterator[list[GenerateReq]]:
        if self.is_too_small:
            return
        yield from self._alone()
        yield from self._long()
        yield from self._together()
        yield from self._adapted()
        if not only_kernels:
            yield from self._admitted()
        yield from self.decoding()

    def decoding(self) -> Iterator[list[GenerateReq]]:
        yield from self._options()
        yield from self._decoding()

    def _alone(self) -> Iterator[list[GenerateReq]]:
        """One prompt: new, found in the cache, and continued."""
        for length in filter(self._fits, self._lengths()):
            prompt, key = self._tokens(length), f"warm-up-{length}"
            yield [self._request(prompt, key=key)]
            yield [self._request(prompt, key=key)]
            more = self._tokens(min(length, PREFIX))
            yield [self._request(prompt + more, key=key)]

    def _long(self) -> Iterator[list[GenerateReq]]:
        """A total of tokens that exceeds one request, in as few requests as possible:
        kernels for experts are chosen by the total.
        """
        limits, longest = self._limits, self._longest
        counts = [n for n in self._lengths() if not self._fits(n)]
        if not limits.has_chunks:
            counts.append(limits.batch_tokens)  # no split prompt has this many
        most = min(limits.batch_tokens, limits.rows * longest)
        shapes = [(-(-min(n, most) // longest), min(n, most)) for n in counts]
        for lengths in self._fitting(shapes, prefix=0):
            yield [self._request(self._tokens(n)) for n in lengths]

    def _lengths(self) -> list[int]:
        """New tokens of single prompts; only the last one may be split."""
        tokens = self._limits.batch_tokens
        cut = [tokens + BEYOND] if self._limits.has_chunks else []
        return [*(n for n in PROMPTS if n <= tokens), *cut]

    def _fits(self, length: int) -> bool:
        """Whether a prompt may be this long and be continued."""
        return PREFIX + length <= self._longest

    def _together(self) -> Iterator[list[GenerateReq]]:
        """Several prompts: new ones, then ones that continue a cached prompt."""
        for lengths in self._fitting(SHAPES, prefix=0):
            options = SCORE if len(lengths) == 1 else {}
            yield [self._request(self._tokens(n), options=options) for n in lengths]
        prefix = self._tokens(PREFIX)
        for lengths in self._fitting(CONTINUED, prefix=PREFIX):
            key = f"warm-up-{len(lengths)}-{sum(lengths)}"
            yield [self._request(prefix, key=key)]
            tails = [self._tokens(length) for length in lengths]
            # Then a single row also runs without a graph.
            wants = self._limits.has_hidden_states and len(lengths) == 1
            options = {"return_hidden_states": True} if wants else {}
            yield [
                self._request(prefix + tail, options=options, key=key) for tail in tails
            ]

    def _fitting(
        self, shapes: Sequence[tuple[int, int]], *, prefix: int
    ) -> Iterator[list[int]]:
        """Yield the prompt lengths of `shapes`, with as many rows as possible."""
        limits = self._limits
        most = min(limits.batch_tokens, limits.slots // 2 - prefix - limits.rows)
        bounded = ((min(n, limits.rows), min(k, most)) for n, k in shapes)
        for rows, tokens in dict.fromkeys(bounded):
            if rows <= tokens <= rows * (self._longest - prefix):
                yield _shared(tokens, rows)

    def _admitted(self) -> Iterator[list[GenerateReq]]:
        """As many requests as may run, half as many, and so on, all sharing a cached
        prompt: memory for copies to the device is allocated in powers of two.
        """
        limits = self._limits
        length = min(self._longest, limits.batch_tokens, WRITE_AT_ONCE // limits.rows)
        if not limits.has_prefix_cache or length < STEPS:
            return
        prompt, key, rows = self._tokens(length), "warm-up-admitted", limits.rows
        yield [self._request(prompt, key=key)]
        while rows > 1:
            yield [self._request(prompt, key=key) for _ in range(rows)]
            rows //= 2

    def _adapted(self) -> Iterator[list[GenerateReq]]:
        """Prompts with an adapter, if there are any."""
        limits = self._limits
        if limits.lora is None:
            return
        most = min(self._longest, limits.batch_tokens)
        options: dict[str, Any] = {"lora": limits.lora}
        for length in dict.fromkeys(min(n, most) for n in ADAPTED):
            yield [self._request(self._tokens(length), options=options | SCORE)]
        for length in dict.fromkeys(min(n, most) for n in ADAPTED_GRAPHS):
            yield [self._request(self._tokens(length), STEPS, options)]

    def _options(self) -> Iterator[list[GenerateReq]]:
        """All sampling options of a request."""
        # Tokens of more than 8 rows are chosen by a different launch.
        for rows in dict.fromkeys((1, min(9, self._limits.rows))):
            for params in OPTIONS:
                yield self._batch(rows, {}, params)
            for options in LOGPROBS:
                yield self._batch(rows, options, {})
            if self._limits.has_hidden_states:
                yield self._batch(rows, {"return_hidden_states": True}, {})
            # In a batch in which not all requests ask.
            yield [*self._batch(rows, {}, {}), *self._batch(1, {}, OPTIONS[0])]
        yield self._scored()
        if self._limits.has_grammars:
            yield self._batch(1, {}, {"regex": "(a|b)*"})

    def _scored(self) -> list[GenerateReq]:
        """Short prompts with the log probabilities of their own tokens."""
        limits, (rows, tokens) = self._limits, SCORED
        tokens = max(1, min(tokens, limits.batch_tokens, limits.slots // 2))
        rows = min(max(rows, -(-tokens // self._longest)), limits.rows, tokens)
        lengths = _shared(min(tokens, rows * self._longest), rows)
        return [self._request(self._tokens(n), options=SCORE) for n in lengths]

    def _decoding(self) -> Iterator[list[GenerateReq]]:
        """Steps with more rows than the largest graph, four row counts per power of
        two, so that every choice made by the number of rows occurs. In each step some
        requests end, because admitting a full batch takes the host long.
        """
        limits = self._limits
        counts = {limits.graph_rows + 1, limits.rows}
        for power in range(limits.rows.bit_length()):
            counts.update((part << power) // 4 for part in range(4, 8))
        most = min(limits.rows, limits.slots // (4 * STEPS))
        left = [n for n in sorted(counts) if limits.graph_rows < n <= most]
        while left:
            rows, length = left[-1], min(5, self._longest)
            tokens = min(limits.context, limits.slots // rows)
            steps = left[-(tokens - length - 1) :]
            del left[-len(steps) :]
            yield [
                self._request(self._tokens(length), 1 + sum(row < n for n in steps))
                for row in range(rows)
            ]

    def long_request(self) -> list[GenerateReq]:
        prompt = self._tokens(STEPS)
        most = min(self._limits.context, self._longest) - len(prompt)
        return [self._request(prompt, min(LONG_OUTPUT, most))]

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
        """`key` names the prompts it may share a prefix with; None shares with no
        other.
        """
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


def _shared(tokens: int, rows: int) -> list[int]:
    """Return the tokens of each row, as even as possible."""
    length, longer = divmod(tokens, rows)
    return [length + (row < longer) for row in range(rows)]
