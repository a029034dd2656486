"""The command `sglang`, also `python -m sglang`: its subcommands, by name.

`sglang serve` takes the flags of `python -m sglang.launch_server`, and accepts the
model without its flag.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from kv_canary.command_line import ends_with_its_reader
from sglang import launch_server
from sglang.srt.entrypoints.exit_codes import ExitCode
from sglang.version import VERSION_TEXT

SERVE_COMMAND = "sglang serve"
HELP = """usage: sglang COMMAND

  serve [MODEL] [flags]   serve a language model over HTTP; serve --help lists the flags
  version                 print the version
"""


@ends_with_its_reader
def main(argv: Sequence[str] | None = None) -> int:
    """Run the CLI and return its exit code. `argv` defaults to `sys.argv[1:]`.

    Without a command name, flags are passed to `serve`.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    name = args[0] if args else "--help"
    if name in ("-h", "--help"):
        print(HELP, end="")
        return 0
    if name == "--version":
        name = "version"
    if name in COMMANDS:
        return COMMANDS[name](args[1:])
    if name.startswith("-"):
        return _serve(args)
    print(
        f"error: sglang has no command {name!r}; use one of {', '.join(COMMANDS)} "
        f"(a model is served by: {SERVE_COMMAND} {name})",
        file=sys.stderr,
    )
    return ExitCode.CONFIGURATION_ERROR


def _serve(args: list[str]) -> int:
    if args and not args[0].startswith("-"):
        args = ["--model-path", *args]
    return launch_server.main(args, prog=SERVE_COMMAND)


def _version(args: list[str]) -> int:
    print(VERSION_TEXT)
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "serve": _serve,
    "version": _version,
}


if __name__ == "__main__":
    sys.exit(main())
