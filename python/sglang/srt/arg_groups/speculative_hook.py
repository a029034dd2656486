"""Checks of the `--speculative-*` flags."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

_DEPENDENT_FLAGS = (
    "speculative_draft_model_path",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_token_map",
)


def handle_speculative(server_args: ServerArgs) -> None:
    """Resolve speculative decoding, or refuse what cannot be served.

    Raises:
        ValueError: names the flag and the fix.
    """
    if server_args.speculative_algorithm is not None:
        _handle_eagle_family(server_args)
        return
    for name in _DEPENDENT_FLAGS:
        value = getattr(server_args, name)
        if value is not None:
            flag = "--" + name.replace("_", "-")
            raise ValueError(
                f"{flag} {value} has no effect without --speculative-algorithm; "
                f"remove {flag}"
            )


def _handle_eagle_family(server_args: ServerArgs) -> None:
    """EAGLE, EAGLE3 and STANDALONE.

    Raises:
        ValueError: speculative decoding is not part of this version.
    """
    raise ValueError(
        f"--speculative-algorithm {server_args.speculative_algorithm} is not available "
        "in this version; remove the flag to serve without speculation"
    )
