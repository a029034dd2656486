"""Limits the requests in flight and their prompt tokens."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from sglang.srt.managers.messages.errors import BadRequest, Unavailable

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


# Share of each limit that is added to it for clients that hold no more than that share.
SPARE_SHARE = 16


def spare_room(limit: int) -> int:
    """Return how much a client that holds little may use beyond a limit that others
    have reached, so that no client keeps all others out.
    """
    return max(limit // SPARE_SHARE, 1)


class Occupancy:
    """Counts requests in flight, and rejects those beyond the flags' limits: with 400
    if they can never fit, with 503 if they do not fit now.
    """

    def __init__(self, server_args: ServerArgs) -> None:
        self._max_queued_requests = server_args.max_queued_requests
        self._max_requests = server_args.max_queued_requests
        self._max_tokens = server_args.max_queued_tokens
        self.clear()

    def set_running(self, max_running_requests: int) -> None:
        """Also allow the requests that the engine runs at once."""
        self._max_requests = self._max_queued_requests + max_running_requests

    def add(self, client: str, prompt_tokens: int) -> None:
        """Add a request."""
        self._num_requests += 1
        self._num_tokens += prompt_tokens
        self._requests_of[client] += 1
        self._tokens_of[client] += prompt_tokens

    def remove(self, client: str, prompt_tokens: int) -> None:
        self._num_requests -= 1
        self._num_tokens -= prompt_tokens
        self._requests_of[client] -= 1
        self._tokens_of[client] -= prompt_tokens
        if not self._requests_of[client]:
            del self._requests_of[client], self._tokens_of[client]

    def clear(self) -> None:
        self._num_requests = self._num_tokens = 0
        self._requests_of: Counter[str] = Counter()
        self._tokens_of: Counter[str] = Counter()

    @property
    def room_in_queue(self) -> int:
        """Number of requests that the scheduler accepts whatever the state of its
        batch.
        """
        return self._max_queued_requests - self._num_requests

    def check_count(self, count: int) -> None:
        """Raises:
        BadRequest: `count` requests can never fit.
        """
        if count > self._max_requests:
            raise BadRequest(
                f"one call asks for {count} outputs, but at most {self._max_requests} "
                "requests may be in flight (--max-queued-requests and "
                "--max-running-requests); split it"
            )

    def check_requests(self, count: int, *, client: str) -> None:
        """Raises:
        BadRequest: `count` requests can never fit.
        Unavailable: they do not fit now.
        """
        self.check_count(count)
        limit, spare = self._max_requests, spare_room(self._max_queued_requests)
        if self._requests_of[client] + count <= spare:
            limit += spare
        if self._num_requests + count > limit:
            raise Unavailable(
                f"{self._num_requests} requests are in flight, of at most "
                f"{self._max_requests}; try again later"
            )

    def check_tokens(self, count: int, *, client: str) -> None:
        """Raises:
        BadRequest: prompts of `count` tokens can never fit.
        Unavailable: they do not fit now.
        """
        if count > self._max_tokens:
            raise BadRequest(
                f"the prompts have {count} tokens, but at most {self._max_tokens} may "
                "be in flight (--max-queued-tokens); split the request"
            )
        limit = self._max_tokens
        if self._tokens_of[client] + count <= spare_room(limit):
            limit += spare_room(limit)
        if self._num_tokens + count > limit:
            raise Unavailable(
                f"the prompts in flight have {self._num_tokens} tokens, of at most "
                f"{self._max_tokens} (--max-queued-tokens); try again later"
            )
