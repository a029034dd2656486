"""Grammars through llguidance: JSON schema, regular expressions and EBNF.

Owns the state of one request inside its grammar. Knows nothing of requests or batches;
sources, dialects and limits are in `llguidance_compiler`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import llguidance
import torch

from sglang.srt.constrained.grammar_sandbox import GrammarSandbox
from sglang.srt.constrained.llguidance_compiler import (
    check_size,
    compile_matcher,
    make_tokenizer,
    matcher_error,
)
from sglang.srt.sampling.vocab_mask import mask_words


class LLGuidanceGrammar:
    """One request's state; see `base_grammar.Grammar`."""

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        eos_ids: frozenset[int],
        *,
        n_accepted: int = 0,
        n_late_eos: int = 0,
    ) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self._n_accepted = n_accepted
        # The matcher does not count an EOS that comes after it has stopped by itself.
        self._n_late_eos = n_late_eos

    def accept(self, token_id: int) -> None:
        matcher = self._matcher
        if token_id in self._eos_ids and matcher.is_stopped():
            self._n_late_eos += 1
            return
        if matcher.try_consume_tokens([token_id]) != 1:
            if matcher.is_error():
                raise RuntimeError(f"the grammar stopped: {matcher_error(matcher)}")
            raise RuntimeError(
                f"the grammar does not allow token {token_id} after "
                f"{self._n_accepted} tokens"
            )
        self._n_accepted += 1

    def fill_mask(self, bitmask_row: torch.Tensor) -> None:
        self._matcher.unsafe_compute_mask_ptr(
            bitmask_row.data_ptr(), bitmask_row.numel() * 4
        )
        if self._matcher.is_error():
            raise RuntimeError(f"the grammar stopped: {matcher_error(self._matcher)}")

    def is_terminated(self) -> bool:
        return bool(self._matcher.is_stopped())

    def rollback(self, n_tokens: int) -> None:
        if not 0 <= n_tokens <= self._n_accepted + self._n_late_eos:
            raise ValueError(
                f"cannot roll back {n_tokens} tokens: the grammar has accepted "
                f"{self._n_accepted + self._n_late_eos}"
            )
        late = min(n_tokens, self._n_late_eos)
        self._n_late_eos -= late
        if n_tokens > late:
            self._matcher.rollback(n_tokens - late)
            self._n_accepted -= n_tokens - late

    def fork(self) -> LLGuidanceGrammar:
        return LLGuidanceGrammar(
            self._matcher.deep_copy(),
            self._eos_ids,
            n_accepted=self._n_accepted,
            n_late_eos=self._n_late_eos,
        )


class LLGuidanceBackend:
    """Compiles grammars for one tokenizer; see `base_grammar.GrammarBackend`.

    Each source is compiled in a sandbox process first, which costs its time twice.

    Dialects
        json_schema: a JSON Schema object. An unimplemented keyword is an error; `oneOf`
            is followed as `anyOf`.
        regex: the syntax of Rust's `regex`, without look-around; matched against the
            whole output. `\\d` is 0 to 9.
        ebnf: GBNF as llama.cpp documents it (start rule `root`), or llguidance's Lark
            dialect (start rule `start`).
    """

    def __init__(
        self,
        tokenizer: str | Path,
        *,
        vocab_size: int,
        eos_ids: Sequence[int],
        compile_timeout_s: float = 5.0,
    ) -> None:
        """Build the tokenizer; sandboxes start at the first compilation.

        Args:
            tokenizer: path of a `tokenizer.json`, or its text.
            vocab_size: width of the model's logits; ids beyond the tokenizer's own are
                padding and never allowed.
            eos_ids: ids that end an output; at least one.
            compile_timeout_s: a source that takes longer is refused.

        Raises:
            ValueError: no EOS id, or the tokenizer does not fit `vocab_size`.
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
        self._timeout_s = compile_timeout_s
        self._tokenizer = make_tokenizer(
            self._source, vocab_size=vocab_size, eos_ids=list(eos_ids)
        )
        self._lock = threading.Lock()
        self._idle_sandboxes: list[GrammarSandbox] = []
        self._closed = False
        eos_row = torch.zeros(mask_words(vocab_size) * 4, dtype=torch.uint8)
        for eos_id in self._eos_ids:
            eos_row[eos_id // 8] |= 1 << (eos_id % 8)
        self._eos_row = eos_row.view(torch.int32)

    def compile(self, kind: str, source: str) -> LLGuidanceGrammar:
        check_size(kind, source)
        self._check_in_sandbox(kind, source)
        return self.compile_checked(kind, source)

    def compile_checked(self, kind: str, source: str) -> LLGuidanceGrammar:
        matcher = compile_matcher(self._tokenizer, kind, source)
        # The lexer is built by the first mask: here, not in the scheduler's step.
        # Copies keep it.
        matcher.compute_bitmask()
        return LLGuidanceGrammar(matcher, self._eos_ids)

    def fill_eos_mask(self, bitmask_row: torch.Tensor) -> None:
        bitmask_row.copy_(self._eos_row)

    def close(self) -> None:
        """End the sandbox processes: idle ones now, others after their source."""
        with self._lock:
            self._closed = True
            sandboxes, self._idle_sandboxes = self._idle_sandboxes, []
        for sandbox in sandboxes:
            sandbox.close()

    def _check_in_sandbox(self, kind: str, source: str) -> None:
        with self._lock:
            sandbox = self._idle_sandboxes.pop() if self._idle_sandboxes else None
        if sandbox is None:
            sandbox = GrammarSandbox(
                self._source,
                vocab_size=self.vocab_size,
                eos_ids=sorted(self._eos_ids),
                timeout_s=self._timeout_s,
            )
        try:
            sandbox.check(kind, source)
        finally:
            with self._lock:
                keep = not self._closed
                if keep:
                    self._idle_sandboxes.append(sandbox)
            if not keep:
                sandbox.close()
