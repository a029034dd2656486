"""Frees memory for running requests by taking others out of the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.common import release_req

if TYPE_CHECKING:
    from sglang.srt.managers.batch.req import Req
    from sglang.srt.managers.batch.schedule_batch import ScheduleBatch


def retract_for_decode(batch: ScheduleBatch, *, chunked: Req | None) -> list[Req]:
    """Take requests out of `batch` until it can decode, and prepare the decode.

    A partly prefilled prompt goes first (it has no output yet), then the requests with
    the fewest output tokens. The memory of a retracted request goes to the prefix cache
    and is evicted only as needed.

    Returns:
        The retracted requests, with their memory released.

    Raises:
        RuntimeError: a single request does not fit; admission should have rejected it.
    """
    cache = batch.env.cache
    retracted: list[Req] = []
    if chunked is not None:
        retracted.append(chunked)
        release_req(chunked, cache=cache)
        chunked.req_pool_idx = 0
        if batch.prepare_for_decode():
            return retracted
    victims = sorted(
        batch.reqs, key=lambda req: (req.output_len, -req.prompt_len), reverse=True
    )
    while len(batch) > 1:
        req = victims.pop()
        retracted.append(req)
        release_req(req, cache=cache)
        req.req_pool_idx = 0
        batch.filter([i for i, other in enumerate(batch.reqs) if other is not req])
        if batch.prepare_for_decode():
            return retracted
    raise RuntimeError(
        f"one request of {len(batch.reqs[0].tokens)} tokens does not fit into "
        f"{cache.allocator.size} KV slots"
    )
