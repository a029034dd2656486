"""Side work: fair turns, deadlines, processes that are killed, clients that leave."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from app_world import App
from manager_world import FOLDER, TOKENIZER, prompt, run

from sglang.srt.managers.front import side_jobs, side_process, side_work
from sglang.srt.managers.front.caller import LEAVING, PEER
from sglang.srt.managers.front.prompt_request import Limits
from sglang.srt.managers.front.prompt_tokenizer import BATCH_CHARS, PromptTokenizer
from sglang.srt.managers.front.side_work import CHEAP_BYTES, LARGE, SideWork
from sglang.srt.managers.messages.errors import (
    BadRequest,
    ClientDisconnected,
    Unavailable,
)
from sglang.srt.utils.fair_turns import FairTurns, QueueFullError
from sglang.srt.utils.hf_tokenizer import Tokenizer, load_tokenizer
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import sampled

register_cpu_ci(est_time=6, suite="cpu")

# Exponential work in few steps, each by another operation.
DOUBLED = (
    "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
)
TUPLES = DOUBLED.replace("[ns.x, ns.x]", "(ns.x, ns.x)").replace("[1]", "(1,)")
BOMBS = {
    "equal": DOUBLED + "{{ ns.x == ns.y }}",
    "in": DOUBLED + "{{ ns.x in [ns.y, 1] }}",
    "less": DOUBLED + "{{ ns.x < ns.y }}",
    "index": DOUBLED + "{{ [ns.y].index(ns.x) }}",
    "count": DOUBLED + "{{ [ns.y, ns.y].count(ns.x) }}",
    "hash": TUPLES + "{{ {ns.x: 1} | length }}",
    "sort": DOUBLED + "{{ [ns.x, ns.y] | sort | length }}",
    "unique": TUPLES + "{{ [ns.x, ns.y] | unique | list | length }}",
}
LIMITS = Limits(
    context_len=1 << 20,
    max_req_input_len=1 << 20,
    max_total_num_tokens=1 << 20,
    vocab_size=4096,
)


@contextmanager
def side(tokenizer: Tokenizer | None = TOKENIZER) -> Iterator[SideWork]:
    made = SideWork(tokenizer)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def short_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_work, "BASE_CPU_SECONDS", 0.1)


async def call(work: SideWork, client: str, job: str, **arguments: Any) -> Any:
    PEER.set(client)
    raw = await work.call(job, field="text", **arguments)
    return msgspec.json.decode(raw)


def chat(trigger: bool) -> dict[str, Any]:
    message = {"role": "user", "content": "now" if trigger else "hi"}
    return {"messages": [message], "variables": {}}


def armed(bomb: str) -> Tokenizer:
    """A template that is harmless until a message says `now`."""
    source = "{% if messages[0].content == 'now' %}" + bomb + "{% endif %}ok"
    return load_tokenizer(FOLDER, chat_template=source)


def random_texts(count: int, size: int) -> list[str]:
    letters = random.Random(0)
    return ["".join(letters.choices("ab \n<|é漢🙂\x00", k=size)) for _ in range(count)]


def test_a_process_makes_the_same_of_texts() -> None:
    texts = random_texts(40, 500)
    copy = Tokenizer.from_portable(
        msgspec.json.decode(msgspec.json.encode(TOKENIZER.portable()))
    )
    assert [copy.encode(text) for text in texts] == [*map(TOKENIZER.encode, texts)]

    async def work() -> None:
        with side() as beside:
            prompts = PromptTokenizer(TOKENIZER, beside)
            assert sum(map(len, texts)) >= LARGE
            found = await prompts.ids([prompt(text) for text in texts], LIMITS)
            assert found == [TOKENIZER.encode(text) for text in texts]
            back = await prompts.decode(found, skip_special_tokens=False)
            assert back == [
                TOKENIZER.decode(ids, skip_special_tokens=False) for ids in found
            ]

    run(work())


def test_prompts_of_a_call_are_tokenized_in_several_turns() -> None:
    long, mixed = "x" * (BATCH_CHARS - 10), [5, 6]

    async def work() -> None:
        with side() as beside:
            prompts = PromptTokenizer(TOKENIZER, beside)
            asked = [
                prompt(long),
                prompt("y" * 20),
                prompt(mixed),
                prompt("z", add_special_tokens=False),
            ]
            found = await prompts.ids(asked, LIMITS)
            assert found[1:] == [
                TOKENIZER.encode("y" * 20),
                mixed,
                TOKENIZER.encode("z", add_special_tokens=False),
            ]
            assert found[0] == TOKENIZER.encode(long)

    run(work())


def test_a_process_that_nobody_waits_for_ends_without_a_word() -> None:
    own, other = socket.socketpair()
    with other:
        process = subprocess.Popen(
            [sys.executable, "-m", side_jobs.__name__, str(other.fileno()), "0"],
            pass_fds=[other.fileno()],
            stderr=subprocess.PIPE,
        )
    with own:
        side_jobs.send(own, b"null")
        for _ in range(2):
            side_jobs.send(own, msgspec.json.encode(["no_job", [], 1.0]))
        # An answer lies there, unread.
        assert select.select([own], [], [], 30)[0]
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (0, b"")


@pytest.mark.usefixtures("short_deadline")
@pytest.mark.parametrize("name", sampled(BOMBS, key=lambda _: None, ci=3))
def test_a_template_that_never_ends_costs_its_client_alone(name: str) -> None:
    tokenizer = armed(BOMBS[name])
    order: list[str] = []

    async def work() -> None:
        with side(tokenizer) as beside:

            async def attack() -> None:
                with pytest.raises(BadRequest, match="too expensive|refused"):
                    await call(beside, "attacker", "render", **chat(True))
                order.append("attack")

            async def honest() -> None:
                for _ in range(3):
                    answer = await call(beside, "honest", "render", **chat(False))
                    assert answer == "ok"
                order.append("honest")

            await asyncio.gather(attack(), attack(), honest())
            # No process of theirs goes on.
            assert await call(beside, "honest", "render", **chat(False)) == "ok"

    run(work())
    assert len(order) == 3


@pytest.mark.usefixtures("short_deadline")
def test_work_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native code does not look at a clock."""
    monkeypatch.setattr(side_work, "BYTES_PER_CPU_SECOND", 1 << 30)

    async def work() -> None:
        with side() as beside:
            with pytest.raises(BadRequest, match="CPU time") as caught:
                await call(beside, "a", "encode", **LARGE_TEXT)
            assert caught.value.param == "text"
            assert await call(beside, "a", "render", **chat(False))

    run(work())


