"""Serves synthetic requests of every kind before the engine is ready, and forgets them.

The first launch of a kernel loads it, and may compile it; the first product of a size,
the first copy to the host and the first pages of the allocators cost milliseconds each.
All of it happens here, on the paths that serve requests, so that no client waits for
it. The effects of these requests are undone: `ready` is the state of an engine that has
served nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from sglang.srt.managers.messages.io_struct import BatchOutput, ShutdownReq
from sglang.srt.managers.scheduler.draft_shapes import DraftShapes
from sglang.srt.managers.scheduler.measure_shapes import measure_shapes
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_io import ListIO
from sglang.srt.managers.scheduler.warm_up_scenes import SceneLimits, scenes
from sglang.srt.mem_cache.ops.move_kv.op import MOVE_SIZES
from sglang.srt.utils.kernels_ahead import compiled_ahead

if TYPE_CHECKING:
    from sglang.srt.kv_canary.runner.canary_manager import CanaryManager
    from sglang.srt.managers.batch.forward_result import GenerationBatchResult
    from sglang.srt.managers.batch.schedule_batch import ScheduleBatch
    from sglang.srt.managers.messages.io_struct import GenerateReq
    from sglang.srt.managers.worker.grammar_masks import GrammarMasks
    from sglang.srt.managers.worker.interface import Worker
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.hf_tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Serials that no client's request will have for a long time, so that nothing left on
# the device can be mistaken for a client's.
FIRST_SERIAL = 1 << 22


def is_warmed_up(server_args: ServerArgs) -> bool:
    """Whether `warm_up` is needed: the CPU has nothing to compile."""
    return not server_args.skip_server_warmup and server_args.device != "cpu"


def measured_costs(
    server_args: ServerArgs, worker: Worker, tokenizer: Tokenizer | None
) -> dict[int, list[float]]:
    """Return what `measure_shapes` finds on the unused, warm `worker`; empty if the
    choice of shapes does not depend on it or warm-ups are off. All ranks must call
    this."""
    if server_args.skip_server_warmup:
        return {}
    if not DraftShapes(server_args).measures:
        return {}
    with (
        _forgotten(worker),
        _made_up(server_args, worker, tokenizer) as (scheduler, io),
    ):
        return measure_shapes(scheduler, io)


def compile_ahead(server_args: ServerArgs, worker: Worker) -> None:
    """Compile all kernels in parallel unless already done on this machine. Call this
    before the graphs of `worker` are captured.
    """
    if not worker.model_runner.compiles_ahead:
        return
    with _forgotten(worker), _rehearsing(worker), compiled_ahead():
        worker.capture_graphs()
        # Tokens are zeros then, which no grammar accepts.
        _serve_all(server_args, Unwatched(worker), None, only_kernels=True)


def warm_up(
    server_args: ServerArgs, worker: Worker, tokenizer: Tokenizer | None
) -> None:
    """Run every kind of work once on the unused `worker`; all ranks must call this.

    Raises:
        CanaryViolation: the KV canary found something.
        RuntimeError: slots were lost.
    """
    began = time.perf_counter()
    with _forgotten(worker):
        count = _serve_all(server_args, worker, tokenizer)
    mark = worker.model_runner.compiled_mark
    if mark is not None:
        mark.set()
    seconds = time.perf_counter() - began
    logger.info("Warmed up with %d requests in %.1f s", count, seconds)


@contextmanager
def _rehearsing(worker: Worker) -> Iterator[None]:
    """As `ModelRunner.rehearsing`, for all models."""
    with ExitStack() as stack:
        for runner in worker.model_runners():
            stack.enter_context(runner.rehearsing())
        yield


class Unwatched:
    """A worker whose findings are ignored, because its kernels have not computed the
    results.
    """

    def __init__(self, worker: Worker) -> None:
        self.model_runner = worker.model_runner
        self.max_behind = worker.max_behind
        self.catch_up = worker.catch_up
        self._forward = worker.forward_batch_generation
        self.capture_graphs = worker.capture_graphs
        self.model_runners = worker.model_runners
        self.on_checkpoint = worker.on_checkpoint

    def forward_batch_generation(
        self, batch: ScheduleBatch, masks: GrammarMasks | None = None
    ) -> GenerationBatchResult:
        """As `Worker.forward_batch_generation`. No kernel has counted accepted tokens,
        and a request that gains none never ends."""
        result = self._forward(batch, masks)
        lens = result.accept_lens
        if lens is not None:
            result.set_accept_lens([max(count, 1) for count in lens])
        return result

    def canary_managers(self) -> list[CanaryManager]:
        return []


def _serve_all(
    server_args: ServerArgs,
    worker: Worker,
    tokenizer: Tokenizer | None,
    *,
    only_kernels: bool = False,
) -> int:
    """Serve all scenes in a separate scheduler; returns the number of requests."""
    count = 0
    adapters = worker.model_runner.adapters
    with (
        _made_up(server_args, worker, tokenizer) as (scheduler, io),
        nullcontext() if adapters is None else adapters.rehearsing() as lora,
    ):
        limits = replace(_limits(server_args, worker, tokenizer), lora=lora)
        for requests in scenes(limits, only_kernels=only_kernels):
            _serve(scheduler, io, requests)
            count += len(requests)
        for policy, scene in scheduler.shapes.rehearsals():
            scheduler.shapes.policy = policy
            for requests in scene(limits):
                _serve(scheduler, io, requests)
                count += len(requests)
        for manager in worker.canary_managers():
            manager.sweep()
        if server_args.speculative_algorithm is not None:
            _move_scratch(worker)
    return count


@contextmanager
def _made_up(
    server_args: ServerArgs, worker: Worker, tokenizer: Tokenizer | None
) -> Iterator[tuple[Scheduler, ListIO]]:
    """Scope of a scheduler for made-up requests, which ends with all memory free."""
    io = ListIO()
    scheduler = Scheduler(
        server_args=server_args,
        worker=worker,
        tokenizer=tokenizer,
        io=io,
        is_warm_up=True,
    )
    scheduler.intake.num_created = FIRST_SERIAL
    yield scheduler, io
    io.requests.append(ShutdownReq())
    scheduler.run_event_loop()  # finds leaks and ends the scheduler's helpers
    scheduler.cache.reset()
    # All slots are free by now, but their order of reuse has changed.
    scheduler.cache.allocator.clear()
    scheduler.cache.req_to_token_pool.clear()


def _move_scratch(worker: Worker) -> None:
    """Move the scratch slot onto itself: the number of slots a verification moves
    depends on its rows.
    """
    pool = worker.model_runner.token_to_kv_pool
    for size in MOVE_SIZES:
        slots = torch.zeros(size, dtype=torch.int64, device=worker.model_runner.device)
        pool.move_kv_cache(slots, slots)


def _limits(
    server_args: ServerArgs, worker: Worker, tokenizer: Tokenizer | None
) -> SceneLimits:
    runner = worker.model_runner
    chunk = server_args.chunked_prefill_size or 0
    graphs = runner.graph_sizes()
    return SceneLimits(
        rows=runner.max_running_requests,
        slots=runner.max_total_num_tokens,
        context=runner.model_config.context_len,
        batch_tokens=min(n for n in (chunk, server_args.max_prefill_tokens) if n > 0),
        has_chunks=chunk > 0,
        vocab_size=runner.model_config.vocab_size,
        graph_rows=max(graphs, default=0),
        is_prefill_only=server_args.disaggregation_mode == "prefill",
        has_prefix_cache=not server_args.disable_radix_cache,
        has_hidden_states=server_args.enable_return_hidden_states,
        has_grammars=tokenizer is not None and server_args.grammar_backend != "none",
    )


def _serve(scheduler: Scheduler, io: ListIO, requests: Sequence[GenerateReq]) -> None:
    io.requests.extend(requests)
    # The same on all ranks: each knows after a step what is left to do.
    scheduler.step()
    while scheduler.has_work():
        scheduler.step()
    for message in io.responses:
        if isinstance(message, BatchOutput):
            for output in message.outputs:
                reason = output.finish_reason
                if reason is not None and reason.type == "abort":
                    logger.warning("Not warmed up: %s", reason.message)
    io.responses.clear()


@contextmanager
def _forgotten(worker: Worker) -> Iterator[None]:
    """Scope whose requests leave no trace in `worker`; they must have released
    everything they held.
    """
    with ExitStack() as stack:
        for manager in worker.canary_managers():
            stack.enter_context(manager.rehearsing())
        yield
    worker.model_runner.reset_counts()
