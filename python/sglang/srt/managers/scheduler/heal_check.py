"""Checks what must hold after a healing, whatever went wrong in it.

The healer relies on the host's records, which may themselves be damaged. So its work is
compared with a snapshot taken before it began. If anything differs, the engine stops
before a token of the step is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from sglang.srt.managers.messages.output_digest import extend_digest, first_digest

if TYPE_CHECKING:
    from sglang.srt.managers.batch.req import Req
    from sglang.srt.managers.batch.schedule_batch import LaunchRecord, StepStart
    from sglang.srt.managers.scheduler.batch_selector import BatchSelector
    from sglang.srt.managers.scheduler.request_intake import RequestIntake


class HealingError(RuntimeError):
    """A healing did not do what it must."""


class HealCheck:
    """A snapshot of a step's requests and the queue before a healing.

    Args:
        before: the requests of the step before its result is processed.
        reqs: all unfinished requests.
    """

    def __init__(
        self, launched: LaunchRecord, before: StepStart, reqs: Iterable[Req]
    ) -> None:
        self._lengths = {req.serial: len(req.tokens) for req in reqs}
        rows = zip(launched.reqs, before.lengths, strict=True)
        self._lengths |= {req.serial: length for req, length in rows}

    def keep_tokens(self, reqs: Iterable[Req]) -> None:
        """Let requests keep their new tokens: the target decides the output, and only
        their drafts are in doubt.
        """
        self._lengths |= {req.serial: len(req.tokens) for req in reqs}

    def check(
        self,
        again: Sequence[Req],
        ended: Sequence[Req],
        *,
        batches: BatchSelector,
        intake: RequestIntake,
    ) -> None:
        """Check requests that should have been recomputed or ended.

        Raises:
            HealingError: a request has gained or lost tokens, lacks tokens that its
                client has, or is not queued.
        """
        waiting = {id(req) for req in batches.waiting}
        for req in again:
            self._check_tokens(req)
            # Without its grammar it first waits for another one.
            is_queued = id(req) in waiting or req.grammar_failure is not None
            if not is_queued or not intake.is_unanswered(req):
                raise HealingError(f"request {req.rid} is not queued again")
            if req.last_node is not None or req.committed_len:
                raise HealingError(f"request {req.rid} still holds memory")
        for req in ended:
            self._check_tokens(req)
            if not req.is_finished or intake.is_unanswered(req):
                raise HealingError(f"request {req.rid} has not ended")

    def check_withheld(self, reqs: Iterable[Req]) -> None:
        """Check that requests have gained nothing from the step.

        Raises:
            HealingError: a request has.
        """
        for req in reqs:
            self._check_tokens(req)

    def _check_tokens(self, req: Req) -> None:
        length = self._lengths.get(req.serial)
        if length is not None and len(req.tokens) != length:
            raise HealingError(
                f"request {req.rid} has {len(req.tokens)} tokens; before the damaged "
                f"step it had {length}"
            )
        sent = req.tokens[req.prompt_len : req.prompt_len + req.sent.num_digested]
        if extend_digest(first_digest(req.rid), sent) != req.sent.digest:
            raise HealingError(f"request {req.rid} lacks tokens that its client has")
