"""Controls access to paths: keys, roles, and pages of other sites."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang.srt.entrypoints.api_keys import ApiKeys, Role
from sglang.srt.entrypoints.http_io import error_response, wait_disconnect
from sglang.srt.entrypoints.page_files import wants_page
from sglang.srt.managers.front.caller import CALLER, CALLER_SALT, LEAVING, PEER
from sglang.srt.managers.messages.errors import ApiError, BadRequest
from sglang.srt.utils.quoting import quoted

# For probes and scrapers, as in SGLang; they show neither prompts nor answers. Pages
# contain no data, and a browser that loads one sends no key.
OPEN_PATHS = frozenset(
    {
        *("/health", "/health_generate", "/livez", "/readyz", "/ping", "/metrics"),
        *("/canary", "/canary/assets/{name}", "/chat/assets/{name}"),
    }
)
_OPEN_FOLDERS = ("/canary/assets/", "/chat/assets/")
# These show or change what concerns all clients.
ADMIN_PATHS = frozenset(
    {
        *("/flush_cache", "/pause_generation", "/continue_generation"),
        *("/canary/events", "/canary/incidents"),
    }
)
# These slow the server down for all clients, or change what it reads or writes.
OPERATOR_PATHS = frozenset(
    {
        *("/start_profile", "/stop_profile", "/configure_logging"),
        *("/load_lora_adapter", "/unload_lora_adapter"),
    }
)
# These change something without needing a body that a page could not send.
CHANGING_PATHS = frozenset(
    {
        *("/flush_cache", "/abort_request", "/configure_logging"),
        *("/pause_generation", "/continue_generation"),
        *("/start_profile", "/stop_profile"),
        *("/load_lora_adapter", "/unload_lora_adapter"),
    }
)
# What a browser sends with a request that was not caused by another site's page.
_OWN_SITE = ("", "same-origin", "none")
_ROLE = "sglang.role"


class AccessMiddleware:
    """Requires a key on all paths except `OPEN_PATHS`, the administrator's key on
    `ADMIN_PATHS` and `OPERATOR_PATHS`, and keeps other sites' pages away from
    `CHANGING_PATHS`.

    Args:
        origins: sites whose pages may change something, in addition to the server's
            own.
    """

    def __init__(
        self, app: ASGIApp, *, keys: ApiKeys, origins: Sequence[str] = ()
    ) -> None:
        self._app = app
        self._keys = keys
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_open(scope):
            try:
                self._check(scope)
            except ApiError as error:
                await error_response(error)(scope, receive, send)
                return
            LEAVING.set(partial(wait_disconnect, receive))
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        role, caller, salt = self._keys.identify(*_given_keys(headers))
        if role is Role.NOBODY:
            raise BadRequest(
                "the API key is missing or wrong",
                status=401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        scope[_ROLE] = role
        CALLER.set(caller)
        CALLER_SALT.set(salt)
        PEER.set((scope.get("client") or ("",))[0])
        if scope["path"] in ADMIN_PATHS:
            _require(Role.ADMIN, role, scope["path"])
        if scope["path"] in OPERATOR_PATHS:
            _require(Role.OPERATOR, role, scope["path"])
        if scope["path"] in CHANGING_PATHS:
            self._check_page(headers)

    def _check_page(self, headers: dict[bytes, bytes]) -> None:
        """Reject requests that another site's page can send without a preflight."""
        site = _foreign_site(headers)
        if site is not None and site not in self._origins:
            raise BadRequest(
                f"a page of {quoted(site)} may not use this path; name the site in "
                "--cors-allow-origins if it may",
                status=403,
            )
        kind = headers.get(b"content-type", b"").decode("latin-1")
        has_body = (
            b"transfer-encoding" in headers
            or headers.get(b"content-length", b"0") != b"0"
        )
        if kind.partition(";")[0].strip().lower() != "application/json" and (
            kind or has_body
        ):
            raise BadRequest(
                f"Content-Type {quoted(kind)} is not accepted here; send "
                "application/json",
                status=415,
            )


def _foreign_site(headers: dict[bytes, bytes]) -> str | None:
    """Return the other site whose page caused a request, or None if there is none.

    A GET of an image or a link has no Origin; for these, browsers send how the sites
    are related, and old browsers at least the page.
    """
    host = headers.get(b"host", b"").decode("latin-1")
    origin = headers.get(b"origin", b"").decode("latin-1")
    if origin:
        return None if origin.partition("://")[2] == host else origin
    page = headers.get(b"referer", b"").decode("latin-1")
    scheme, _, rest = page.partition("://")
    if page and rest.partition("/")[0] != host:
        return f"{scheme}://{rest.partition('/')[0]}"
    relation = headers.get(b"sec-fetch-site", b"").decode("latin-1")
    return None if relation in _OWN_SITE else f"another site ({relation})"


def _is_open(scope: Scope) -> bool:
    path: str = scope["path"]
    if path == "/":
        return wants_page(scope)
    return path in OPEN_PATHS or path.startswith(_OPEN_FOLDERS)


def request_owner(request: Request) -> str | None:
    """Return the owner whose requests the sender's rids refer to, or None for all
    owners.

    A client's key refers to its own requests even if it has administrator rights.
    """
    caller = CALLER.get()
    return None if request.scope[_ROLE] >= Role.ADMIN and not caller else caller


def require_admin(request: Request) -> None:
    """Raise unless the request has the administrator's key.

    Raises:
        BadRequest: the request has a client's key or no key.
    """
    _require(Role.ADMIN, request.scope[_ROLE], request.url.path)


def _require(needed: Role, role: Role, path: str) -> None:
    if role < needed:
        raise BadRequest(f"{path}: needs the key of --admin-api-key", status=403)


def _given_keys(headers: dict[bytes, bytes]) -> list[bytes]:
    """Return the keys of a request, from the header of OpenAI or Anthropic clients."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    keys = [key.strip()] if scheme.lower() == b"bearer" else []
    if b"x-api-key" in headers:
        keys.append(headers[b"x-api-key"].strip())
    return keys
