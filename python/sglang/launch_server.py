"""`python -m sglang.launch_server`: run a server with the given flags."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sglang.srt.entrypoints.exit_codes import ExitCode
from sglang.srt.entrypoints.http_server import launch_server
from sglang.srt.server_args import LAUNCH_COMMAND, ServerArgs
from sglang.srt.utils.standard_streams import guard_standard_streams


def main(argv: Sequence[str] | None = None, *, prog: str = LAUNCH_COMMAND) -> int:
    """Serve with the flags in `argv`, which defaults to `sys.argv[1:]`.

    Returns:
        An `ExitCode`; the reason for `CONFIGURATION_ERROR` is one line on stderr.
    """
    guard_standard_streams()
    try:
        return launch_server(ServerArgs.from_cli(argv, prog=prog))
    except ValueError as error:
        # A library's message may have several lines.
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return ExitCode.CONFIGURATION_ERROR


if __name__ == "__main__":
    sys.exit(main())
