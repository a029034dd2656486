"""A TokenizerManager and the scheduler that a test plays for it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import msgspec

from sglang.srt.managers.front.prompt_request import PromptRequest
from sglang.srt.managers.front.tokenizer_manager import TokenizerManager
from sglang.srt.managers.messages.io_struct import (
    AbortReq,
    BatchOutput,
    FinishReason,
    GenerateBatch,
    GenerateReq,
    RequestOutput,
    SchedulerReady,
    SchedulerRequest,
    SchedulerStats,
    decode_request,
    encode,
)
from sglang.srt.metrics.front_metrics import FrontMetrics
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_tokenizer import load_tokenizer
from sglang.srt.utils.paths import bundled_demo_model_path

FOLDER = str(bundled_demo_model_path())
TOKENIZER = load_tokenizer(FOLDER)
READY = SchedulerReady(
    context_len=100,
    max_req_input_len=99,
    max_total_num_tokens=1000,
    max_running_requests=64,
    vocab_size=4096,
    hidden_size=1000,
)


def ready_for(args: ServerArgs, ready: SchedulerReady = READY) -> SchedulerReady:
    """The report of an engine that runs as many requests as its flags say."""
    assert args.max_running_requests is not None
    return msgspec.structs.replace(
        ready, max_running_requests=args.max_running_requests
    )


LENGTH = FinishReason(type="length", length=1)


class Wire:
    """A TokenizerManager whose scheduler is played by the test.

    Every message crosses the encoding.

    Attributes:
        sent: messages to the scheduler, in order.
    """

    def __init__(self, *, tokenizer: Any = TOKENIZER, **flags: Any) -> None:
        self.sent: list[SchedulerRequest] = []
        self._said: Counter[str] = Counter()
        args = ServerArgs(model_path=FOLDER, **flags)
        self.manager = TokenizerManager(
            server_args=args,
            tokenizer=tokenizer,
            send=lambda ms: self.sent.extend(decode_request(encode(m)) for m in ms),
            metrics=FrontMetrics(
                "m",
                first=SchedulerStats(),
                engine_type="unified",
                canary_mode="none",
            ),
        )
        self.manager.set_ready(ready_for(args))

    def generated(self) -> list[GenerateReq]:
        return [request for message in self.sent for request in _requests(message)]

    def aborted(self) -> list[str]:
        return [m.rid for m in self.sent if isinstance(m, AbortReq)]

    def answer(
        self,
        rid: str,
        ids: list[int],
        finish: FinishReason | None = LENGTH,
        **fields: Any,
    ) -> None:
        self._said[rid] += len(ids)
        counts = {"completion_tokens": self._said[rid]} | fields
        output = RequestOutput(
            rid=rid,
            output_ids=ids,
            prompt_tokens=1,
            cached_tokens=0,
            finish_reason=finish,
            **counts,
        )
        if finish is not None:
            del self._said[rid]
        self.manager.receive(BatchOutput(outputs=[output]))


def _requests(message: SchedulerRequest) -> list[GenerateReq]:
    if isinstance(message, GenerateBatch):
        return list(message.unpack())
    return [message] if isinstance(message, GenerateReq) else []


def prompt(
    text: str | list[int] = "x", params: dict[str, Any] | None = None, **fields: Any
) -> PromptRequest:
    return PromptRequest(
        prompt=text,
        sampling_params=SamplingParams(**({"max_new_tokens": 5} | (params or {}))),
        **fields,
    )


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 20))
