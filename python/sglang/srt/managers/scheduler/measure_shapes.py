"""Measures, before the engine is ready, what an iteration of each draft shape costs.

The scheduler itself serves made-up requests with each shape of the ladder in turn, so
the costs hold what an iteration really takes: kernels, graphs, sampling, results.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.managers.messages.io_struct import AbortReq, GenerateReq
from sglang.srt.managers.scheduler.draft_shapes import FixedShape
from sglang.srt.sampling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler.scheduler import Scheduler
    from sglang.srt.managers.scheduler.scheduler_io import ListIO

logger = logging.getLogger(__name__)

BATCH_SIZES = (1, 4, 16, 64, 256, 1024)
PROMPT_TOKENS = 16
ROUNDS, SETTLING, TIMED = 3, 2, 3
"""In each round every shape has a turn: iterations that are not timed, then some that
are. The shortest turn counts."""
BUDGET_SECONDS = 4.0
"""A batch size that would take longer than what is left is not measured."""


def measure_shapes(scheduler: Scheduler, io: ListIO) -> dict[int, list[float]]:
    """Return seconds of an iteration of each index of the ladder, by batch size; all
    ranks must call this.

    Args:
        scheduler: of a warm-up, whose requests are forgotten.
    """
    found: dict[int, list[float]] = {}
    began = last = time.perf_counter()
    spent = 0.0
    for rows in _sizes(scheduler):
        left = BUDGET_SECONDS - (last - began)
        # Of at most four times as many requests a GPU takes about twice as long.
        if get_tp_group().min_int(int(2 * spent < left)) == 0:
            break
        found[rows] = _measure(scheduler, io, rows)
        now = time.perf_counter()
        spent, last = now - last, now
    for rows, costs in found.items():
        each = ", ".join(f"{1e3 * cost:.2f}" for cost in costs)
        logger.info("Iterations of %d requests by draft shape: %s ms", rows, each)
    return found


def _sizes(scheduler: Scheduler) -> Iterator[int]:
    """Yield batch sizes for which there is memory, ascending, and the largest of a
    batch."""
    env, runner = scheduler.env, scheduler.worker.model_runner
    each = PROMPT_TOKENS + _new_tokens(scheduler) + env.decode_reserve
    pages = -(-each // env.cache.page_size) * env.cache.page_size
    if PROMPT_TOKENS + _new_tokens(scheduler) >= runner.model_config.context_len:
        return
    most = runner.max_running_requests
    for rows in (*(size for size in BATCH_SIZES if size < most), most):
        if rows * pages <= env.cache.allocator.size:
            yield rows


def _new_tokens(scheduler: Scheduler) -> int:
    """Return tokens that a request may gain, and that it does not end with."""
    widths = [1 if s is None else s.accept_width for s in scheduler.shapes.ladder]
    return ROUNDS * (SETTLING + TIMED) * sum(widths) + 2 * max(widths)


def _measure(scheduler: Scheduler, io: ListIO, rows: int) -> list[float]:
    vocab_size = scheduler.model_config.vocab_size
    for row in range(rows):
        params = SamplingParams(
            max_new_tokens=_new_tokens(scheduler), temperature=0.0, ignore_eos=True
        )
        name = f"measured-{rows}-{row}"
        prompt = [(row + i) % vocab_size for i in range(PROMPT_TOKENS)]
        io.requests.append(
            GenerateReq(
                rid=name, extra_key=name, input_ids=prompt, sampling_params=params
            )
        )
    scheduler.shapes.policy = FixedShape(0)
    # The same on all ranks: each knows after a step what is left to prefill.
    scheduler.step()
    while scheduler.batches.waiting or scheduler.batches.chunked is not None:
        scheduler.step()
    indices = range(len(scheduler.shapes.ladder))
    costs = [math.inf for _ in indices]
    for _ in range(ROUNDS):
        for index in indices:
            scheduler.shapes.policy = FixedShape(index)
            for _ in range(SETTLING):
                scheduler.step()
            costs[index] = min(costs[index], _seconds(scheduler))
    io.requests.append(AbortReq(abort_all=True, message="measured"))
    scheduler.step()
    while scheduler.has_work():
        scheduler.step()
    io.responses.clear()
    return costs


def _seconds(scheduler: Scheduler) -> float:
    """Return the seconds of an iteration."""
    _wait(scheduler)
    began = time.perf_counter()
    for _ in range(TIMED):
        scheduler.step()
    _wait(scheduler)
    return (time.perf_counter() - began) / TIMED


def _wait(scheduler: Scheduler) -> None:
    if scheduler.env.device.type != "cpu":
        torch.cuda.synchronize()
