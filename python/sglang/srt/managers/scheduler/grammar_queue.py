"""Requests that wait for their grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.constrained.base_grammar import CompilerUnavailableError
from sglang.srt.constrained.grammar_library import GrammarLibrary
from sglang.srt.constrained.grammar_manager import GrammarManager
from sglang.srt.constrained.llguidance_backend import LLGuidanceBackend
from sglang.srt.managers.messages.io_struct import GrammarDecision

if TYPE_CHECKING:
    from collections.abc import Collection

    from sglang.srt.constrained.base_grammar import Grammar, GrammarBackend
    from sglang.srt.managers.batch.req import Req
    from sglang.srt.managers.scheduler.request_factory import RequestLimits
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.hf_tokenizer import Tokenizer

_MIB = 1 << 20
# A grammar is renewed before it reaches its limit of 100,000 lexer states, or an eighth
# of the memory of all grammars.
_RENEW_BYTES = 48 * _MIB
_RENEW_SHARE = 8


def create_grammar_queue(
    server_args: ServerArgs,
    *,
    tokenizer: Tokenizer | None,
    limits: RequestLimits,
    decides: bool,
) -> GrammarQueue | None:
    """Create the queue, or return None if requests may not have grammars."""
    if server_args.grammar_backend == "none" or tokenizer is None:
        return None
    if not limits.eos_token_ids:
        return None
    backend = LLGuidanceBackend(
        tokenizer.tokenizer_json,
        vocab_size=limits.vocab_size,
        eos_ids=limits.eos_token_ids,
        allow_additional_properties=(
            server_args.constrained_json_allow_additional_properties
        ),
    )
    max_bytes = server_args.grammar_cache_mb * _MIB
    library = GrammarLibrary(
        max_bytes=max_bytes, renew_bytes=min(_RENEW_BYTES, max_bytes // _RENEW_SHARE)
    )
    return GrammarQueue(
        backend,
        library,
        manager=GrammarManager(backend, library) if decides else None,
    )


class GrammarQueue:
    """Compiles grammars outside the scheduler loop; a request is queued once its
    grammar is ready.

    Args:
        library: only `apply` changes it, so it is the same on every rank.
        manager: the manager of the rank that decides when a grammar is ready
            (`decide`), or None on the other ranks, which apply its decisions and
            compile only what it could compile.
    """

    def __init__(
        self,
        backend: GrammarBackend,
        library: GrammarLibrary,
        *,
        manager: GrammarManager | None,
    ) -> None:
        self._backend = backend
        self._library = library
        self._manager = manager
        self._waiting: dict[str, Req] = {}
        # Decided but not yet applied.
        self._compiled: dict[str, Grammar] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> Collection[Req]:
        """The requests whose grammars are being compiled."""
        return self._waiting.values()

    def submit(self, req: Req) -> None:
        """Compile the grammar of a new request, or of one that lost its grammar."""
        key = req.params.grammar_key
        assert key is not None
        self._waiting[req.rid] = req
        if req.grammar_failure is not None:
            self._library.drop_dead(key)
        if self._manager is None:
            return
        if req.grammar_failure is None:
            self._manager.submit(req.rid, *key, client=req.client)
        else:
            self._manager.resume(req.rid, *key, req.output_tokens(), client=req.client)

    def decide(self) -> list[GrammarDecision]:
        """Return requests that need not wait longer; empty if another rank decides."""
        if self._manager is None or not self._waiting:
            return []
        decisions = []
        for rid, error, fresh in self._manager.poll():
            if error is not None:
                code = _status_code(error)
                decision = GrammarDecision(rid=rid, error=str(error), status_code=code)
            else:
                decision = GrammarDecision(rid=rid, is_fresh=fresh is not None)
            if fresh is not None:
                self._compiled[rid] = fresh
            decisions.append(decision)
        return decisions

    def apply(self, decisions: list[GrammarDecision]) -> tuple[list[Req], list[Req]]:
        """Carry out decisions of `decide`, made here or on another rank.

        Returns:
            Requests whose grammar is ready, and requests that ended with an error.

        Raises:
            ValueError: this rank cannot compile a grammar that another could.
            GrammarLimitError: this rank cannot follow a grammar as far as another
                could.
        """
        ready: list[Req] = []
        failed: list[Req] = []
        for decision in decisions:
            req = self._waiting.pop(decision.rid)
            if decision.error is None:
                req.take_grammar(self._make_grammar(req, is_fresh=decision.is_fresh))
                ready.append(req)
            else:
                req.abort(decision.error, status_code=decision.status_code)
                failed.append(req)
        self._library.trim()
        return ready, failed

    def _make_grammar(self, req: Req, *, is_fresh: bool) -> Grammar:
        key = req.params.grammar_key
        assert key is not None
        compiled = self._compiled.pop(req.rid, None)
        if req.grammar_failure is not None:
            return compiled or self._backend.resume(*key, req.output_tokens())
        if is_fresh:
            template = compiled or self._backend.compile_checked(*key)
            self._library.install(key, template)
        return self._library.fork(key)

    def cancel(self, rid: str) -> Req | None:
        """Stop waiting for the grammar of `rid`; returns the request if it was here."""
        req = self._waiting.pop(rid, None)
        if req is not None and self._manager is not None:
            self._manager.cancel(rid)
        return req

    def shutdown(self) -> None:
        if self._manager is None:
            self._backend.close()
        else:
            self._manager.shutdown()


def _status_code(error: Exception) -> int:
    """HTTP status for a request whose grammar failed."""
    if isinstance(error, ValueError):
        return 400
    return 503 if isinstance(error, CompilerUnavailableError) else 500
