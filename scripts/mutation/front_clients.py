"""Clients that talk to the front, which runs in this process between two steps.

Every message crosses the wire's encoding, and every answer is built as a body of
`/generate`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from scripts.mutation.answers import Received
from scripts.mutation.clients import Clients
from scripts.mutation.worlds import World
from sglang.srt.entrypoints.generate_api import GenerateAnswer
from sglang.srt.managers.front.prompt_request import PromptRequest
from sglang.srt.managers.front.request_state import RequestGroup, Update
from sglang.srt.managers.front.tokenizer_manager import TokenizerManager
from sglang.srt.managers.messages.io_struct import (
    BatchOutput,
    SchedulerRequest,
    decode_request,
    decode_response,
    encode,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.hf_tokenizer import load_tokenizer
from sglang.test.harness import EngineHarness

# Turns of the loop after which every reader has read what arrived.
TURNS = 12


class FrontClients(Clients):
    """Prompts with several outputs each, streamed or awaited."""

    def __init__(
        self, harness: EngineHarness, world: World, *, seed: int, aborts: float
    ) -> None:
        super().__init__(harness, world, seed=seed, aborts=aborts)
        assert harness.server_args.tokenizer_path is not None
        self._manager = TokenizerManager(
            server_args=harness.server_args,
            tokenizer=load_tokenizer(harness.server_args.tokenizer_path),
            send=self._send,
        )
        self._manager.set_ready(harness.scheduler.ready_message())
        self._loop = asyncio.new_event_loop()
        self._readers: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        for reader in self._readers:
            reader.cancel()
        self._loop.run_until_complete(_turns())
        self._loop.close()
        self._manager.close()

    def _send(self, messages: Sequence[SchedulerRequest]) -> None:
        for message in messages:
            self._harness.io.requests.append(decode_request(encode(message)))

    def _submit(self, number: int) -> None:
        ask = self._asks[number]
        params = SamplingParams.from_wire(ask.params)
        names = [f"q{number}.{copy}" for copy in range(params.n)]
        self.received |= {name: Received(ask=ask) for name in names}
        request = PromptRequest(
            prompt=ask.prompt,
            sampling_params=params,
            stream=ask.stream,
            rid=f"q{number}",
            extra_key=ask.extra_key,
        )
        # Every second client gets the whole answer with each update.
        reader = self._read(request, names, is_incremental=number % 2 == 0)
        self._readers.add(self._loop.create_task(reader))
        self._loop.run_until_complete(_turns())

    def _abort(self, name: str) -> None:
        """Abort all outputs of a prompt."""
        rid = name.partition(".")[0]
        for other, received in self.received.items():
            if other.partition(".")[0] == rid:
                received.is_aborted = True
        self._manager.abort(rid)

    def _take(self, messages: list[BatchOutput]) -> None:
        for message in messages:
            self._manager.receive(decode_response(encode(message)))
        self._loop.run_until_complete(_turns())

    async def _read(
        self, request: PromptRequest, names: list[str], *, is_incremental: bool
    ) -> None:
        shown = [
            GenerateAnswer(None, with_text=False, is_incremental=is_incremental)
            for _ in names
        ]
        try:
            group = await self._manager.submit([request], wait_for_room=True)
            async for updates in self._updates(group, stream=request.stream):
                for update in updates:
                    body = shown[update.index].add(update)
                    _show(self.received[names[update.index]], body, is_incremental)
        except Exception as error:
            for name in names:
                if self.received[name].reason is None:
                    self.received[name].failure = f"{type(error).__name__}: {error}"

    async def _updates(
        self, group: RequestGroup, *, stream: bool
    ) -> AsyncIterator[list[Update]]:
        if not stream:
            yield await self._manager.results(group)
            return
        async for updates in self._manager.updates(group):
            yield updates


def _show(received: Received, body: dict, is_incremental: bool) -> None:  # type: ignore[type-arg]
    """Add an answer's body to what its client has."""
    received.messages_after_end += received.reason is not None
    earlier = (received.output, received.text) if is_incremental else ([], "")
    received.output = earlier[0] + body["output_ids"]
    received.text = earlier[1] + body["text"]
    finish = body["meta_info"]["finish_reason"]
    if finish is not None:
        received.reason = finish["type"]
        received.matched = finish.get("matched")


async def _turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)
