"""A prefill engine and a decode engine in this process, as a router uses them, and a
wire between them that can be damaged."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from sglang.srt.disaggregation.messages import (
    Ask,
    Unit,
    decode_to_receiver,
    decode_to_sender,
    encode,
)
from sglang.srt.environ import envs
from sglang.srt.managers.messages.io_struct import Bootstrap
from sglang.srt.managers.scheduler.decode_side import DecodeSide
from sglang.srt.managers.scheduler.prefill_side import PrefillSide
from sglang.test.harness import EngineHarness, Finished
from sglang.test.mock_traffic import Traffic, check
from sglang.test.tier_traffic import VOCAB, tiered, tiers_of, windows_of

HOST = "127.0.0.1"
# The engines wait for their threads.
_PAUSE_SECONDS = 0.0005
_MAX_STEPS = 100_000
_SETTLE_SECONDS = 20.0


@contextmanager
def engine_pair(
    folder: Path,
    kind: str,
    *,
    backend: str = "tcp",
    patience: float = 60.0,
    beat: float = 4.0,
    decode_args: Mapping[str, Any] = MappingProxyType({}),
    **server_args: Any,
) -> Iterator[EnginePair]:
    """Start a prefill engine and a decode engine on a mock model of one of `KINDS`.

    Args:
        patience: seconds that requests wait for units. beat: seconds between two signs
            of life, of which five may stay out: few on a busy machine do by themselves.
        decode_args: what only the decode engine is given.
    """
    common: dict[str, Any] = {"disaggregation_transfer_backend": backend, **server_args}
    pace = envs.SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL.override(beat)
    waiting = envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.override(patience)
    with pace, waiting:
        prefill = tiered(
            folder,
            kind,
            disaggregation_mode="prefill",
            disaggregation_bootstrap_port=0,
            **common,
        )
        decode = tiered(
            folder,
            kind,
            disaggregation_mode="decode",
            **{"enable_hierarchical_cache": False, **common, **decode_args},
        )
    pair = EnginePair(prefill, decode)
    try:
        yield pair
    finally:
        pair.close()


class EnginePair:
    """Sends each request to both engines, and answers with the decode engine's.

    Attributes:
        scheduler: the decode engine's.
        port: where the decode engine finds the prefill engine.
    """

    def __init__(self, prefill: EngineHarness, decode: EngineHarness) -> None:
        self.prefill, self.decode = prefill, decode
        self.scheduler = decode.scheduler
        prefill_side = tiers_of_side(prefill)
        decode_side = tiers_of_side(decode)
        assert isinstance(prefill_side, PrefillSide)
        assert isinstance(decode_side, DecodeSide)
        self.listener, self.sender = prefill_side._listener, prefill_side._sender
        self.receiver = decode_side._receiver
        self.port = self.listener.port
        self._rooms = itertools.count(1)

    def submit(
        self,
        input_ids: Sequence[int],
        *,
        is_prefilled: bool = True,
        port: int | None = None,
        **options: Any,
    ) -> str:
        """Queue a request on both engines, or only on the decode engine."""
        bootstrap = Bootstrap(host=HOST, port=port or self.port, room=next(self._rooms))
        rid = self.decode.submit(input_ids, bootstrap=bootstrap, **options)
        if is_prefilled:
            options["rid"] = rid
            self.prefill.submit(input_ids, bootstrap=bootstrap, **options)
        return rid

    def abort(self, rid: str) -> None:
        """Abort a request, as a router does whose client has left."""
        self.decode.abort(rid)
        self.prefill.abort(rid)

    def run(
        self, *, on_step: Callable[[int], None] = lambda step: None
    ) -> dict[str, Finished]:
        """Step both engines until they are idle; return the decode engine's answers."""
        for step in range(_MAX_STEPS):
            on_step(step)
            is_busy = [harness.scheduler.step() for harness in self._both]
            if any(is_busy):
                continue
            if not any(h.io.requests or h.scheduler.has_work() for h in self._both):
                self.prefill.collect()
                return self.decode.collect()
            time.sleep(_PAUSE_SECONDS)
        raise AssertionError(f"not idle after {_MAX_STEPS} steps")

    @property
    def _both(self) -> tuple[EngineHarness, EngineHarness]:
        return self.prefill, self.decode

    def generate(self, input_ids: Sequence[int], **options: Any) -> Finished:
        """Run one request alone."""
        rid = self.submit(input_ids, **options)
        return self.run()[rid]

    def settle(self) -> None:
        """Wait until nothing is on the wire, and check that all memory is back."""
        until = time.monotonic() + _SETTLE_SECONDS
        while self._lent() and time.monotonic() < until:
            for harness in self._both:
                harness.scheduler.step()
            time.sleep(_PAUSE_SECONDS)
        assert not self._lent()

    def _lent(self) -> list[str]:
        """Return what has not come back."""
        lent = {
            "deliveries": self.sender.num_deliveries,
            "units on their way": any(self.sender._sending.values()),
            "landing memory": not self.receiver.landing.is_whole,
        }
        return [name for name, count in lent.items() if count]

    def close(self) -> None:
        for harness in self._both:
            tiers_of_side(harness).close()


