"""Scale of the tests, and the switch that runs them under the KV canary."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from sglang.srt.environ import envs

Variant = TypeVar("Variant")

POOL_TOKENS = 16384
"""Default KV slots of a test's engine: the CPU's default is up to four times as many,
all of which are written at start.
"""


def is_full() -> bool:
    return envs.SGLANG_TEST_FULL.get()


def count(*, ci: int, full: int) -> int:
    """Return `full` under `make test-full`, else `ci`.

    Scale changes counts, never assertions.
    """
    return full if is_full() else ci


def sampled(
    variants: Iterable[Variant], *, key: Callable[[Variant], object], ci: int
) -> list[Variant]:
    """Return all variants under `make test-full`, else at most `ci` of each `key`.

    The sample contains the first, the last and others in between.
    """
    groups: dict[object, list[Variant]] = {}
    for variant in variants:
        groups.setdefault(key(variant), []).append(variant)
    if is_full():
        return [variant for group in groups.values() for variant in group]
    chosen = []
    for group in groups.values():
        last, steps = len(group) - 1, max(ci - 1, 1)
        places = sorted({round(i * last / steps) for i in range(ci)})
        chosen += [group[place] for place in places]
    return chosen


def with_canary(server_args: dict[str, Any]) -> dict[str, Any]:
    """Return `server_args`, with the canary on if the switch is, unless they set it."""
    if not envs.SGLANG_TEST_KV_CANARY.get() or "kv_canary" in server_args:
        return server_args
    has_radix = not server_args.get("disable_radix_cache", False)
    return {
        **server_args,
        "kv_canary": "raise",
        "kv_canary_real_data": "all",
        "kv_canary_sweep_interval": 8 if has_radix else 0,
    }
