"""Checks of the flags about connections and bodies."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def handle_http(args: ServerArgs) -> None:
    """Check what the flags say together.

    Raises:
        ValueError: names flag, value and fix.
    """
    if args.max_total_body_bytes < args.max_body_bytes:
        raise ValueError(
            f"--max-total-body-bytes {args.max_total_body_bytes} is less than "
            f"--max-body-bytes {args.max_body_bytes}: a body of that size could never "
            "be read; raise it"
        )
