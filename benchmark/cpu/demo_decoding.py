"""A CPU scheduler in the middle of a request to the demo model."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.messages.io_struct import GenerateReq
from sglang.srt.managers.scheduler.build import build_scheduler
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_io import ListIO
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

SPARE_STEPS = 64


def demo_decoding(*, prompt: range, warm: int, tokens: int, **flags: Any) -> Scheduler:
    """Return a scheduler `warm` steps into a request with more than `tokens` left."""
    io = ListIO()
    scheduler = build_scheduler(
        ServerArgs(
            device="cpu",
            skip_tokenizer_init=True,
            max_total_tokens=8192,
            **flags,
        ),
        io,
    )
    params = SamplingParams(
        max_new_tokens=warm + tokens + SPARE_STEPS, temperature=0.0, ignore_eos=True
    )
    io.requests.append(
        GenerateReq(rid="a", input_ids=list(prompt), sampling_params=params)
    )
    for _ in range(warm):
        scheduler.step()
    return scheduler
