"""Checks whether the engine still makes tokens; concurrent callers share one check."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.managers.front.heartbeat import INTERVAL_SECONDS
from sglang.srt.managers.front.prompt_request import PromptRequest
from sglang.srt.managers.messages.errors import Unavailable
from sglang.srt.sampling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from sglang.srt.managers.front.tokenizer_manager import TokenizerManager


class Health(NamedTuple):
    """The state of a working engine.

    Fields:
        age: seconds since it last proved that it works.
        is_degraded: whether the KV canary healed something in the last minute, or keeps
            pages out of use.
    """

    age: float
    is_degraded: bool


class HealthProbe:
    """Asks the engine at most once per `INTERVAL_SECONDS`, however often it is called.

    While requests run, an answer of the scheduler between two steps is enough: a probe
    request would take a client's place in the queue. An idle engine must make a token.
    """

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager
        self._timeout = manager.server_args.health_timeout
        self._last_good = -INTERVAL_SECONDS
        self._is_degraded = False
        self._asking: asyncio.Task[None] | None = None

    async def check(self) -> Health:
        """Return the most recent health of the engine.

        Raises:
            ApiError: the engine does not work; Unavailable also if it did not answer in
                time.
        """
        if time.monotonic() - self._last_good > INTERVAL_SECONDS:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._ask())
            # A caller that leaves must not end the check for the others.
            await asyncio.shield(self._asking)
        return Health(time.monotonic() - self._last_good, self._is_degraded)

    async def _ask(self) -> None:
        if not self._manager.num_in_flight:
            await self._make_token()
        stats = await self._manager.scheduler_stats(self._timeout)
        self._is_degraded = stats.kv_canary_is_degraded
        self._last_good = time.monotonic()

    async def _make_token(self) -> None:
        probe = PromptRequest(
            prompt=[0],
            sampling_params=SamplingParams(max_new_tokens=1, temperature=0.0),
        )
        group = await self._manager.submit([probe])
        try:
            results = self._manager.results(group)
            await asyncio.wait_for(results, self._timeout)
        except asyncio.TimeoutError:
            raise Unavailable(f"no token within {self._timeout:g} seconds") from None