def test_cheap_work_does_not_wait_for_expensive_work() -> None:
    order: list[str] = []

    async def work() -> None:
        with side() as beside:

            async def encode(client: str, text: str) -> None:
                await call(
                    beside,
                    client,
                    "encode",
                    texts=[text],
                    add_special_tokens=True,
                    with_strings=False,
                )
                order.append(client)

            large = "word " * (3 * CHEAP_BYTES // 5)
            attacks = [encode("attacker", large) for _ in range(4)]
            await asyncio.gather(*attacks, encode("honest", "word " * 5000))

    run(work())
    assert order.index("honest") < 3


# Seconds of work, in native code.
LARGE_TEXT = {
    "texts": ["word " * 1_600_000],
    "add_special_tokens": True,
    "with_strings": False,
}


def test_work_ends_when_its_client_leaves() -> None:
    async def work() -> None:
        with side() as beside:
            left = asyncio.Event()

            async def wait_left() -> None:
                await left.wait()

            async def attack() -> None:
                LEAVING.set(wait_left)
                with pytest.raises(ClientDisconnected):
                    await call(beside, "attacker", "encode", **LARGE_TEXT)

            attacks = [asyncio.create_task(attack()) for _ in range(3)]
            while not (running := pids(beside)):
                await asyncio.sleep(0.01)
            left.set()
            await asyncio.gather(*attacks)
            assert await call(beside, "honest", "render", **chat(False))
            assert not set(running) & set(pids(beside))
            for pid in running:
                with pytest.raises(ProcessLookupError):
                    os.kill(pid, 0)

    run(work())


def test_work_that_fails_as_its_client_leaves_is_not_logged() -> None:
    """The loop would report an error that nobody has read."""
    reported: list[dict[str, Any]] = []

    async def fail() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise BadRequest("too expensive") from None

    async def leave() -> None:
        await asyncio.sleep(0)

    async def work() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: reported.append(context)
        )
        LEAVING.set(leave)
        with pytest.raises(ClientDisconnected):
            await side_work._unless_left(fail())
        # Cancelled from outside, too.
        LEAVING.set(asyncio.Event().wait)
        waiting = asyncio.create_task(side_work._unless_left(fail()))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.sleep(0.01)
        gc.collect()

    asyncio.run(work())
    assert not reported


def pids(beside: SideWork) -> list[int]:
    return [pid for process in beside.processes if (pid := process.pid) is not None]


def test_a_process_that_somebody_ends_is_replaced() -> None:
    async def work() -> None:
        with side() as beside:
            assert await call(beside, "a", "render", **chat(False))
            attack = asyncio.create_task(call(beside, "b", "encode", **LARGE_TEXT))
            await asyncio.sleep(0.2)
            for pid in pids(beside):
                os.kill(pid, signal.SIGKILL)
            with pytest.raises(Unavailable, match="was ended"):
                await attack
            assert await call(beside, "a", "render", **chat(False))

    run(work())


