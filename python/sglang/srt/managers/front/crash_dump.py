"""The requests of the last minutes, written down when the engine dies.

Bounded in number, in bytes and, for requests that have ended, in age. Knows nothing
about clients: a dump contains no keys or addresses.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sglang.version import __version__

if TYPE_CHECKING:
    from sglang.srt.managers.messages.io_struct import GenerateReq, RequestOutput
    from sglang.srt.sampling.sampling_params import SamplingParams

    Shared = array[int] | bytes

logger = logging.getLogger(__name__)

FORMAT = "sglang crash dump 2"
KEPT_SECONDS = 300.0
MAX_REQUESTS = 10_000
MAX_BYTES = 128 << 20
"""Maximum size of a dump."""
CLOSE_SECONDS = 10.0
"""How long an exit waits for a dump that is being written."""

# Maximum bytes of a token, and of a line without its prompt and parameters.
_TOKEN_BYTES = 8
_LINE_BYTES = 2048
MAX_REASON_CHARS = 400
# Fields of a request that are written unchanged.
_OPTIONS = (
    "rid",
    "stream",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "token_ids_logprob",
    "return_hidden_states",
    "priority",
)


class _SharedParts:
    """Prompts and sampling parameters that requests share, each kept once.

    Parameters are kept in their written form: equal ones share one part, whichever
    request they came with. A prompt is one part for all requests of a call.

    Attributes:
        num_bytes: size of all parts in a dump.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._users: dict[int, int] = {}
        self._params: dict[bytes, bytes] = {}
        # The latest objects: the requests of a call arrive in a row and share one
        # object.
        self._last_ids: tuple[list[int], array[int]] | None = None
        self._last_params: tuple[SamplingParams, bytes] | None = None

    def take_prompt(self, input_ids: list[int], *, is_wide: bool) -> array[int]:
        """Return the part that holds a prompt, adding one user; `is_wide` if its ids
        have 64 bits."""
        if self._last_ids is None or self._last_ids[0] is not input_ids:
            self._last_ids = (input_ids, array("q" if is_wide else "i", input_ids))
        part = self._last_ids[1]
        self._add_user(part)
        return part

    def take_params(self, params: SamplingParams) -> bytes:
        """Return the part that holds sampling parameters, adding one user."""
        if self._last_params is None or self._last_params[0] is not params:
            one_output = msgspec.structs.replace(params, n=1)
            self._last_params = (params, msgspec.json.encode(one_output))
        encoded = self._last_params[1]
        part = self._params.setdefault(encoded, encoded)
        self._add_user(part)
        return part

    def drop(self, part: Shared) -> None:
        """Remove one user; a part without users is dropped."""
        self._users[id(part)] -= 1
        if self._users[id(part)] == 0:
            del self._users[id(part)]
            self.num_bytes -= _size(part)
            if isinstance(part, bytes):
                del self._params[part]

    def _add_user(self, part: Shared) -> None:
        users = self._users.get(id(part), 0)
        self._users[id(part)] = users + 1
        if users == 0:
            self.num_bytes += _size(part)


def _size(part: Shared) -> int:
    text = len(part) if isinstance(part, bytes) else _TOKEN_BYTES * len(part)
    return _LINE_BYTES + text


@dataclass(slots=True, kw_only=True)
class _Kept:
    """A request as it was sent to the scheduler.

    Fields:
        options: options of `POST /generate`, without prompt, parameters and namespace.
        seed: seed of this output, or None if the scheduler draws one.
        arrived: arrival time in seconds of the wall clock.
        ended: end time in seconds of `clock`, or None while in flight.
        finish: type of the finish reason.
        output_tokens: number of output tokens that had arrived.
    """

    input_ids: array[int]
    params: bytes
    options: dict[str, Any]
    has_input_embeds: bool
    extra_key: str | None
    seed: int | None
    arrived: float
    ended: float | None = None
    finish: str | None = None
    output_tokens: int = 0


