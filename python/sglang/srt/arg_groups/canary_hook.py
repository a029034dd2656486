"""Checks of the `--kv-canary*` flags."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.environ import envs

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

# Modes that are parsed but not available, and the fix that the error names.
_NOT_YET = {"heal": "use --kv-canary raise, which stops at the first violation"}


def handle_kv_canary(server_args: ServerArgs) -> None:
    """Refuse modes that do not exist yet, and options without effect or in conflict.

    Raises:
        ValueError: names the flag, its value and the fix.
    """
    mode = server_args.kv_canary
    if mode in _NOT_YET:
        raise ValueError(
            f"--kv-canary {mode} is not available in this version; {_NOT_YET[mode]}"
        )
    interval = server_args.kv_canary_sweep_interval
    if interval < 0:
        raise ValueError(
            f"--kv-canary-sweep-interval {interval} must be at least 0 (0 turns the "
            "sweep off)"
        )
    if mode == "none":
        _refuse_options_without_effect(server_args)
        return
    if interval > 0 and server_args.disable_radix_cache:
        raise ValueError(
            f"--kv-canary-sweep-interval {interval} sweeps the prefix cache, which "
            "--disable-radix-cache turns off; remove one of them"
        )
    simulated = envs.SGLANG_SIMULATE_ACC_LEN.get()
    if simulated:
        raise ValueError(
            f"SGLANG_SIMULATE_ACC_LEN={simulated} makes up what is accepted, which "
            f"--kv-canary {mode} reports as damage; unset it, or use --kv-canary none"
        )


def _refuse_options_without_effect(server_args: ServerArgs) -> None:
    real_data = server_args.kv_canary_real_data
    for flag, value in (
        ("--kv-canary-real-data", None if real_data == "partial" else real_data),
        ("--kv-canary-sweep-interval", server_args.kv_canary_sweep_interval or None),
        ("--kv-canary-report-dir", server_args.kv_canary_report_dir),
        ("--kv-canary-report-tokens", server_args.kv_canary_report_tokens or None),
    ):
        if value is not None:
            shown = "" if value is True else f" {value}"
            raise ValueError(
                f"{flag}{shown} has no effect with --kv-canary none; remove it, or use "
                "--kv-canary log or raise"
            )
