"""Requests whose newest tokens vLLM discards, because blocks were not loaded intact.

The scheduler then lowers the request's number of computed tokens. The second runner
keeps this number on the device and, up to 0.33, does not read it again for a request
that goes on: it would continue at the wrong position. It gets such a request once more
as a new one, which is how it gets those that come back from a preemption.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kv_canary.engines.block_ledger import LedgerRequest


class NewRequests:
    """The scheduler's messages about the requests that run."""

    def __init__(self) -> None:
        self._messages: dict[str, Any] = {}

    def note(self, output: Any) -> None:
        """Keep the messages of a `SchedulerOutput`."""
        for rid in (*output.finished_req_ids, *(output.preempted_req_ids or ())):
            self._messages.pop(rid, None)
        for message in output.scheduled_new_reqs:
            self._messages[message.req_id] = message

    def again(self, output: Any, requests: Sequence[LedgerRequest]) -> Any:
        """Return a `SchedulerOutput` in which `requests` are new, too."""
        if not requests:
            return output
        cached = output.scheduled_cached_reqs
        more = dict(zip(cached.req_ids, cached.new_block_ids, strict=True))
        new = [
            dataclasses.replace(
                self._messages[request.rid],
                # The runner adds the step's own blocks itself.
                block_ids=tuple(
                    blocks[: len(blocks) - len(added)]
                    for blocks, added in zip(
                        request.blocks,
                        more[request.rid] or [()] * len(request.blocks),
                        strict=True,
                    )
                ),
                num_computed_tokens=request.computed,
            )
            for request in requests
        ]
        every = [*output.scheduled_new_reqs, *new]
        return dataclasses.replace(output, scheduled_new_reqs=every)
