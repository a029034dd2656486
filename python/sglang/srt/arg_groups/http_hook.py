"""Checks the flags for keys, sites, connections and bodies."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from sglang.srt.utils.paths import private_folder

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+")


def handle_http(args: ServerArgs) -> None:
    """Check combinations of the flags.

    Raises:
        ValueError: names the flag, the fix and, unless it is a key, the value.
    """
    for flag, key in (
        ("--api-key", args.api_key),
        ("--admin-api-key", args.admin_api_key),
    ):
        if key is not None:
            check_key(key, flag)
    if args.cache_namespace_per_key and not (args.api_key or args.api_key_file):
        raise ValueError(
            "--cache-namespace-per-key tells clients apart by their keys, but there "
            "are none; set --api-key-file, or remove the flag"
        )
    for origin in args.cors_allow_origins or ():
        if not _ORIGIN.fullmatch(origin):
            raise ValueError(
                f"--cors-allow-origins {origin}: write * or a site as browsers name "
                "it, such as https://example.com or http://localhost:8080"
            )
    if args.crash_dump_folder is not None:
        private_folder(args.crash_dump_folder, flag="--crash-dump-folder")
    if args.max_total_body_bytes < args.max_body_bytes:
        raise ValueError(
            f"--max-total-body-bytes {args.max_total_body_bytes} is less than "
            f"--max-body-bytes {args.max_body_bytes}: a body of that size could never "
            "be read; raise it"
        )


def check_key(key: str, where: str) -> None:
    """Reject an empty key, which would admit everyone, or one that does not fit in a
    header.

    Raises:
        ValueError: names `where`, not the key.
    """
    if not key.strip():
        raise ValueError(
            f"{where} is empty, which would serve everybody; set a key, or remove "
            "the flag"
        )
    if any(char.isspace() or not char.isprintable() for char in key):
        raise ValueError(
            f"{where} holds a space or a control character, which a header cannot "
            "carry; choose another key"
        )
