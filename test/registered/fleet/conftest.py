"""Requests for fleets, and the answers that must come."""

from __future__ import annotations

import pytest

from sglang.test.fleet_gateway import Replica, python_with
from sglang.test.fleet_traffic import Answer, Ask, run_asks, shared_prefix_asks

REQUESTS, GROUPS = 500, 25


@pytest.fixture(scope="session")
def asks() -> list[Ask]:
    return shared_prefix_asks(REQUESTS, groups=GROUPS)


@pytest.fixture(scope="session")
def expected(asks: list[Ask]) -> list[Answer | None]:
    """Answers of one server, without the canary and without a router."""
    python_with("sglang_router", "ray")
    server = Replica(["--enable-cache-report"])
    try:
        report = run_asks(server.wait_ready().url, asks)
    finally:
        server.server.stop()
    report.check()
    return report.answers
