"""What a client is shown is what the engine sampled: each step on the way is compared,
and a difference ends that request alone, before anything wrong is shown."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manager_world import LENGTH, TOKENIZER, Wire, prompt, run
from web_world import app_of, post, serving

from sglang.srt.managers.front import request_state
from sglang.srt.managers.front.output_check import OutputCheck
from sglang.srt.managers.front.output_text import OutputText
from sglang.srt.managers.front.request_state import (
    RequestGroup,
    RequestState,
    Update,
)
from sglang.srt.managers.messages.errors import EngineFailure
from sglang.srt.managers.messages.io_struct import FinishReason, RequestOutput
from sglang.srt.managers.messages.output_digest import extend_digest, first_digest
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.detokenizer import IncrementalDetokenizer
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count

register_cpu_ci(est_time=8, suite="cpu")

VOCAB = 4096
SPECIAL = sorted(TOKENIZER.special_ids)
IDS = st.lists(
    st.one_of(
        st.integers(0, VOCAB - 1),
        # Parts of characters, which are often no text alone.
        st.sampled_from(TOKENIZER.encode("é€😀漢\n\nab") + SPECIAL),
    ),
    max_size=30,
)


def output(
    ids: Sequence[int],
    *,
    rid: str = "r",
    digest: int | None = None,
    finish: FinishReason | None = None,
) -> RequestOutput:
    return RequestOutput(
        rid=rid,
        output_ids=list(ids),
        prompt_tokens=1,
        completion_tokens=len(ids),
        cached_tokens=0,
        digest=digest,
        finish_reason=finish,
    )


class Follower:
    """An output with its text and its check, as `RequestState` puts them together."""

    def __init__(self, params: SamplingParams) -> None:
        self.text = OutputText(TOKENIZER, params)
        self.check = OutputCheck("r", params, TOKENIZER)

    def push(self, ids: Sequence[int], finish: FinishReason | None = None) -> str:
        assert self.check.take_tokens(output(ids, finish=finish)) is None
        shown = self.text.push(ids, finish)
        self.check.take_text(shown, finish)
        return shown


@given(
    ids=IDS,
    cuts=st.lists(st.integers(0, 30), max_size=5),
    end=st.sampled_from(["length", "stop token", "stop string", "trimmed string"]),
    stop_token=st.sampled_from([7, *TOKENIZER.encode("é€😀漢"), *SPECIAL]),
    no_stop_trim=st.booleans(),
    skip_special_tokens=st.booleans(),
)
@settings(max_examples=count(ci=400, full=20000), derandomize=True, deadline=None)
def test_right_text_passes_in_every_chunking(
    ids: list[int],
    cuts: list[int],
    end: str,
    stop_token: int,
    no_stop_trim: bool,
    skip_special_tokens: bool,
) -> None:
    finish, stops = LENGTH, []
    if end == "stop token":
        ids = [*ids, stop_token]
        finish = FinishReason(type="stop", matched=stop_token)
    elif "string" in end:
        ids = [*ids, *TOKENIZER.encode("STOP" if end == "stop string" else "xSTOPy")]
        stops, finish = ["STOP"], FinishReason(type="stop", matched="STOP")
    params = SamplingParams(
        stop=stops,
        no_stop_trim=no_stop_trim,
        skip_special_tokens=skip_special_tokens,
    )
    follower = Follower(params)
    places = sorted({min(cut, len(ids)) for cut in cuts} | {0})
    shown = ""
    for begin, stop in zip(places, places[1:], strict=False):
        shown += follower.push(ids[begin:stop])
    shown += follower.push(ids[places[-1] :], finish)
    assert follower.check.text_len == len(shown)


def test_a_stop_token_that_would_complete_a_character() -> None:
    *begin, last = TOKENIZER.encode("😀")
    assert begin and OutputText(TOKENIZER, SamplingParams()).push(begin) == ""
    finish = FinishReason(type="stop", matched=last)
    assert Follower(SamplingParams()).push([*begin, last], finish) == "\ufffd"


FAULTS: dict[str, Callable[[str], str]] = {
    "a character less": lambda text: text[:-1],
    "a character more": lambda text: text + "x",
    "another's": lambda text: "y" * len(text),
    "twice": lambda text: text * 2,
    "nothing": lambda text: "",
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("at", [0, 3, 5])
def test_wrong_text_is_an_error_before_it_is_shown(fault: str, at: int) -> None:
    ids = TOKENIZER.encode("def area(width, height):\n    return")[:6]
    follower = Follower(SamplingParams())
    shown = OutputText(TOKENIZER, SamplingParams())
    with pytest.raises(EngineFailure, match="the text is not the one of its tokens"):
        for i, token in enumerate(ids):
            finish = LENGTH if i == len(ids) - 1 else None
            assert follower.check.take_tokens(output([token])) is None
            text = shown.push([token], finish)
            follower.check.take_text(FAULTS[fault](text) if i == at else text, finish)


@given(ids=st.lists(st.integers(-(2**31), 2**31), max_size=20), cut=st.integers(0, 20))
@settings(max_examples=count(ci=200, full=5000), derandomize=True, deadline=None)
def test_a_digest_is_of_all_tokens_in_their_order(ids: list[int], cut: int) -> None:
    whole = extend_digest(first_digest("r"), ids)
    assert (
        extend_digest(extend_digest(first_digest("r"), ids[:cut]), ids[cut:]) == whole
    )
    assert extend_digest(first_digest("s"), ids) != whole
    for other in (
        ids[1:],
        ids[:-1],
        ids[::-1],
        [*ids, 0],
        [token + 1 for token in ids],
    ):
        if other != ids:
            assert extend_digest(first_digest("r"), other) != whole


# -- the front -------------------------------------------------------------------------


class Engine:
    """The messages of an engine with digests; `change` damages those of request a."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.digests: dict[str, int] = {}

    def say(
        self,
        rid: str,
        ids: list[int],
        finish: FinishReason | None = None,
        *,
        sends: list[int] | None = None,
        **fields: Any,
    ) -> None:
        """Answer with `ids`; by a fault the message has the tokens `sends`."""
        digest = self.digests.get(rid, first_digest(rid))
        self.digests[rid] = digest = extend_digest(digest, ids)
        sent = ids if sends is None else sends
        self.wire.answer(rid, sent, finish, digest=digest, **fields)


