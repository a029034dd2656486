"""`Engine`: runs the engine from a Python process, without HTTP.

Runs the same TokenizerManager as the server, on an event loop in its own thread, so it
works in scripts, in notebooks and from any thread. The calling thread sleeps while the
scheduler process computes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from sglang.srt.arg_groups.kv_events_hook import describe_kv_events
from sglang.srt.entrypoints.generate_api import (
    GenerateAnswer,
    GenerateRequest,
    ParsedGenerate,
    parse_generate,
)
from sglang.srt.entrypoints.neutral_fields import GENERATE, without_neutral
from sglang.srt.entrypoints.scoring import ScoreRequest
from sglang.srt.managers.front.engine_core import EngineCore, start_engine
from sglang.srt.managers.front.scheduler_process import SchedulerDied, available_cores
from sglang.srt.managers.front.tokenizer_manager import TokenizerManager
from sglang.srt.managers.messages.errors import BadRequest
from sglang.srt.managers.messages.io_struct import CACHE_TIERS
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.logging import configure_embedded_logging
from sglang.version import __version__

T = TypeVar("T")

DEFAULT_LOG_LEVEL = "error"
FORKED = (
    "this process was forked from the one that made the engine, which alone can use "
    "it; make an Engine here, or send the work there"
)

Answer = dict[str, Any]


class Engine:
    """A running engine. Keyword arguments are the fields of `ServerArgs`.

    Uses all cores for the model unless OMP_NUM_THREADS is set. `shutdown`, leaving a
    `with` block, or the end of the process stops it. It belongs to the process that
    created it: in a forked process, using it raises a RuntimeError and `shutdown` does
    nothing.

    Raises:
        TypeError: an argument is not a field of `ServerArgs`.
        ValueError: the configuration cannot be served.
        SchedulerDied: the scheduler exited during startup.
    """

    def __init__(self, *, server_args: ServerArgs | None = None, **kwargs: Any) -> None:
        if server_args is None:
            server_args = ServerArgs(**{"log_level": DEFAULT_LOG_LEVEL, **kwargs})
        elif kwargs:
            raise ValueError(
                f"Engine got server_args and also {', '.join(sorted(kwargs))}; "
                "set them in server_args"
            )
        configure_embedded_logging(server_args.log_level)
        self.server_args = server_args
        self._host = _EngineHost(server_args)
        self._finalizer = weakref.finalize(self, self._host.close)

    @property
    def tokenizer_manager(self) -> TokenizerManager:
        """The tokenizer manager; its methods must run in the engine's own loop."""
        return self._host.core.manager

    @property
    def scheduler_pids(self) -> list[int]:
        """Process ids of the scheduler by tensor parallel rank, for profilers and
        monitors; constant for the engine's life."""
        return list(self._host.core.process.pids)

    # -- generation ----------------------------------------------------------------

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        stream: bool = False,
        **options: Any,
    ) -> Answer | list[Answer] | Iterator[Answer]:
        """Answer a prompt, or a list of prompts with a list of answers.

        Args:
            prompt: the text. `input_ids` holds tokens instead.
            sampling_params: as in `POST /generate`; a list has one entry per prompt.
            stream: whether to return an iterator over answers. They are cumulative
                unless `incremental_streaming_output` is set; answers to a list have an
                `index`.
            options: further fields of `POST /generate`, such as `return_logprob`.

        Raises:
            ValueError: a value is invalid; nothing was run.
            ApiError: the engine failed.
        """
        parsed = self._parse(prompt, sampling_params, input_ids, stream, options)
        if stream:
            return self._sync_stream(self._host.stream(parsed))
        return self._host.call(self._host.whole(parsed))

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        stream: bool = False,
        **options: Any,
    ) -> Answer | list[Answer] | AsyncIterator[Answer]:
        """`generate` in the caller's event loop; `stream` returns an async iterator."""
        parsed = self._parse(prompt, sampling_params, input_ids, stream, options)
        if stream:
            return self._async_stream(self._host.stream(parsed))
        return await self._host.acall(self._host.whole(parsed))

    def score(
        self,
        query: str | list[int],
        items: str | list[str] | list[list[int]],
        label_token_ids: list[int],
        apply_softmax: bool = False,
        item_first: bool = False,
    ) -> list[list[float]]:
        """Return how likely each of `label_token_ids` is to follow the query and each
        item: a list per item, as in `POST /v1/score`.

        Raises:
            ValueError: a value is invalid; nothing was run.
            ApiError: the engine failed.
        """
        fields = {
            "query": query,
            "items": items,
            "label_token_ids": label_token_ids,
            "apply_softmax": apply_softmax,
            "item_first": item_first,
        }
        try:
            request = msgspec.convert(fields, ScoreRequest)
        except msgspec.ValidationError as error:
            raise BadRequest(str(error)) from error
        return self._host.call(self._host.score(request))

    # -- control -------------------------------------------------------------------

    def flush_cache(self, tiers: Sequence[str] = CACHE_TIERS) -> bool:
        """Empty the prefix cache; does nothing and returns False while requests run.

        Args:
            tiers: those to empty, of device, host and storage.
        """
        return self._host.call(self.tokenizer_manager.flush_cache(tiers))

    def load_lora_adapter(self, lora_name: str, lora_path: str) -> dict[str, str]:
        """Load the adapter in a folder; returns all adapters by name, with their paths.

        Raises:
            ValueError: it cannot be served, or the name is in use.
        """
        manager = self.tokenizer_manager
        self._host.call(manager.load_lora(lora_name, lora_path))
        return {ref.name: ref.path for ref in manager.loras.loaded}

    def unload_lora_adapter(self, lora_name: str) -> dict[str, str]:
        """Unload an adapter once its requests have ended; returns the others.

        Raises:
            ValueError: it is not loaded.
        """
        manager = self.tokenizer_manager
        self._host.call(manager.unload_lora(lora_name))
        return {ref.name: ref.path for ref in manager.loras.loaded}

    def abort_request(self, rid: str = "", *, abort_all: bool = False) -> None:
        """End requests with the finish reason "abort"; unknown ids are ignored."""

        async def abort() -> None:
            self.tokenizer_manager.abort(rid, abort_all=abort_all)

        self._host.call(abort())

    def get_server_info(self) -> dict[str, Any]:
        """Return the flags, limits, version and current scheduler statistics, as
        values that `json.dumps` takes."""
        stats = self._host.call(self.tokenizer_manager.scheduler_stats())
        limits = self.tokenizer_manager.limits
        info: dict[str, Any] = msgspec.to_builtins(
            {
                **dataclasses.asdict(self.server_args),
                **({} if limits is None else dataclasses.asdict(limits)),
                "version": __version__,
                "kv_events": describe_kv_events(self.server_args),
                "internal_states": [stats],
            }
        )
        return info

    def canary_incidents(self) -> list[dict[str, Any]]:
        """Return the incidents of the KV canary, oldest first; empty while it is off.

        `docs/kv_canary.md` describes their fields.
        """
        return self._host.call(self.tokenizer_manager.canary_incidents())

    def shutdown(self) -> None:
        """Stop the scheduler process; calling again does nothing."""
        self._finalizer()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _parse(
        self,
        prompt: str | list[str] | None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None,
        input_ids: list[int] | list[list[int]] | None,
        stream: bool,
        options: dict[str, Any],
    ) -> ParsedGenerate:
        fields = {
            "text": prompt,
            "sampling_params": sampling_params,
            "input_ids": input_ids,
            "stream": stream,
            **without_neutral(options, GENERATE),
        }
        try:
            request = msgspec.convert(fields, GenerateRequest, strict=False)
        except msgspec.ValidationError as error:
            raise BadRequest(str(error)) from error
        manager = self.tokenizer_manager
        return parse_generate(
            request,
            sampling_defaults=manager.sampling_defaults,
            loras=manager.loras,
        )

    def _sync_stream(self, answers: AsyncIterator[Answer]) -> Iterator[Answer]:
        """Fetch one answer at a time; updates that arrive meanwhile are merged."""
        try:
            while (answer := self._host.call(_next(answers))) is not None:
                yield answer
        finally:
            if not self._host.is_forgotten:
                self._host.call(_close(answers))

    async def _async_stream(
        self, answers: AsyncIterator[Answer]
    ) -> AsyncIterator[Answer]:
        try:
            while (answer := await self._host.acall(_next(answers))) is not None:
                yield answer
        finally:
            if not self._host.is_forgotten:
                await self._host.acall(_close(answers))


