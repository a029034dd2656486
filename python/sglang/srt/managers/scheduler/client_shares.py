"""Shares the engine between clients: turns at admission, and places in the batch.

Everything follows from the current requests, so all ranks and a replay decide alike.
Has no effect on a client that is alone.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from sglang.srt.managers.scheduler.schedule_policy import CLIP_MAX_NEW_TOKENS

if TYPE_CHECKING:
    from sglang.srt.managers.batch.req import Req


# Called at every step, on a queue that may be long.
_CLIENT = attrgetter("client")


def in_turns(waiting: Sequence[Req], running: Iterable[Req]) -> Iterator[Req]:
    """Yield the waiting requests in the order in which they may be admitted.

    The next client is the one whose running and already yielded requests have the
    fewest tokens; a client's own requests keep their order. Healed requests have
    already run and come before all others.
    """
    if len(set(map(_CLIENT, waiting))) < 2:
        yield from waiting
        return
    by_client: dict[str, list[Req]] = {}
    for req in waiting:
        by_client.setdefault(req.client, []).append(req)
    healed = [req for req in waiting if req.heals.count]
    yield from healed
    held: Counter[str] = Counter()
    for req in (*running, *healed):
        held[req.client] += _weight(req)
    rests = [
        iter([r for r in reqs if not r.heals.count]) for reqs in by_client.values()
    ]
    # Ties go to the client whose first request came first.
    heap = [(held[client], i) for i, client in enumerate(by_client)]
    heapq.heapify(heap)
    while heap:
        tokens, i = heapq.heappop(heap)
        following = next(rests[i], None)
        if following is not None:
            yield following
            heapq.heappush(heap, (tokens + _weight(following), i))


def who_yields(waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
    """Return the requests that give up their places in a full batch to other clients.

    Each belongs to the client with the most places, and yields only if that client then
    still has as many as the other, so nothing goes back and forth. Requests with the
    fewest output tokens, which lose least, come first.
    """
    if len({*map(_CLIENT, running), *map(_CLIENT, waiting)}) < 2:
        return []
    by_client: dict[str, list[Req]] = {}
    for req in sorted(running, key=lambda req: (-req.output_len, req.prompt_len)):
        by_client.setdefault(req.client, []).append(req)
    places = Counter({client: len(reqs) for client, reqs in by_client.items()})
    found: list[Req] = []
    for req in in_turns(waiting, running):
        client, most = max(places.items(), key=lambda item: item[1], default=("", 0))
        if most <= places[req.client] + 1:
            break
        found.append(by_client[client].pop())
        places[client] -= 1
        places[req.client] += 1
    return found


def is_decode_due(prefilled: Sequence[Req], running: Sequence[Req]) -> bool:
    """Whether a client has running requests but had none in the last prefill.

    Without a step between two prefills its outputs would stall for as long as others
    have prompts.
    """
    clients = set(map(_CLIENT, prefilled))
    return any(req.client not in clients for req in running)


def _weight(req: Req) -> int:
    """Number of tokens that it has and is expected to get."""
    return len(req.tokens) + min(req.remaining_new_tokens, CLIP_MAX_NEW_TOKENS)