async def shown(wire: Wire, group: Any) -> tuple[list[int], EngineFailure | None]:
    """The tokens that a reader sees, and the error at their end."""
    seen: list[int] = []
    try:
        async for news in wire.manager.updates(group):
            for update in news:
                seen += update.output_ids
    except EngineFailure as error:
        return seen, error
    return seen, None


@pytest.mark.parametrize("sends", [[6], [7, 5], [6, 5], [6, 6], [9, 9]], ids=str)
@pytest.mark.parametrize("is_last", [False, True])
def test_other_tokens_than_the_engine_keeps(sends: list[int], is_last: bool) -> None:
    """None of the message is shown; what came before it is, and so are all of others'
    tokens."""

    async def work() -> None:
        wire = Wire(kv_canary="log")
        engine = Engine(wire)
        groups = [
            await wire.manager.submit([prompt(rid=rid, stream=True)]) for rid in "ab"
        ]
        readers = [asyncio.create_task(shown(wire, group)) for group in groups]
        for rid in "ab":
            engine.say(rid, [1, 2])
        await asyncio.sleep(0.01)
        finish = LENGTH if is_last else None
        engine.say("a", [5, 6], finish, sends=sends)
        engine.say("b", [5, 6])
        if not is_last:
            engine.say("a", [8])
        engine.say("b", [8], LENGTH)
        (of_a, error), (of_b, none) = await asyncio.gather(*readers)
        assert of_a == [1, 2] and error is not None and error.status == 500
        assert "request a" in str(error) and of_b == [1, 2, 5, 6, 8] and none is None
        assert wire.aborted() == ([] if is_last else ["a"])

    run(work())


def test_without_the_canary_nothing_is_compared() -> None:
    async def work() -> None:
        wire = Wire()
        group = await wire.manager.submit([prompt(rid="a", stream=True)])
        reader = asyncio.create_task(shown(wire, group))
        wire.answer("a", [5, 6], LENGTH, digest=1)
        assert await reader == ([5, 6], None)
        assert all(state._check is None for state in group.states)

    run(work())


# -- the answers -----------------------------------------------------------------------

PATHS = {
    "/generate": lambda rid: {"text": "x", "rid": rid},
    "/v1/completions": lambda rid: {"model": "m", "prompt": "x", "rid": rid},
    "/v1/chat/completions": lambda rid: {
        "model": "m", "messages": [{"role": "user", "content": "x"}], "rid": rid
    },
}  # fmt: skip


def lose_a_token(patch: pytest.MonkeyPatch, rid: str) -> None:
    """The detokenizer of one request loses a token."""
    push, of = IncrementalDetokenizer.push_many, list[Any]()
    take = RequestState.take

    def marked(state: RequestState) -> Any:
        of[:] = [state.rid]
        return take(state)

    def losing(decoder: IncrementalDetokenizer, tokens: Sequence[int]) -> str:
        return push(decoder, tokens[1:] if of == [rid] else tokens)

    patch.setattr(RequestState, "take", marked)
    patch.setattr(IncrementalDetokenizer, "push_many", losing)


def repeat_the_last_character(patch: pytest.MonkeyPatch, rid: str) -> None:
    """A slice of one request's text begins a character early."""
    push, before = OutputText.push, dict[int, str]()
    take, of = RequestState.take, list[str]()

    def marked(state: RequestState) -> Any:
        of[:] = [state.rid]
        return take(state)

    def early(text: OutputText, *args: Any) -> str:
        piece = push(text, *args)
        if of != [rid]:
            return piece
        again = before.get(id(text), "")[-1:]
        before[id(text)] = piece
        return again + piece

    patch.setattr(RequestState, "take", marked)
    patch.setattr(OutputText, "push", early)


