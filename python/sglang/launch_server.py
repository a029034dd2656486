"""`python -m sglang.launch_server`: run a server with the given flags."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sglang.srt.entrypoints.http_server import launch_server
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.standard_streams import guard_standard_streams

CONFIGURATION_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Serve with the flags `argv` (None: those of this process).

    Returns:
        0 after a signal, 1 after a failure, 2 for a configuration that cannot be served
        (its reason is one line on stderr).
    """
    guard_standard_streams()
    try:
        return launch_server(ServerArgs.from_cli(argv))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return CONFIGURATION_ERROR


if __name__ == "__main__":
    sys.exit(main())
