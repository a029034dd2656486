"""The canary's configuration: its flags and environment, resolved in one place."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kv_canary.runtime.mode import Mode
from sglang.srt.environ import EnvVar, envs
from sglang.srt.utils.paths import private_folder

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


CanaryMode = Mode


class RealData(str, Enum):
    """Which KV bytes are fingerprinted."""

    NONE = "none"
    PARTIAL = "partial"
    ROTATE = "rotate"
    ALL = "all"


STATS_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryConfig:
    """The canary's resolved configuration.

    Fields:
        sweep_interval: launches between two sweep passes; 0: no sweep.
        sweep_budget: slots of one pass at most.
        rotation_steps: forwards in which `RealData.ROTATE` re-hashes every slot read.
        report_dir: one JSON file per incident, or None.
        report_tokens: whether reports hold token ids.
        max_report_files: of this process; 0: no limit.
        ring_capacity: violations that the device keeps between two results.
        stats_every: forwards between two stats lines; 0: none.
        stats_seconds: seconds between them at least.
        check_write_inputs, check_read_tokens, use_token_oracle: for tests.
        divergence_every: launches between two divergence reports; 0: none.
    """

    mode: CanaryMode
    real_data: RealData
    sweep_interval: int = 0
    sweep_budget: int = 16384
    rotation_steps: int = 128
    report_dir: Path | None = None
    report_tokens: bool = False
    max_report_files: int = 1000
    ring_capacity: int = 1024
    stats_every: int = 100
    stats_seconds: float = STATS_SECONDS
    check_write_inputs: bool = False
    check_read_tokens: bool = False
    use_token_oracle: bool = False
    divergence_every: int = 0

    @property
    def is_on(self) -> bool:
        return self.mode is not CanaryMode.NONE

    @property
    def covers_all_bytes(self) -> bool:
        """Whether all bytes are checked, at once or in turn."""
        return self.real_data in (RealData.ROTATE, RealData.ALL)

    @classmethod
    def from_server_args(cls, server_args: ServerArgs) -> CanaryConfig:
        """Read flags and environment.

        Raises:
            ValueError: a variable has an impossible value, or it needs the canary and
                the canary is off; names the variable, the value and the fix.
        """
        stats_every = envs.SGLANG_KV_CANARY_STATS_PRINT_EVERY_N_STEPS
        config = cls(
            mode=CanaryMode(server_args.kv_canary),
            real_data=RealData(server_args.kv_canary_real_data),
            sweep_interval=server_args.kv_canary_sweep_interval,
            sweep_budget=at_least(envs.SGLANG_KV_CANARY_SWEEP_BUDGET, 1),
            rotation_steps=at_least(envs.SGLANG_KV_CANARY_ROTATION_STEPS, 1),
            report_dir=_report_dir(server_args.kv_canary_report_dir),
            report_tokens=server_args.kv_canary_report_tokens,
            max_report_files=at_least(envs.SGLANG_KV_CANARY_MAX_REPORT_FILES, 0),
            ring_capacity=at_least(envs.SGLANG_KV_CANARY_RING_CAPACITY, 1),
            stats_every=at_least(stats_every, 0),
            # Who sets the variable wants just that many.
            stats_seconds=0.0 if stats_every.is_set() else STATS_SECONDS,
            check_write_inputs=envs.SGLANG_KV_CANARY_ENABLE_WRITE_INPUT_ASSERT.get(),
            check_read_tokens=envs.SGLANG_KV_CANARY_ENABLE_VERIFY_TOKEN_ASSERT.get(),
            use_token_oracle=envs.SGLANG_KV_CANARY_ENABLE_TOKEN_ORACLE.get(),
            divergence_every=at_least(
                envs.SGLANG_KV_CANARY_SWA_DIVERGENCE_STATS_INTERVAL, 0
            ),
        )
        config._refuse_conflicts()
        return config

    def refuse_without_windows(self) -> None:
        """For a model that has no window slots.

        Raises:
            ValueError: a variable is about them; names it.
        """
        if self.divergence_every > 0:
            refuse_without_windows(envs.SGLANG_KV_CANARY_SWA_DIVERGENCE_STATS_INTERVAL)

    def _refuse_conflicts(self) -> None:
        if self.check_write_inputs and not self.use_token_oracle:
            raise ValueError(
                "SGLANG_KV_CANARY_ENABLE_WRITE_INPUT_ASSERT=1 compares inputs with the "
                "token oracle; set SGLANG_KV_CANARY_ENABLE_TOKEN_ORACLE=1 too"
            )
        if self.is_on:
            return
        for variable, is_set in (
            (
                "SGLANG_KV_CANARY_ENABLE_WRITE_INPUT_ASSERT",
                self.check_write_inputs,
            ),
            (
                "SGLANG_KV_CANARY_ENABLE_VERIFY_TOKEN_ASSERT",
                self.check_read_tokens,
            ),
            ("SGLANG_KV_CANARY_ENABLE_TOKEN_ORACLE", self.use_token_oracle),
            (
                "SGLANG_KV_CANARY_SWA_DIVERGENCE_STATS_INTERVAL",
                self.divergence_every > 0,
            ),
        ):
            if is_set:
                refuse_while_off(variable)


def refuse_while_off(variable: str) -> NoReturn:
    raise ValueError(
        f"{variable} has no effect with --kv-canary none; unset it, or use "
        "--kv-canary log, raise or heal"
    )


def refuse_without_windows(variable: EnvVar[Any]) -> NoReturn:
    raise ValueError(
        f"{variable.name}={variable.get()} is about window slots, which "
        "this model with these flags does not have; unset it"
    )


def at_least(variable: EnvVar[int], low: int) -> int:
    """Return the value of `variable`.

    Raises:
        ValueError: it is below `low`; names the variable.
    """
    value = variable.get()
    if value < low:
        raise ValueError(f"{variable.name}={value} must be at least {low}")
    return value


def _report_dir(path: str | None) -> Path | None:
    if path is None:
        return None
    return private_folder(path, flag="--kv-canary-report-dir")
