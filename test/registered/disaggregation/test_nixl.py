"""Two engines over NIXL, where it is installed: the extra `nixl`."""

from __future__ import annotations

import random
import signal
import socket
import struct
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest
import torch

from sglang.srt.arg_groups.tiers_hook import NIXL_MODULES
from sglang.srt.disaggregation import nixl_transport
from sglang.srt.disaggregation.link import Pace
from sglang.srt.disaggregation.messages import (
    PROTOCOL,
    EngineIdentity,
    Unit,
    Welcome,
    encode,
)
from sglang.srt.disaggregation.nixl_transport import NixlInlet
from sglang.srt.disaggregation.receiver import Receiver
from sglang.srt.disaggregation.transfer import Address
from sglang.srt.kv_tiers.landing import LandingMemory
from sglang.srt.kv_tiers.unit import SlotTensor, UnitLayout
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.engine_pairs import engine_pair, serve_random
from sglang.test.scale import count, sampled
from sglang.test.tier_traffic import KINDS, VOCAB, tiers_of

register_cpu_ci(est_time=1, suite="cpu", full_time=300)
register_cuda_ci(est_time=60, suite="cuda")

IDENTITY = EngineIdentity(protocol=PROTOCOL)

pytestmark = pytest.mark.skipif(
    not any(find_spec(module) for module in NIXL_MODULES),
    reason="NIXL is not installed: pip install 'sglang-canary[nixl]'",
)


@pytest.mark.parametrize(
    "kind", sampled(KINDS, key=lambda kind: "any kind", ci=1), ids=str
)
def test_random_requests(tmp_path, kind):
    with engine_pair(tmp_path, kind, backend="nixl", kv_canary="raise") as pair:
        serve_random(pair, kind, total=count(ci=30, full=1000), seed=3)


def test_units_that_were_replaced_while_they_were_read_are_noticed(tmp_path):
    """The sender announces one unit and lets the receiver read another one."""
    rng = random.Random(5)
    prompts = [[rng.randrange(VOCAB) for _ in range(5 * 64 + 2)] for _ in range(2)]
    with engine_pair(tmp_path, "plain", backend="nixl", kv_canary="none") as pair:
        outlet = pair.sender._outlet
        send, sent = outlet.send, []

        def send_other(link, unit, data, on_sent):
            sent.append(data)
            other = sent[1] if len(sent) > 5 and unit.position == 2 else data
            send(link, unit, other, on_sent)

        outlet.send = send_other
        for prompt in prompts:
            pair.generate(prompt, max_new_tokens=4, ignore_eos=True)
        incidents = pair.scheduler.own_incidents()
        assert tiers_of(pair.decode).stats.loaded == (5 + 2) * 64, incidents
        pair.settle()


SENDER = """
import sys
import torch
from sglang.srt.disaggregation.nixl_transport import NixlOutlet
memory = torch.ones({size}, dtype=torch.uint8)
outlet = NixlOutlet([memory])
print(outlet.describe().hex(), memory.data_ptr(), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    "end",
    sampled([signal.SIGSTOP, signal.SIGKILL], key=lambda end: "any end", ci=1),
    ids=str,
)
def test_memory_is_out_of_use_while_a_read_has_not_ended(monkeypatch, end):
    """A sender is stopped, or dies, in the middle of a read. A stopped one may go on,
    and then the rest of the read is written: to memory of nobody else."""
    # Over shared memory a read is over at once. NIXL wants copies of a GPU's memory.
    has_gpu = torch.cuda.is_available()
    monkeypatch.setenv("UCX_TLS", "tcp,cuda_copy" if has_gpu else "tcp")
    monkeypatch.setattr(nixl_transport, "_READ_SECONDS", 1.0)
    layout = UnitLayout(4, (SlotTensor("k", torch.zeros(1, 4, 1 << 23)),))
    size = layout.bytes_per_unit
    landing = LandingMemory(3 * size, is_pinned=False)
    receiver = Receiver(
        IDENTITY,
        rank=0,
        inlet=NixlInlet(landing.memory),
        landing=landing,
        layouts=[layout],
        pace=Pace(beat=0.2, silence=20.0),
    )
    key = b"k" * 16
    sender = subprocess.Popen(
        [sys.executable, "-c", SENDER.format(size=size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert sender.stdout is not None
    words: list[str] = []
    while len(words) != 2:  # NIXL itself prints, too.
        words = sender.stdout.readline().split()
    description, address = words
    unit = Unit(
        transfer=1,
        number=1,
        group=0,
        position=0,
        key=key,
        size=size,
        seal=b"",
        address=int(address),
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        peer = Address("127.0.0.1", server.getsockname()[1])
        transfer = receiver.begin(peer, room=1, first=0, keys=[key], counts=[])
        assert transfer is not None
        connection, _ = server.accept()
        with connection:
            for message in (Welcome(transport=bytes.fromhex(description)), unit):
                body = encode(message)
                connection.sendall(struct.pack("<I", len(body)) + body)
            wait_until(lambda: landing.memory[: size // 32].any())
            sender.send_signal(end)
            wait_until(lambda: transfer.ended is not None)
        transfer.release()
        assert not transfer.arrived
        if end == signal.SIGSTOP:
            assert not landing.is_whole
            assert not landing.memory[size - 8 : size].any()
            sender.send_signal(signal.SIGCONT)
        wait_until(lambda: landing.is_whole)
        if end == signal.SIGSTOP:
            assert landing.memory[:size].all()
    assert not landing.memory[size:].any()
    sender.kill()
    sender.wait()


def wait_until(is_true) -> None:
    until = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < until
        time.sleep(0.005)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
