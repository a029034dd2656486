"""Replicas under Ray Serve: routing by prefix, faults, replacements, refusals.

With whole counts; skipped where Ray is not installed (`make fleet-venv`).
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import closing

import httpx
import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fleet_gateway import wait_until
from sglang.test.fleet_serve import ENGINE as DEPLOYMENT
from sglang.test.fleet_serve import PREFILL, RayServe
from sglang.test.fleet_traffic import PLANTED, Answer, Ask, run_asks

register_cpu_ci(est_time=900, suite="fleet")

# Twelve of the 25 prefixes fit: one replica cannot hold all, the fleet can.
ENGINE = {
    "kv_canary": "raise",
    "enable_cache_report": "true",
    "max_total_tokens": "6144",
    "health_check_period_s": "0.5",
}
LIMIT_SECONDS = 240.0
PAIRED_REQUESTS = 200


@pytest.fixture(scope="module")
def ray_serve() -> Iterator[RayServe]:
    with closing(RayServe(num_cpus=4)) as running:
        yield running


@pytest.mark.parametrize("routing", ["load", "prefix"])
@pytest.mark.parametrize("count", [2, 4])
def test_clients_get_right_answers_whatever_happens_to_a_replica(
    ray_serve: RayServe,
    asks: list[Ask],
    expected: Sequence[Answer | None],
    count: int,
    routing: str,
) -> None:
    deployed = ray_serve.deploy(**ENGINE, num_replicas=str(count), routing=routing)
    assert deployed == {"RUNNING": count}, deployed
    quiet = run_asks(ray_serve.url, asks, expected=expected)
    quiet.check()
    assert not quiet.retries and not quiet.cut, quiet
    _record(f"ray {routing}", count, quiet.as_row())

    seconds: dict[str, float] = {}
    moments: list[float] = []

    def wait_back(before: set[int], name: str) -> set[int]:
        """Wait for the replica that takes the place of one of `before`."""

        def is_back() -> bool:
            new = ray_serve.replica_pids() - before
            return bool(new) and ray_serve.num_running() == count

        seconds[f"{name}: back"] = wait_until(is_back, LIMIT_SECONDS, name)
        return ray_serve.replica_pids() - before

    def script() -> None:
        before = ray_serve.replica_pids()
        assert len(before) == count
        ray_serve.plant(PLANTED)
        moments.append(time.monotonic())
        os.kill(min(before), signal.SIGKILL)
        (planted,) = wait_back(before, "killed")
        moments.append(time.monotonic())
        wait_until(
            lambda: planted not in ray_serve.replica_pids(), LIMIT_SECONDS, "planted"
        )
        wait_back(before | {planted}, "stopped")

    report = run_asks(ray_serve.url, asks, expected=expected, during=script)
    report.check()
    assert any("kv_canary violation" in line for line in ray_serve.lines)
    killed, back = moments
    after_kill = [at - killed for at in report.failed_at if at < back]
    after_stop = [at for at in report.failed_at if at >= back]
    seconds["killed: failures until"] = max(after_kill, default=0.0)
    seconds["stopped: failures for"] = max(after_stop, default=0) - min(
        after_stop, default=0
    )
    if routing == "prefix":
        # The front asks another replica; only a stream that has begun cannot go on.
        assert not report.retries, report
    rounded = {name: round(value, 2) for name, value in seconds.items()}
    _record(f"ray {routing} faults", count, {**report.as_row(), **rounded})


@pytest.mark.timeout(900)
@pytest.mark.parametrize("routing", ["load", "prefix"])
def test_prompts_come_from_other_replicas_whatever_happens_to_them(
    ray_serve: RayServe,
    asks: list[Ask],
    expected: Sequence[Answer | None],
    routing: str,
) -> None:
    deployed = ray_serve.deploy(
        **ENGINE,
        num_replicas="2",
        prefill_replicas="2",
        prefill_args=json.dumps({"chunked_prefill_size": 256}),
        disaggregation_transfer_backend="tcp",
        routing=routing,
    )
    assert deployed == {"RUNNING": 2}, deployed
    asks, expected = asks[:PAIRED_REQUESTS], expected[:PAIRED_REQUESTS]
    quiet = run_asks(ray_serve.url, asks, expected=expected)
    quiet.check()
    assert not quiet.retries and not quiet.cut, quiet
    _record(f"ray pairs, {routing}", 4, quiet.as_row())
    url = ray_serve.url + "/server_info"
    state = httpx.get(url, trust_env=False, timeout=60).json()["internal_states"][0]
    assert state["kv_transfer_received_bytes_total"] > 0
    seconds: dict[str, float] = {}

    def replace_one(name: str) -> None:
        before = ray_serve.replica_pids(name)
        assert len(before) == 2
        os.kill(min(before), signal.SIGKILL)

        def is_back() -> bool:
            new = ray_serve.replica_pids(name) - before
            return len(new) == 1 and ray_serve.num_running(name) == 2

        seconds[f"{name} killed: back"] = wait_until(is_back, LIMIT_SECONDS, name)

    def script() -> None:
        for name in (PREFILL, DEPLOYMENT):
            replace_one(name)

    report = run_asks(ray_serve.url, asks, expected=expected, during=script)
    report.check()
    # Only a stream of the decode replica that has begun cannot go on.
    assert not report.retries, report
    rounded = {name: round(value, 2) for name, value in seconds.items()}
    _record(f"ray pairs, {routing}: faults", 4, {**report.as_row(), **rounded})


def test_autoscaling_adds_replicas_under_load(
    ray_serve: RayServe, asks: list[Ask], expected: Sequence[Answer | None]
) -> None:
    deployed = ray_serve.deploy(
        **ENGINE, min_replicas="1", max_replicas="2", target_ongoing_requests="2"
    )
    assert deployed == {"RUNNING": 1}, deployed

    def until_scaled() -> None:
        wait_until(lambda: ray_serve.num_running() == 2, LIMIT_SECONDS, "scaled")

    report = run_asks(
        ray_serve.url, asks[:50], expected=expected[:50], during=until_scaled
    )
    report.check()
    assert not report.retries and not report.cut, report


def test_a_client_that_leaves_frees_its_place(ray_serve: RayServe) -> None:
    assert ray_serve.deploy(**ENGINE, routing="prefix") == {"RUNNING": 1}
    params = {"max_new_tokens": 1500, "temperature": 0, "ignore_eos": True}
    body = {"text": "def main(", "sampling_params": params, "stream": True}
    with httpx.Client(base_url=ray_serve.url, timeout=60, trust_env=False) as client:
        with client.stream("POST", "/generate", json=body) as response:
            next(response.iter_lines())
        wait_until(
            lambda: client.get("/server_info").json()["num_in_flight"] == 0,
            60,
            "the request goes on",
        )
        stats = client.get("/server_info").json()["internal_states"][0]
    assert stats["num_aborted_requests_total"] == 1, stats


def test_a_replica_that_dies_while_starting_tells_why(ray_serve: RayServe) -> None:
    answer = ray_serve.deploy(model_path="/does/not/exist")
    assert "error" in answer
    told = [line for line in ray_serve.lines if "the replica did not start" in line]
    assert any("/does/not/exist" in line for line in told), ray_serve.lines[-20:]


def test_gpus_that_are_not_there_are_refused_at_once(ray_serve: RayServe) -> None:
    error = ray_serve.deploy(device="cuda", tp_size="2")["error"]
    assert "1 replica(s) of 2 GPU(s) each do not fit" in error
    assert "device=cpu" in error and "\n" not in error


def _record(name: str, replicas: int, row: dict[str, object]) -> None:
    """Print a line for the table in docs/fleet.md."""
    print(json.dumps({"run": name, "replicas": replicas, **row}))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
