"""Checks what must hold after a healing, whatever went wrong in it.

The healer relies on the host's records, which may themselves be damaged. So its work is
compared with a snapshot taken before it began, and with the records on the device. If
anything differs, the engine stops before a token of the step is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kv_canary.records import SERIAL_MASK, TOKEN_MASK, Record
from sglang.srt.kv_canary.lineages import KnownTokens, known_tokens
from sglang.srt.managers.messages.output_digest import extend_digest, first_digest

if TYPE_CHECKING:
    from sglang.srt.managers.batch.req import Req
    from sglang.srt.managers.batch.schedule_batch import LaunchRecord, StepStart
    from sglang.srt.managers.scheduler.batch_selector import BatchSelector
    from sglang.srt.managers.scheduler.request_intake import RequestIntake
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.page_ledger import IntArray


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
        self._launched = launched
        self._rows = {launched.reqs[row].serial: row for row in before.live}
        self._known: dict[int, KnownTokens] = {}
        self._note({req: len(req.tokens) for req in reqs})
        self._note(dict(zip(launched.reqs, before.lengths, strict=True)))
        # Of the withheld requests: the positions that the step wrote, by serial, and
        # the slots that it may have written.
        self._written: dict[int, range] = {}
        self._slots: list[IntArray] = []

    def _note(self, lengths: Mapping[Req, int]) -> None:
        known = known_tokens(list(lengths), list(lengths.values()))
        self._known |= zip((req.serial for req in lengths), known, strict=True)

    def keep_tokens(self, reqs: Iterable[Req]) -> None:
        """Let requests keep their new tokens: the target decides the output, and only
        their drafts are in doubt.
        """
        self._note({req: len(req.tokens) for req in reqs})

    def note_slots(self, withheld: Iterable[Req], rows: ReqToTokenPool) -> None:
        """Note where the step wrote for withheld requests, before they lose their
        memory.
        """
        launched = self._launched
        for req in withheld:
            row = self._rows.get(req.serial)
            if row is None or not req.req_pool_idx:
                continue
            start, end = int(launched.starts[row]), int(launched.ends[row])
            # How many drafts a step accepts is only known with its result.
            end = req.allocated_len if launched.is_speculative else end
            self._written[req.serial] = range(start, max(start, end))
            slots = rows.row_slots(req.req_pool_idx, start, max(start, end))
            self._slots.append(slots.numpy())

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
            HealingError: a request has gained, lost or changed tokens, lacks tokens
                that its client has, or is not queued.
        """
        self._check_tokens([*again, *ended])
        waiting = {id(req) for req in batches.waiting}
        for req in again:
            # Without its grammar it first waits for another one.
            is_queued = id(req) in waiting or req.grammar_failure is not None
            if not is_queued or not intake.is_unanswered(req):
                raise HealingError(f"request {req.rid} is not queued again")
            if req.last_node is not None or req.committed_len:
                raise HealingError(f"request {req.rid} still holds memory")
        for req in ended:
            if not req.is_finished or intake.is_unanswered(req):
                raise HealingError(f"request {req.rid} has not ended")

    def check_cache(
        self, cache: BasePrefixCache, read_heads: Callable[[IntArray], IntArray]
    ) -> None:
        """Check that nothing that the step wrote for withheld requests is cached.

        Args:
            read_heads: returns the head records of slots, int64 [n, 4].

        Raises:
            HealingError: a cached slot was written by the step of a withheld request,
                in its own row or over another owner's token.
        """
        runs = list(cache.iter_cached_runs())
        if not self._written or not runs:
            return
        slots = np.concatenate([run.slots for run in runs])
        if np.isin(slots, np.concatenate(self._slots)).any():
            raise HealingError("what a damaged step wrote is still cached")
        heads = read_heads(slots)
        word0, serial = heads[:, Record.WORD0], heads[:, Record.WORD3] & SERIAL_MASK
        position, token = word0 >> 32, word0 & TOKEN_MASK
        # An older copy of the same token is right.
        is_other = position != np.concatenate([run.positions() for run in runs])
        is_other |= token != np.concatenate([run.tokens for run in runs])
        for writer, written in self._written.items():
            is_own = (serial == writer & SERIAL_MASK) & (position >= written.start)
            if (is_other & is_own & (position < written.stop)).any():
                raise HealingError(
                    "a cached slot that a damaged step overwrote is kept"
                )

    def noted(self, reqs: Iterable[Req]) -> dict[Req, KnownTokens]:
        """Return what requests had before the step, as far as that was noted."""
        known = ((req, self._known.get(req.serial)) for req in reqs)
        return {req: then for req, then in known if then is not None}

    def check_withheld(self, reqs: Iterable[Req]) -> None:
        """Check that requests have gained nothing from the step.

        Raises:
            HealingError: a request has.
        """
        self._check_tokens(reqs)

    def _check_tokens(self, reqs: Iterable[Req]) -> None:
        reqs = list(reqs)
        for req, then in self.noted(reqs).items():
            if len(req.tokens) != then.length:
                raise HealingError(
                    f"request {req.rid} has {len(req.tokens)} tokens; before the "
                    f"damaged step it had {then.length}"
                )
        found = known_tokens(reqs, [len(req.tokens) for req in reqs])
        for req, now in zip(reqs, found, strict=True):
            if self._known.get(req.serial, now) != now:
                raise HealingError(f"request {req.rid} has other tokens than before")
            sent = req.tokens[req.prompt_len : req.prompt_len + req.sent.num_digested]
            if extend_digest(first_digest(req.rid), sent) != req.sent.digest:
                raise HealingError(
                    f"request {req.rid} lacks tokens that its client has"
                )
