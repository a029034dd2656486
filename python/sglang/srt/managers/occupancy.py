"""Room for requests in flight, in requests and in tokens of their prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.managers.errors import BadRequest, Unavailable

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


class Occupancy:
    """Counts what is in flight, and refuses what exceeds the flags' limits: with 400
    where it never fits, with 503 where it does not fit now."""

    def __init__(self, server_args: ServerArgs) -> None:
        assert server_args.max_running_requests is not None
        self._max_queued_requests = server_args.max_queued_requests
        self._max_requests = (
            server_args.max_queued_requests + server_args.max_running_requests
        )
        self._max_tokens = server_args.max_queued_tokens
        self.clear()

    def add(self, prompt_tokens: int) -> None:
        """Count one more request."""
        self._num_requests += 1
        self._num_tokens += prompt_tokens

    def remove(self, prompt_tokens: int) -> None:
        self._num_requests -= 1
        self._num_tokens -= prompt_tokens

    def clear(self) -> None:
        self._num_requests = self._num_tokens = 0

    @property
    def room_in_queue(self) -> int:
        """Requests that the scheduler takes whatever the state of its batch is."""
        return self._max_queued_requests - self._num_requests

    def check_count(self, count: int) -> None:
        """Raises:
        BadRequest: `count` requests never fit.
        """
        if count > self._max_requests:
            raise BadRequest(
                f"one call asks for {count} outputs, but at most {self._max_requests} "
                "requests may be in flight (--max-queued-requests and "
                "--max-running-requests); split it"
            )

    def check_requests(self, count: int) -> None:
        """Raises:
        BadRequest: `count` requests never fit.
        Unavailable: they do not fit now.
        """
        self.check_count(count)
        if self._num_requests + count > self._max_requests:
            raise Unavailable(
                f"{self._num_requests} requests are in flight, of at most "
                f"{self._max_requests}; try again later"
            )

    def check_tokens(self, count: int) -> None:
        """Raises:
        BadRequest: prompts of `count` tokens never fit.
        Unavailable: they do not fit now.
        """
        if count > self._max_tokens:
            raise BadRequest(
                f"the prompts have {count} tokens, but at most {self._max_tokens} may "
                "be in flight (--max-queued-tokens); split the request"
            )
        if self._num_tokens + count > self._max_tokens:
            raise Unavailable(
                f"the prompts in flight have {self._num_tokens} tokens, of at most "
                f"{self._max_tokens} (--max-queued-tokens); try again later"
            )
