"""The scheduler: receives requests, forms batches, runs them, sends what came out.

One loop body serves the normal and the overlapped order; they differ in how many
launched batches may be unresolved (`max_in_flight`). Policies, admission, result
processing and messages are objects of their own.
"""

from __future__ import annotations

import logging
from collections import deque
from functools import partial
from typing import NamedTuple

from sglang.srt.constrained.grammar_manager import GrammarManager
from sglang.srt.constrained.llguidance_backend import LLGuidanceBackend
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.managers.io_struct import (
    AbortReq,
    FlushCacheReq,
    FlushCacheRsp,
    GenerateReq,
    GetIncidentsReq,
    GetIncidentsRsp,
    GetStateReq,
    GetStateRsp,
    GrammarDecision,
    SchedulerReady,
    SchedulerRequest,
    SchedulerStats,
    ShutdownReq,
)
from sglang.srt.managers.req import Req
from sglang.srt.managers.schedule_batch import (
    BatchEnvironment,
    LaunchRecord,
    ScheduleBatch,
)
from sglang.srt.managers.schedule_policy import (
    SCHEDULE_POLICIES,
    Admission,
    NewTokenRatio,
    PrefillAdder,
    PrefillBudget,
)
from sglang.srt.managers.scheduler_components.canary_gate import CanaryGate
from sglang.srt.managers.scheduler_components.grammar_queue import GrammarQueue
from sglang.srt.managers.scheduler_components.output_streamer import OutputStreamer
from sglang.srt.managers.scheduler_components.request_factory import (
    RequestFactory,
    RequestLimits,
)
from sglang.srt.managers.scheduler_components.result_processor import (
    BatchResultProcessor,
)
from sglang.srt.managers.scheduler_components.retraction import retract_for_decode
from sglang.srt.managers.scheduler_components.scheduler_io import SchedulerIO
from sglang.srt.managers.scheduler_components.stats import (
    StatsTracker,
    add_graph_stats,
)
from sglang.srt.managers.scheduler_components.step_inputs import StepInputs
from sglang.srt.managers.scheduler_components.watchdog import Watchdog
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult, decode_reserve
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.common import check_idle, release_req
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.utils.hf_tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# An idle receive returns this often, so that the process notices signals.
IDLE_WAIT_MS = 1000
GRAMMAR_THREADS = 2
# While a grammar compiles and nothing else runs.
GRAMMAR_WAIT_MS = 2


class InFlight(NamedTuple):
    """A launched batch whose result is not processed yet."""

    launched: LaunchRecord
    result: GenerationBatchResult


