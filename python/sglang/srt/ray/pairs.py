"""Requests whose prompt one replica computes for another one, as SGLang's router pairs
engines.

Serve chooses both replicas. The prefill replica says in its first message where it is
asked for KV, so that any of Serve's routers will do.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

import msgspec
from starlette.types import Message

from sglang.srt.ray.http_call import MEETING, HttpCall

if TYPE_CHECKING:
    from sglang.srt.ray.front import Answers, Replicas

logger = logging.getLogger(__name__)

PATHS = frozenset({"/generate", "/v1/completions", "/v1/chat/completions"})
ADDRESS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
"""Fields of a body that the front alone sets: they choose whose KV is taken."""
# Prompts of a request. Each has a room, and a longer list is not worth pairing.
MOST_PROMPTS = 1024
# For which a prefill replica may be silent before the other one does without.
MEETING_SECONDS = 5.0
ROOM_BITS = 62

Fields: TypeAlias = dict[str, msgspec.Raw]


class PairedReplicas:
    """Replicas that compute prompts, and those that answer with their KV.

    A request is answered whatever becomes of its prefill replica: one that is lost,
    silent or refuses costs the other one the prompt.
    """

    def __init__(self, prefill: Replicas, decode: Replicas) -> None:
        self.lost = decode.lost
        self._prefill = prefill
        self._decode = decode

    def ask(self, call: HttpCall, *, key: str) -> Answers:
        fields = _fields(call.body)
        if fields is None:
            return self._decode.ask(call, key=key)
        alone = call
        if not fields.keys().isdisjoint(ADDRESS):
            kept = {name: fields[name] for name in fields if name not in ADDRESS}
            fields, alone = kept, call.with_body(msgspec.json.encode(kept))
        rooms = _rooms(call.scope["path"], fields)
        if rooms is None:
            return self._decode.ask(alone, key=key)
        fields["bootstrap_room"] = msgspec.Raw(msgspec.json.encode(rooms))
        return _PairAnswers(self._prefill, self._decode, alone, fields, key)


class _PairAnswers:
    """The decode replica's answer.

    Args:
        alone: the request without a room. fields: of its body, with a room.
    """

    def __init__(
        self,
        prefill: Replicas,
        decode: Replicas,
        alone: HttpCall,
        fields: Fields,
        key: str,
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._alone = alone
        self._fields = fields
        self._key = key
        self._asked: list[Answers] = []
        self._is_cancelled = False

    def cancel(self) -> None:
        self._is_cancelled = True
        for answers in self._asked:
            answers.cancel()

    async def __aiter__(self) -> AsyncIterator[Message]:
        prefilling = self._ask(self._prefill, self._with_fields({}))
        news = aiter(prefilling)
        refusal: asyncio.Task[bool] | None = None
        try:
            meeting = await self._meet(news)
            if meeting is not None:
                refusal = asyncio.create_task(_is_refused(news, self._prefill.lost))
                answers = self._ask(self._decode, self._with_fields(meeting))
                messages = aiter(answers)
                first = await _first_unless(messages, refusal)
                if first is not None:
                    yield first
                    async for message in messages:
                        yield message
                    return
                answers.cancel()
            async for message in self._ask(self._decode, self._alone):
                yield message
        finally:
            if refusal is not None:
                refusal.cancel()
            prefilling.cancel()

    def _ask(self, replicas: Replicas, call: HttpCall) -> Answers:
        if self._is_cancelled:
            raise asyncio.CancelledError
        answers = replicas.ask(call, key=self._key)
        self._asked.append(answers)
        return answers

    def _with_fields(self, others: Mapping[str, str | int]) -> HttpCall:
        return self._alone.with_body(msgspec.json.encode({**self._fields, **others}))

    async def _meet(self, news: AsyncIterator[Message]) -> dict[str, str | int] | None:
        """Return where the prefill replica is asked for KV, or None if there is none
        that can be."""
        lost: tuple[type[Exception], ...]
        lost = (asyncio.TimeoutError, *self._prefill.lost)
        try:
            message = await asyncio.wait_for(anext(news), MEETING_SECONDS)
        except lost as error:
            logger.warning(
                "no prefill replica takes a request (%s); it goes on alone",
                type(error).__name__,
            )
            return None
        assert message["type"] == MEETING
        return {
            "bootstrap_host": message["host"],
            "bootstrap_port": message["port"],
        }


async def _is_refused(
    news: AsyncIterator[Message], lost: tuple[type[Exception], ...]
) -> bool:
    """Return whether a prefill replica refuses a request, once that is known.

    Args:
        lost: what is raised if the replica is lost.
    """
    try:
        async for message in news:
            if message["status"] >= 400:
                return True
    except lost:
        # The decode engine knows what has come.
        pass
    except Exception:
        # A request is answered whatever becomes of its prefill replica.
        logger.exception("the answer of a prefill replica could not be read")
    return False


async def _first_unless(
    messages: AsyncIterator[Message], refusal: asyncio.Task[bool]
) -> Message | None:
    """Return the first message, or None if there is a refusal before."""
    first = asyncio.ensure_future(anext(messages))
    try:
        await asyncio.wait({first, refusal}, return_when=asyncio.FIRST_COMPLETED)
        if not first.done() and refusal.done() and refusal.result():
            return None
        return await first
    finally:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


def _fields(body: bytes) -> Fields | None:
    """Return the fields of a body, or None if it is no object."""
    try:
        return msgspec.json.decode(body, type=Fields)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _rooms(path: str, fields: Fields) -> int | list[int] | None:
    """Return a room for each prompt of a request, or None if it needs no pair.

    The prompt's log probabilities in a whole answer are left out by a decode engine
    with a room, so such requests have none.
    """
    if path not in PATHS or "logprob_start_len" in fields:
        return None
    room = secrets.randbits(ROOM_BITS)
    for name in ("text", "input_ids", "prompt"):
        count = _num_listed(fields.get(name))
        if count > MOST_PROMPTS:
            return None
        if count:
            return [room + i for i in range(count)]
    return room


def _num_listed(prompts: msgspec.Raw | None) -> int:
    """Return the number of prompts in a list of them, or 0 if it is a single prompt."""
    if prompts is None or not bytes(prompts).lstrip().startswith(b"["):
        return 0
    entries = msgspec.json.decode(prompts, type=list[msgspec.Raw])
    is_list = entries and bytes(entries[0]).lstrip()[:1] in (b'"', b"[")
    return len(entries) if is_list else 0
