"""Keys, what each of them opens, and what a page of another site may do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from manager_world import Wire, run
from web_world import app_of, eventually

from sglang.srt.entrypoints.api_keys import MAX_KEYS, ApiKeys
from sglang.srt.entrypoints.front import Front
from sglang.srt.entrypoints.http_server import create_app
from sglang.srt.managers.messages.io_struct import FlushCacheReq, FlushCacheRsp
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="cpu")

CLIENT, OTHER, ADMIN = "client-key", "other-key", "admin-key"
BOTH = {"api_key": CLIENT, "admin_api_key": ADMIN}
NO_STEPS = {"num_steps": 0}
SITE = "https://ui.example.com"
ABORT_ALL = {"abort_all": True}


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.touch(mode=0o600)
    path.write_text(f"# of the team\n{CLIENT}\n\n  {OTHER}  \n")
    return path


@asynccontextmanager
async def client(
    wire: Wire, key: str | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    transport = httpx.ASGITransport(app=app_of(wire))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://own:30000", headers=headers
    ) as made:
        yield made


async def flush(
    wire: Wire, http: httpx.AsyncClient, method: str = "POST", **options: Any
) -> int:
    """The status of a flush, which the scheduler grants if it hears of it."""
    asked = asyncio.create_task(http.request(method, "/flush_cache", **options))
    before = len(wire.sent)
    await asyncio.sleep(0.02)
    for question in wire.sent[before:]:
        if isinstance(question, FlushCacheReq):
            wire.manager.receive(FlushCacheRsp(call_id=question.call_id, success=True))
    return (await asked).status_code


# Statuses of: a model list, an abort of its own, an abort of all, a flush, a profile
# that its range refuses.
@pytest.mark.parametrize(
    ("keys", "caller", "statuses"),
    [
        ({}, None, (200, 200, 200, 200, 400)),
        ({}, "whatever", (200, 200, 200, 200, 400)),
        ({"api_key": CLIENT}, CLIENT, (200, 200, 200, 200, 403)),
        ({"api_key": CLIENT}, None, (401, 401, 401, 401, 401)),
        ({"api_key": CLIENT}, CLIENT + "x", (401, 401, 401, 401, 401)),
        ({"api_key": CLIENT}, CLIENT[:-1], (401, 401, 401, 401, 401)),
        ({"admin_api_key": ADMIN}, None, (200, 200, 403, 403, 403)),
        ({"admin_api_key": ADMIN}, "whatever", (200, 200, 403, 403, 403)),
        ({"admin_api_key": ADMIN}, ADMIN, (200, 200, 200, 200, 400)),
        (BOTH, None, (401, 401, 401, 401, 401)),
        (
            {"api_key": CLIENT, "admin_api_key": ADMIN},
            CLIENT,
            (200, 200, 403, 403, 403),
        ),
        (BOTH, ADMIN, (200, 200, 200, 200, 400)),
    ],
)
def test_what_a_key_opens(
    keys: dict[str, str], caller: str | None, statuses: tuple[int, ...]
) -> None:
    async def work() -> None:
        wire = Wire(strict_fields=True, **keys)
        async with client(wire, caller) as http:
            seen = [
                (await http.get("/v1/models")).status_code,
                (await http.post("/abort_request", json={"rid": "r"})).status_code,
                (await http.post("/abort_request", json=ABORT_ALL)).status_code,
                await flush(wire, http),
                (await http.post("/start_profile", json=NO_STEPS)).status_code,
            ]
            changes = await http.post(
                "/configure_logging", json={"log_requests_level": 9}
            )
            assert changes.status_code == seen[-1]
            pause = await http.post("/pause_generation", json={"mode": "no mode"})
            assert pause.status_code == {200: 400}.get(seen[3], seen[3])
            incidents = await http.get("/canary/incidents")
            for path in ("/health", "/livez", "/readyz", "/ping"):
                assert (await http.get(path)).status_code == 200
        assert tuple(seen) == statuses
        # Off, or hidden.
        assert incidents.status_code == {200: 404}.get(seen[3], seen[3])

    run(work())


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"bearer  {OTHER}"},
        {"X-Api-Key": OTHER},
        {"X-Api-Key": OTHER, "Authorization": "Bearer wrong"},
    ],
)
def test_headers_of_a_key(headers: dict[str, str], key_file: Path) -> None:
    async def work() -> None:
        async with client(Wire(api_key_file=str(key_file))) as http:
            assert (await http.get("/v1/models")).status_code == 401
            basic = {"Authorization": f"Basic {OTHER}"}
            assert (await http.get("/v1/models", headers=basic)).status_code == 401
            assert (await http.get("/v1/models", headers=headers)).status_code == 200

    run(work())


@pytest.mark.parametrize("flags", [{}, {"admin_api_key": ADMIN}])
def test_two_clients_may_use_one_rid(key_file: Path, flags: dict[str, Any]) -> None:
    """Nobody keeps a rid from another client, and each ends its own."""

    async def work() -> None:
        wire = Wire(api_key_file=str(key_file), **flags)
        body = {"input_ids": [1], "rid": "mine"}
        async with client(wire, CLIENT) as http, client(wire, OTHER) as other:
            asked = asyncio.create_task(http.post("/generate", json=body))
            await eventually(lambda: len(wire.generated()) == 1)
            also = asyncio.create_task(other.post("/generate", json=body))
            await eventually(lambda: len(wire.generated()) == 2)
            first, second = (request.rid for request in wire.generated())
            twice = await http.post("/generate", json=body)
            assert twice.status_code == 400
            assert "rid 'mine' is in use" in twice.json()["error"]["message"]
            await other.post("/abort_request", json={"rid": "mine"})
            assert wire.aborted() == [second]
            for rid, task in ((first, asked), (second, also)):
                wire.answer(rid, [5])
                assert (await task).json()["meta_info"]["id"] == "mine"

    run(work())


async def tenants(key_file: Path, **flags: Any) -> list[str | None]:
    """Of CLIENT and OTHER without a key of their requests, then with one."""
    wire = Wire(api_key_file=str(key_file), **flags)
    async with client(wire, CLIENT) as http, client(wire, OTHER) as other:
        for key in (None, "tenant"):
            for each in (http, other):
                count = len(wire.generated()) + 1
                body = {"input_ids": [1], "extra_key": key}
                asked = asyncio.create_task(each.post("/generate", json=body))
                await eventually(lambda n=count: len(wire.generated()) == n)
                wire.answer(wire.generated()[-1].rid, [5])
                assert (await asked).status_code == 200
    return [request.extra_key for request in wire.generated()]


@pytest.mark.parametrize("is_per_key", [False, True])
def test_keys_with_one_salt_are_one_tenant(key_file: Path, is_per_key: bool) -> None:
    """Whether or not all other keys are kept apart."""

    async def of(*salts: str) -> list[str | None]:
        lines = zip((CLIENT, OTHER), salts, strict=True)
        key_file.write_text("".join(f"{key}  {salt}\n" for key, salt in lines))
        return await tenants(key_file, cache_namespace_per_key=is_per_key)

    async def work() -> None:
        same = await of("cache_salt=a", "cache_salt=a")
        assert same[0] == same[1] != same[2] == same[3] and None not in same
        assert len(set(await of("cache_salt=a", "cache_salt=b"))) == 4
        mixed = await of("cache_salt=a", "")
        assert len(set(mixed)) == 4
        assert (None in mixed) is not is_per_key

    run(work())


def test_prefixes_are_kept_apart_by_key_where_the_operator_wants_it(
    key_file: Path,
) -> None:
    async def work() -> None:
        assert len(set(await tenants(key_file))) == 2
        apart = await tenants(key_file, cache_namespace_per_key=True)
        assert len(set(apart)) == 4 and None not in apart
        again = await tenants(key_file, cache_namespace_per_key=True)
        assert apart == again, "a restart changes nothing"

    run(work())
    with pytest.raises(ValueError, match="--cache-namespace-per-key tells clients"):
        Wire(cache_namespace_per_key=True)


def test_a_client_ends_its_own_requests_only(key_file: Path) -> None:
    async def work() -> None:
        wire = Wire(api_key_file=str(key_file), admin_api_key=ADMIN)
        body = {"input_ids": [1], "rid": "mine"}
        async with (
            client(wire, CLIENT) as http,
            client(wire, OTHER) as other,
            client(wire, ADMIN) as admin,
        ):
            asked = asyncio.create_task(http.post("/generate", json=body))
            await eventually(lambda: len(wire.generated()) == 1)
            abort = {"rid": "mine"}
            assert (await other.post("/abort_request", json=abort)).status_code == 200
            assert wire.aborted() == []
            await http.post("/abort_request", json=abort)
            (rid,) = wire.aborted()
            await admin.post("/abort_request", json=abort)
            assert wire.aborted() == [rid] * 2
            wire.answer(rid, [5])
            assert (await asked).json()["meta_info"]["id"] == "mine"

    run(work())


# -- the file of keys ------------------------------------------------------------------


def test_the_file_is_read_again(key_file: Path, log: pytest.LogCaptureFixture) -> None:
    async def status(http: httpx.AsyncClient, key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return (await http.get("/v1/models", headers=headers)).status_code

    async def work() -> None:
        wire = Wire(api_key="fixed", api_key_file=str(key_file))
        args = wire.manager.server_args
        keys = ApiKeys(args)
        front = Front(server_args=args, manager=wire.manager, model_name="m")
        transport = httpx.ASGITransport(app=create_app(front, keys))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            key_file.write_text("new-key\n")
            assert await status(http, CLIENT) == 200
            keys.reload()
            assert await status(http, "fixed") == await status(http, "new-key") == 200
            assert await status(http, CLIENT) == 401
            for bad in (b"", b"# nothing\n", b"\xff\xfe\n", b"two words\n", None):
                log.clear()
                key_file.unlink() if bad is None else key_file.write_bytes(bad)
                keys.reload()
                assert await status(http, "new-key") == 200
                (record,) = log.records
                assert record.levelname == "ERROR"
                assert "--api-key-file" in record.message
                assert "the keys stay as they were" in record.message
                assert "words" not in record.message

    run(work())


def test_reload_without_a_file(log: pytest.LogCaptureFixture) -> None:
    keys = ApiKeys(ServerArgs(api_key="k"))
    log.set_level(logging.INFO, "sglang")
    keys.reload()
    assert keys.has_client_keys and "no --api-key-file" in log.text


def test_a_file_that_everybody_can_read(
    key_file: Path, log: pytest.LogCaptureFixture
) -> None:
    ApiKeys(ServerArgs(api_key_file=str(key_file)))
    assert not log.records
    key_file.chmod(0o644)
    ApiKeys(ServerArgs(api_key_file=str(key_file)))
    assert "chmod 600" in log.text and CLIENT not in log.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("\n# only\n", "holds 0 keys"),
        ("k\n" * (MAX_KEYS + 1), "holds 1001 keys"),
        ("good\nwith space\n", "line 2 holds a space"),
        ("good cache_salt=\n", "line 1 holds a space"),
        ("good cache_salt=a b\n", "line 1 holds a space"),
        ("k cache_salt=a\nk\n", "line 2 repeats a key with another cache_salt"),
        ("x" * 2_000_000, "not a file of at most"),
        (ADMIN, "every client an administrator"),
    ],
)
def test_a_file_that_cannot_serve(
    tmp_path: Path, content: str | None, message: str
) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
    args = ServerArgs(api_key_file=str(path), admin_api_key=ADMIN)
    with pytest.raises(ValueError, match=message) as refused:
        ApiKeys(args)
    assert ADMIN not in str(refused.value)


def test_secrets_are_not_shown(key_file: Path) -> None:
    async def work() -> None:
        wire = Wire(
            api_key=CLIENT,
            admin_api_key=ADMIN,
            api_key_file=str(key_file),
            random_seed=123456789,
        )
        async with client(wire, ADMIN) as http:
            asked = asyncio.create_task(http.get("/get_server_info"))
            await eventually(lambda: len(wire.sent) == 1)
            wire.manager.set_dead("over")  # answers without the scheduler
            text = (await asked).text + str(wire.manager.server_args.url())
        for secret in (CLIENT, ADMIN, str(key_file), "123456789"):
            assert secret not in text

    run(work())


# -- pages of other sites --------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/flush_cache", "/abort_request", "/pause_generation"]
)
@pytest.mark.parametrize(
    ("headers", "content", "status"),
    [
        ({"Content-Type": "application/x-www-form-urlencoded"}, b"a=b", 415),
        ({"Content-Type": "multipart/form-data; boundary=x"}, b"--x--", 415),
        ({"Content-Type": "text/plain"}, b'{"abort_all": true}', 415),
        ({"Content-Type": "text/plain"}, b"", 415),
        ({}, b'{"abort_all": true}', 415),
        ({"Origin": "https://evil.example"}, b"", 403),
        ({"Origin": "null"}, b"", 403),
        (
            {"Origin": "https://evil.example", "Content-Type": "application/json"},
            b'{"abort_all": true}',
            403,
        ),
    ],
)
@pytest.mark.parametrize("origins", [None, ["*"], [SITE]])
def test_another_site_changes_nothing(
    path: str,
    headers: dict[str, str],
    content: bytes,
    status: int,
    origins: list[str] | None,
) -> None:
    async def work() -> None:
        wire = Wire(cors_allow_origins=origins)
        async with client(wire) as http:
            answer = await http.post(path, headers=headers, content=content)
            assert answer.status_code == status, answer.text
            assert answer.json()["error"]["code"] == status
        assert not wire.sent

    run(work())


@pytest.mark.parametrize(
    "headers", [{}, {"Origin": "http://own:30000"}, {"Origin": SITE}]
)
def test_who_may_flush(headers: dict[str, str]) -> None:
    """SGLang's clients send no body and no type."""

    async def work() -> None:
        wire = Wire(cors_allow_origins=[SITE])
        async with client(wire) as http:
            assert await flush(wire, http, headers=headers) == 200
            assert await flush(wire, http, headers=headers, json={}) == 200
            assert await flush(wire, http, method="GET", headers=headers) == 200
            assert (await http.put("/flush_cache")).status_code == 405

    run(work())


