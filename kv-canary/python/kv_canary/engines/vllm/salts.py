"""The cache salts of vLLM's requests.

vLLM's scheduler keeps blocks of different salts apart and does not tell its workers of
salts. So the message about a new request gets one more attribute on its way.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from kv_canary.engines.namespaces import namespace_salt

logger = logging.getLogger(__name__)

_ATTRIBUTE = "kv_canary_cache_salt"


def with_cache_salt(
    method: Callable[..., Any], cls: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Wrap `NewRequestData.from_request`: pass on the request's salt."""
    made = method(cls, request, *args, **kwargs)
    setattr(made, _ATTRIBUTE, getattr(request, "cache_salt", None))
    return made


def request_salt(request: Any) -> int:
    """Return the salt of a request that begins, from the scheduler's message."""
    if not hasattr(request, _ATTRIBUTE) and not _is_of_warm_up(request.req_id):
        _warn_once()
    return _salt(request, getattr(request, _ATTRIBUTE, None))


def scheduler_salt(request: Any) -> int:
    """Return the salt of a request of the scheduler."""
    return _salt(request, getattr(request, "cache_salt", None))


def _salt(request: Any, tenant: str | None) -> int:
    lora = request.lora_request
    return namespace_salt(
        adapter=None if lora is None else str(lora.lora_name), tenant=tenant
    )


def _is_of_warm_up(rid: str) -> bool:
    """Whether the worker made a request itself: the second runner warms up with steps
    of its own, which no scheduler has seen."""
    return rid.startswith("_") and "warmup" in rid


@functools.cache
def _warn_once() -> None:
    logger.warning(
        "kv_canary: the scheduler's process does not load this plugin, so a block that "
        "is served across cache salts is not seen: set KV_CANARY there too"
    )
