"""Two prefill and two decode engines behind SGLang's model gateway: kills, stops and
partitions under load.

With whole counts; skipped where no gateway is installed (`make fleet-venv`).
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.engine_pairs import Frame, Wire
from sglang.test.fleet_gateway import (
    Gateway,
    Replica,
    free_port,
    python_with,
    wait_until,
)
from sglang.test.fleet_traffic import Answer, Ask, run_asks

register_cpu_ci(est_time=400, suite="fleet")

FLAGS = (
    *("--kv-canary", "raise", "--enable-cache-report"),
    *("--max-total-tokens", "6144", "--drain-timeout", "60"),
    *("--disaggregation-transfer-backend", "tcp"),
)
GATEWAYS = ("sglang_router", "smg")
LIMIT_SECONDS = 120.0
REQUESTS = 200
# Longer than the silence after which an engine is given up.
PARTITION_SECONDS = 15.0
# Requests to a stopped engine are repeated after this.
TIMEOUT_FLAGS = ("--request-timeout-secs", "20")
# Health checks alone decide which engines are used. A breaker also opens for an engine
# whose partner has died.
NO_BREAKER = ("--disable-circuit-breaker",)
# By default an answer that fails stays with the engine until the next check.
SPREAD = ("--prefill-policy", "round_robin", "--decode-policy", "round_robin")


class Fleet:
    """The engines, and a wire that can be cut before each prefill engine."""

    def __init__(self, stack: ExitStack) -> None:
        self.is_cut = [False, False]
        self.prefill: list[Replica] = []
        self.wires: list[Wire] = []
        for number in range(2):
            port = free_port()
            role = ("--disaggregation-mode", "prefill")
            at = ("--disaggregation-bootstrap-port", str(port))
            self.prefill.append(Replica([*FLAGS, *role, *at]))
            self.wires.append(Wire(port, tamper=self._tamper(number)))
        self.decode = [
            Replica([*FLAGS, "--disaggregation-mode", "decode"]) for _ in range(2)
        ]
        for wire in self.wires:
            stack.callback(wire.close)
        for replica in self.every:
            stack.callback(lambda one=replica: one.server.stop())
        for replica in self.every:
            replica.wait_ready()

    def _tamper(self, number: int) -> Callable[[Frame], list[Frame]]:
        def hold(frame: Frame) -> list[Frame]:
            # A partition delays what was sent; nothing in between gets lost.
            while self.is_cut[number]:
                time.sleep(0.05)
            return [frame]

        return hold

    @property
    def every(self) -> list[Replica]:
        return [*self.prefill, *self.decode]

    @property
    def worker_flags(self) -> list[str]:
        flags = ["--pd-disaggregation"]
        for replica, wire in zip(self.prefill, self.wires, strict=True):
            flags += ["--prefill", replica.url, str(wire.port)]
        for replica in self.decode:
            flags += ["--decode", replica.url]
        return flags

    def received_bytes(self) -> int:
        return sum(
            replica.internal_state()["kv_transfer_received_bytes_total"]
            for replica in self.decode
        )


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    python_with(*GATEWAYS)
    with ExitStack() as stack:
        yield Fleet(stack)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("module", GATEWAYS)
def test_clients_get_right_answers_whatever_happens(
    fleet: Fleet,
    asks: list[Ask],
    expected: Sequence[Answer | None],
    module: str,
) -> None:
    urls = [replica.url for replica in fleet.every]
    gateway = Gateway(
        python_with(module),
        module,
        urls,
        policy="round_robin",
        flags=(*SPREAD, *TIMEOUT_FLAGS, *NO_BREAKER),
        workers=fleet.worker_flags,
    )
    asks, expected = asks[:REQUESTS], expected[:REQUESTS]
    with closing(gateway):
        quiet = run_asks(gateway.url, asks, expected=expected)
        quiet.check()
        assert not quiet.retries and not quiet.cut, quiet
        assert fleet.received_bytes() > 0
        _record(f"{module} quiet", quiet.as_row())
        seconds: dict[str, float] = {}

        def wait_back(replica: Replica, name: str) -> None:
            seconds[f"{name}: back"] = wait_until(
                lambda: replica.url in gateway.in_rotation(), LIMIT_SECONDS, name
            )
            before = replica.num_requests()
            wait_until(lambda: replica.num_requests() > before, LIMIT_SECONDS, name)

        def wait_out(replica: Replica, name: str) -> None:
            seconds[f"{name}: out"] = wait_until(
                lambda: replica.url not in gateway.in_rotation(), LIMIT_SECONDS, name
            )

        def script() -> None:
            for name, replica in (
                ("prefill", fleet.prefill[0]),
                ("decode", fleet.decode[0]),
            ):
                replica.server.process.kill()
                wait_out(replica, f"{name} killed")
                assert replica.server.wait_exit() == -signal.SIGKILL
                replica.restart()
                wait_back(replica, f"{name} killed")
            for name, replica in (
                ("prefill", fleet.prefill[1]),
                ("decode", fleet.decode[1]),
            ):
                replica.server.signal(signal.SIGSTOP)
                wait_out(replica, f"{name} stopped")
                replica.server.signal(signal.SIGCONT)
                wait_back(replica, f"{name} stopped")
            fleet.is_cut[0] = True
            time.sleep(PARTITION_SECONDS)
            fleet.is_cut[0] = False

        report = run_asks(gateway.url, asks, expected=expected, during=script)
    rounded = {name: round(value, 2) for name, value in seconds.items()}
    _record(f"{module} faults", {**report.as_row(), **rounded})
    report.check()
    for replica in fleet.every:
        stats = replica.internal_state()
        assert stats["num_running_reqs"] == stats["num_queue_reqs"] == 0, stats


def _record(name: str, row: dict[str, object]) -> None:
    """Print a line for the table in docs/fleet.md."""
    print(json.dumps({"run": name, **row}))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
