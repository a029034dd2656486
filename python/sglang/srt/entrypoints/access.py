"""Who may ask for which path: keys, roles, and the pages of other sites."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang.srt.entrypoints.api_keys import ApiKeys, Role
from sglang.srt.entrypoints.http_io import error_response, wait_disconnect
from sglang.srt.entrypoints.page_files import wants_page
from sglang.srt.managers.front.caller import CALLER, LEAVING, PEER
from sglang.srt.managers.messages.errors import ApiError, BadRequest
from sglang.srt.utils.quoting import quoted

# For probes and scrapers, as in SGLang; they show neither prompts nor answers. Pages
# hold no data, and a browser that loads one brings no key.
OPEN_PATHS = frozenset(
    {
        *("/health", "/health_generate", "/livez", "/readyz", "/ping", "/metrics"),
        *("/canary", "/canary/assets/{name}", "/chat/assets/{name}"),
    }
)
_OPEN_FOLDERS = ("/canary/assets/", "/chat/assets/")
# They show or change what concerns all clients.
ADMIN_PATHS = frozenset(
    {
        *("/flush_cache", "/pause_generation", "/continue_generation"),
        *("/canary/events", "/canary/incidents"),
    }
)
# They slow the server down for everybody, or change what it writes.
OPERATOR_PATHS = frozenset({"/start_profile", "/stop_profile", "/configure_logging"})
# They change something and need no body that a page could not send.
CHANGING_PATHS = frozenset(
    {
        *("/flush_cache", "/abort_request", "/configure_logging"),
        *("/pause_generation", "/continue_generation"),
        *("/start_profile", "/stop_profile"),
    }
)
# What a browser says of a request that no page of another site has caused.
_OWN_SITE = ("", "same-origin", "none")
_ROLE = "sglang.role"


class AccessMiddleware:
    """Asks for a key on all paths but `OPEN_PATHS`, for the administrator's on
    `ADMIN_PATHS` and `OPERATOR_PATHS`, and keeps other sites' pages away from
    `CHANGING_PATHS`.

    Args:
        origins: sites whose pages may change something; the server's own may.
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
        role, caller = self._keys.identify(*_given_keys(headers))
        if role is Role.NOBODY:
            raise BadRequest(
                "the API key is missing or wrong",
                status=401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        scope[_ROLE] = role
        CALLER.set(caller)
        PEER.set((scope.get("client") or ("",))[0])
        if scope["path"] in ADMIN_PATHS:
            _require(Role.ADMIN, role, scope["path"])
        if scope["path"] in OPERATOR_PATHS:
            _require(Role.OPERATOR, role, scope["path"])
        if scope["path"] in CHANGING_PATHS:
            self._check_page(headers)

    def _check_page(self, headers: dict[bytes, bytes]) -> None:
        """Refuse what a page of another site can send without being asked first."""
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
    """The other site whose page has caused a request; None where none has.

    A GET of an image or a link has no Origin; there a browser says how the site relates
    to its own, an old one at least the page.
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


def owner_of(request: Request) -> str | None:
    """Whose requests the sender of this one means by a rid; None: everybody's.

    A client's key means its own even where it has the administrator's rights.
    """
    caller = CALLER.get()
    return None if request.scope[_ROLE] >= Role.ADMIN and not caller else caller


def require_admin(request: Request) -> None:
    """Refuse what needs the administrator's key.

    Raises:
        BadRequest: the request came with a client's key, or with none.
    """
    _require(Role.ADMIN, request.scope[_ROLE], request.url.path)


def _require(needed: Role, role: Role, path: str) -> None:
    if role < needed:
        raise BadRequest(f"{path}: needs the key of --admin-api-key", status=403)


def _given_keys(headers: dict[bytes, bytes]) -> list[bytes]:
    """The keys that a request brings, in the header of OpenAI's or of Anthropic's
    clients."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    keys = [key.strip()] if scheme.lower() == b"bearer" else []
    if b"x-api-key" in headers:
        keys.append(headers[b"x-api-key"].strip())
    return keys
