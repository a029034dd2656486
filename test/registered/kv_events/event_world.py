"""Readers of KV events: bare sockets, and the example of the guide."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import zmq

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "kv_events.md"
PATIENCE_SECONDS = 60.0
END = (1 << 64) - 1


def example() -> Any:
    """The class of the guide's code."""
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    module = ModuleType("example")
    exec(code, module.__dict__)
    return module.CachedBlocks


def wait_until(condition: Callable[[], object], text: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, text
        time.sleep(0.002)


class Subscriber:
    """Raw messages of a PUB socket."""

    def __init__(self, endpoint: str, topic: str = "", hwm: int = 0) -> None:
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.set_hwm(hwm)
        self.socket.subscribe(topic)
        self.socket.connect(endpoint)

    def next(self, timeout_ms: float = PATIENCE_SECONDS * 1000) -> list[bytes] | None:
        if not self.socket.poll(timeout_ms):
            return None
        return self.socket.recv_multipart()

    def close(self) -> None:
        self.socket.close(linger=0)


class ReplayClient:
    """Raw messages of a ROUTER socket."""

    def __init__(self, endpoint: str, kind: int = zmq.DEALER) -> None:
        self.socket = zmq.Context.instance().socket(kind)
        self.socket.connect(endpoint)

    def ask(self, first: int) -> None:
        self.socket.send_multipart([b"", first.to_bytes(8, "big")])

    def next(self) -> list[bytes]:
        assert self.socket.poll(PATIENCE_SECONDS * 1000), "no answer"
        return self.socket.recv_multipart()

    def replay(self, first: int) -> list[tuple[int, bytes]]:
        """The batches of one answer."""
        self.ask(first)
        batches = []
        while True:
            delimiter, topic, seq, payload = self.next()
            assert delimiter == b""
            if int.from_bytes(seq, "big") == END:
                assert topic == payload == b""
                return batches
            batches.append((int.from_bytes(seq, "big"), payload))

    def close(self) -> None:
        self.socket.close(linger=0)


def events_of(payload: bytes) -> list[list[Any]]:
    """The events of a batch, as arrays without types."""
    timestamp, events, rank = msgspec.msgpack.decode(payload)
    assert abs(timestamp - time.time()) < 3600 and rank == 0
    return events
