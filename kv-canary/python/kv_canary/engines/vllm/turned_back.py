"""Requests whose newest tokens vLLM discards, because blocks were not loaded intact
(vllm-project/vllm#49250).

The scheduler then lowers the request's number of computed tokens. The second runner
keeps this number on the device and, up to 0.33, does not read it again for a request
that goes on: it would continue at the wrong position. It gets such a request once more
as a new one, which is how it gets those that come back from a preemption.

The scheduler, up to 0.33, also counts the tokens of steps that had begun by then, under
asynchronous scheduling: the first one would be taken for the request's next. Their
outputs are discarded here, as vLLM discards those of a preempted request. The first
runner would also put such a token at the end of the prompt that is computed again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
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


def forget_sampled(runner: Any, requests: Sequence[LedgerRequest]) -> None:
    """Let the first runner take no input of these requests from what the last step
    sampled for them."""
    for request in requests:
        places = runner.input_batch.prev_req_id_to_index
        if places:
            places.pop(request.rid, None)


def discarding_steps(
    method: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any
) -> Any:
    """Wrap `Scheduler._handle_invalid_blocks`, which returns running requests that it
    turned back, or that will end with an error."""
    failed = method(scheduler, *args, **kwargs)
    if scheduler.recompute_kv_load_failures:
        for rid in failed:
            request = scheduler.requests[rid]
            if not hasattr(request, "drop_stale_output"):
                continue  # before vLLM 0.28, which could not discard them
            request.drop_stale_output = True
            request.num_stale_output_tokens = request.num_in_flight_tokens
            request.num_output_placeholders = 0
    return failed