# A whole answer is one piece.
@pytest.mark.parametrize(
    ("plant", "stream"),
    [(lose_a_token, True), (lose_a_token, False), (repeat_the_last_character, True)],
)
@pytest.mark.parametrize("path", PATHS)
def test_a_fault_of_the_detokenizer_ends_its_request_alone(
    path: str,
    stream: bool,
    plant: Callable[[pytest.MonkeyPatch, str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = TOKENIZER.encode("def area(width, height):\n    return width * height")

    async def work() -> None:
        wire = Wire(kv_canary="log")
        engine = Engine(wire)
        app = app_of(wire)
        async with serving(app) as web:
            asked = [
                asyncio.create_task(
                    web.ask(
                        post(
                            path,
                            PATHS[path](rid) | {"stream": stream},
                            "Connection: close",
                        )
                    )
                )
                for rid in ("good", "bad")
            ]
            while len(wire.generated()) < 2:
                await asyncio.sleep(0.005)
            rids = [request.rid for request in wire.generated()]
            plant(monkeypatch, next(rid for rid in rids if rid.endswith("bad")))
            for begin in range(0, len(ids), 3):
                last = begin + 3 >= len(ids)
                for rid in rids:
                    part = ids[begin : begin + 3]
                    engine.say(rid, part, LENGTH if last else None)
                await asyncio.sleep(0.01)
            good, bad = await asyncio.gather(*asked)
        assert b"kv_canary: output of request" in bad and b'"code": 500' in bad.replace(
            b'":500', b'": 500'
        )
        assert b"kv_canary" not in good and b"height" in good

    run(work())


# -- between the check and the client --------------------------------------------------


async def answer_of(wire: Wire, group: RequestGroup, *, stream: bool) -> list[Update]:
    if not stream:
        return await wire.manager.results(group)
    return [one async for news in wire.manager.updates(group) for one in news]


@pytest.mark.parametrize(
    "change",
    [{"output_ids": [8, 7]}, {"output_ids": [7]}, {"text": "xx"}, {"text": ""}],
    ids=["order", "fewer", "text", "no text"],
)
@pytest.mark.parametrize("stream", [True, False])
def test_an_update_that_differs_from_what_was_checked_is_an_error(
    change: dict[str, Any], stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its request alone."""

    def damaged(**fields: Any) -> Update:
        return Update(**fields | (change if fields["rid"] == "bad" else {}))

    monkeypatch.setattr(request_state, "Update", damaged)

    async def work() -> None:
        wire = Wire(kv_canary="raise")
        groups = {}
        for rid in ("good", "bad"):
            groups[rid] = await wire.manager.submit([prompt(rid=rid, stream=stream)])
            wire.answer(rid, [7, 8])
        with pytest.raises(EngineFailure, match="of request bad: an update differs"):
            await answer_of(wire, groups["bad"], stream=stream)
        (update,) = await answer_of(wire, groups["good"], stream=stream)
        assert update.output_ids == [7, 8]
        assert update.text == TOKENIZER.decode([7, 8])

    run(work())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("canary", ["none", "raise"])
@pytest.mark.parametrize("lost", ["message", "news", "end"])
def test_a_reader_does_not_wait_for_an_end_that_has_come(
    lost: str, canary: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive, notify = RequestState.receive, RequestGroup.notify

    def receive_most(state: RequestState, output: RequestOutput) -> None:
        if lost != "message" or state.rid != "a-1":
            receive(state, output)

    def notify_most(
        group: RequestGroup, state: RequestState, finish: FinishReason | None
    ) -> None:
        if state.rid != "a-1":
            notify(group, state, finish)
        elif lost != "news":
            notify(group, state, None)

    monkeypatch.setattr(RequestState, "receive", receive_most)
    monkeypatch.setattr(RequestGroup, "notify", notify_most)

    async def work() -> None:
        wire = Wire(kv_canary=canary)
        both = prompt("x", {"n": 2}, rid="a", stream=stream)
        group = await wire.manager.submit([both])
        for copy in range(2):
            wire.answer(f"a-{copy}", [1])
        with pytest.raises(EngineFailure, match="its end did not reach its reader"):
            await answer_of(wire, group, stream=stream)
        assert wire.manager.num_in_flight == 0

    run(work())


class Skipping(dict[int, RequestState]):
    """Loses its first element whenever it is read."""

    def values(self) -> Any:
        return list(super().values())[1:]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("lost", ["count", "element"])
def test_a_reader_gets_the_end_of_every_request_or_an_error(
    lost: str, stream: bool
) -> None:
    async def work() -> None:
        wire = Wire()
        both = prompt("x", {"n": 2}, rid="a", stream=stream)
        group = await wire.manager.submit([both])
        if lost == "count":
            group._unfinished -= 2
        else:
            group._fresh = Skipping()
        reading = asyncio.create_task(answer_of(wire, group, stream=stream))
        await asyncio.sleep(0)
        for copy in range(2):
            wire.answer(f"a-{copy}", [1])
        if lost == "element" and not stream:
            # The results of a whole answer are not read from there.
            assert len(await reading) == 2
            return
        with pytest.raises((EngineFailure, IndexError)):
            await reading

    run(work())
