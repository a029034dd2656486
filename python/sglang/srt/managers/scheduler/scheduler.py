"""The scheduler: receives requests, forms and runs batches, sends their results.

One loop body serves the normal and the overlapped order, which differ in how many
launched batches may be unresolved (`max_in_flight`). Policies, admission, result
processing and messages are separate objects.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from kv_canary.reporter import CanaryViolation
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.managers.messages.io_struct import (
    AbortReq,
    FlushCacheReq,
    FlushCacheRsp,
    GenerateBatch,
    GenerateReq,
    GetIncidentsReq,
    GetIncidentsRsp,
    GetSlotReq,
    GetSnapshotReq,
    GetStateReq,
    GetStateRsp,
    GetTiersReq,
    LoadLoraReq,
    PauseReq,
    ProfileReq,
    SchedulerReady,
    SchedulerRequest,
    SchedulerStats,
    ShutdownReq,
    UnloadLoraReq,
)
from sglang.srt.managers.scheduler.batch_selector import BatchSelector
from sglang.srt.managers.scheduler.canary_gate import CanaryGate
from sglang.srt.managers.scheduler.draft_shapes import DraftShapes
from sglang.srt.managers.scheduler.environment import create_environment
from sglang.srt.managers.scheduler.generation_pause import GenerationPause
from sglang.srt.managers.scheduler.grammar_queue import (
    GrammarQueue,
    create_grammar_queue,
)
from sglang.srt.managers.scheduler.handover import Handover
from sglang.srt.managers.scheduler.healer import Healer, HealLimits
from sglang.srt.managers.scheduler.inspector import Inspector
from sglang.srt.managers.scheduler.kv_event_feed import KvEventFeed
from sglang.srt.managers.scheduler.lora_control import LoraControl
from sglang.srt.managers.scheduler.output_streamer import OutputStreamer
from sglang.srt.managers.scheduler.profiler import Profiler
from sglang.srt.managers.scheduler.request_factory import RequestFactory, request_limits
from sglang.srt.managers.scheduler.request_intake import RequestIntake
from sglang.srt.managers.scheduler.result_processor import (
    BatchResultProcessor,
    ProcessedBatch,
)
from sglang.srt.managers.scheduler.stall_check import SchedulerStalled, StallCheck
from sglang.srt.managers.scheduler.stats import StatsTracker, add_runner_stats
from sglang.srt.managers.scheduler.step_inputs import StepInputs
from sglang.srt.managers.scheduler.tier_setup import create_tier_loads
from sglang.srt.managers.scheduler.watchdog import Watchdog
from sglang.srt.managers.worker.grammar_masks import GrammarMasks
from sglang.srt.mem_cache.common import check_idle
from sglang.srt.model_executor.memory_plan import device_bytes
from sglang.srt.replay.recording.attach import create_recorder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sglang.srt.kv_events.event_publisher import ZmqEventPublisher
    from sglang.srt.managers.batch.forward_result import GenerationBatchResult
    from sglang.srt.managers.batch.req import Req
    from sglang.srt.managers.batch.schedule_batch import LaunchRecord, ScheduleBatch
    from sglang.srt.managers.messages.io_struct import StepInput
    from sglang.srt.managers.scheduler.scheduler_io import SchedulerIO
    from sglang.srt.managers.worker.interface import Worker
    from sglang.srt.replay.recording.record_file import Checkpoint
    from sglang.srt.replay.recording.recorder import Recorder
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.hf_tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# An idle receive returns this often so that the process notices signals.
IDLE_WAIT_MS = 1000
# Maximum number of lost requests whose ids are logged.
MAX_LOST_SHOWN = 16
# Wait while a grammar is compiled and nothing else runs.
GRAMMAR_WAIT_MS = 2
# Wait while KV is loaded from another tier and nothing else runs.
LOAD_WAIT_MS = 1
# Wait while a profile runs or is written and nothing else runs.
PROFILE_WAIT_MS = 50


class InFlight(NamedTuple):
    """A launched batch whose result has not been processed yet."""

    launched: LaunchRecord
    result: GenerationBatchResult


class Scheduler:
    """Serves the requests of one process, or of one rank of several.

    With tensor parallelism every rank runs one, and all must act alike: rank 0 decides
    everything that depends on time or on another thread (`StepInputs`).

    Args:
        worker: runs the batches.
        tokenizer: for stop strings and grammars; None with --skip-tokenizer-init.
        io: where messages come from and go to.
        event_publisher: publisher of KV events, or None.
        is_warm_up: whether its requests are made up, and nothing may outlive it.

    Attributes:
        batches: the queue and the batches between two steps.
        in_flight: launched batches, oldest first.
        max_in_flight: how many of them a step leaves unresolved; 0 is the normal order.
        intake: accepts requests.
        idle_checked: whether the current idle period, if any, was checked.
    """

    def __init__(
        self,
        *,
        server_args: ServerArgs,
        worker: Worker,
        tokenizer: Tokenizer | None,
        io: SchedulerIO,
        event_publisher: ZmqEventPublisher | None = None,
        is_warm_up: bool = False,
    ) -> None:
        self.server_args = server_args
        self.io = io
        self.worker = worker
        self.model_config = worker.model_runner.model_config
        self.env = create_environment(
            server_args, worker.model_runner, max_behind=worker.max_behind
        )
        self.shapes = DraftShapes(server_args)
        self.cache = self.env.cache
        self._group = get_tp_group()
        self._inputs = StepInputs(io, self._group)
        self._stats = StatsTracker(self.cache, server_args)
        self._unfinished: dict[str, Req] = {}
        self._limits = request_limits(
            server_args, runner=worker.model_runner, tokenizer=tokenizer
        )
        self._grammars, self._masks = self._create_grammars(tokenizer)
        self._canary = self._create_canary_gate()
        self.tiers = create_tier_loads(
            server_args,
            worker,
            self.cache,
            group=self._group,
            canary=self._canary,
            is_warm_up=is_warm_up,
            wake=io.wake,
        )
        self.batches = BatchSelector(
            self.env,
            server_args=server_args,
            stats=self._stats,
            resolve=self._free_memory,
            on_dropped=lambda req: self.intake.end(req),
            loads=self.tiers,
        )
        self._streamer = OutputStreamer(
            io,
            stream_interval=server_args.stream_interval,
            has_digests=server_args.kv_canary != "none",
        )
        self._lora = LoraControl(
            worker.model_runner.adapters,
            requests=self._unfinished.values,
            group=self._group,
            send=io.send,
        )
        self.intake = RequestIntake(
            RequestFactory(
                self._limits,
                tokenizer=tokenizer,
                random_seed=server_args.random_seed or 0,
                check_lora=self._lora.check,
            ),
            batches=self.batches,
            grammars=self._grammars,
            canary=self._canary,
            streamer=self._streamer,
            stats=self._stats,
            max_queued_requests=server_args.max_queued_requests,
            unfinished=self._unfinished,
            handover=Handover() if self.tiers is None else self.tiers.handover,
        )
        self._results = BatchResultProcessor(
            self.cache,
            on_finish=self.intake.forget,
            on_lost_grammar=self.intake.renew_grammar,
            on_verified=self._stats.on_verified,
        )
        self._stall_check = StallCheck(self.batches, cache=self.cache)
        self._watchdog = Watchdog(server_args.watchdog_timeout)
        self._profiler = Profiler(
            rank=self._group.rank, device=self.env.device, send=io.send
        )
        self.in_flight: deque[InFlight] = deque()
        self._healer = self._create_healer()
        self._pause = GenerationPause(
            batches=self.batches,
            intake=self.intake,
            resolve=self.resolve_all,
            send=io.send,
        )
        self._inspector = Inspector(
            self.env,
            io=io,
            requests=self._unfinished.values,
            stats=self.stats_snapshot,
            managers=worker.canary_managers(),
            healer=self._healer,
            tiers=self.tiers,
            is_leader=self._group.is_leader,
        )
        # The CPU has nothing to overlap: a launch there returns when it is done.
        has_overlap = (
            server_args.device != "cpu" and not server_args.disable_overlap_schedule
        )
        self.max_in_flight = 1 if has_overlap else 0
        self._kv_events = (
            None
            if event_publisher is None
            else KvEventFeed(self.cache, event_publisher)
        )
        if self._kv_events is not None and self.tiers is not None:
            self._kv_events.watch(self.tiers.tiers)
        self._is_shut_down = False
        self._is_loading_alone = False
        self.idle_checked = True
        self.recorder = create_recorder(self)
        if self.recorder is not None:
            self.attach_recorder(self.recorder)

    # -- set-up --------------------------------------------------------------------

    def _create_grammars(
        self, tokenizer: Tokenizer | None
    ) -> tuple[GrammarQueue | None, GrammarMasks | None]:
        """Create the queue of grammars being compiled and the masks of running
        requests.
        """
        grammars = create_grammar_queue(
            self.server_args,
            tokenizer=tokenizer,
            limits=self._limits,
            decides=self._group.is_leader,
        )
        if grammars is None:
            return None, None
        masks = GrammarMasks(
            max_batch_size=self.worker.model_runner.max_running_requests,
            vocab_size=self._limits.vocab_size,
            device=self.env.device,
        )
        return grammars, masks

    def _create_canary_gate(self) -> CanaryGate | None:
        managers = self.worker.canary_managers()
        if not managers:
            return None
        return CanaryGate(
            managers,
            cache=self.cache,
            requests=self._unfinished.values,
            group=self._group,
        )

    def _create_healer(self) -> Healer | None:
        if self._canary is None or not self._canary.heals:
            return None
        return Healer(
            gate=self._canary,
            cache=self.cache,
            batches=self.batches,
            intake=self.intake,
            results=self._results,
            limits=HealLimits(
                heals_per_minute=self.server_args.kv_canary_heal_limit,
                quarantine_share=self.server_args.kv_canary_quarantine_limit,
                decode_reserve=self.env.decode_reserve,
            ),
            requests=self._unfinished.values,
            launches=lambda: [launched for launched, _ in self.in_flight],
            num_forwards=lambda: self._stats.num_forwards,
        )

    def ready_message(self) -> SchedulerReady:
        limits = self._limits
        return SchedulerReady(
            context_len=self.model_config.context_len,
            max_req_input_len=limits.max_req_input_len,
            max_total_num_tokens=self.worker.model_runner.max_total_num_tokens,
            max_running_requests=self.worker.model_runner.max_running_requests,
            kv_pool_bytes=self.worker.model_runner.token_to_kv_pool.nbytes,
            device_bytes=device_bytes(
                self.worker.model_runners(),
                self.server_args.device,
                watched=sum(m.nbytes for m in self.worker.canary_managers()),
            ),
            vocab_size=limits.vocab_size,
            hidden_size=limits.hidden_size,
            loras=self._lora.loaded,
            bootstrap_port=0 if self.tiers is None else self.tiers.handover.port,
        )

    # -- the loop ------------------------------------------------------------------

    def run_event_loop(self) -> None:
        """Serve until a `ShutdownReq` arrives."""
        while not self._is_shut_down:
            self.step(may_wait=True)
        self._watchdog.close()
        if self._grammars is not None:
            self._grammars.shutdown()
        if self._kv_events is not None:
            self._kv_events.close()
        if self.tiers is not None:
            self.tiers.close()
        self._profiler.close()

    def step(self, *, may_wait: bool = False) -> bool:
        """Run one round: receive, launch a batch, process the results that are due.

        `may_wait` lets the receive wait if there is nothing else to do. Returns whether
        a batch was launched or processed.
        """
        decided = [] if self._grammars is None else self._grammars.decide()
        inputs = self._inputs.next(
            wait_ms=self._wait_ms() if may_wait and not decided else 0,
            grammars=decided,
            tiers=None if self.tiers is None else self.tiers.decide(),
            shape=self.shapes.choose(self.batches),
        )
        with self._watchdog.guard():
            try:
                return self._run_round(inputs)
            except CanaryViolation:
                if self.tiers is not None:
                    self.tiers.on_violation()
                raise

    def _run_round(self, inputs: StepInput) -> bool:
        """Run one round after its messages have been received; see `step`."""
        self.batches.shape = self.shapes.ladder[inputs.shape]
        recorder = self.recorder
        if recorder is not None:
            self._begin_record(recorder, inputs)
        if inputs.grammars:
            self.intake.apply_grammars(inputs.grammars)
        if self.tiers is not None and inputs.tiers is not None:
            self.tiers.apply(inputs.tiers)
        for message in inputs.requests:
            self._dispatch(message)
        if self._must_know_results():
            self._resolve(0)
        self._is_loading_alone = False
        was_checked, may_run = self.idle_checked, self._may_run()
        batch = None if self._pause.is_on else self.batches.get_next_batch_to_run()
        if batch is not None:
            self.idle_checked = False
            self.in_flight.append(self._launch(batch))
        did_process = self._resolve(self.max_in_flight if batch is not None else 0)
        if self._healer is not None and self._healer.is_busy:
            self._healer.after_step(has_launched=batch is not None)
        if batch is None and not did_process:
            self._on_empty_round(inputs)
        if self.tiers is not None and inputs.tiers is not None:
            self.tiers.after_round(inputs.tiers)
        if self._kv_events is not None:
            self._kv_events.publish()
        if self._profiler.is_busy:
            self._profiler.poll()
        if recorder is not None and batch is None:
            has_input = bool(inputs.requests or inputs.grammars)
            has_changed = may_run or self.idle_checked != was_checked
            recorder.end_round(is_kept=has_input or did_process or has_changed)
        return batch is not None or did_process

    def _begin_record(self, recorder: Recorder, inputs: StepInput) -> None:
        """Open a round of the record. Results in flight are processed first if a new
        part of the record begins or the next batch depends on them.
        """
        resolves = recorder.is_due or self._must_know_results()
        if resolves:
            self._resolve(0)
        if recorder.is_due:
            recorder.begin_generation()
        recorder.begin_round(inputs, resolves=resolves)

    def _must_know_results(self) -> bool:
        """Whether the next batch depends on results in flight: every batch does, or its
        masks depend on the tokens.
        """
        if self.env.needs_results(self.batches.shape):
            return True
        return any([launched.has_grammar for launched, _ in self.in_flight])

    def _resolve(self, max_in_flight: int) -> bool:
        """Process results, oldest first, until `max_in_flight` are left; returns
        whether any was.
        """
        did_process = False
        while len(self.in_flight) > max_in_flight:
            self._process(self.in_flight.popleft())
            did_process = True
        return did_process

    def _free_memory(self) -> bool:
        """Free the memory of ended requests and watched pages; returns whether there
        may be any.
        """
        has_freed = self._resolve(0)
        if self._healer is not None:
            has_freed |= self._healer.release_watched()
        return has_freed

    def _wait_ms(self) -> int:
        """How long the receive may wait: 0 while there is something to run."""
        if self._is_loading_alone:
            return LOAD_WAIT_MS
        if self.in_flight or self._may_run():
            return 0
        if self._grammars:
            return GRAMMAR_WAIT_MS
        if self._profiler.is_busy:
            return PROFILE_WAIT_MS
        most = None if self.tiers is None else self.tiers.handover.wait_ms
        return IDLE_WAIT_MS if most is None else most

    def _may_run(self) -> bool:
        """Whether there is something to launch."""
        return not self._pause.is_on and self.batches.has_requests()

    def has_work(self) -> bool:
        """Whether any request is unfinished, or KV is on its way."""
        is_loading = self.tiers is not None and self.tiers.num_loading > 0
        return bool(
            self.in_flight
            or self.batches.has_requests()
            or self._grammars
            or is_loading
        )

    def _launch(self, batch: ScheduleBatch) -> InFlight:
        launched = batch.record()
        if self.recorder is not None:
            self.recorder.on_launch(batch, launched)
        if self._inputs.are_compared:
            self._inputs.remember(len(batch), int(launched.ends.sum()))
        masks = self._masks if batch.has_grammar else None
        with self._watchdog.guard():
            try:
                result = self.worker.forward_batch_generation(batch, masks)
            except Exception as error:
                self._explain(error)
                raise
        return InFlight(launched, result)

    def _process(self, done: InFlight) -> None:
        # The canary may be the first to wait for the device.
        with self._watchdog.guard():
            try:
                processed = self._process_checked(done)
            except Exception as error:
                self._explain(error)
                raise
        if self._inputs.are_compared:
            self._inputs.remember(*(req.tokens[-1] for req in processed.reqs))
        self._stats.on_tokens(processed.num_generated)
        self._streamer.send(processed.reqs)
        if self._profiler.is_busy:
            self._profiler.count_forward()

    def _process_checked(self, done: InFlight) -> ProcessedBatch:
        """Give a result to its requests, with canary checks before and after.

        Raises:
            CanaryViolation: a violation was found and is not healed.
        """
        launched, result = done
        self.shapes.observe(launched, result)
        canary, healer = self._canary, self._healer
        if canary is None:
            return self._results.process(launched, result)
        sighting = canary.inspect(result)
        if healer is not None:
            return healer.process(launched, result, sighting)
        before = launched.before_result()
        ended = [] if sighting is None else canary.end_alone(launched, sighting)
        for req, why in ended:
            self._results.end(req, why)
        failures: dict[int, Exception] = {}
        processed = self._results.process(
            launched, result, on_error=failures.__setitem__
        )
        canary.confirm(launched, result, before, failures)
        return processed._replace(reqs=[req for req, _ in ended] + processed.reqs)

    def _explain(self, error: Exception) -> None:
        """Report what the canary found before a launch or a result failed.

        Raises:
            CanaryViolation: there are findings and the mode is not `log`.
        """
        if self._canary is not None:
            self._canary.fail(error)

    def _on_empty_round(self, inputs: StepInput) -> None:
        """Check what must hold if nothing was launched or processed."""
        if not self.has_work():
            self._on_idle()
        elif (
            inputs.requests
            or inputs.grammars
            or self._grammars
            or self._pause.is_on
            or (inputs.tiers is not None and inputs.tiers.arrived)
        ):
            self._stall_check.restart()
        elif self.tiers is not None and self.tiers.num_loading:
            self._is_loading_alone = True
            self._stall_check.restart()
        else:
            try:
                self._stall_check.count_round(self._stats.num_forwards)
            except SchedulerStalled as error:
                self._explain(error)
                raise

    def _on_idle(self) -> None:
        """Check that every request has its answer, and once per idle period that every
        slot is free or cached."""
        if self._unfinished:
            self._end_lost()
        if self._streamer.owed:
            self._streamer.send_owed()
        if not self.idle_checked:
            try:
                self._check_idle()
            except RuntimeError as error:
                if self._healer is None:
                    raise
                self._healer.heal_idle(error)
                self._check_idle()
            self._stats.on_idle()
            self.shapes.on_idle()
            self.batches.on_idle()
            self.idle_checked = True

    def _end_lost(self) -> None:
        """Answer requests that, because of a scheduler error, are in no queue and no
        batch and would otherwise never be answered.
        """
        lost = list(self._unfinished.values())
        logger.error(
            "%d request(s) were in no queue and no batch, and end with an error: %s",
            len(lost),
            ", ".join(req.rid for req in lost[:MAX_LOST_SHOWN]),
        )
        for req in lost:
            if not req.is_finished:
                req.abort("the scheduler has lost this request", status_code=500)
            if req.last_node is not None:
                self.cache.allocator.free(self.cache.let_go(req))
            self.intake.end(req)

    def _check_idle(self) -> None:
        fenced, *in_groups = [0] if self._healer is None else self._healer.fenced
        check_idle(self.cache, fenced=fenced, fenced_in_groups=in_groups)

    # -- checkpoints ---------------------------------------------------------------

    def attach_recorder(self, recorder: Recorder) -> None:
        """Let `recorder` record every decision from now on."""
        self.recorder = self.intake.recorder = recorder

    @property
    def unfinished(self) -> list[Req]:
        """All unfinished requests, oldest first."""
        return list(self._unfinished.values())

    @property
    def num_created(self) -> int:
        """Number of requests so far."""
        return self.intake.num_created

    @property
    def is_paused(self) -> bool:
        """Whether launching is paused."""
        return self._pause.is_on

    def why_not_saved(self) -> str | None:
        """Return why a checkpoint would not be enough to continue from, or None if it
        would.
        """
        for group in self.cache.groups:
            if group.slots.unsaved:
                return group.slots.unsaved
        if self._healer is not None and any(self._healer.fenced):
            return "damaged pages were out of use when the log was cut"
        if self._grammars:
            return "grammars were being compiled when the log was cut"
        return None

    def catch_up(self) -> None:
        """Let the drafts' KV have all that the target's has, as after a prefill of the
        same tokens. Nothing is in flight."""
        self.batches.restart_lapsed()
        batch = self.running
        if batch is None or not self.env.max_behind:
            return
        batch.filter_decoding()
        batch.plan_catch_up()
        self.worker.catch_up(batch)

    def resolve_all(self) -> None:
        """Process all results in flight."""
        self._resolve(0)

    def restore(self, checkpoint: Checkpoint, reqs: Mapping[int, Req]) -> None:
        """Restore saved queues and counters; `reqs` maps saved serials to requests."""
        self.batches.load(checkpoint.batches, reqs)
        self.intake.num_created = checkpoint.created
        self.idle_checked = checkpoint.idle_checked
        self._pause.is_on = checkpoint.is_paused

    # -- messages ------------------------------------------------------------------

    def _dispatch(self, message: SchedulerRequest) -> None:
        match message:
            case GenerateReq():
                self.intake.accept(message)
            case GenerateBatch():
                for request in message.unpack():
                    self.intake.accept(request)
            case AbortReq():
                self.intake.abort(message)
            case FlushCacheReq():
                self.io.send(self._flush_cache(message))
            case GetStateReq():
                self.io.send(
                    GetStateRsp(call_id=message.call_id, stats=self.stats_snapshot())
                )
            case GetIncidentsReq():
                self.io.send(self._incidents(message))
            case GetSnapshotReq() | GetSlotReq() | GetTiersReq():
                self._inspector.answer(message)
            case ProfileReq():
                self._profiler.handle(message)
            case PauseReq():
                self._pause.handle(message)
            case LoadLoraReq() | UnloadLoraReq():
                self._lora.handle(message)
            case ShutdownReq():
                self._is_shut_down = True

    def _flush_cache(self, message: FlushCacheReq) -> FlushCacheRsp:
        # A finished request may still be in a batch until the next round. While paused,
        # requests without memory may be waiting.
        success = not self._unfinished or (
            self._pause.is_on
            and not any(req.req_pool_idx for req in self._unfinished.values())
        )
        if self.tiers is not None:
            success = success and self.tiers.flush(message.tiers)
        if success and "device" in message.tiers:
            self.cache.reset()
        if success:
            logger.info("Flushed the prefix cache: %s", ", ".join(message.tiers))
        return FlushCacheRsp(call_id=message.call_id, success=success)

    def _incidents(self, message: GetIncidentsReq) -> GetIncidentsRsp:
        found = [] if self._canary is None else self._canary.incidents()
        return GetIncidentsRsp(call_id=message.call_id, incidents=found)

    def own_incidents(self) -> list[dict[str, Any]]:
        """Return this rank's newest KV canary incidents, without asking other ranks."""
        return [] if self._canary is None else self._canary.own_incidents()

    @property
    def running(self) -> ScheduleBatch | None:
        """The batch that decodes."""
        return self.batches.running

    @property
    def waiting(self) -> list[Req]:
        """The queue."""
        return self.batches.waiting

    def stats_snapshot(self) -> SchedulerStats:
        """Return all current counters and gauges."""
        running = 0 if self.running is None else len(self.running)
        compiling = 0 if self._grammars is None else len(self._grammars)
        stats = self._stats.snapshot(
            running=running, waiting=self.waiting, compiling=compiling
        )
        add_runner_stats(stats, self.worker.model_runner)
        if self._canary is not None:
            self._canary.add_stats(stats)
        if self._healer is not None:
            self._healer.add_stats(stats)
        if self._kv_events is not None:
            self._kv_events.add_stats(stats)
        if self.tiers is not None:
            self.tiers.add_stats(stats)
        return stats
