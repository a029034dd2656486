"""Landing memory, handshakes, and peers that send anything."""

from __future__ import annotations

import random
import socket
import struct
import time
from contextlib import closing, suppress

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from sglang.srt.disaggregation.link import Pace
from sglang.srt.disaggregation.listener import MAX_ASKS, MAX_KEYS, Listener
from sglang.srt.disaggregation.messages import (
    PROTOCOL,
    Ask,
    Beat,
    Cancel,
    End,
    EndReason,
    EngineIdentity,
    Hello,
    Refusal,
    Taken,
    Unit,
    Welcome,
    decode_to_receiver,
    encode,
    mismatch,
)
from sglang.srt.disaggregation.receiver import Receiver
from sglang.srt.disaggregation.transfer import Address
from sglang.srt.disaggregation.transport import TcpInlet
from sglang.srt.kv_tiers.landing import LandingMemory
from sglang.srt.kv_tiers.unit import SlotTensor, UnitLayout
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count

register_cpu_ci(est_time=6, suite="cpu", full_time=300)

HOST = "127.0.0.1"
PACE = Pace(beat=0.2, silence=2.0)
IDENTITY = EngineIdentity(
    protocol=PROTOCOL,
    model="m",
    loading="quantization None",
    dtype="float32",
    kv_dtype="float32",
    unit_tokens=64,
    tp_size=1,
    kv_canary="on",
    layout="l",
    transport="tcp",
)
LAYOUT = UnitLayout(4, (SlotTensor("k", torch.zeros(1, 8, 2)),))
SIZE = LAYOUT.bytes_per_unit
KEYS = [bytes([number]) * 16 for number in range(6)]


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_landing_memory_lends_every_byte_once(data):
    memory = LandingMemory(64 * 20, is_pinned=False)
    lent = []
    for _ in range(data.draw(st.integers(1, 30))):
        if lent and data.draw(st.booleans()):
            memory.give(lent.pop(data.draw(st.integers(0, len(lent) - 1))))
            continue
        taken = memory.take(data.draw(st.integers(1, 400)))
        free = memory.size - sum(end - begin for begin, end in lent)
        if taken is None:
            assert free < 400 or len(lent) > 0
            continue
        begin, end = taken
        assert 0 <= begin < end <= memory.size
        assert all(end <= other or begin >= stop for other, stop in lent)
        lent.append(taken)
        assert memory.free_bytes == memory.size - sum(e - b for b, e in lent)
    for taken in lent:
        memory.give(taken)
    assert memory.is_whole
    # What was given back in pieces is whole again.
    assert memory.take(memory.size) is not None


def test_memory_that_is_free_is_not_given_back():
    memory = LandingMemory(640, is_pinned=False)
    taken, other = memory.take(128), memory.take(128)
    assert taken and other
    memory.give(taken)
    with pytest.raises(RuntimeError, match="free already"):
        memory.give(taken)


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("model", "n", "weights"),
        ("dtype", "bfloat16", "--dtype"),
        ("unit_tokens", 96, "--page-size, tokens of a unit: 96 there, 64 here"),
        ("loading", "quantization fp8", "quantization fp8 there, quantization None"),
        ("kv_dtype", "float8_e5m2", "--kv-cache-dtype"),
        ("draft_pools", 1, "--speculative-algorithm, pools of drafts: 1 there, 0 here"),
        ("layout", "other", "the layout of units differs"),
        ("tp_size", 2, "--tp-size"),
        ("kv_canary", "off", "--kv-canary"),
        ("transport", "nixl", "--disaggregation-transfer-backend"),
        ("protocol", 99, "protocol"),
    ],
)
def test_engine_of_another_kind_is_refused_by_name(field, value, word, caplog):
    other = structs.replace(IDENTITY, **{field: value})
    assert mismatch(IDENTITY, IDENTITY) is None
    assert word in (mismatch(IDENTITY, other) or "")
    with closing(open_listener()) as listener:
        receiver = open_receiver(other)
        transfer = begin(receiver, port_of(listener))
        wait_for(lambda: transfer.ended is not None)
        assert word in transfer.ended
        assert not transfer.is_broken
        transfer.release()
        assert receiver.landing.is_whole


def test_only_what_explains_the_layout_is_named():
    other = structs.replace(IDENTITY, tp_size=2, layout="other")
    assert mismatch(IDENTITY, other) == "--tp-size 2 there, 1 here"


def test_engine_of_another_protocol_is_refused_by_name():
    """Whatever else it says of itself."""
    identity = {"protocol": PROTOCOL + 1, "something": "new"}
    hello = {"type": "hello", "identity": identity, "rank": 0, "more": [1]}
    with (
        closing(open_listener()) as listener,
        socket.create_connection((HOST, port_of(listener))) as connection,
    ):
        connection.sendall(framed(msgspec.msgpack.encode(hello)))
        (length,) = struct.unpack("<I", connection.recv(4, socket.MSG_WAITALL))
        answer = decode_to_receiver(connection.recv(length, socket.MSG_WAITALL))
    assert isinstance(answer, Refusal)
    assert f"protocol {PROTOCOL + 1} there, {PROTOCOL} here" in answer.reason


def open_listener() -> Listener:
    server = socket.create_server((HOST, 0))
    port = server.getsockname()[1]
    return Listener(server, IDENTITY, rank=0, ports=[port], description=b"", pace=PACE)


def port_of(listener: Listener) -> int:
    port: int = listener._ports[0]
    return port


def open_receiver(identity: EngineIdentity = IDENTITY) -> Receiver:
    return Receiver(
        identity,
        rank=0,
        inlet=TcpInlet(),
        landing=LandingMemory(SIZE * 32, is_pinned=False),
        layouts=[LAYOUT],
        pace=PACE,
    )


