"""A fault in a stock vLLM in this process, read from the pages of its own server:
`vllm_page.py`. Prints what they answer as a line of JSON."""

from __future__ import annotations

import asyncio
import json
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.testclient import TestClient

from kv_canary.engines.vllm.page import CanaryEndpoint
from kv_canary.faults.vllm.host import VllmHost, write_model
from kv_canary.faults.vllm.planters import run_fault

LOCAL = "http://127.0.0.1:8000"


class Engine:
    """Calls workers as vLLM's client does."""

    def __init__(self, host: VllmHost) -> None:
        self._executor = host.core.model_executor

    async def collective_rpc(self, method: str, timeout: float) -> list[Any]:
        found: list[Any] = self._executor.collective_rpc(method, timeout)
        return found


def client_of(host: VllmHost, keys: list[str] | None, peer: str) -> TestClient:
    app, endpoint = FastAPI(), CanaryEndpoint()
    endpoint.attach_router(app)
    given = Namespace(api_key=keys)
    asyncio.run(endpoint.init_state(Engine(host), app.state, given))
    return TestClient(app, base_url=LOCAL, client=(peer, 1))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        host = VllmHost(write_model(Path(folder), "plain"))
        outcome = run_fault(host, "overwritten block", 0)
    client = client_of(host, None, "127.0.0.1")
    (rank,) = client.get("/kv_canary/report").json()["ranks"]
    number = rank["incidents"][-1]["number"]
    keyed = client_of(host, ["secret"], "10.0.0.7")
    print(
        json.dumps(
            {
                "due": sorted(outcome.due)[0],
                "named": outcome.named,
                "rank": {k: v for k, v in rank.items() if k != "incidents"},
                "explained": client.get(f"/kv_canary/explain/0/{number}").text,
                "absent": client.get("/kv_canary/explain/0/999").status_code,
                "page": client.get("/kv_canary").text,
                "script": client.get("/kv_canary/page.js").status_code,
                "policy": client.get("/kv_canary").headers["content-security-policy"],
                "elsewhere": client_of(host, None, "10.0.0.7")
                .get("/kv_canary/report")
                .status_code,
                "without a key": keyed.get("/kv_canary/report").status_code,
                "with a key": keyed.get(
                    "/kv_canary/report", headers={"Authorization": "Bearer secret"}
                ).status_code,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
