"""SGLang's model gateway in front of replicas: routing by prefix, faults, restarts.

The gateway is the one of the registry, as it is installed. With whole counts; skipped
where it is not installed (`make fleet-venv`).
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest

from sglang.srt.entrypoints.exit_codes import ExitCode
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fleet_gateway import Gateway, Replica, python_with, wait_until
from sglang.test.fleet_traffic import PLANTED, Answer, Ask, run_asks

register_cpu_ci(est_time=300, suite="fleet")

# Twelve of the 25 prefixes fit: one replica cannot hold all, the fleet can.
FLAGS = (
    *("--kv-canary", "raise", "--enable-cache-report"),
    *("--max-total-tokens", "6144", "--drain-timeout", "60"),
)
# SGLang's gateway, and what has become of it.
GATEWAYS = ("sglang_router", "smg")
# By default prefixes stay where they are while a replica has less than 64 requests more
# than another: one that is back would get none.
BALANCED = ("--balance-abs-threshold", "4", "--balance-rel-threshold", "1.2")
LIMIT_SECONDS = 120.0
# Where nothing fails, a busy machine may keep a check waiting.
PATIENT = ("--health-check-timeout-secs", "30")


@pytest.fixture(scope="module", params=[2, 4])
def replicas(request: pytest.FixtureRequest) -> Iterator[list[Replica]]:
    python_with(GATEWAYS[0])
    started = [Replica(FLAGS) for _ in range(request.param)]
    try:
        for replica in started:
            replica.wait_ready()
        yield started
    finally:
        for replica in started:
            replica.server.stop()


def test_prefix_aware_routing_finds_more_in_the_caches(
    replicas: list[Replica], asks: list[Ask], expected: Sequence[Answer | None]
) -> None:
    rates = {}
    for policy in ("round_robin", "cache_aware"):
        for replica in replicas:
            replica.flush_cache()
        with closing(_gateway("sglang_router", replicas, policy, *PATIENT)) as gateway:
            report = run_asks(gateway.url, asks, expected=expected)
            for replica in replicas:
                assert replica.server.process.poll() is None, replica.server.log()
            assert not gateway.warnings(), gateway.warnings()[:5]
        report.check()
        assert not report.retries and not report.cut, report
        rates[policy] = report.hit_rate
        _record(f"gateway {policy}", replicas, report.as_row())
    assert rates["cache_aware"] > rates["round_robin"]


@pytest.mark.parametrize("module", GATEWAYS)
def test_clients_do_not_notice_a_replica_that_dies_or_is_stopped(
    replicas: list[Replica],
    asks: list[Ask],
    expected: Sequence[Answer | None],
    module: str,
) -> None:
    seconds: dict[str, float] = {}
    killed, planted = replicas[0], replicas[1]
    with closing(_gateway(module, replicas, "cache_aware", *BALANCED)) as gateway:

        def wait_out(replica: Replica, name: str) -> None:
            seconds[f"{name}: out"] = wait_until(
                lambda: replica.url not in gateway.in_rotation(), LIMIT_SECONDS, name
            )

        def restart(
            replica: Replica, name: str, environment: dict[str, str] | None = None
        ) -> None:
            replica.restart(environment)
            seconds[f"{name}: back"] = wait_until(
                lambda: replica.url in gateway.in_rotation(), LIMIT_SECONDS, name
            )

        def script() -> None:
            killed.server.process.kill()
            wait_out(killed, "killed")
            assert killed.server.wait_exit() == -signal.SIGKILL
            restart(killed, "killed")
            wait_until(lambda: killed.num_requests() > 0, LIMIT_SECONDS, "idle")

            planted.server.signal(signal.SIGTERM)
            wait_out(planted, "drained")
            assert planted.server.wait_exit(LIMIT_SECONDS) == ExitCode.DRAINED, (
                planted.server.log()
            )
            restart(planted, "drained", PLANTED)
            assert planted.server.wait_exit(LIMIT_SECONDS) == ExitCode.FAILURE
            wait_out(planted, "stopped")
            assert "kv_canary violation" in planted.server.log()
            restart(planted, "stopped")
            wait_until(lambda: planted.num_requests() > 0, LIMIT_SECONDS, "idle")

        report = run_asks(gateway.url, asks, expected=expected, during=script)
    report.check()
    # Only a stream that has begun cannot be sent to another replica.
    assert not report.retries, report
    rounded = {name: round(value, 2) for name, value in seconds.items()}
    _record(f"{module} faults", replicas, {**report.as_row(), **rounded})


def _gateway(
    module: str, replicas: Sequence[Replica], policy: str, *flags: str
) -> Gateway:
    urls = [replica.url for replica in replicas]
    return Gateway(python_with(module), module, urls, policy=policy, flags=flags)


def _record(name: str, replicas: Sequence[Replica], row: dict[str, object]) -> None:
    """Print a line for the table in docs/fleet.md."""
    print(json.dumps({"run": name, "replicas": len(replicas), **row}))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
