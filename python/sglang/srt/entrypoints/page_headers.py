"""Headers of every page that the server shows in a browser."""

from __future__ import annotations

import base64
import hashlib


def page_headers(*, style: str | None = None) -> dict[str, str]:
    """Return headers that forbid external resources, inline scripts and styles, and
    frames around the page.

    Args:
        style: the only inline style to allow.
    """
    sources = "'self'"
    if style is not None:
        digest = hashlib.sha256(style.encode()).digest()
        sources += f" 'sha256-{base64.b64encode(digest).decode()}'"
    return {
        "Content-Security-Policy": f"default-src 'self'; style-src {sources}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "object-src 'none'",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
