"""Where a prefill engine lets decode engines in, and hears what they ask for.

Threads accept connections and read from them; what they hear waits in a queue for the
scheduler.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import structs

from sglang.srt.disaggregation.link import Link, LinkLost, Pace
from sglang.srt.disaggregation.messages import (
    Ask,
    Cancel,
    EngineIdentity,
    Hello,
    Refusal,
    Taken,
    ToSender,
    Welcome,
    decode_to_sender,
    is_valid,
    mismatch,
)
from sglang.srt.kv_tiers.unit import KEY_BYTES

logger = logging.getLogger(__name__)

_MAX_LINKS = 1024
# Questions of one connection that were not answered, and keys in them.
MAX_ASKS = 4096
MAX_KEYS = 1 << 20
# Messages that wait for the scheduler; beyond that connections are not read.
_MAX_HEARD = 4096
_RETRY_SECONDS = 1.0


class Heard(NamedTuple):
    """A message of a decode engine, or None when its connection has ended."""

    link: Link[ToSender]
    message: Ask | Cancel | Taken | None


@dataclass(slots=True, kw_only=True, eq=False)
class _Questions:
    """How much a decode engine has asked for. Its thread alone counts what comes, and
    the scheduler alone what has ended."""

    asks: int = 0
    keys: int = 0
    ended_asks: int = 0
    ended_keys: int = 0

    def add(self, ask: Ask) -> bool:
        """Count a question; returns whether there may be so many."""
        self.asks += 1
        self.keys += len(ask.keys)
        open_asks = self.asks - self.ended_asks
        return open_asks <= MAX_ASKS and self.keys - self.ended_keys <= MAX_KEYS

    def end(self, ask: Ask) -> None:
        self.ended_asks += 1
        self.ended_keys += len(ask.keys)


class Listener:
    """Accepts decode engines whose KV is of the same kind.

    Args:
        rank: rank of this process. ports: where each rank listens.
        description: of the outlet, for receivers.
        on_news: called in other threads when there is something in `heard`.

    Attributes:
        heard: what decode engines have said.
        num_links: connections that are open.
        port: where the first rank listens.
    """

    def __init__(
        self,
        server: socket.socket,
        identity: EngineIdentity,
        *,
        rank: int,
        ports: Sequence[int],
        description: bytes,
        pace: Pace,
        on_news: Callable[[], None] = lambda: None,
    ) -> None:
        self.heard: queue.Queue[Heard] = queue.Queue(_MAX_HEARD)
        self._is_closed = False
        self._server = server
        self._identity = identity
        self._rank = rank
        self._ports = list(ports)
        self.port = self._ports[0]
        self._description = description
        self._pace = pace
        self._on_news = on_news
        self._links: dict[Link[ToSender], _Questions] = {}
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def num_links(self) -> int:
        return len(self._links)

    def close(self) -> None:
        """Accept nobody any more, and end every connection."""
        self._is_closed = True
        with contextlib.suppress(OSError):  # Some systems want it to be connected.
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for link in list(self._links):
            link.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, (host, port, *_) = self._server.accept()
            except OSError:
                return
            if len(self._links) >= _MAX_LINKS:
                connection.close()
                continue
            link = Link(
                connection,
                decode=decode_to_sender,
                peer=f"decode engine {host}:{port}",
                pace=self._pace,
            )
            self._links[link] = _Questions()
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: Link[ToSender]) -> None:
        try:
            if self._welcomes(link):
                self._listen(link)
        except LinkLost as error:
            logger.info("KV transfer: %s", error)
        link.dispose()
        del self._links[link]
        self._tell(Heard(link, None))

    def _welcomes(self, link: Link[ToSender]) -> bool:
        hello = link.receive()
        if not isinstance(hello, Hello):
            raise LinkLost(f"{link.peer} did not greet")
        theirs = hello.identity
        if hello.rank != self._rank:
            # It compares its share of the weights with the same rank here.
            theirs = structs.replace(
                theirs, model=self._identity.model, layout=self._identity.layout
            )
        why = mismatch(self._identity, theirs)
        if why is None and not 0 <= hello.rank < len(self._ports):
            why = f"there is no rank {hello.rank}"
        if why is not None:
            logger.error("KV transfer: refused %s: %s", link.peer, why)
            link.send(Refusal(reason=why))
            self._linger(link)
            return False
        if hello.rank != self._rank:
            link.send(Welcome(port=self._ports[hello.rank]))
            self._linger(link)
            return False
        link.send(Welcome(transport=self._description))
        return True

    def _linger(self, link: Link[ToSender]) -> None:
        """Wait until the other side has read the answer and left."""
        with contextlib.suppress(LinkLost):
            link.receive()

    def _listen(self, link: Link[ToSender]) -> None:
        while True:
            message = link.receive()
            if isinstance(message, Ask) and not is_valid(message, key_bytes=KEY_BYTES):
                raise LinkLost(f"{link.peer} asks for units that cannot be")
            if not isinstance(message, Ask | Cancel | Taken):
                raise LinkLost(f"{link.peer} sent {type(message).__name__}")
            if isinstance(message, Ask) and not self._links[link].add(message):
                raise LinkLost(
                    f"{link.peer} has more than {MAX_ASKS} open questions, or "
                    f"{MAX_KEYS} units in them"
                )
            self._tell(Heard(link, message))

    def on_end(self, link: Link[ToSender], ask: Ask) -> None:
        """Note that a question was answered."""
        questions = self._links.get(link)
        if questions is not None:
            questions.end(ask)

    def _tell(self, heard: Heard) -> None:
        while not self._is_closed:
            with contextlib.suppress(queue.Full):
                self.heard.put(heard, timeout=_RETRY_SECONDS)
                break
        self._on_news()
