"""What a worker tells of its canary: a method that vLLM's `collective_rpc` calls."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kv_canary.engines.vllm.attachment import get_attachment
from kv_canary.records import Counter

if TYPE_CHECKING:
    from kv_canary.engines.vllm.attachment import Attachment

METHOD = "kv_canary_report"
_WORKERS = "vllm.v1.worker.worker_base"


def add_method() -> Callable[[], None]:
    """Give the workers of this process the method; return a function to undo it."""
    owner = importlib.import_module(_WORKERS).WorkerBase
    setattr(owner, METHOD, report)
    return lambda: delattr(owner, METHOD)


def report(worker: Any) -> str:
    """Return a JSON document of this worker's canary. Waits for the device."""
    attachment = get_attachment(getattr(worker, "model_runner", None))
    rank = getattr(worker, "rank", 0)
    if attachment is None:
        return json.dumps({"rank": rank, "attached": False})
    return json.dumps({"rank": rank, "attached": True, **_of_canary(attachment)})


def _of_canary(attachment: Attachment) -> dict[str, Any]:
    canary, settings = attachment.canary, attachment.settings
    counters = canary.counters()
    requests, verified = canary.requests()
    units = canary.units
    more = {}
    if units is not None:
        more = {"loaded_blocks": units.compared, "damaged_blocks": units.damaged}
    healed = canary.healed()
    if healed is not None:
        more["healed_requests"] = healed
    return {
        "since": attachment.since,
        "mode": settings.mode_name,
        "real_data": settings.real_data,
        "sample": settings.sample,
        "groups": canary.names,
        "forwards": canary.forwards,
        "verified_slots": counters[Counter.VERIFIED_SLOTS],
        "recorded_slots": counters[Counter.TAIL_SLOTS],
        "requests": requests,
        "verified_requests": verified,
        **more,
        "violations": dict(canary.reporter.counts),
        "incidents": list(canary.reporter.incidents),
    }