class CrashDump:
    """Keeps requests in case the engine dies.

    Args:
        folder: existing folder for the files.
        clock: returns seconds, for the age of requests.
        wall_clock: returns seconds since 1970.
        max_bytes: maximum size of a dump; the excess is dropped as requests arrive.
    """

    def __init__(
        self,
        folder: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        max_requests: int = MAX_REQUESTS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._folder = folder
        self._clock = clock
        self._wall_clock = wall_clock
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._open: OrderedDict[str, _Kept] = OrderedDict()
        self._ended: OrderedDict[int, _Kept] = OrderedDict()
        self._parts = _SharedParts()
        self._num_ended = 0
        self._num_dropped = 0
        self._writing: threading.Thread | None = None

    def on_sent(self, request: GenerateReq) -> None:
        """Keep a request that is sent to the scheduler."""
        has_embeds = request.input_embeds is not None
        options = {name: getattr(request, name) for name in _OPTIONS}
        if request.lora is not None:
            options["lora_path"] = request.lora.name
        self._open[request.rid] = _Kept(
            input_ids=self._parts.take_prompt(request.input_ids, is_wide=has_embeds),
            params=self._parts.take_params(request.sampling_params),
            options=options,
            has_input_embeds=has_embeds,
            extra_key=request.extra_key,
            seed=request.seed,
            arrived=self._wall_clock(),
        )
        self._trim()

    def on_output(self, output: RequestOutput) -> None:
        """Record the number of tokens so far, and the end of a request."""
        kept = self._open.get(output.rid)
        if kept is None:
            return
        kept.output_tokens = output.completion_tokens
        if output.finish_reason is not None:
            kept.finish, kept.ended = output.finish_reason.type, self._clock()
            self._ended[self._num_ended] = self._open.pop(output.rid)
            self._num_ended += 1

    def _trim(self) -> None:
        """Drop requests that ended long ago; beyond the bounds, first those that ended
        earliest, then those that arrived earliest.
        """
        horizon = self._clock() - KEPT_SECONDS
        while self._ended:
            first = next(iter(self._ended.values()))
            if first.ended is not None and first.ended >= horizon:
                break
            self._drop(self._ended)
        while self._is_full():
            self._num_dropped += 1
            self._drop(self._ended if self._ended else self._open)

    def _is_full(self) -> bool:
        count = len(self._open) + len(self._ended)
        num_bytes = self._parts.num_bytes + (count + 1) * _LINE_BYTES
        return count > self._max_requests or num_bytes > self._max_bytes

    def _drop(self, kept: OrderedDict[Any, _Kept]) -> None:
        _, gone = kept.popitem(last=False)
        self._parts.drop(gone.input_ids)
        self._parts.drop(gone.params)

    def begin_writing(self, reason: str) -> None:
        """Write the kept requests in a thread; no more requests may be sent."""
        self._writing = threading.Thread(
            target=self.write, args=(reason,), name="crash-dump", daemon=True
        )
        self._writing.start()

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Wait at most `timeout` seconds for a dump that is being written."""
        if self._writing is None:
            return
        self._writing.join(timeout)
        if self._writing.is_alive():
            logger.error("crash dump: not written after %g s; giving up", timeout)

    def write(self, reason: str) -> Path | None:
        """Write the kept requests as JSON lines with mode 0600.

        The name ends in `.incomplete` until the file is complete. Logs the cause and
        returns None if it cannot be written.
        """
        path = self._folder / f"crash_dump-{time.time_ns()}.jsonl"
        begun = path.with_name(f"{path.name}.incomplete")
        try:
            descriptor = os.open(begun, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                for line in self._lines(reason):
                    file.write(msgspec.json.encode(line) + b"\n")
            begun.rename(path)
        except OSError as error:
            logger.error("crash dump: %s cannot be written: %s", path, error)
            return None
        logger.error(
            "crash dump: %d request(s), %d of them in flight, in %s; send them again "
            "with python -m sglang.bench_serving --replay %s",
            len(self._open) + len(self._ended),
            len(self._open),
            path,
            path,
        )
        return path

    def _lines(self, reason: str) -> Iterator[dict[str, Any]]:
        """Yield the head, then the requests in order; shared parts precede their first
        user.
        """
        every = [*self._ended.values(), *self._open.values()]
        every.sort(key=lambda kept: kept.arrived)
        yield {
            "format": FORMAT,
            "version": __version__,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "reason": reason[:MAX_REASON_CHARS],
            "requests": len(every),
            "in_flight": len(self._open),
            "dropped": self._num_dropped,
        }
        begin = every[0].arrived if every else 0.0
        # Which requests share a cache namespace, without its digest.
        namespaces: dict[str, str] = {}
        shared: dict[int, int] = {}
        for kept in every:
            for name, part in (
                ("input_ids", kept.input_ids),
                ("sampling_params", kept.params),
            ):
                if id(part) not in shared:
                    shared[id(part)] = len(shared)
                    yield {"shared": shared[id(part)], name: _value(part)}
            request = {
                **kept.options,
                "input_ids": shared[id(kept.input_ids)],
                "sampling_params": shared[id(kept.params)],
            }
            if kept.extra_key is not None:
                name = f"namespace {len(namespaces) + 1}"
                request["extra_key"] = namespaces.setdefault(kept.extra_key, name)
            yield {
                "seconds": round(kept.arrived - begin, 6),
                "finish": kept.finish,
                "output_tokens": kept.output_tokens,
                "has_input_embeds": kept.has_input_embeds,
                "seed": kept.seed,
                "request": request,
            }


def _value(part: Shared) -> list[int] | msgspec.Raw:
    return msgspec.Raw(part) if isinstance(part, bytes) else part.tolist()
