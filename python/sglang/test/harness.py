"""A scheduler in this process, for tests: requests in, finished requests out."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sglang.srt.managers.messages.io_struct import (
    AbortReq,
    BatchOutput,
    Bootstrap,
    FinishReason,
    GenerateReq,
    LogprobDelta,
    LoraRef,
    SchedulerRequest,
    SchedulerResponse,
)
from sglang.srt.managers.messages.output_digest import extend_digest, first_digest
from sglang.srt.managers.scheduler.build import build_scheduler
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_io import ListIO
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.salt_chain import content_ids
from sglang.test.scale import POOL_TOKENS, with_canary

SHARED_GPU_TOKENS = 65536
SHARED_GPU_STATES = 1024
SHARED_GPU_CHUNK = 512


def _nothing() -> None:
    pass


@dataclass
class Finished:
    """All output of one request, as a client receives it."""

    output_ids: list[int] = field(default_factory=list)
    messages: int = 0
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    logprobs: list[LogprobDelta] = field(default_factory=list)
    hidden_states: list[list[float]] = field(default_factory=list)


class EngineHarness:
    """A scheduler with an in-process message queue.

    `overlap` launches each batch before the previous result is processed, as on a GPU;
    the order of all bookkeeping is the same on a CPU.

    Attributes:
        close: ends its threads and processes; called when the engine is collected.
    """

    def __init__(
        self, model: Path, *, overlap: bool = False, **server_args: Any
    ) -> None:
        self.io = ListIO()
        if torch.cuda.is_available():
            # Many tests share a GPU, so none may use all of its memory or capture
            # prefill graphs of unused sizes.
            server_args.setdefault("max_total_tokens", SHARED_GPU_TOKENS)
            if not server_args.get("disable_radix_cache"):
                server_args.setdefault("max_mamba_cache_size", SHARED_GPU_STATES)
            server_args.setdefault("chunked_prefill_size", SHARED_GPU_CHUNK)
            # Many engines start there, and few of them serve much.
            server_args.setdefault("skip_server_warmup", True)
        server_args.setdefault("max_total_tokens", POOL_TOKENS)
        self.server_args = ServerArgs(model_path=str(model), **with_canary(server_args))
        self.scheduler: Scheduler = build_scheduler(self.server_args, self.io)
        if overlap:
            self.scheduler.max_in_flight = 1
        self._next = 0
        grammars = self.scheduler._grammars
        # Compilers of grammars are threads and processes that would outlive the engine.
        self.close = weakref.finalize(
            self.scheduler, _nothing if grammars is None else grammars.shutdown
        )

    def submit(
        self,
        input_ids: Sequence[int],
        *,
        rid: str | None = None,
        stream: bool = False,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        token_ids_logprob: Sequence[int] = (),
        extra_key: str | None = None,
        return_hidden_states: bool = False,
        only_last_hidden_state: bool = False,
        input_embeds: bytes | None = None,
        priority: int | None = None,
        client: str = "",
        lora: LoraRef | str | None = None,
        bootstrap: Bootstrap | None = None,
        **params: Any,
    ) -> str:
        """Queue a request, greedy unless `params` change it; return its rid."""
        rid = rid or f"r{self._next}"
        if input_embeds is not None:
            # As the front does.
            input_ids = content_ids(input_embeds, len(input_ids))
        self._next += 1
        self.io.requests.append(
            GenerateReq(
                rid=rid,
                input_ids=list(input_ids),
                sampling_params=SamplingParams(**{"temperature": 0.0} | params),
                stream=stream,
                return_logprob=return_logprob,
                logprob_start_len=logprob_start_len,
                top_logprobs_num=top_logprobs_num,
                token_ids_logprob=list(token_ids_logprob),
                extra_key=extra_key,
                return_hidden_states=return_hidden_states,
                only_last_hidden_state=only_last_hidden_state,
                input_embeds=input_embeds,
                priority=priority,
                client=client,
                lora=self.lora(lora) if isinstance(lora, str) else lora,
                bootstrap=bootstrap,
            )
        )
        return rid

    def lora(self, name: str) -> LoraRef:
        """A loaded adapter by its name."""
        loaded = self.scheduler.ready_message().loras
        return next(ref for ref in loaded if ref.name == name)

    def ask(self, message: SchedulerRequest) -> SchedulerResponse:
        """Return the scheduler's answer to a question."""
        self.io.requests.append(message)
        while message in self.io.requests:
            self.scheduler.step()
        return self.io.responses.pop()

    def abort(self, rid: str) -> None:
        self.io.requests.append(AbortReq(rid=rid))

    def run(
        self, *, on_step: Callable[[int], None] | None = None, max_steps: int = 100_000
    ) -> dict[str, Finished]:
        """Step until the scheduler is idle (it checks itself); return the answers."""
        for step in range(max_steps):
            if on_step is not None:
                on_step(step)
            did_something = self.scheduler.step()
            has_more = self.io.requests or self.scheduler.has_work()
            if not did_something:
                if not has_more:
                    return self.collect()
                # A grammar is compiled in a thread, which may take long on a busy
                # machine: empty steps make no progress and must not be fast.
                time.sleep(0.001)
        raise AssertionError(f"not idle after {max_steps} steps")

    def collect(self, *, keep: bool = False) -> dict[str, Finished]:
        """Return the answers since the last call; `keep` leaves them for the next."""
        answers: dict[str, Finished] = {}
        for message in self.io.responses:
            if not isinstance(message, BatchOutput):
                continue
            for output in message.outputs:
                answer = answers.setdefault(output.rid, Finished())
                assert answer.finish_reason is None, f"{output.rid} finished twice"
                answer.output_ids += output.output_ids
                answer.messages += 1
                answer.cached_tokens = output.cached_tokens
                answer.finish_reason = output.finish_reason
                if output.logprobs is not None:
                    answer.logprobs.append(output.logprobs)
                answer.hidden_states += output.hidden_states or []
                assert len(answer.output_ids) == output.completion_tokens
                if output.digest is not None:
                    due = extend_digest(first_digest(output.rid), answer.output_ids)
                    assert output.digest == due, output.rid
        if not keep:
            self.io.responses.clear()
        return answers

    def generate(self, input_ids: Sequence[int], **options: Any) -> Finished:
        """Run one request alone."""
        rid = self.submit(input_ids, **options)
        return self.run()[rid]
