"""Checks of the `--kv-canary*` flags."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.arg_groups.tiers_hook import FLAG as TIERS_FLAG
from sglang.srt.arg_groups.tiers_hook import has_tiers
from sglang.srt.environ import envs

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

KV_CANARY_MODES = ("none", "log", "raise", "heal")


# Number of forwards; cheap enough to be the default (docs/replay.md).
DEFAULT_RECORD = 1000


def handle_kv_canary(server_args: ServerArgs) -> None:
    """Reject options that have no effect, are out of range or conflict.

    Raises:
        ValueError: names the flag, its value and the fix.
    """
    mode = server_args.kv_canary
    interval = server_args.kv_canary_sweep_interval
    if interval < 0:
        raise ValueError(
            f"--kv-canary-sweep-interval {interval} must be at least 0 (0 turns the "
            "sweep off)"
        )
    _check_limits(server_args)
    if mode == "none":
        _refuse_options_without_effect(server_args)
        server_args.kv_canary_record = 0
        return
    _handle_record(server_args)
    if interval > 0 and server_args.disable_radix_cache:
        raise ValueError(
            f"--kv-canary-sweep-interval {interval} sweeps the prefix cache, which "
            "--disable-radix-cache turns off; remove one of them"
        )
    for variable in (envs.SGLANG_SIMULATE_ACC_LEN, envs.SGLANG_SIMULATE_ACC_RATE):
        if variable.get():
            raise ValueError(
                f"{variable.name}={variable.get()} makes up what is accepted, which "
                f"--kv-canary {mode} reports as damage; unset it, or use --kv-canary "
                "none"
            )


def _handle_record(server_args: ServerArgs) -> None:
    """Resolve `--kv-canary-record`: on by default if there is a folder for it and a
    record could be replayed.
    """
    asked, folder = server_args.kv_canary_record, server_args.kv_canary_report_dir
    needs_tokens = (
        server_args.speculative_algorithm is not None
        and not server_args.kv_canary_report_tokens
    )
    if asked is None:
        is_on = not (folder is None or needs_tokens or has_tiers(server_args))
        server_args.kv_canary_record = DEFAULT_RECORD if is_on else 0
    elif asked and folder is None:
        raise ValueError(
            f"--kv-canary-record {asked} goes beside the files of incidents; set "
            "--kv-canary-report-dir too, or remove it"
        )
    elif asked and has_tiers(server_args):
        raise ValueError(
            f"--kv-canary-record {asked}: when KV comes from host memory is not "
            "recorded, so nothing could be replayed; remove it, or "
            f"{TIERS_FLAG}"
        )
    elif asked and needs_tokens:
        raise ValueError(
            f"--kv-canary-record {asked} with --speculative-algorithm "
            f"{server_args.speculative_algorithm}: which drafts are accepted depends "
            "on the tokens; set --kv-canary-report-tokens too, or remove it"
        )


def _check_limits(server_args: ServerArgs) -> None:
    """Check that the bounds of healing are in range and have an effect."""
    for flag, value, default, is_valid, due in (
        (
            "--kv-canary-heal-limit",
            server_args.kv_canary_heal_limit,
            60,
            server_args.kv_canary_heal_limit >= 0,
            "at least 0 (0: no limit)",
        ),
        (
            "--kv-canary-quarantine-limit",
            server_args.kv_canary_quarantine_limit,
            0.05,
            0.0 <= server_args.kv_canary_quarantine_limit <= 1.0,
            "a share between 0 and 1",
        ),
    ):
        if not is_valid:
            raise ValueError(f"{flag} {value} must be {due}")
        if server_args.kv_canary != "heal" and value != default:
            raise ValueError(
                f"{flag} {value} has no effect with --kv-canary "
                f"{server_args.kv_canary}; remove it, or use --kv-canary heal"
            )


def _refuse_options_without_effect(server_args: ServerArgs) -> None:
    real_data: str | None = server_args.kv_canary_real_data
    if real_data in ("partial", "none"):
        real_data = None  # the default, or nothing
    for flag, value in (
        ("--kv-canary-real-data", real_data),
        ("--kv-canary-sweep-interval", server_args.kv_canary_sweep_interval or None),
        ("--kv-canary-report-dir", server_args.kv_canary_report_dir),
        ("--kv-canary-record", server_args.kv_canary_record or None),
        ("--kv-canary-report-tokens", server_args.kv_canary_report_tokens or None),
    ):
        if value is not None:
            shown = "" if value is True else f" {value}"
            raise ValueError(
                f"{flag}{shown} has no effect with --kv-canary none; remove it, or use "
                "--kv-canary log, raise or heal"
            )