def serve_random(pair: EnginePair, kind: str, *, total: int, seed: int) -> None:
    """Serve random requests, some of which are aborted, and check every answer, that
    KV was handed over, and that nothing was reported or lost."""
    traffic = Traffic(pair, random.Random(seed), total, longest_output=24)
    rng = random.Random(seed + 1)
    traffic.stems = [
        [rng.randrange(VOCAB) for _ in range(rng.randrange(60, 250))] for _ in range(10)
    ]
    answers: dict[str, Finished] = {}
    while traffic.left:
        answers |= pair.run(on_step=traffic.on_step)
    check(traffic.expected, answers, vocab_size=VOCAB, windows=windows_of(kind))
    stats = tiers_of(pair.decode).stats
    assert stats.loaded > 0
    assert stats.damaged == 0
    for harness in (pair.prefill, pair.decode):
        assert not harness.scheduler.own_incidents()
        harness.scheduler.cache.check()
    pair.settle()


def tiers_of_side(harness: EngineHarness) -> Any:
    """Return an engine's side of the transfers."""
    loads = harness.scheduler.tiers
    assert loads is not None
    return loads.handover


class Frame(NamedTuple):
    """A message to the decode engine, and the bytes behind it."""

    message: Any
    payload: bytes = b""


Tamper = Callable[[Frame], list[Frame]]


class Cut(Exception):
    """Ends the connection, after some bytes."""

    def __init__(self, last: bytes = b"") -> None:
        super().__init__()
        self.last = last


class Wire:
    """Stands between two engines, reads every message, and may change it.

    Args:
        port: where the prefill engine listens.
        tamper: given a frame to the decode engine, returns the frames to send.
        rewrite: changes a question of the decode engine.

    Attributes:
        port: where the decode engine must connect.
    """

    def __init__(
        self,
        port: int,
        *,
        tamper: Tamper = lambda frame: [frame],
        rewrite: Callable[[Ask], Ask] = lambda ask: ask,
    ) -> None:
        self._target = port
        self._tamper = tamper
        self._rewrite = rewrite
        self._server = socket.create_server((HOST, 0))
        self.port: int = self._server.getsockname()[1]
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for one in self._sockets:
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                decode, _ = self._server.accept()
            except OSError:
                return
            try:
                prefill = socket.create_connection((HOST, self._target))
            except OSError:
                decode.close()
                continue
            self._sockets += [decode, prefill]
            for run in (self._ask, self._answer):
                threading.Thread(target=run, args=(decode, prefill)).start()

    def _ask(self, decode: socket.socket, prefill: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                message = decode_to_sender(_read_body(decode))
                if isinstance(message, Ask):
                    message = self._rewrite(message)
                prefill.sendall(_with_length(encode(message)))
        self._hang_up(decode, prefill)

    def _answer(self, decode: socket.socket, prefill: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                message = decode_to_receiver(_read_body(prefill))
                size = message.size if isinstance(message, Unit) else 0
                frame = Frame(message, _read(prefill, size))
                try:
                    frames = self._tamper(frame)
                except Cut as cut:
                    decode.sendall(cut.last)
                    break
                for changed in frames:
                    decode.sendall(as_bytes(changed))
        self._hang_up(decode, prefill)

    def _hang_up(self, *ends: socket.socket) -> None:
        for one in ends:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def as_bytes(frame: Frame) -> bytes:
    """Return a frame as it travels."""
    return _with_length(encode(frame.message)) + frame.payload


def _with_length(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def _read_body(source: socket.socket) -> bytes:
    (length,) = struct.unpack("<I", _read(source, 4))
    return _read(source, length)


def _read(source: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = source.recv(size - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
