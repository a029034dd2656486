"""The publisher: its frames, its replays, and readers that do not read."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from event_world import (
    ReplayClient,
    Subscriber,
    events_of,
    example,
    wait_until,
)

from sglang.bench_utils.memory import resident_mib
from sglang.srt.arg_groups.kv_events_hook import KVEventsConfig
from sglang.srt.kv_events import connection_guard, replay_service
from sglang.srt.kv_events.event_publisher import ZmqEventPublisher
from sglang.srt.kv_events.messages import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    NamespacedBlockStored,
)
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count

register_cpu_ci(est_time=8, suite="cpu")

Endpoints = tuple[str, str]
Publish = Callable[..., ZmqEventPublisher]


@pytest.fixture
def start(endpoints: Endpoints) -> Iterator[Publish]:
    """Starts publishers on `endpoints`."""
    started: list[ZmqEventPublisher] = []

    def start(**config: Any) -> ZmqEventPublisher:
        config = {
            "publisher": "zmq",
            "endpoint": endpoints[0],
            "replay_endpoint": endpoints[1],
            **config,
        }
        started.append(ZmqEventPublisher(KVEventsConfig(**config)))
        return started[-1]

    yield start
    for publisher in started:
        publisher.close()


@pytest.fixture
def subscriber(endpoints: Endpoints) -> Iterator[Subscriber]:
    found = Subscriber(endpoints[0])
    yield found
    found.close()


@pytest.fixture
def replays(endpoints: Endpoints) -> Iterator[ReplayClient]:
    found = ReplayClient(endpoints[1])
    yield found
    found.close()


def stored(hashes: list[int], parent: int | None = None, size: int = 2) -> BlockStored:
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=parent,
        token_ids=list(range(size * len(hashes))),
        block_size=size,
        lora_id=None,
        medium="GPU",
    )


def join(publisher: ZmqEventPublisher, subscriber: Subscriber) -> int:
    """Publish until the subscription is there; the sequence number it begins at."""
    while True:
        publisher.publish([AllBlocksCleared()])
        message = subscriber.next(timeout_ms=20)
        if message is not None:
            return int.from_bytes(message[1], "big")


def test_bytes_of_every_event(
    start: Publish, subscriber: Subscriber, replays: ReplayClient
) -> None:
    publisher = start(topic="kv@here@demo")
    first = join(publisher, subscriber)
    top = (1 << 64) - 1
    publisher.publish(
        [
            stored([top, 0], parent=7),
            NamespacedBlockStored(
                **msgspec.structs.asdict(stored([5])),
                lora_name=None,
                extra_keys=[("tenant",)],
            ),
            BlockRemoved(block_hashes=[top], medium="GPU"),
            AllBlocksCleared(),
        ]
    )
    message = subscriber.next()
    while message is not None and len(events_of(message[2])) == 1:
        message = subscriber.next()
    assert message is not None
    topic, seq, payload = message
    assert topic == b"kv@here@demo"
    assert len(seq) == 8 and int.from_bytes(seq, "big") > first
    assert events_of(payload) == [
        ["BlockStored", [top, 0], 7, [0, 1, 2, 3], 2, None, "GPU"],
        ["BlockStored", [5], None, [0, 1], 2, None, "GPU", None, [["tenant"]]],
        ["BlockRemoved", [top], "GPU"],
        ["AllBlocksCleared"],
    ]
    # An array of three, the time as a float of 64 bits.
    assert payload[:2] == b"\x93\xcb"
    # Whoever has the types reads all of it, too.
    batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
    assert [type(event) for event in batch.events] == [
        BlockStored,
        BlockStored,
        BlockRemoved,
        AllBlocksCleared,
    ]
    (last,) = replays.replay(int.from_bytes(seq, "big"))
    assert last == (int.from_bytes(seq, "big"), payload)
    replays.ask(int.from_bytes(seq, "big"))
    assert replays.next() == [b"", topic, seq, payload]
    assert replays.next() == [b"", b"", b"\xff" * 8, b""]


def test_replays_hold_the_last_batches(start: Publish, replays: ReplayClient) -> None:
    publisher = start(buffer_steps=10, max_queue_size=40)
    for number in range(25):
        publisher.publish([stored([number])])
    wait_until(lambda: publisher.num_published == 25, "all batches are sent")
    for first, expected in ((0, 15), (15, 15), (20, 20), (24, 24), (25, 25), (99, 25)):
        batches = replays.replay(first)
        assert [seq for seq, _ in batches] == list(range(expected, 25))
        for seq, payload in batches:
            assert events_of(payload)[0][1] == [seq]
    assert publisher.num_replayed == 10 + 10 + 5 + 1


def test_a_request_without_a_delimiter_is_answered(
    start: Publish, replays: ReplayClient
) -> None:
    start().publish([AllBlocksCleared()])
    replays.socket.send((0).to_bytes(8, "big"))
    assert int.from_bytes(replays.next()[2], "big") == 0


def test_garbage_on_the_replay_socket_costs_nobody_else(
    start: Publish, endpoints: Endpoints, replays: ReplayClient
) -> None:
    publisher = start()
    publisher.publish([AllBlocksCleared()])
    hostile = ReplayClient(endpoints[1])
    for frames in ([b""], [b"", b"x"], [b"x" * 9], [b"a", b"b", b"c"], [b""] * 40):
        hostile.socket.send_multipart(frames)
    hostile.socket.send(b"x" * 1_000_000)
    (batch,) = replays.replay(0)
    assert batch[0] == 0
    hostile.close()


def test_what_the_thread_cannot_send_is_a_gap_that_can_be_replayed(
    start: Publish,
    subscriber: Subscriber,
    endpoints: Endpoints,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publisher = start(max_queue_size=3, buffer_steps=100)
    join(publisher, subscriber)
    wait_until(lambda: publisher._next == publisher._log.end, "it has sent everything")
    before = publisher._log.end
    with monkeypatch.context() as context:
        # The thread sleeps.
        context.setattr(publisher, "_wake", lambda: None)
        for _ in range(20):
            publisher.publish([stored([1]), AllBlocksCleared()])
    publisher.publish([stored([1])])
    numbers: list[int] = []
    while not numbers or numbers[-1] < before + 20:
        message = subscriber.next()
        assert message is not None
        numbers.append(int.from_bytes(message[1], "big"))
    assert [n for n in numbers if n >= before] == [
        before + 18,
        before + 19,
        before + 20,
    ]
    wait_until(lambda: publisher._next == before + 21, "the thread has counted")
    assert publisher.num_dropped == 18 * 2
    assert publisher.num_published == before + 2 * 2 + 1
    client = ReplayClient(endpoints[1])
    assert [seq for seq, _ in client.replay(before)] == list(range(before, before + 21))
    client.close()


def test_readers_that_do_not_read_cost_themselves(
    start: Publish, endpoints: Endpoints
) -> None:
    """Two subscribers and two replays that are never read, while another reader follows
    with the code of the guide: it has every block at the end."""
    publisher = start(hwm=20, buffer_steps=5000, topic="t")
    idle = [Subscriber(endpoints[0], "t", hwm=1) for _ in range(2)]
    cached = example()(*endpoints, "t")
    publisher.publish([AllBlocksCleared()])
    stuck = [ReplayClient(endpoints[1]) for _ in range(2)]
    rng, blocks = random.Random(0), set()
    number = count(ci=1500, full=4000)
    for step in range(number):
        events: list[Any] = [stored([step * 10 + i for i in range(10)], size=200)]
        blocks.update(events[0].block_hashes)
        if rng.random() < 0.3:
            gone = rng.sample(sorted(blocks), 5)
            blocks.difference_update(gone)
            events.append(BlockRemoved(block_hashes=gone, medium="GPU"))
        publisher.publish(events)
        if step % 100 == 0:
            for client in stuck:
                client.ask(0)
            cached.read(timeout_ms=0)
    wait_until(lambda: publisher._next == publisher._log.end, "all was sent")

    # The last messages may be among those that it missed.
    def follows() -> bool:
        publisher.publish([BlockRemoved(block_hashes=[], medium="GPU")])
        while cached.read(timeout_ms=5):
            pass
        return cached.seq > number

    wait_until(follows, "the reader has caught up")
    assert set(cached.blocks) == blocks
    for reader in (*idle, *stuck):
        reader.close()


def test_a_client_that_stalls_is_given_up(
    start: Publish, endpoints: Endpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_service, "STALL_SECONDS", 0.05)
    publisher = start(buffer_steps=5000)
    for _ in range(3000):
        publisher.publish([stored(list(range(20)), size=100)])
    client = ReplayClient(endpoints[1])
    client.ask(0)
    service = publisher._replays
    assert service is not None
    wait_until(lambda: publisher.num_replayed > 0, "it begins")
    wait_until(lambda: not service._replays, "it is given up")
    assert publisher.num_replayed < 3000
    client.close()


def test_a_reader_follows_an_engine_that_was_restarted(
    start: Publish, endpoints: Endpoints
) -> None:
    publisher = start()
    cached = example()(*endpoints)
    publisher.publish([AllBlocksCleared(), stored([1, 2])])

    def has(blocks: set[int]) -> bool:
        publisher.publish([BlockRemoved(block_hashes=[], medium="GPU")])
        while cached.read(timeout_ms=5):
            pass
        return set(cached.blocks) == blocks

    wait_until(lambda: has({1, 2}), "the reader has the first engine's")
    for _ in range(300):
        publisher.publish([stored([3])])
    wait_until(lambda: has({1, 2, 3}), "and all of them")
    publisher.close()
    publisher = start()
    publisher.publish([AllBlocksCleared(), stored([4])])
    wait_until(lambda: has({4}), "the reader has the second engine's")


# -- endpoints ---------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("key", ["endpoint", "replay_endpoint"])
def test_an_endpoint_in_use_is_named(start: Publish, key: str) -> None:
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        used = f"tcp://127.0.0.1:{owner.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"{key} {used} is in use; stop who"):
            start(**{key: used})
    # The other endpoint was not kept.
    start()


def test_a_unix_socket_in_use_is_not_taken_away(
    start: Publish, endpoints: Endpoints, subscriber: Subscriber
) -> None:
    publisher = start()
    with pytest.raises(ValueError, match="endpoint ipc://.* is in use"):
        start()
    assert join(publisher, subscriber) >= 0
    path = Path(endpoints[0].removeprefix("ipc://"))
    assert path.stat().st_mode & 0o777 == 0o600
    publisher.close()
    # Of an engine that was killed.
    with socket.socket(socket.AF_UNIX) as left:
        path.unlink(missing_ok=True)
        left.bind(str(path))
    assert join(start(), subscriber) >= 0


def test_a_file_is_not_overwritten(start: Publish, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ValueError, match="is a file and no socket"):
        start(endpoint=f"ipc://{tmp_path}/file")
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("host", ["localhost", "*", "127.0.0.1", "[::1]"])
def test_hosts_of_this_machine_are_bound(
    start: Publish, host: str, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    with caplog.at_level(logging.WARNING):
        try:
            publisher = start(endpoint=f"tcp://{host}:{port}")
        except ValueError as error:
            assert host == "[::1]", error
            pytest.skip("no IPv6 here")
    shown = host if host == "[::1]" else "127.0.0.1"
    reader = Subscriber(f"tcp://{shown}:{port}")
    if host == "[::1]":
        reader.close()
        return
    assert join(publisher, reader) >= 0
    assert ("no key" in caplog.text) == (host == "*")
    reader.close()


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [("tcp://no-such-host.invalid:5557", "has no address"), ("ipc:///no/x", "bound")],
)
def test_an_endpoint_that_cannot_be(start: Publish, endpoint: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"--kv-events-config: endpoint.*{reason}"):
        start(endpoint=endpoint)


def test_replays_are_served_on_this_host_alone(start: Publish) -> None:
    with pytest.raises(ValueError, match="replay_endpoint tcp://192.0.2.1:9 is not an"):
        start(replay_endpoint="tcp://192.0.2.1:9")


def test_another_host_is_connected_to(
    start: Publish, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        publisher = start(endpoint="tcp://192.0.2.1:5557")
    assert "tcp://192.0.2.1:5557 is not an address of this host" in caplog.text
    publisher.publish([AllBlocksCleared()])
    wait_until(lambda: publisher._next == 1, "it does not wait for the reader")


def test_a_publisher_that_fails_does_not_take_the_scheduler_along(
    start: Publish, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = start()
    publisher.publish([AllBlocksCleared()])
    wait_until(lambda: publisher.num_published == 1, "it works")

    def broken(seq: int) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(publisher._log, "get", broken)
    with caplog.at_level(logging.ERROR):
        publisher.publish([AllBlocksCleared(), AllBlocksCleared()])
        wait_until(lambda: not publisher._thread.is_alive(), "its thread has ended")
        publisher.publish([AllBlocksCleared()])
    assert "no KV events are published any more" in caplog.text
    assert (publisher.num_published, publisher.num_dropped) == (1, 3)


def test_closing_leaves_no_thread_and_no_socket(
    start: Publish, endpoints: Endpoints
) -> None:
    publisher = start()
    publisher.publish([AllBlocksCleared()])
    publisher.close()
    assert publisher.num_published == 1
    assert publisher._thread not in threading.enumerate()
    probe = zmq.Context.instance().socket(zmq.PUB)
    probe.bind(endpoints[0])
    probe.close(linger=0)
    publisher.close()


# -- who may connect ---------------------------------------------------------------


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\0NULL" + bytes(48)
READY = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB"
STRANGERS = {
    "garbage": b"x" * 100,
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "an old protocol": b"\xff" + bytes(8) + b"\x7f\x01\x02\0\0",
    "half a greeting": GREETING[:20],
    "silence": b"",
    "subscribers": GREETING + READY,
}


def address_of(endpoint: str) -> tuple[str, int]:
    host, port = endpoint.removeprefix("tcp://").split(":")
    return host, int(port)


@pytest.fixture
def tcp_endpoints() -> Endpoints:
    with (
        socket.create_server(("127.0.0.1", 0)) as a,
        socket.create_server(("127.0.0.1", 0)) as b,
    ):
        names = [f"tcp://127.0.0.1:{one.getsockname()[1]}" for one in (a, b)]
    return names[0], names[1]


def test_strangers_leave_nothing(start: Publish, tcp_endpoints: Endpoints) -> None:
    """And the subscriber among them misses nothing."""
    publisher = start(endpoint=tcp_endpoints[0], replay_endpoint=tcp_endpoints[1])
    honest = Subscriber(tcp_endpoints[0])
    join(publisher, honest)
    number = count(ci=80, full=3000)
    sizes: list[float] = []
    for first in [*STRANGERS.values()] * 2:
        for endpoint in tcp_endpoints:
            address = address_of(endpoint)
            peers = [socket.create_connection(address) for _ in range(number // 2)]
            for peer in peers:
                with contextlib.suppress(OSError):
                    peer.sendall(first)
            publisher.publish([AllBlocksCleared()])
            assert honest.next() is not None
            for peer in peers:
                peer.close()
        wait_until(lambda: publisher.num_connections == 1, "connections are left")
        sizes.append(resident_mib(os.getpid()))
    assert sizes[-1] - sizes[len(STRANGERS) - 1] < 5
    late = Subscriber(tcp_endpoints[0])
    join(publisher, late)
    # The kernel may hand over strangers that have left long after they came.
    wait_until(lambda: publisher.num_connections == 2, "connections are left")
    honest.close()
    late.close()
    wait_until(lambda: publisher.num_connections == 0, "connections are left")


def test_a_crowd_is_refused_and_the_first_stay(
    start: Publish, tcp_endpoints: Endpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_guard, "MAX_CONNECTIONS", 8)
    publisher = start(endpoint=tcp_endpoints[0], replay_endpoint=tcp_endpoints[1])
    honest = Subscriber(tcp_endpoints[0])
    join(publisher, honest)
    address = address_of(tcp_endpoints[0])
    crowd = [socket.create_connection(address) for _ in range(30)]
    for peer in crowd:
        with contextlib.suppress(OSError):
            peer.sendall(GREETING + READY)
        peer.setblocking(False)
    ended: set[socket.socket] = set()

    def note_ends() -> bool:
        for peer in crowd:
            with contextlib.suppress(BlockingIOError):
                try:
                    while peer.recv(4096):
                        pass
                except ConnectionError:
                    pass
                ended.add(peer)
        return len(ended) >= 30 - 7

    wait_until(note_ends, "the crowd stays")
    # The sockets end before the publisher's monitor has counted them.
    wait_until(lambda: publisher.num_connections <= 8, "the crowd is counted")
    publisher.publish([AllBlocksCleared()])
    assert honest.next() is not None
    for peer in crowd:
        peer.close()
    honest.close()


@pytest.mark.parametrize(
    ("allow", "is_allowed"),
    [
        ((), True),
        (("127.0.0.0/8",), True),
        (("10.0.0.0/8", "127.0.0.1"), True),
        (("10.0.0.0/8",), False),
        (("::1",), False),
    ],
)
def test_only_allowed_networks_connect(
    start: Publish,
    tcp_endpoints: Endpoints,
    allow: tuple[str, ...],
    is_allowed: bool,
) -> None:
    port = address_of(tcp_endpoints[0])[1]
    publisher = start(endpoint=f"tcp://*:{port}", replay_endpoint=None, allow=allow)
    subscriber = Subscriber(tcp_endpoints[0])
    if is_allowed:
        join(publisher, subscriber)
    else:
        for _ in range(5):
            publisher.publish([AllBlocksCleared()])
            assert subscriber.next(timeout_ms=50) is None
    subscriber.close()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