def begin(receiver: Receiver, port: int):
    address = Address(HOST, port)
    transfer = receiver.begin(address, room=7, first=2, keys=KEYS, counts=[])
    assert transfer is not None
    return transfer


def wait_for(is_true) -> None:
    until = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < until
        time.sleep(0.001)


# -- anything on the wire ----------------------------------------------------------


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def unit(rng: random.Random, **changes) -> bytes:
    """Return a unit as it travels, with a valid or a changed head."""
    index = rng.randrange(len(KEYS))
    payload = rng.randbytes(SIZE)
    fields = {
        "transfer": 1,
        "number": index,
        "group": 0,
        "position": 2 + index,
        "key": KEYS[index],
        "size": SIZE,
        "seal": LAYOUT.seal(torch.frombuffer(bytearray(payload), dtype=torch.uint8)),
        **changes,
    }
    return framed(encode(Unit(**fields))) + payload


def anything(rng: random.Random) -> bytes:
    """Return bytes that a broken or hostile sender might send."""
    good = unit(rng)
    return rng.choice(
        [
            lambda: good,
            lambda: unit(rng, group=rng.choice((-1, 1, 1 << 40))),
            lambda: unit(rng, position=rng.choice((-1, 0, 8, 1 << 60))),
            lambda: unit(rng, transfer=rng.choice((0, 2, -5))),
            lambda: unit(rng, size=rng.choice((0, SIZE - 1, SIZE + 1))),
            lambda: unit(rng, key=rng.randbytes(rng.randrange(20))),
            lambda: unit(rng, seal=rng.randbytes(16)),
            lambda: framed(encode(End(transfer=1, reason=EndReason.COMPLETE))),
            lambda: framed(encode(Beat())),
            lambda: framed(encode(Welcome())),
            lambda: framed(encode(Taken(number=1))),
            lambda: framed(rng.randbytes(rng.randrange(64))),
            lambda: rng.randbytes(rng.randrange(1, 32)),
            lambda: struct.pack("<I", rng.choice(((1 << 22) + 1, 0xFFFFFFFF))),
            lambda: good[: rng.randrange(len(good))],
        ]
    )()


def test_hostile_senders_write_only_where_they_may():
    for seed in range(count(ci=100, full=20_000)):
        meet_hostile_sender(seed)


def meet_hostile_sender(seed):
    rng = random.Random(seed)
    receiver = open_receiver()
    fence = receiver.landing.take(64)
    with socket.create_server((HOST, 0)) as server:
        transfer = begin(receiver, server.getsockname()[1])
        connection, _ = server.accept()
        with connection:
            connection.sendall(framed(encode(Welcome())))
            for _ in range(rng.randrange(1, 6)):
                try:
                    connection.sendall(anything(rng))
                except OSError:
                    break
        wait_for(lambda: transfer.ended is not None and transfer._is_quiet)
    for (group, key), memory in transfer.arrived.items():
        assert (group, key) in {(0, own) for own in KEYS}
        assert memory.numel() == SIZE
    begin_at = transfer.place.end
    assert not receiver.landing.memory[begin_at:].any()
    transfer.release()
    assert fence is not None
    receiver.landing.give(fence)
    assert receiver.landing.is_whole


def test_open_questions_are_bounded():
    """Those that were answered do not count."""
    hello = framed(encode(Hello(identity=IDENTITY, rank=0)))
    short = framed(encode(Ask(transfer=1, room=1, first=0, keys=[])))
    most = MAX_KEYS // 8 + 1
    long = framed(encode(Ask(transfer=1, room=1, first=0, keys=[KEYS[0]] * most)))
    with closing(open_listener()) as listener:
        for ask, fit in ((short, MAX_ASKS), (long, 7)):
            with socket.create_connection((HOST, port_of(listener))) as connection:
                connection.sendall(hello + ask * fit)
                for _ in range(fit):
                    link, message = listener.heard.get(timeout=20)
                    assert isinstance(message, Ask)
                    listener.on_end(link, message)
                connection.sendall(ask * (fit + 1))
                for _ in range(fit):
                    assert isinstance(listener.heard.get(timeout=20).message, Ask)
                assert listener.heard.get(timeout=20).message is None


def test_hostile_decode_engines_are_let_go():
    for seed in range(count(ci=60, full=5_000)):
        meet_hostile_decode_engine(seed)


def meet_hostile_decode_engine(seed):
    rng = random.Random(seed)
    bad = [
        b"",
        rng.randbytes(rng.randrange(1, 40)),
        framed(rng.randbytes(rng.randrange(64))),
        struct.pack("<I", 0xFFFFFFFF),
        framed(encode(Ask(transfer=1, room=1, first=-1, keys=[]))),
        framed(encode(Ask(transfer=1, room=1, first=0, keys=[b"short"]))),
        framed(encode(Welcome())),
    ]
    with closing(open_listener()) as listener:
        with socket.create_connection((HOST, port_of(listener))) as connection:
            if rng.random() < 0.7:
                hello = Hello(identity=IDENTITY, rank=0)
                connection.sendall(framed(encode(hello)))
                if rng.random() < 0.5:
                    connection.sendall(framed(encode(Cancel(transfer=5))))
            with suppress(OSError):  # It may have hung up already.
                connection.sendall(rng.choice(bad))
                connection.shutdown(socket.SHUT_WR)
            wait_for(lambda: not listener.num_links)
        heard = []
        wait_for(
            lambda: heard.append(listener.heard.get()) or heard[-1].message is None
        )
        assert all(not isinstance(one.message, Ask) for one in heard)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
