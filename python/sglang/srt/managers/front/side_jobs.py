"""Main module of a side-work process: runs jobs of unbounded cost.

Reads and answers one job at a time on the socket whose descriptor is passed as its
argument.
Imports no torch: it starts in a tenth of a second and takes some 35 MB beside its
tokenizer. A job that exceeds its CPU time or `MEMORY_BYTES` of memory ends the process,
even in native code.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from sglang.srt.function_call.core_types import Tool
from sglang.srt.function_call.function_call_parser import parse_calls
from sglang.srt.managers.front.template_manager import TemplateManager
from sglang.srt.managers.messages.errors import BadRequest
from sglang.srt.parser.reasoning_parser import split_reasoning
from sglang.srt.utils.hf_tokenizer import Tokenizer

# Limit of the address space; the tokens of the longest texts take a quarter of it.
MEMORY_BYTES = 4 << 30
# A process that has grown this large exits after the job, because its heap would stay.
MAX_KEPT_BYTES = 512 << 20
# Wall time rather than CPU time, for a busy machine.
SECONDS_PER_CPU_SECOND = 20
LENGTH_BYTES = 8


class JobRequest(msgspec.Struct, kw_only=True, array_like=True):
    """A job's name in `Jobs`, its arguments, and its CPU time limit."""

    name: str
    arguments: msgspec.Raw
    cpu_seconds: float


class JobAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a job returned, or the rejection or failure it ended with.

    Fields:
        refusal: message, field and status of the `BadRequest`, if any.
        is_last: whether the process exits now.
    """

    result: msgspec.Raw = msgspec.Raw(b"null")
    refusal: tuple[str, str | None, int] | None = None
    failure: str | None = None
    is_last: bool = False


class Encoded(msgspec.Struct, kw_only=True, array_like=True):
    """Tokenized texts; the ids and the texts of all tokens are already JSON."""

    counts: list[int]
    ids: msgspec.Raw
    strings: msgspec.Raw


class Jobs:
    """The jobs: functions of plain values and of the tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._templates = TemplateManager(tokenizer)

    def run(self, request: JobRequest) -> Any:
        jobs: dict[str, Callable[..., Any]] = {
            "encode": self.encode,
            "decode": self.decode,
            "render": self._templates.render,
            "parse_calls": _parse_calls,
            "split_reasoning": split_reasoning,
        }
        return jobs[request.name](**msgspec.json.decode(request.arguments))

    def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool, with_strings: bool
    ) -> Encoded:
        return encode_texts(
            self._need_tokenizer(),
            texts,
            add_special_tokens=add_special_tokens,
            with_strings=with_strings,
        )

    def decode(
        self, lists: Sequence[Sequence[int]], *, skip_special_tokens: bool
    ) -> list[str]:
        tokenizer = self._need_tokenizer()
        return [
            tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
            for ids in lists
        ]

    def _need_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ValueError("the server has no tokenizer")
        return self._tokenizer


def encode_texts(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    add_special_tokens: bool,
    with_strings: bool = False,
) -> Encoded:
    lists = [
        tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts
    ]
    strings = [
        [tokenizer.token_text(token) for token in ids] if with_strings else []
        for ids in lists
    ]
    return Encoded(
        counts=list(map(len, lists)),
        ids=msgspec.Raw(msgspec.json.encode(lists)),
        strings=msgspec.Raw(msgspec.json.encode(strings)),
    )


def _parse_calls(text: str, *, parser: str, tools: Sequence[dict[str, Any]]) -> Any:
    return parse_calls(text, parser=parser, tools=[Tool(**tool) for tool in tools])


def serve(connection: socket.socket) -> None:
    """Answer jobs; the first message is the tokenizer's.

    Raises:
        EOFError, ConnectionError: the other end has closed, also with an answer unread.
    """
    portable = msgspec.json.decode(receive(connection))
    jobs = Jobs(None if portable is None else Tokenizer.from_portable(portable))
    requests = msgspec.json.Decoder(JobRequest)
    while True:
        answer = _answer(jobs, requests.decode(receive(connection)))
        send(connection, msgspec.json.encode(answer))
        if answer.is_last:
            return


def _answer(jobs: Jobs, request: JobRequest) -> JobAnswer:
    answer = JobAnswer()
    try:
        with limited_cpu(request.cpu_seconds):
            answer.result = msgspec.Raw(msgspec.json.encode(jobs.run(request)))
    except BadRequest as error:
        answer.refusal = (error.message, error.param, error.status)
    except UnicodeEncodeError as error:
        # JSON inside a text may contain half of a surrogate pair.
        answer.refusal = (f"the text is not valid Unicode: {error.reason}", None, 400)
    except MemoryError:
        os.abort()
    except BaseException:
        # The tokenizer library panics with an error that does not derive from
        # Exception.
        answer.failure = traceback.format_exc()
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    answer.is_last = largest > MAX_KEPT_BYTES
    return answer


@contextmanager
def limited_cpu(seconds: float) -> Iterator[None]:
    """End the process if the block takes longer: the signals' default action needs
    neither the interpreter nor a living parent.
    """
    timers = {
        signal.ITIMER_PROF: seconds,
        signal.ITIMER_REAL: seconds * SECONDS_PER_CPU_SECOND,
    }
    for timer, limit in timers.items():
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for timer in timers:
            signal.setitimer(timer, 0)


def send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(len(message).to_bytes(LENGTH_BYTES, "big") + message)


def receive(connection: socket.socket) -> bytes:
    """Return the next message.

    Raises:
        EOFError: the other end has closed.
    """
    length = int.from_bytes(_receive_exactly(connection, LENGTH_BYTES), "big")
    return _receive_exactly(connection, length)


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    parts = bytearray(size)
    view, at = memoryview(parts), 0
    while at < size:
        count = connection.recv_into(view[at:])
        if not count:
            raise EOFError
        at += count
    return bytes(parts)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(int(sys.argv[2]))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = socket.socket(fileno=int(sys.argv[1]))
    # It also closes while a job runs that nobody waits for any more.
    with connection, suppress(EOFError, ConnectionError):
        serve(connection)


if __name__ == "__main__":
    main()
