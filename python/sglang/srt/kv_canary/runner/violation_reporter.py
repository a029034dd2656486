"""The reporter of this engine's violations: its flags, and their names in messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_canary.reporter import ReportOptions, ViolationReporter
from sglang.srt.environ import envs
from sglang.srt.kv_canary.config import CanaryMode

if TYPE_CHECKING:
    from kv_canary.serials import SerialMap
    from sglang.srt.kv_canary.config import CanaryConfig


def create_reporter(
    config: CanaryConfig, *, page_size: int, serials: SerialMap, rank: int = 0
) -> ViolationReporter:
    """A reporter configured by flags and environment; `rank`: of this process."""
    options = ReportOptions(
        mode=config.mode.value,
        real_data=config.real_data.value,
        is_repaired=config.mode is CanaryMode.HEAL,
        folder=config.report_dir,
        with_tokens=config.report_tokens,
        max_files=config.max_report_files,
        max_files_option=envs.SGLANG_KV_CANARY_MAX_REPORT_FILES.name,
        replay_command="python -m sglang.srt.kv_canary.replay",
        ring_capacity=config.ring_capacity,
        ring_capacity_option=envs.SGLANG_KV_CANARY_RING_CAPACITY.name,
    )
    return ViolationReporter(options, page_size=page_size, serials=serials, rank=rank)
