"""Grammars through llguidance: JSON schema, regular expressions, EBNF, tags.

Owns the state of one request in its grammar. Knows nothing about requests or batches;
sources, dialects and limits are in `llguidance_compiler`.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llguidance
import torch
from llguidance.gbnf_to_lark import is_lark_syntax

from sglang.srt.constrained.base_grammar import (
    Cancellation,
    EosInsideGrammarError,
    GrammarLimitError,
)
from sglang.srt.constrained.gbnf_lexemes import gbnf_to_lark
from sglang.srt.constrained.grammar_sandbox import GrammarSandbox
from sglang.srt.constrained.llguidance_compiler import (
    BITS,
    JSON_OPTIONS,
    StateLimits,
    check_eos,
    check_size,
    compile_matcher,
    make_tokenizer,
    matcher_error,
)
from sglang.srt.constrained.schema_closing import close_objects
from sglang.srt.constrained.schema_reading import read_schema
from sglang.srt.constrained.structural_tag import (
    parse_structural_tag,
    structural_tag_to_lark,
)

# For the memory estimate; measured (docs/LOG.md): compiled sources without outputs take
# 20 to 220 kB, states 0.1 to 2.7 kB each, and a state costs at least 30 units of work.
_BASE_BYTES = 16 * 1024
_BYTES_PER_CHAR = 16
_BYTES_PER_STATE = 550
_COST_PER_STATE = 30
_BYTES_PER_COST = 0.9

# Limits for state owned by one request; if these fail, the request fails.
_OWN_LIMITS = StateLimits(step_fuel=500_000)


class LLGuidanceGrammar:
    """One request's state; see `base_grammar.Grammar`.

    Args:
        n_chars: length of the source.
        max_states: limit of the lexer that the copies share.
        is_shared: whether others also use this matcher, so that it is copied before it
            changes. Copies are made late because a copy may take as much memory as its
            source, and most requests are waiting.
    """

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        eos_ids: frozenset[int],
        *,
        n_chars: int,
        max_states: int,
        n_accepted: int = 0,
        n_late_eos: int = 0,
        is_shared: bool = False,
    ) -> None:
        self._matcher = matcher
        self._is_shared = is_shared
        self._eos_ids = eos_ids
        self._n_chars = n_chars
        self._max_states = max_states
        self._n_accepted = n_accepted
        # The matcher does not count an EOS after it has stopped by itself.
        self._n_late_eos = n_late_eos

    @property
    def num_accepted(self) -> int:
        return self._n_accepted + self._n_late_eos

    def accept(self, token_id: int) -> None:
        matcher = self._own()
        if token_id in self._eos_ids and self._is_over():
            self._n_late_eos += 1
            return
        if matcher.try_consume_tokens([token_id]) != 1:
            is_allowed = self._mask_allows(token_id)
            self._check()
            if is_allowed and not self.is_usable():
                raise GrammarLimitError("the grammar stopped with another output")
            if is_allowed and token_id in self._eos_ids:
                raise EosInsideGrammarError(
                    f"the grammar asks for token {token_id} inside an output, which "
                    "ends with it; leave its text out of the grammar"
                )
            raise RuntimeError(
                f"the grammar does not allow token {token_id} after "
                f"{self._n_accepted} tokens"
            )
        self._n_accepted += 1

    def fill_mask(self, bitmask_row: torch.Tensor) -> None:
        self._own().unsafe_compute_mask_ptr(
            bitmask_row.data_ptr(), bitmask_row.numel() * 4
        )
        self._check()

    def prepare_mask(self) -> None:
        """Do the work of the next `fill_mask` in advance."""
        self._own().compute_bitmask()
        self._check()

    def is_terminated(self) -> bool:
        return bool(self._matcher.is_stopped())

    def rollback(self, n_tokens: int) -> None:
        if not 0 <= n_tokens <= self.num_accepted:
            raise ValueError(
                f"cannot roll back {n_tokens} tokens: the grammar has accepted "
                f"{self.num_accepted}"
            )
        late = min(n_tokens, self._n_late_eos)
        self._n_late_eos -= late
        if n_tokens > late:
            self._own().rollback(n_tokens - late)
            self._n_accepted -= n_tokens - late

    def fork(self) -> LLGuidanceGrammar:
        self._is_shared = True
        return LLGuidanceGrammar(
            self._matcher,
            self._eos_ids,
            n_chars=self._n_chars,
            max_states=self._max_states,
            n_accepted=self._n_accepted,
            n_late_eos=self._n_late_eos,
            is_shared=True,
        )

    def is_usable(self) -> bool:
        return self._step_ahead()[1]

    def shared_bytes(self) -> int:
        cost = self._lexer_cost()
        states = min(self._max_states, cost // _COST_PER_STATE)
        return (
            _BASE_BYTES
            + _BYTES_PER_CHAR * self._n_chars
            + _BYTES_PER_STATE * states
            + int(_BYTES_PER_COST * cost)
        )

    def _lexer_cost(self) -> int:
        """Return the work that the shared lexer has done so far.

        The library reports it only in error texts, as of the last step. So a copy makes
        one fixed step and is then rolled back too far.

        Raises:
            RuntimeError: this version of the library does not report it.
        """
        probe, _ = self._step_ahead()
        probe.rollback(1 << 30)
        found = re.search(r'"lexer_cost": (\d+)', probe.get_error())
        if found is None:
            raise RuntimeError(
                f"llguidance {llguidance.__version__} does not report the cost of its "
                "lexer, from which the memory of grammars is estimated; install the "
                "version of constraints.txt, or start with --grammar-backend none"
            )
        return int(found[1])

    def _step_ahead(self) -> tuple[llguidance.LLMatcher, bool]:
        """Return a copy that has taken the first allowed token, and whether it could.

        Only a step tells a matcher about the other copies: whether the lexer has failed
        in one of their steps, and how much work it has done. A copy's own error stays
        its own.
        """
        probe = self._matcher.deep_copy()
        mask: bytes = probe.compute_bitmask()
        for token in (8 * i + bit for i, byte in enumerate(mask) for bit in BITS[byte]):
            if token not in self._eos_ids:
                is_taken = probe.try_consume_tokens([token]) == 1
                probe.compute_bitmask()
                return probe, is_taken and not probe.is_error()
        return probe, not probe.is_error()

    def _own(self) -> llguidance.LLMatcher:
        """Return the matcher, unshared from now on."""
        if self._is_shared:
            self._matcher = self._matcher.deep_copy()
            self._is_shared = False
        return self._matcher

    def _is_over(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def _mask_allows(self, token_id: int) -> bool:
        mask: bytes = self._matcher.compute_bitmask()
        return bool(mask[token_id // 8] >> (token_id % 8) & 1)

    def _check(self) -> None:
        if self._matcher.is_error():
            error = matcher_error(self._matcher)
            raise GrammarLimitError(f"the grammar stopped: {error}")


class LLGuidanceBackend:
    """Compiles grammars for one tokenizer; see `base_grammar.GrammarBackend`.

    Each source is first compiled in a sandbox process, so it is compiled twice.

    Dialects
        json_schema: a JSON Schema object, read by `schema_reading`. A keyword that
            cannot be kept is an error; `oneOf` is followed as `anyOf`; objects have
            declared properties only (`close_objects`), unless
            `allow_additional_properties`.
        regex: the syntax of Rust's `regex`, without look-around; matched against the
            whole output. `\\d` is 0 to 9.
        ebnf: GBNF as llama.cpp documents it (start rule `root`; `gbnf_lexemes`), or
            llguidance's Lark dialect (start rule `start`).
        structural_tag: see `structural_tag`.
    """

    def __init__(
        self,
        tokenizer: str | Path,
        *,
        vocab_size: int,
        eos_ids: Sequence[int],
        compile_cpu_seconds: float = 5.0,
        allow_additional_properties: bool = False,
        limits: StateLimits | None = None,
    ) -> None:
        """Build the tokenizer; sandboxes start at the first compilation.

        Args:
            tokenizer: path of a `tokenizer.json`, or its contents.
            vocab_size: width of the model's logits; ids beyond the tokenizer's own are
                padding and never allowed.
            eos_ids: ids that end an output, at least one.
            compile_cpu_seconds: maximum CPU time to compile a source.
            allow_additional_properties: whether to follow the JSON Schema standard and
                leave objects open.
            limits: limits of the state that requests of one source share.

        Raises:
            ValueError: there is no EOS id, or the tokenizer does not fit `vocab_size`.
            RuntimeError: this version of llguidance cannot be used.
        """
        if not eos_ids:
            raise ValueError("constrained decoding needs at least one EOS token id")
        for eos_id in eos_ids:
            if not 0 <= eos_id < vocab_size:
                raise ValueError(
                    f"EOS token id {eos_id} is outside the vocabulary of "
                    f"{vocab_size} tokens"
                )
        self.vocab_size = vocab_size
        self._source = str(tokenizer)
        self._eos_ids = frozenset(eos_ids)
        self._cpu_seconds = compile_cpu_seconds
        self._allow_additional_properties = allow_additional_properties
        self._limits = limits or StateLimits()
        self._tokenizer = make_tokenizer(
            self._source, vocab_size=vocab_size, eos_ids=list(eos_ids)
        )
        self._lock = threading.Lock()
        self._specials: dict[str, int] | None = None
        self._idle_sandboxes: list[GrammarSandbox] = []
        self._closed = False
        self._compile("regex", "a", self._limits).shared_bytes()

    def compile(
        self, kind: str, source: str, *, cancellation: Cancellation | None = None
    ) -> LLGuidanceGrammar:
        prepared = self._prepare(kind, source)
        self._check_in_sandbox(kind, prepared, cancellation or Cancellation())
        return self._compile(kind, prepared, self._limits)

    def compile_checked(self, kind: str, source: str) -> LLGuidanceGrammar:
        return self._compile(kind, self._prepare(kind, source), self._limits)

    def resume(
        self, kind: str, source: str, tokens: Sequence[int]
    ) -> LLGuidanceGrammar:
        grammar = self._compile(kind, self._prepare(kind, source), _OWN_LIMITS)
        for token in tokens:
            grammar.accept(token)
        grammar.prepare_mask()
        return grammar

    def _prepare(self, kind: str, source: str) -> str:
        """Return the text that is compiled, here and in the sandbox.

        Raises:
            ValueError: `source` is too large, or cannot be served.
        """
        check_size(kind, source)
        check_eos(self._tokenizer, kind, source)
        try:
            if kind == "json_schema":
                return self._read_schema(source)
            if kind == "structural_tag":
                return self._read_structural_tag(source)
            if kind == "ebnf" and not is_lark_syntax(source):
                return gbnf_to_lark(source)
        except ValueError as error:
            raise ValueError(f"invalid {kind}: {error}") from error
        return source

    def _read_schema(self, source: str) -> str:
        try:
            schema = json.loads(source)
        except ValueError:
            return source  # the compiler says why
        self._prepare_schema(schema)
        return json.dumps(schema, separators=(",", ":"))

    def _prepare_schema(self, schema: Any) -> None:
        if not self._allow_additional_properties:
            close_objects(schema)
        read_schema(schema)

    def _read_structural_tag(self, source: str) -> str:
        def prepare(schema: Any, path: str) -> str:
            schema = {} if schema is True else schema
            try:
                self._prepare_schema(schema)
            except ValueError as error:
                raise ValueError(f"{path}.{error}") from error
            options = {"x-guidance": JSON_OPTIONS}
            whole = schema | options if isinstance(schema, dict) else schema
            return json.dumps(whole, separators=(",", ":"))

        tag = parse_structural_tag(source)
        for text in tag.texts():
            check_eos(self._tokenizer, "ebnf", text)
        special_ids = self._special_ids()
        return structural_tag_to_lark(
            tag,
            prepare=prepare,
            special_ids=special_ids,
            free_ids=sorted({*special_ids.values()} - self._eos_ids),
        )

    def _special_ids(self) -> dict[str, int]:
        """Special token ids by their text."""
        with self._lock:
            if self._specials is None:
                tokenizer = self._tokenizer
                self._specials = {
                    text: i
                    for i in range(tokenizer.vocab_size)
                    if tokenizer.is_special_token(i)
                    and (text := tokenizer.decode_str([i]))
                    # Padding of the vocabulary has only a number.
                    and text != f"<[{i}]>"
                }
        return self._specials

    def _compile(
        self, kind: str, source: str, limits: StateLimits
    ) -> LLGuidanceGrammar:
        matcher = compile_matcher(self._tokenizer, kind, source, limits=limits)
        # The first mask builds the lexer: do it here, not in the scheduler's step.
        # Copies keep it.
        grammar = LLGuidanceGrammar(
            matcher,
            self._eos_ids,
            n_chars=len(source),
            max_states=limits.max_states,
        )
        grammar.prepare_mask()
        return grammar

    def close(self) -> None:
        """End the sandbox processes: idle ones now, busy ones after their current
        source.
        """
        with self._lock:
            self._closed = True
            sandboxes, self._idle_sandboxes = self._idle_sandboxes, []
        for sandbox in sandboxes:
            sandbox.close()

    def _check_in_sandbox(
        self, kind: str, source: str, cancellation: Cancellation
    ) -> None:
        with self._lock:
            sandbox = self._idle_sandboxes.pop() if self._idle_sandboxes else None
        if sandbox is None:
            sandbox = GrammarSandbox(
                self._source,
                vocab_size=self.vocab_size,
                eos_ids=sorted(self._eos_ids),
                cpu_seconds=self._cpu_seconds,
            )
        try:
            sandbox.check(kind, source, cancellation)
        finally:
            with self._lock:
                keep = not self._closed
                if keep:
                    self._idle_sandboxes.append(sandbox)
            if not keep:
                sandbox.close()
