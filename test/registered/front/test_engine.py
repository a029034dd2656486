"""`sglang.Engine` on a tiny model: sync, async, streams, many prompts, the end."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import sglang
from sglang.srt.managers.front.scheduler_process import available_cores
from sglang.srt.managers.messages.errors import BadRequest, EngineFailure
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import POOL_TOKENS
from sglang.test.tiny_models import write_mock_model

register_cpu_ci(est_time=12, suite="cpu")

GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 16}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "mock"
    return write_mock_model(folder, vocab_size=257, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[sglang.Engine]:
    with sglang.Engine(
        model_path=str(model), max_queued_requests=50, max_total_tokens=POOL_TOKENS
    ) as running:
        yield running


def ids(answer: Any) -> list[int]:
    output: list[int] = answer["output_ids"]
    return output


def scheduler_pid(engine: sglang.Engine) -> int:
    (pid,) = engine.scheduler_pids
    return pid


def test_one_prompt_and_a_list(engine: sglang.Engine) -> None:
    one = engine.generate("hello", GREEDY)
    assert isinstance(one, dict) and len(ids(one)) == 16
    many = engine.generate(["hello", "other"], GREEDY)
    assert isinstance(many, list) and ids(many[0]) == ids(one)
    by_ids = engine.generate(input_ids=list(b"hello"), sampling_params=GREEDY)
    assert ids(by_ids) == ids(one)


def test_logprobs_and_n(engine: sglang.Engine) -> None:
    answers = engine.generate(
        "x", GREEDY | {"n": 2}, return_logprob=True, top_logprobs_num=3
    )
    assert isinstance(answers, list) and len(answers) == 2
    assert len(answers[0]["meta_info"]["output_top_logprobs"][0]) == 3


def test_sync_stream(engine: sglang.Engine) -> None:
    # A consumer that is late gets several tokens in one answer.
    params = GREEDY | {"max_new_tokens": 900}
    whole = engine.generate("stream", params)
    parts = list(engine.generate("stream", params, stream=True))
    assert len(parts) > 1 and ids(parts[-1]) == ids(whole)
    assert parts[-1]["meta_info"]["finish_reason"]["type"] == "length"
    listed = list(engine.generate(["stream", "b"], GREEDY, stream=True))
    assert {part["index"] for part in listed} == {0, 1}


def test_an_abandoned_stream_is_aborted(engine: sglang.Engine) -> None:
    stream = engine.generate("long", GREEDY | {"max_new_tokens": 900}, stream=True)
    assert not isinstance(stream, (dict, list))
    next(stream)
    stream.close()
    deadline = time.monotonic() + 10
    while not engine.flush_cache():
        assert time.monotonic() < deadline


def test_async_in_the_callers_loop(engine: sglang.Engine) -> None:
    async def work() -> None:
        one = await engine.async_generate("hello", GREEDY)
        several = await asyncio.gather(
            *(engine.async_generate("hello", GREEDY) for _ in range(3))
        )
        assert all(ids(answer) == ids(one) for answer in several)
        stream: Any = await engine.async_generate("hello", GREEDY, stream=True)
        parts = [part async for part in stream]
        assert ids(parts[-1]) == ids(one)

    asyncio.run(work())


def test_many_threads(engine: sglang.Engine) -> None:
    expected = ids(engine.generate("thread", GREEDY))
    answers: list[list[int]] = []

    def ask() -> None:
        answers.append(ids(engine.generate("thread", GREEDY)))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [expected] * 8


def test_more_prompts_than_the_queue_holds(engine: sglang.Engine) -> None:
    prompts = [[i % 250, i // 250] for i in range(300)]
    answers = engine.generate(
        input_ids=prompts, sampling_params=GREEDY | {"max_new_tokens": 2}
    )
    assert isinstance(answers, list) and len(answers) == 300
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [2] * 300


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": "x", "sampling_params": {"top_p": 7}}, "top_p must be in"),
        ({"prompt": "x" * 2000}, "at most 1023 tokens fit"),
        ({}, "exactly one of text, input_ids and input_embeds"),
        ({"prompt": 5}, "text"),
        ({"prompt": "x", "no_such_option": 1}, "no_such_option"),
    ],
)
def test_bad_values_are_value_errors(
    engine: sglang.Engine, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine.generate(**arguments)


def test_the_front_sleeps_while_the_scheduler_works(engine: sglang.Engine) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF)
    engine.generate(["a", "b"], GREEDY | {"max_new_tokens": 500})
    after = resource.getrusage(resource.RUSAGE_SELF)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used < 0.05


def test_info_and_threads(engine: sglang.Engine) -> None:
    info = engine.get_server_info()
    assert info["context_len"] == 1024 and info["internal_states"][0]
    assert json.loads(json.dumps(info)) == info
    environment = (
        Path(f"/proc/{scheduler_pid(engine)}/environ").read_bytes().split(b"\0")
    )
    assert b"OMP_WAIT_POLICY=passive" in environment
    threads = os.environ.get("OMP_NUM_THREADS") or str(available_cores())
    assert f"OMP_NUM_THREADS={threads}".encode() in environment


def test_scores_are_probabilities_of_the_next_token(engine: sglang.Engine) -> None:
    query, items, labels = [7, 8], [[9], [10, 11], []], [5, 250, 5]
    scores = engine.score(query, items, labels)
    shares = engine.score(query, items, labels, apply_softmax=True)
    for item, score, share in zip(items, scores, shares, strict=True):
        answer = engine.generate(
            input_ids=query + item,
            sampling_params={"max_new_tokens": 1, "temperature": 1.0},
            return_logprob=True,
            top_logprobs_num=257,
        )
        assert isinstance(answer, dict)
        top = {e[1]: e[0] for e in answer["meta_info"]["output_top_logprobs"][0]}
        expected = [math.exp(top[label]) for label in labels]
        assert score == pytest.approx(expected, abs=1e-6)
        assert share == pytest.approx([e / sum(expected) for e in expected], abs=1e-6)
    flipped = engine.score([8], [[7], [9]], labels, item_first=True)
    assert flipped == engine.score([], [[7, 8], [9, 8]], labels)
    assert engine.score("ab", "c", [99]) == engine.score("", ["abc"], [99])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (([1], [[2]], []), "label_token_ids"),
        (([1], ["text"], [1]), "items"),
        (("text", [[1]], [1]), "items"),
        (([1], [[2]], [257]), "token_ids_logprob"),
        (([1], [[2]], [-1]), "token_ids_logprob"),
        (([], [[]], [1]), "input_ids"),
        (([1], [[257]], [1]), "input_ids"),
    ],
)
def test_wrong_scores(engine: sglang.Engine, fields: Any, param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        engine.score(*fields)
    assert refused.value.param == param


def test_abort_from_another_thread(engine: sglang.Engine) -> None:
    def abort_once_running() -> None:
        deadline = time.monotonic() + 10
        while not engine.get_server_info()["internal_states"][0]["num_running_reqs"]:
            assert time.monotonic() < deadline
        engine.abort_request("doomed")

    with ThreadPoolExecutor(1) as pool:
        aborted = pool.submit(abort_once_running)
        params = GREEDY | {"max_new_tokens": 1000}
        answer = engine.generate("y", params, rid="doomed")
        aborted.result(10)
    assert isinstance(answer, dict)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_end_of_an_engine(model: Path) -> None:
    """A dead scheduler fails requests; shutdown twice is fine, and final."""
    engine = sglang.Engine(model_path=str(model), max_total_tokens=POOL_TOKENS)
    pid = scheduler_pid(engine)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineFailure, match="scheduler process died"):
        engine.generate("x", GREEDY)
    engine.shutdown()
    engine.shutdown()
    wait_gone(pid)
    with pytest.raises(RuntimeError, match="shut down"):
        engine.generate("x", GREEDY)


def test_a_forgotten_engine_is_stopped(model: Path) -> None:
    engine = sglang.Engine(model_path=str(model), max_total_tokens=POOL_TOKENS)
    pid = scheduler_pid(engine)
    del engine
    gc.collect()
    wait_gone(pid)


def in_fork(work: Callable[[], object]) -> int:
    """The exit code of a forked child that does `work` and leaves as scripts do."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            weakref.finalize._exitfunc()  # type: ignore[attr-defined]
            os._exit(code)
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended[1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_leaves_the_engine_to_its_parent(model: Path) -> None:
    engine = sglang.Engine(model_path=str(model), max_total_tokens=POOL_TOKENS)
    before = ids(engine.generate("abc", GREEDY))
    stream = engine.generate("abc", GREEDY | {"max_new_tokens": 900}, stream=True)
    next(stream)

    def refused(use: Callable[[], object]) -> None:
        with pytest.raises(RuntimeError, match="was forked from the one that made"):
            use()

    async def use_async() -> None:
        await engine.async_generate("abc", GREEDY)

    for work in (
        lambda: None,
        engine.shutdown,
        lambda: engine.__exit__(None, None, None),
        lambda: stream.close(),
        lambda: refused(lambda: engine.generate("abc", GREEDY)),
        lambda: refused(lambda: asyncio.run(use_async())),
        lambda: refused(lambda: next(stream)),
        lambda: refused(engine.flush_cache),
        lambda: refused(engine.get_server_info),
        lambda: refused(lambda: engine.abort_request(abort_all=True)),
        lambda: in_fork(engine.shutdown) == 0 or os._exit(2),
    ):
        assert in_fork(work) == 0
    assert next(stream)
    stream.close()
    assert ids(engine.generate("abc", GREEDY)) == before
    engine.shutdown()


def test_a_scheduler_ends_with_its_parent_whatever_was_forked(
    model: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import os, signal, sys, time
        import sglang
        engine = sglang.Engine(model_path={str(model)!r})
        child = os.fork()
        if child == 0:
            os.close(1)
            time.sleep(60)
            os._exit(0)
        print(child, *engine.scheduler_pids, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """)
    )
    done = subprocess.run(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, timeout=60
    )
    child, scheduler = map(int, done.stdout.split())
    try:
        wait_gone(scheduler)
    finally:
        os.kill(child, signal.SIGKILL)


def test_hidden_states(model: Path) -> None:
    with sglang.Engine(
        model_path=str(model), enable_return_hidden_states=True
    ) as engine:
        answer = engine.generate(
            "abc", GREEDY | {"max_new_tokens": 3}, return_hidden_states=True
        )
    assert isinstance(answer, dict)
    rows = answer["meta_info"]["hidden_states"]
    assert rows and all(len(row) == 512 for row in rows)


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="/does/not/exist"):
        sglang.Engine(model_path="/does/not/exist")
    with pytest.raises(TypeError, match="no argument 'no_such_flag'; arguments"):
        sglang.Engine(no_such_flag=1)
    with pytest.raises(ValueError, match="--dp-size 2: data parallelism"):
        sglang.Engine(dp_size=2)
    with pytest.raises(TypeError, match="did you mean model_path"):
        sglang.Engine(modelpath="x")


def test_options_of_sglang_s_own_engine(engine: sglang.Engine) -> None:
    neutral = {"lora_path": None, "image_data": None, "custom_logit_processor": None}
    answer = engine.generate("abc", GREEDY, **neutral)
    assert ids(answer) == ids(engine.generate("abc", GREEDY))
    with pytest.raises(ValueError, match="image_data is not supported"):
        engine.generate("abc", GREEDY, image_data=["x"])


def test_a_plain_script_needs_no_main_guard_and_leaves_nothing(
    model: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import sglang
        engine = sglang.Engine(model_path={str(model)!r})
        print(len(engine.generate("hi", {{"max_new_tokens": 3}})["output_ids"]))
        print(*engine.scheduler_pids)
        """)
    )
    result = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert not result.stderr, result.stderr
    count, pid = result.stdout.split()
    assert count == "3"
    wait_gone(int(pid))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
