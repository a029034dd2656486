"""Requests that wait for their grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.constrained.grammar_manager import GrammarManager
from sglang.srt.constrained.llguidance_backend import LLGuidanceBackend
from sglang.srt.managers.io_struct import GrammarDecision

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar import Grammar
    from sglang.srt.managers.req import Req
    from sglang.srt.managers.scheduler_components.request_factory import RequestLimits
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.hf_tokenizer import Tokenizer

GRAMMAR_THREADS = 2


def create_grammar_manager(
    server_args: ServerArgs,
    *,
    tokenizer: Tokenizer | None,
    limits: RequestLimits,
    decides: bool,
) -> GrammarManager | None:
    """Compiles in threads where this rank `decides`; None where requests may not have
    grammars."""
    if server_args.grammar_backend == "none" or tokenizer is None:
        return None
    if not limits.eos_token_ids:
        return None
    backend = LLGuidanceBackend(
        tokenizer.tokenizer_json,
        vocab_size=limits.vocab_size,
        eos_ids=limits.eos_token_ids,
    )
    return GrammarManager(backend, n_threads=GRAMMAR_THREADS if decides else 0)


class GrammarQueue:
    """Compiles grammars beside the scheduler loop; a request is queued once its grammar
    is ready.

    Args:
        decides: whether this rank decides when a grammar is ready (`decide`). Another
            rank applies its decisions, and compiles only the grammars that it could.
    """

    def __init__(self, manager: GrammarManager, *, decides: bool) -> None:
        self._manager = manager
        self._decides = decides
        self._waiting: dict[str, Req] = {}
        # Decided and not applied yet.
        self._compiled: dict[str, Grammar] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, req: Req, kind: str, source: str) -> None:
        self._waiting[req.rid] = req
        self._manager.submit(req.rid, kind, source)

    def decide(self) -> list[GrammarDecision]:
        """Requests that need not wait longer; empty where another rank decides."""
        if not self._decides or not self._waiting:
            return []
        decisions = []
        for rid, outcome in self._manager.poll():
            if isinstance(outcome, ValueError):
                decisions.append(GrammarDecision(rid=rid, error=str(outcome)))
            else:
                self._compiled[rid] = outcome
                decisions.append(GrammarDecision(rid=rid))
        return decisions

    def apply(self, decisions: list[GrammarDecision]) -> tuple[list[Req], list[Req]]:
        """Carry out the decisions of `decide`, from here or from another rank.

        Returns:
            Requests whose grammar is ready, and requests that ended with an error.

        Raises:
            ValueError: this rank cannot compile a grammar that another could.
        """
        ready: list[Req] = []
        failed: list[Req] = []
        for decision in decisions:
            req = self._waiting.pop(decision.rid)
            if decision.error is None:
                req.grammar = self._take(decision.rid)
                ready.append(req)
            else:
                self._manager.cancel(decision.rid)
                req.abort(decision.error, status_code=400)
                failed.append(req)
        return ready, failed

    def _take(self, rid: str) -> Grammar:
        if self._decides:
            return self._compiled.pop(rid)
        return self._manager.compile_now(rid)

    def cancel(self, rid: str) -> Req | None:
        """Stop waiting for the grammar of `rid`; the request, if it was here."""
        req = self._waiting.pop(rid, None)
        if req is not None:
            self._manager.cancel(rid)
        return req

    def shutdown(self) -> None:
        self._manager.shutdown()
