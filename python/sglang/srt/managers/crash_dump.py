"""The requests of the last minutes, written down when the engine dies.

Bounded in number, in tokens and, for those that have ended, in age. Knows nothing of
clients: a dump holds no key and no address.
"""

from __future__ import annotations

import json
import logging
import os
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
    from sglang.srt.managers.io_struct import GenerateReq, RequestOutput

logger = logging.getLogger(__name__)

FORMAT = "sglang crash dump"
KEPT_SECONDS = 300.0
MAX_REQUESTS = 10_000
# Of prompts, 4 bytes each.
MAX_TOKENS = 1 << 24


@dataclass(slots=True, kw_only=True)
class _Kept:
    """A request as it was sent to the scheduler.

    Fields:
        arrived: seconds of the wall clock.
        ended: seconds of `clock`; None: it is in flight.
        finish: type of its end; output_tokens: so many had arrived.
    """

    request: GenerateReq
    input_ids: array[int]
    arrived: float
    ended: float | None = None
    finish: str | None = None
    output_tokens: int = 0


class CrashDump:
    """Keeps requests in case that the engine dies.

    Args:
        folder: of the files; exists.
        clock: seconds, for the age of requests; wall_clock: seconds since 1970.
    """

    def __init__(
        self,
        folder: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        max_requests: int = MAX_REQUESTS,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        self._folder = folder
        self._clock = clock
        self._wall_clock = wall_clock
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._open: OrderedDict[str, _Kept] = OrderedDict()
        self._ended: OrderedDict[int, _Kept] = OrderedDict()
        self._num_ended = 0
        self._num_tokens = 0
        self._num_dropped = 0

    def on_sent(self, request: GenerateReq) -> None:
        """Keep a request that goes to the scheduler."""
        ids = array("i", request.input_ids)
        has_embeds = request.input_embeds is not None
        bare = msgspec.structs.replace(
            request, input_ids=[], input_embeds=b"" if has_embeds else None, client=""
        )
        self._open[request.rid] = _Kept(
            request=bare, input_ids=ids, arrived=self._wall_clock()
        )
        self._num_tokens += len(ids)
        self._trim()

    def on_output(self, output: RequestOutput) -> None:
        """Note how many tokens there are so far, and the end of a request."""
        kept = self._open.get(output.rid)
        if kept is None:
            return
        kept.output_tokens = output.completion_tokens
        if output.finish_reason is not None:
            kept.finish, kept.ended = output.finish_reason.type, self._clock()
            self._ended[self._num_ended] = self._open.pop(output.rid)
            self._num_ended += 1

    def _trim(self) -> None:
        """Drop what ended long ago; beyond the bounds, what ended first, and then what
        arrived first."""
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
        return count > self._max_requests or self._num_tokens > self._max_tokens

    def _drop(self, kept: OrderedDict[Any, _Kept]) -> None:
        _, gone = kept.popitem(last=False)
        self._num_tokens -= len(gone.input_ids)

    def write(self, reason: str) -> Path | None:
        """Write what is kept, as JSON lines, mode 0600; None where it cannot be."""
        path = self._folder / f"crash_dump-{time.time_ns()}.jsonl"
        begun = path.with_name(f".{path.name}.part")
        try:
            descriptor = os.open(begun, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                for line in self._lines(reason):
                    file.write(json.dumps(line) + "\n")
            begun.rename(path)
        except OSError as error:
            begun.unlink(missing_ok=True)
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
        every = [*self._ended.values(), *self._open.values()]
        every.sort(key=lambda kept: kept.arrived)
        yield {
            "format": FORMAT,
            "version": __version__,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "reason": reason,
            "requests": len(every),
            "in_flight": len(self._open),
            "dropped": self._num_dropped,
        }
        begin = every[0].arrived if every else 0.0
        # Who shares a cache namespace, and not its digest.
        namespaces: dict[str, str] = {}
        for kept in every:
            key = kept.request.extra_key
            if key is not None:
                namespaces.setdefault(key, f"namespace {len(namespaces) + 1}")
            yield {
                "seconds": round(kept.arrived - begin, 6),
                "finish": kept.finish,
                "output_tokens": kept.output_tokens,
                "has_input_embeds": kept.request.input_embeds is not None,
                "request": _body(kept, namespaces.get(key or "")),
            }


def _body(kept: _Kept, namespace: str | None) -> dict[str, Any]:
    """The request as `POST /generate` takes it: one output, with the seed that it
    had."""
    request = kept.request
    params = msgspec.to_builtins(request.sampling_params)
    params.pop("n", None)
    if request.seed is not None:
        params["sampling_seed"] = request.seed
    return {
        "rid": request.rid,
        "input_ids": kept.input_ids.tolist(),
        "sampling_params": params,
        "stream": request.stream,
        "return_logprob": request.return_logprob,
        "logprob_start_len": request.logprob_start_len,
        "top_logprobs_num": request.top_logprobs_num,
        "return_hidden_states": request.return_hidden_states,
        **({} if namespace is None else {"extra_key": namespace}),
    }