class _EngineHost:
    """The event loop, its thread, and the engine core that runs in it.

    Holds no reference to the `Engine`, so that an unreferenced engine is collected and
    stopped.

    Attributes:
        is_forgotten: whether this process was forked from the owner of the loop's
            thread and the scheduler.
    """

    def __init__(self, server_args: ServerArgs) -> None:
        started = start_engine(server_args, num_threads=available_cores())
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="sglang-engine", daemon=True
        )
        self._thread.start()

        async def create() -> EngineCore:
            return EngineCore(started, server_args=server_args)

        self.is_forgotten = False
        self.core = self.call(create())
        os.register_at_fork(after_in_child=_forgetter(weakref.ref(self)))
        try:
            self.call(self.core.wait_ready())
        except (ValueError, SchedulerDied, KeyboardInterrupt):
            self.close()
            raise

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the loop and wait; interrupting the caller cancels it."""
        future = self._start(work)
        try:
            return future.result()
        finally:
            future.cancel()

    async def acall(self, work: Coroutine[Any, Any, T]) -> T:
        """`call` from another event loop."""
        return await asyncio.wrap_future(self._start(work))

    def _start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self.is_forgotten or self._loop.is_closed():
            work.close()
            raise RuntimeError(
                FORKED if self.is_forgotten else "the engine was shut down"
            )
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Stop the engine core, the loop and its thread."""
        if self.is_forgotten or self._loop.is_closed():
            return

        async def close() -> None:
            self.core.close()

        self.call(close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def forget(self) -> None:
        """Leave the engine to this process's parent."""
        self.is_forgotten = True
        self.core.process.forget()

    async def whole(self, parsed: ParsedGenerate) -> Answer | list[Answer]:
        manager = self.core.manager
        group = await manager.submit(parsed.prompts, wait_for_room=True)
        updates = await manager.results(group)
        answers = [self._answer(parsed).add(update) for update in updates]
        return answers if parsed.is_list else answers[0]

    async def score(self, request: ScoreRequest) -> list[list[float]]:
        manager = self.core.manager
        group = await manager.submit(request.prompts(manager.loras), wait_for_room=True)
        return request.scores(await manager.results(group))

    async def stream(self, parsed: ParsedGenerate) -> AsyncIterator[Answer]:
        manager = self.core.manager
        group = await manager.submit(parsed.prompts, wait_for_room=True)
        answers = [self._answer(parsed) for _ in group.states]
        try:
            async for news in manager.updates(group):
                for update in news:
                    answer = answers[update.index].add(update)
                    if parsed.is_list:
                        answer["index"] = update.index
                    yield answer
        finally:
            manager.release(group)

    def _answer(self, parsed: ParsedGenerate) -> GenerateAnswer:
        manager = self.core.manager
        return GenerateAnswer(
            manager.tokenizer,
            with_text=parsed.with_text,
            is_incremental=parsed.stream
            and manager.server_args.incremental_streaming_output,
        )


def _forgetter(host: weakref.ref[_EngineHost]) -> Callable[[], None]:
    """Return a fork hook, which outlives its engine."""

    def forget() -> None:
        if (known := host()) is not None:
            known.forget()

    return forget


async def _next(answers: AsyncIterator[Answer]) -> Answer | None:
    return await anext(answers, None)


async def _close(answers: AsyncIterator[Answer]) -> None:
    await answers.aclose()  # type: ignore[attr-defined]
