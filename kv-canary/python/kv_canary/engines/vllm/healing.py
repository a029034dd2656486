"""Mode `heal`: vLLM discards what was computed from damaged KV, and computes it again.

A worker names the requests that met damage along with the output of that step. Before
the scheduler processes the output, it does what it does when weights are replaced: it
preempts all running requests, discards the output of every step that has begun, and
empties the prefix cache. Nothing less is safe: other requests may have read the damaged
block before anything was named, and their own blocks may be in the cache by now.
"""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

logger = logging.getLogger(__name__)

MOST_HEALS = 3
"""A request that meets damage once more ends with an error."""
MOST_STEPS = 4
"""Steps that may begin until the scheduler has taken a request back."""
_DAMAGED = "kv_canary_damaged"
_HEALS = "kv_canary_heals"


def with_damage(output: Any, rids: Sequence[str]) -> Any:
    """Return a `ModelRunnerOutput` that names requests which met damage."""
    # vLLM shares one empty output among all steps that have none.
    output = copy.copy(output)
    setattr(output, _DAMAGED, tuple(rids))
    return output


def taking_back(
    method: Callable[..., Any],
    scheduler: Any,
    scheduler_output: Any,
    model_runner_output: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Wrap `Scheduler.update_from_output`."""
    damaged = getattr(model_runner_output, _DAMAGED, None)
    ended: list[Any] = []
    if damaged is not None and not _is_discarded(scheduler, scheduler_output):
        ended = _take_back(scheduler, damaged)
    outputs = method(scheduler, scheduler_output, model_runner_output, *args, **kwargs)
    _say_that_they_ended(ended, outputs)
    return outputs


def _is_discarded(scheduler: Any, scheduler_output: Any) -> bool:
    """Whether a step began before its requests were taken back the last time."""
    requests = map(scheduler.requests.get, scheduler_output.num_scheduled_tokens)
    return any(
        request is not None
        and request.num_stale_output_tokens > 0
        and request.drop_stale_output
        for request in requests
    )


def _take_back(scheduler: Any, damaged: Iterable[str]) -> list[Any]:
    """Let all running requests begin again; return those that ended instead."""
    running = len(scheduler.running)
    try:
        scheduler.reset_prefix_cache(reset_running_requests=True)
    except RuntimeError:
        # All were preempted, but others that wait for something hold blocks. Those are
        # verified when they are read; nobody else may find them.
        manager = scheduler.kv_cache_manager
        manager.evict_blocks(set(range(1, len(manager.block_pool.blocks))))
    hopeless = []
    for rid in damaged:
        request = scheduler.requests.get(rid)
        if request is not None:
            heals = getattr(request, _HEALS, 0) + 1
            setattr(request, _HEALS, heals)
            if heals > MOST_HEALS:
                hopeless.append(rid)
    logger.warning(
        "kv_canary: healing: %d running requests are computed again, and the prefix "
        "cache is emptied%s",
        running - len(hopeless),
        "".join(f"; {rid!r} ends with an error" for rid in hopeless),
    )
    if not hopeless:
        return []
    status = importlib.import_module("vllm.v1.request").RequestStatus
    ended = scheduler.finish_requests(hopeless, status.FINISHED_ERROR)
    return list(ended)


def _say_that_they_ended(requests: Sequence[Any], outputs: dict[int, Any]) -> None:
    """Add the ends of requests to what the scheduler answers, by client."""
    if not requests:
        return
    engine = importlib.import_module("vllm.v1.engine")
    for request in requests:
        end = engine.EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=request.get_finished_reason(),
        )
        of_client = outputs.setdefault(
            request.client_index, engine.EngineCoreOutputs(outputs=[])
        )
        of_client.outputs.append(end)


class AskedBack:
    """Requests that a worker asked the scheduler to take back."""

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}

    def ask(self, rids: Iterable[str], step: int) -> None:
        """Note requests that are named with the output of a step."""
        self._steps.update(dict.fromkeys(rids, step))

    def hear(self, scheduler_output: Any, step: int) -> None:
        """Note what the scheduler says of the step that begins.

        Raises:
            RuntimeError: a request goes on with the KV in which damage was found.
        """
        gone = scheduler_output.finished_req_ids
        for rid in (*gone, *(scheduler_output.preempted_req_ids or ())):
            self._steps.pop(rid, None)
        for rid in scheduler_output.num_scheduled_tokens if self._steps else ():
            if step - self._steps.get(rid, step) > MOST_STEPS:
                raise RuntimeError(
                    f"kv_canary: the scheduler did not take back request {rid!r}, "
                    "whose KV is damaged: its process does not load this plugin, or "
                    "its class has an `update_from_output` of its own. Use raise"
                )
