"""The server's own pages: files without data, and detection of browsers."""

from __future__ import annotations

from functools import cached_property

from starlette.responses import Response
from starlette.types import Scope

from sglang.srt.entrypoints.endpoint import HTML
from sglang.srt.entrypoints.page_headers import page_headers
from sglang.srt.managers.messages.errors import NotFound
from sglang.srt.utils.paths import page_folders
from sglang.srt.utils.quoting import quoted

INDEX = "index.html"
MEDIA_TYPES = {
    ".css": "text/css",
    ".html": HTML,
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


def wants_page(scope: Scope) -> bool:
    """Whether a request comes from a browser that opens a page.

    Scripts and API clients accept anything or JSON; browsers ask for HTML.
    """
    accepted = dict(scope["headers"]).get(b"accept", b"")
    return HTML.encode() in accepted and scope["method"] in ("GET", "HEAD")


class PageFiles:
    """The files of one page, read on first use.

    Args:
        page: name of its folder in the assets; shared files are added to it.
    """

    def __init__(self, page: str) -> None:
        self._page = page

    @cached_property
    def _files(self) -> dict[str, tuple[bytes, str]]:
        return {
            path.name: (path.read_bytes(), MEDIA_TYPES[path.suffix])
            for folder in page_folders(self._page)
            for path in folder.iterdir()
            if path.suffix in MEDIA_TYPES
        }

    def answer(self, name: str = INDEX) -> Response:
        """Answer with a file.

        Raises:
            NotFound: the page has no file with this name.
        """
        if name not in self._files:
            raise NotFound(f"this page has no part {quoted(name)}")
        content, media_type = self._files[name]
        return Response(content, media_type=media_type, headers=page_headers())
