"""Checks of the `--kv-canary*` flags."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def handle_kv_canary(server_args: ServerArgs) -> None:
    """Refuse what this version cannot check.

    Raises:
        ValueError: the canary is asked for, or one of its options is set while it is
            off.
    """
    if server_args.kv_canary != "none":
        raise ValueError(
            f"--kv-canary {server_args.kv_canary} is not available in this version; "
            "use --kv-canary none"
        )
    if server_args.kv_canary_sweep_interval < 0:
        raise ValueError(
            f"--kv-canary-sweep-interval {server_args.kv_canary_sweep_interval} must "
            "be at least 0 (0 turns the sweep off)"
        )
    if server_args.kv_canary_sweep_interval > 0:
        raise ValueError(
            f"--kv-canary-sweep-interval {server_args.kv_canary_sweep_interval} has no "
            "effect with --kv-canary none; remove it"
        )
    if server_args.kv_canary_report_dir is not None:
        raise ValueError(
            f"--kv-canary-report-dir {server_args.kv_canary_report_dir} has no effect "
            "with --kv-canary none; remove it"
        )
    if server_args.kv_canary_report_tokens:
        raise ValueError(
            "--kv-canary-report-tokens has no effect with --kv-canary none; remove it"
        )
