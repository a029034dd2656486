"""`/` for browsers and for others: who gets the page, and that it holds nothing."""

from __future__ import annotations

import asyncio
import re

import httpx
import pytest
from manager_world import Wire

from sglang.srt.entrypoints.front import Front
from sglang.srt.entrypoints.http_server import create_app
from sglang.srt.utils.paths import page_folders
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="cpu")

KEY = "the-key"
NAME = "private-name"
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


def fetch(path: str, *, key: str | None = None, **headers: str) -> httpx.Response:
    """GET `path` from a server that asks for a key."""
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"

    async def work() -> httpx.Response:
        manager = Wire(api_key=KEY).manager
        front = Front(server_args=manager.server_args, manager=manager, model_name=NAME)
        transport = httpx.ASGITransport(app=create_app(front))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://x", headers=headers
        ) as http:
            return await http.get(path)

    return asyncio.run(work())


def test_a_browser_gets_the_page_without_a_key() -> None:
    page = fetch("/", accept=BROWSER)
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["vary"] == "Accept"
    assert page.headers["content-security-policy"].startswith("default-src 'self';")
    texts = [page.text]
    assets = re.findall(r'(?:src|href)="(chat/assets/[^"]+)"', page.text)
    assert len(assets) >= 4
    files = {file.name for folder in page_folders("chat") for file in folder.iterdir()}
    for name in files | {path.rpartition("/")[2] for path in assets}:
        part = fetch(f"/chat/assets/{name}")
        assert part.status_code == 200, name
        assert part.headers["content-security-policy"].startswith("default-src 'self';")
        texts.append(part.text)
    # Everything comes from this server, and tells nothing of it.
    whole = "\n".join(texts)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", whole)
    assert NAME not in whole and KEY not in whole
    assert not re.search(r"<script(?![^>]*\ssrc=)|\son\w+=|\sstyle=", page.text)


@pytest.mark.parametrize("accept", ["*/*", "application/json", ""])
def test_others_get_paths_and_need_the_key(accept: str) -> None:
    refused = fetch("/", accept=accept)
    assert refused.status_code == 401 and NAME not in refused.text
    index = fetch("/", key=KEY, accept=accept)
    assert index.json()["model"] == NAME
    assert "/v1/chat/completions" in index.json()["paths"]
    assert index.headers["vary"] == "Accept"


@pytest.mark.parametrize("name", ["none.js", "..%2F..%2Fpy.typed", "", "map.js"])
def test_parts_are_those_of_the_page_alone(name: str) -> None:
    assert fetch(f"/chat/assets/{name}").status_code == 404


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