def test_a_stopped_process_ends_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_process, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(side_process, "SECONDS_PER_CPU_SECOND", 0)

    async def work() -> None:
        with side() as beside:
            await beside.start()
            os.kill(pids(beside)[0], signal.SIGSTOP)
            with pytest.raises(BadRequest, match="too expensive"):
                await call(beside, "a", "render", **chat(False))

    run(work())


def test_a_failure_beside_is_a_failure_here() -> None:
    async def work() -> None:
        with side() as beside:
            with pytest.raises(RuntimeError, match="KeyError"):
                await call(beside, "a", "split_reasoning", text="x", parser="none")
            with pytest.raises(BadRequest, match="must not be empty") as caught:
                await call(beside, "a", "render", messages=[], variables={})
            assert caught.value.param == "messages"

    run(work())


def test_a_client_cannot_let_everything_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_work, "MAX_WAITING", 3 * side_work.MIN_COST)

    async def work() -> None:
        with side() as beside:
            calls = [call(beside, "a", "render", **chat(False)) for _ in range(9)]
            other = call(beside, "b", "render", **chat(False))
            *answers, last = await asyncio.gather(*calls, other, return_exceptions=True)
            refused = [a for a in answers if isinstance(a, Unavailable)]
            assert len(refused) == 4, "two run, three wait"
            assert isinstance(last, str)

    run(work())


def test_liveness_sees_work_that_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    app = App()
    beside = app.wire.manager.side_work
    end = threading.Event()

    async def work() -> None:
        stuck = asyncio.create_task(beside.run(LARGE, end.wait))
        await asyncio.sleep(0.05)
        beside.check()
        monkeypatch.setattr(side_work, "STUCK_SECONDS", 0.01)
        with pytest.raises(Unavailable, match="stuck"):
            beside.check()
        for path in ("/health", "/livez", "/readyz"):
            response = await app._ask("GET", path, {})
            assert response.status_code == 503
        end.set()
        await stuck
        beside.check()

    run(work())


def test_an_exit_waits_for_nothing() -> None:
    code = (
        "import asyncio, time\n"
        "from sglang.srt.managers.front.side_work import LARGE, SideWork\n"
        "async def main():\n"
        "    beside = SideWork()\n"
        "    asyncio.create_task(beside.run(LARGE, lambda: time.sleep(300)))\n"
        "    await asyncio.sleep(0.1)\n"
        "    beside.close()\n"
        "asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


# -- turns -------------------------------------------------------------------------


def test_turns_are_fair_by_cost() -> None:
    order: list[str] = []

    async def take(turns: FairTurns[str], client: str, cost: int) -> None:
        async with turns.turn(client, cost):
            order.append(client)
            await asyncio.sleep(0)

    async def work() -> None:
        turns = FairTurns({"only": math.inf}, max_waiting=1000)
        dear = [take(turns, "dear", 10) for _ in range(4)]
        cheap = [take(turns, "cheap", 1) for _ in range(12)]
        await asyncio.gather(*dear, *cheap)
        assert turns.num_waiting == 0

    run(work())
    # Whoever has had less is next: ten cheap ones weigh as much as a dear one.
    assert order[0] == "dear" and order[1:11] == ["cheap"] * 10
    assert order.count("dear") == 4 and order.count("cheap") == 12


def test_idle_time_gives_no_credit() -> None:
    order: list[str] = []

    async def work() -> None:
        turns = FairTurns({"only": math.inf}, max_waiting=1000)

        async def take(client: str) -> None:
            async with turns.turn(client, 1):
                order.append(client)
                await asyncio.sleep(0)

        for _ in range(50):
            await take("busy")
        await asyncio.gather(*(take(c) for c in ["busy"] * 4 + ["late"] * 4))

    run(work())
    assert "busy" in order[50:53] and "late" in order[50:53]
    assert order[-8:].count("late") == 4


def test_a_waiter_that_is_cancelled_leaves_no_trace() -> None:
    async def work() -> None:
        turns = FairTurns({"only": math.inf}, max_waiting=2)

        async def hold(event: asyncio.Event) -> None:
            async with turns.turn("a", 1):
                await event.wait()

        first, second = asyncio.Event(), asyncio.Event()
        holding = asyncio.create_task(hold(first))
        waiting = [asyncio.create_task(hold(second)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await hold(second)
        waiting[0].cancel()
        first.set()
        # Granted and cancelled in the same turn of the loop.
        await holding
        waiting[1].cancel()
        await asyncio.wait(waiting)
        assert turns.num_waiting == 0
        second.set()
        await hold(second)

    run(work())


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