@pytest.mark.parametrize(
    ("headers", "is_own"),
    [
        # A client, an address that was typed, and the server's own page.
        ({}, True),
        ({"Sec-Fetch-Site": "none"}, True),
        (
            {"Sec-Fetch-Site": "same-origin", "Referer": "http://own:30000/canary"},
            True,
        ),
        # An image or a link on another page: a GET has no Origin.
        ({"Sec-Fetch-Site": "cross-site"}, False),
        ({"Sec-Fetch-Site": "same-site"}, False),
        ({"Referer": "https://evil.example/page"}, False),
        ({"Referer": "http://own:30001/"}, False),
        ({"Referer": "http://own:30000.evil.example/"}, False),
        ({"Referer": "own:30000"}, False),
        ({"Origin": "https://evil.example"}, False),
        ({"Sec-Fetch-Site": "cross-site", "Origin": SITE}, True),
        ({"Sec-Fetch-Site": "cross-site", "Referer": SITE + "/page"}, True),
    ],
)
def test_who_may_flush_with_a_get(headers: dict[str, str], is_own: bool) -> None:
    async def work() -> None:
        wire = Wire(cors_allow_origins=[SITE])
        async with client(wire) as http:
            status = await flush(wire, http, method="GET", headers=headers)
            assert status == (200 if is_own else 403)
            assert bool(wire.sent) is is_own
            if not is_own:
                answer = await http.head("/flush_cache", headers=headers)
                assert answer.status_code == 403 and not wire.sent

    run(work())


@pytest.mark.parametrize(
    ("origins", "origin", "allowed"),
    [
        (None, SITE, None),
        ([SITE], SITE, SITE),
        ([SITE], "https://evil.example", None),
        (["*"], "https://evil.example", "*"),
    ],
)
def test_which_pages_read_answers(
    origins: list[str] | None, origin: str, allowed: str | None
) -> None:
    async def work() -> None:
        wire = Wire(cors_allow_origins=origins, api_key=CLIENT)
        async with client(wire) as http:
            preflight = await http.options(
                "/v1/models",
                headers={
                    "Origin": origin,
                    "Access-Control-Request-Method": "GET",
                    "Access-Control-Request-Headers": "authorization",
                },
            )
            refused = await http.get("/v1/models", headers={"Origin": origin})
        assert (preflight.status_code == 200) == (allowed is not None)
        assert refused.status_code == 401
        for answer in (preflight, refused):
            assert answer.headers.get("access-control-allow-origin") == allowed

    run(work())


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