class Scheduler:
    """Args:
    worker: runs the batches.
    tokenizer: for stop strings and grammars; None with --skip-tokenizer-init.
    io: where messages come from and go to.

    Under tensor parallelism every rank runs one, and all of them must do the same: what
    depends on time or on another thread is decided by rank 0 (`StepInputs`).
    """

    def __init__(
        self,
        *,
        server_args: ServerArgs,
        worker: TpModelWorker | EAGLEWorkerV2,
        tokenizer: Tokenizer | None,
        io: SchedulerIO,
    ) -> None:
        self.server_args = server_args
        self.io = io
        self._inputs = StepInputs(io, get_tp_group())
        self.worker = worker
        runner = worker.model_runner
        self.model_config = runner.model_config
        cache_class: type[BasePrefixCache] = (
            ChunkCache if server_args.disable_radix_cache else RadixCache
        )
        self.cache = cache_class(
            req_pool=runner.req_to_token_pool,
            allocator=runner.allocator,
            # A slot of the draft's pool depends on the next token, too.
            bigram=server_args.speculative_algorithm is not None,
        )
        self.env = BatchEnvironment(
            cache=self.cache,
            vocab_size=self.model_config.vocab_size,
            needs_host_lens=runner.attn_backend.capabilities.needs_cpu_seq_lens,
            decode_reserve=decode_reserve(server_args),
        )
        self._factory = RequestFactory(
            self._limits(tokenizer),
            tokenizer=tokenizer,
            random_seed=server_args.random_seed or 0,
        )
        self._grammars = self._create_grammar_queue(tokenizer)
        self._order_waiting = SCHEDULE_POLICIES[server_args.schedule_policy]
        self._new_token_ratio = NewTokenRatio(server_args.schedule_conservativeness)
        self._stats = StatsTracker(
            self.cache, decode_log_interval=server_args.decode_log_interval
        )
        self._results = BatchResultProcessor(
            self.cache,
            on_finish=self._on_request_finished,
            on_verified=self._stats.on_verified,
        )
        self._streamer = OutputStreamer(io, stream_interval=server_args.stream_interval)
        self._watchdog = Watchdog(server_args.watchdog_timeout)

        self.waiting: list[Req] = []
        self.running: ScheduleBatch | None = None
        self._chunked: Req | None = None
        self._last_prefill: ScheduleBatch | None = None
        self._in_flight: deque[InFlight] = deque()
        # The CPU has nothing to overlap with: a launch there returns when it is done.
        has_overlap = (
            server_args.device != "cpu" and not server_args.disable_overlap_schedule
        )
        self.max_in_flight = 1 if has_overlap else 0
        self._by_rid: dict[str, Req] = {}
        self._canary = self._create_canary_gate()
        self._is_shut_down = False
        self._idle_checked = True

    # -- set-up --------------------------------------------------------------------

    def _limits(self, tokenizer: Tokenizer | None) -> RequestLimits:
        config, runner = self.model_config, self.worker.model_runner
        eos = set(config.eos_token_ids)
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            eos.add(tokenizer.eos_token_id)
        slots = runner.max_total_num_tokens
        reserve = decode_reserve(self.server_args)
        if reserve + self.cache.page_size > slots:
            raise ValueError(
                f"{slots} KV slots do not hold one request: its drafts reserve "
                f"{reserve} beside its tokens; raise --max-total-tokens or "
                "--mem-fraction-static, or lower --speculative-eagle-topk or "
                "--page-size"
            )
        return RequestLimits(
            # The last sampled token needs no slot.
            max_total_len=min(config.context_len, slots - reserve + 1),
            vocab_size=config.vocab_size,
            eos_token_ids=tuple(sorted(eos)),
            allow_hidden_states=self.server_args.enable_return_hidden_states,
            hidden_size=config.hidden_size,
            embeds_refusal=self._embeds_refusal(),
            max_new_tokens=1
            if self.server_args.disaggregation_mode == "prefill"
            else None,
        )

    def _embeds_refusal(self) -> str | None:
        """Why requests may not bring embeddings; None: they may."""
        if not self.worker.model_runner.model.takes_input_embeds:
            return f"{self.model_config.architecture} takes tokens only"
        if self.server_args.speculative_algorithm is not None:
            return (
                "the draft model needs tokens; start the server without "
                f"--speculative-algorithm {self.server_args.speculative_algorithm}"
            )
        return None

    def _create_grammar_queue(self, tokenizer: Tokenizer | None) -> GrammarQueue | None:
        eos_ids = self._factory.limits.eos_token_ids
        if self.server_args.grammar_backend == "none" or tokenizer is None:
            return None
        if not eos_ids:
            return None
        assert self.server_args.max_running_requests is not None
        vocab_size = self.model_config.vocab_size
        backend = LLGuidanceBackend(
            tokenizer.tokenizer_json, vocab_size=vocab_size, eos_ids=eos_ids
        )
        decides = get_tp_group().is_leader
        return GrammarQueue(
            GrammarManager(backend, n_threads=GRAMMAR_THREADS if decides else 0),
            decides=decides,
            max_rows=self.server_args.max_running_requests,
            vocab_size=vocab_size,
            device=self.env.device,
        )

    def _create_canary_gate(self) -> CanaryGate | None:
        managers = self.worker.canary_managers()
        if not managers:
            return None
        return CanaryGate(
            managers,
            cache=self.cache,
            requests=lambda: self._by_rid.values(),
            group=get_tp_group(),
        )

    def ready_message(self) -> SchedulerReady:
        limits = self._factory.limits
        return SchedulerReady(
            context_len=self.model_config.context_len,
            max_req_input_len=limits.max_req_input_len,
            max_total_num_tokens=self.worker.model_runner.max_total_num_tokens,
            vocab_size=limits.vocab_size,
        )

    # -- the loop ------------------------------------------------------------------

    def run_event_loop(self) -> None:
        """Serve until a `ShutdownReq` arrives."""
        while not self._is_shut_down:
            self.step(may_wait=True)
        if self._grammars is not None:
            self._grammars.shutdown()

    def step(self, *, may_wait: bool = False) -> bool:
        """One round: receive, launch a batch, process what must be processed.

        `may_wait` lets the receive wait where there is nothing else to do. Returns
        whether a batch was launched or processed.
        """
        decided = [] if self._grammars is None else self._grammars.decide()
        inputs = self._inputs.next(
            wait_ms=self._wait_ms() if may_wait and not decided else 0,
            grammars=decided,
        )
        self._collect_grammars(inputs.grammars)
        for message in inputs.requests:
            self._dispatch(message)
        if self._must_know_results():
            self._resolve(0)
        batch = self._get_next_batch_to_run()
        if batch is not None:
            self._in_flight.append(self._launch(batch))
        did_process = self._resolve(self.max_in_flight if batch is not None else 0)
        if batch is None and not did_process and not self.has_work():
            self._on_idle()
        return batch is not None or did_process

    def _must_know_results(self) -> bool:
        """Whether the next batch depends on what is in flight: its masks on the tokens,
        or its metadata on the lengths that a verification decides."""
        if self.env.decode_reserve and self.env.needs_host_lens:
            return True
        return any(launched.has_grammar for launched, _ in self._in_flight)

    def _resolve(self, max_in_flight: int) -> bool:
        """Process results, oldest first, until so many are left; True if any was."""
        did_process = False
        while len(self._in_flight) > max_in_flight:
            self._process(self._in_flight.popleft())
            did_process = True
        return did_process

    def _wait_ms(self) -> int:
        """How long the receive may wait: not at all while there is something to run."""
        if self._can_run():
            return 0
        return GRAMMAR_WAIT_MS if self._grammars else IDLE_WAIT_MS

    def _can_run(self) -> bool:
        return bool(
            self.waiting
            or self._in_flight
            or self._chunked is not None
            or self._last_prefill is not None
            or self.running is not None
        )

    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self._can_run() or bool(self._grammars)

    def _launch(self, batch: ScheduleBatch) -> InFlight:
        launched = batch.record()
        if self._inputs.are_compared:
            self._inputs.remember(len(batch), int(launched.ends.sum()))
        with self._watchdog.guard():
            try:
                return InFlight(launched, self._run(batch))
            except Exception as error:
                self._explain(error)
                raise

    def _run(self, batch: ScheduleBatch) -> GenerationBatchResult:
        grammars, worker = self._grammars, self.worker
        if grammars is None or not batch.has_grammar:
            return worker.forward_batch_generation(batch, batch.sampling_info)
        if isinstance(worker, EAGLEWorkerV2) and batch.forward_mode.is_decode:
            return worker.forward_batch_generation(
                batch,
                batch.sampling_info,
                tree_masks=partial(grammars.tree_masks, batch),
            )
        return worker.forward_batch_generation(batch, grammars.with_masks(batch))

    def _process(self, done: InFlight) -> None:
        # The canary may be the first to wait for the device.
        with self._watchdog.guard():
            try:
                if self._canary is not None:
                    self._canary.inspect(done.result)
                processed = self._results.process(done.launched, done.result)
            except Exception as error:
                self._explain(error)
                raise
        if self._inputs.are_compared:
            self._inputs.remember(*(req.tokens[-1] for req in processed.reqs))
        self._stats.on_tokens(processed.num_generated)
        self._streamer.send(processed.reqs)

    def _explain(self, error: Exception) -> None:
        """What the canary found before a launch or a result failed.

        Raises:
            CanaryViolation: it found something and its mode is `raise`.
        """
        if self._canary is not None:
            self._canary.fail(error)

    def _on_idle(self) -> None:
        """Once per idle period: nothing runs, so every slot must be free or cached."""
        if not self._idle_checked:
            check_idle(self.cache)
            self._stats.on_idle()
            self._new_token_ratio.on_idle()
            self._idle_checked = True

    # -- choosing a batch ----------------------------------------------------------

    def _get_next_batch_to_run(self) -> ScheduleBatch | None:
        prefilled = self._last_prefill is not None
        self._merge_last_prefill()
        # Between two chunks of a long prompt the others get one decode step.
        is_decode_turn = prefilled and self._chunked is not None
        if not (is_decode_turn and self.running is not None):
            batch = self._get_new_prefill_batch()
            if batch is not None:
                self._last_prefill = batch
                self._idle_checked = False
                return batch
        return self._get_decode_batch()

    def _merge_last_prefill(self) -> None:
        """Requests whose prompt is complete start to decode."""
        batch, self._last_prefill = self._last_prefill, None
        if batch is None:
            return
        batch.filter(
            [
                i
                for i, req in enumerate(batch.reqs)
                if req.decodes_on and not req.is_chunked
            ]
        )
        if not batch.reqs:
            return
        if self.running is not None:
            self.running.filter_decoding()
        if self.running is None or not self.running.reqs:
            self.running = batch
            batch.sort_for_decode()
        else:
            self.running.merge(batch)

    def _get_new_prefill_batch(self) -> ScheduleBatch | None:
        if self._chunked is not None and self._chunked.abort_message is not None:
            self._drop_chunked()
        if self._chunked is None and not self.waiting:
            return None
        adder = self._fill_prefill_adder()
        if not adder.reqs:
            return None
        batch = ScheduleBatch.prepare_for_extend(
            adder.reqs, adder.extend_lens, self.env
        )
        if batch is None:
            self._undo_admission(adder)
            return None
        self._chunked = adder.chunked
        added = {req.serial for req in adder.reqs}
        self.waiting = [req for req in self.waiting if req.serial not in added]
        for req in adder.reqs:
            if not req.was_admitted:
                req.was_admitted = True
                self._stats.on_admitted(req)
        self._stats.on_prefill(
            batch.reqs, sum(adder.extend_lens), waiting=len(self.waiting)
        )
        return batch

    def _fill_prefill_adder(self) -> PrefillAdder:
        args = self.server_args
        assert args.chunked_prefill_size is not None
        running = [] if self.running is None else self.running.reqs
        adder = PrefillAdder(
            cache=self.cache,
            running=[req for req in running if req.decodes_on],
            new_token_ratio=self._new_token_ratio.value,
            budget=PrefillBudget(
                max_prefill_tokens=args.max_prefill_tokens,
                chunk_tokens=(
                    args.chunked_prefill_size if args.chunked_prefill_size > 0 else None
                ),
                max_new_reqs=self.cache.req_pool.available_size()
                + (self._chunked is not None),
                decode_reserve=self.env.decode_reserve,
            ),
        )
        if self._chunked is not None:
            adder.add_chunked(self._chunked)
        self.waiting = self._order_waiting(self.waiting, self.cache)
        for req in self.waiting:
            if adder.add(req) is Admission.NO_BUDGET:
                break
        return adder

    def _undo_admission(self, adder: PrefillAdder) -> None:
        """The slots did not suffice after all: locks go, and so does the begun
        prompt."""
        for req in adder.reqs:
            if req is self._chunked:
                continue
            assert req.last_node is not None
            self.cache.dec_lock_ref(req.last_node)
            req.last_node, req.cache_protected_len = None, 0
            req.is_chunked = False
        self._resolve(0)
        if self._chunked is not None:
            self._requeue(self._chunked)
            self._chunked = None

    def _get_decode_batch(self) -> ScheduleBatch | None:
        batch = self.running
        if batch is None:
            return None
        batch.filter_decoding()
        if batch.reqs and not batch.prepare_for_decode():
            self._make_room(batch)
        if not batch.reqs:
            self.running = None
            return None
        self._new_token_ratio.on_decode()
        self._stats.on_decode(len(batch), len(self.waiting))
        self._idle_checked = False
        return batch

    def _make_room(self, batch: ScheduleBatch) -> None:
        """Retract requests until the others can decode.

        The results in flight come first: what ends in them gives its slots back.
        """
        if self._resolve(0):
            batch.filter_decoding()
            if not batch.reqs or batch.prepare_for_decode():
                return
        retracted = retract_for_decode(batch, chunked=self._chunked)
        for req in reversed(retracted):
            if req is self._chunked:
                self._chunked = None
            self._requeue(req)
        self._new_token_ratio.on_retract(batch.reqs)
        self._stats.on_retract(len(retracted))
        logger.warning(
            "KV cache is full: retracted %d request(s), %d go on; a larger "
            "--schedule-conservativeness admits fewer",
            len(retracted),
            len(batch),
        )

    def _requeue(self, req: Req) -> None:
        """Put a request whose memory was (or is now) released at the front."""
        if req.req_pool_idx:
            release_req(req, cache=self.cache)
            req.req_pool_idx = 0
        req.reset_for_retry()
        self.waiting.insert(0, req)

    # -- messages ------------------------------------------------------------------

    def _dispatch(self, message: SchedulerRequest) -> None:
        match message:
            case GenerateReq():
                self._accept(message)
            case AbortReq():
                self._abort(message)
            case FlushCacheReq():
                self._flush_cache(message)
            case GetStateReq():
                self.io.send(
                    GetStateRsp(call_id=message.call_id, stats=self.stats_snapshot())
                )
            case GetIncidentsReq():
                self.io.send(self._incidents(message))
            case ShutdownReq():
                self._is_shut_down = True

    def _accept(self, request: GenerateReq) -> None:
        try:
            req = self._factory.create(request)
        except ValueError as error:
            self._refuse(request, str(error), status_code=400)
            return
        limit = self.server_args.max_queued_requests
        grammars_waiting = 0 if self._grammars is None else len(self._grammars)
        if len(self.waiting) + grammars_waiting >= limit:
            self._refuse(
                request,
                f"the queue is full ({limit} requests wait); try again later",
                status_code=503,
            )
            return
        self._by_rid[req.rid] = req
        if self._canary is not None:
            self._canary.admit(req)
        grammar_key = req.params.grammar_key
        if grammar_key is None:
            self.waiting.append(req)
        elif self._grammars is None:
            req.abort(
                f"{grammar_key[0]} needs a tokenizer with an EOS token and "
                "--grammar-backend llguidance",
                status_code=400,
            )
            self._end_unstarted(req)
        else:
            self._grammars.submit(req, *grammar_key)

    def _refuse(self, request: GenerateReq, message: str, *, status_code: int) -> None:
        """Answer a request that never became one."""
        self._streamer.refuse(request, message, status_code=status_code)

    def _abort(self, message: AbortReq) -> None:
        rids = list(self._by_rid) if message.abort_all else [message.rid]
        for rid in rids:
            req = self._by_rid.get(rid)
            if req is None or req.is_finished:
                continue
            req.abort_message = message.message
            if self._grammars is not None and self._grammars.cancel(rid) is not None:
                req.finish_if_aborted()
                self._end_unstarted(req)
            elif req.req_pool_idx == 0 and req in self.waiting:
                self.waiting.remove(req)
                req.finish_if_aborted()
                self._end_unstarted(req)

    def _collect_grammars(self, decisions: list[GrammarDecision]) -> None:
        if not decisions:
            return
        assert self._grammars is not None
        ready, failed = self._grammars.apply(decisions)
        self.waiting += ready
        for req in failed:
            self._end_unstarted(req)

    def _drop_chunked(self) -> None:
        """End an aborted request between two chunks of its prompt."""
        req, self._chunked = self._chunked, None
        assert req is not None
        req.finish_if_aborted()
        release_req(req, cache=self.cache)
        self._end_unstarted(req)

    def _end_unstarted(self, req: Req) -> None:
        self._on_request_finished(req)
        self._streamer.send([req])

    def _on_request_finished(self, req: Req) -> None:
        self._by_rid.pop(req.rid, None)
        self._stats.on_finish(req)

    def _flush_cache(self, message: FlushCacheReq) -> None:
        # A request that has ended may still be in a batch until the next round.
        success = not self._by_rid
        if success:
            self.cache.reset()
            logger.info("Flushed the prefix cache")
        self.io.send(FlushCacheRsp(call_id=message.call_id, success=success))

    def _incidents(self, message: GetIncidentsReq) -> GetIncidentsRsp:
        found = [] if self._canary is None else self._canary.incidents()
        return GetIncidentsRsp(call_id=message.call_id, incidents=found)

    def stats_snapshot(self) -> SchedulerStats:
        running = 0 if self.running is None else len(self.running)
        stats = self._stats.snapshot(running=running, waiting=len(self.waiting))
        add_graph_stats(stats, self.worker.model_runner)
        if self._canary is not None:
            self._canary.add_stats(stats)
        return stats
