"""Tensor parallelism on the CPU: two processes give what one gives."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import sglang
from sglang.srt.managers.front.scheduler_process import SchedulerDied, SchedulerProcess
from sglang.srt.managers.messages.errors import EngineFailure
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.hybrid_models import write_hybrid_model
from sglang.test.mock_oracle import next_tokens
from sglang.test.scale import POOL_TOKENS, count, sampled
from sglang.test.tiny_models import write_mock_model, write_tiny_model

register_cpu_ci(est_time=30, suite="cpu")

VOCAB = 265  # odd: the second rank's part is padded
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 24}


# -- one model, one rank and two ---------------------------------------------------


def family(folder: Path, name: str) -> dict[str, Any]:
    """Arguments of an engine on a tiny model."""
    if name == "qwen3":
        write_tiny_model(folder, "Qwen3ForCausalLM", vocab_size=VOCAB)
        return {"model_path": str(folder)}
    if name == "qwen3-next":
        write_hybrid_model(folder, "Qwen3NextForCausalLM", vocab_size=VOCAB)
        return {"model_path": str(folder)}
    # Biases after the sums over ranks, a shared table, and weights that each rank
    # draws.
    write_tiny_model(
        folder,
        "LlamaForCausalLM",
        vocab_size=VOCAB,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        num_key_value_heads=1,
    )
    return {"model_path": str(folder), "load_format": "dummy"}


def random_prompts(number: int, *, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    stem = [rng.randrange(256) for _ in range(60)]
    return [
        stem[: rng.randrange(61)]
        + [rng.randrange(256) for _ in range(rng.randrange(1, 80))]
        for _ in range(number)
    ]


def answers_of(tp_size: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Prefill in chunks, decode, cached prefixes, and drawn tokens; by priority, and
    with a pause."""
    prompts = random_prompts(12, seed=1)
    drawn = [
        {"temperature": 1.0, "top_p": 0.9, "sampling_seed": i, "max_new_tokens": 16}
        for i in range(len(prompts))
    ]
    with sglang.Engine(
        tp_size=tp_size,
        chunked_prefill_size=48,
        max_total_tokens=640,
        schedule_conservativeness=0.3,
        enable_priority_scheduling=True,
        **options,
    ) as engine:
        answers: list[dict[str, Any]] = []
        # Whoever scores a prompt computes it whole: only the last find it cached.
        for params, start in ((GREEDY, 0), (drawn, 0), (GREEDY, -1)):
            answers += engine.generate(
                input_ids=prompts,
                sampling_params=params,
                return_logprob=True,
                logprob_start_len=start,
                token_ids_logprob=[7, VOCAB - 1],
                priority=start,
            )
        stream = engine.generate(
            input_ids=prompts[0], sampling_params=GREEDY, stream=True
        )
        assert not isinstance(stream, dict | list)
        last = next(stream)
        manager, call = engine.tokenizer_manager, engine._host.call
        call(manager.pause_generation("retract"))
        assert call(manager.flush_cache())
        call(manager.continue_generation())
        for update in stream:  # none is left if a busy machine showed all at once
            last = update
        assert last["output_ids"] == answers[-len(prompts)]["output_ids"]
        assert engine.get_server_info()["max_total_num_tokens"] == 640
    return answers


@pytest.mark.parametrize(
    "name", sampled(["qwen3", "llama-dummy", "qwen3-next"], key=type, ci=1)
)
def test_two_ranks_equal_one(tmp_path: Path, name: str) -> None:
    options = family(tmp_path / name, name)
    one, two = answers_of(1, options), answers_of(2, options)
    for a, b in zip(one, two, strict=True):
        assert a["output_ids"] == b["output_ids"]
        for kind in ("input_token_logprobs", "output_token_logprobs"):
            scores = [
                (x[0], y[0])
                for x, y in zip(a["meta_info"][kind], b["meta_info"][kind], strict=True)
                if x[0] is not None
            ]
            assert scores or kind == "input_token_logprobs"
            assert all(x == pytest.approx(y, abs=1e-4) for x, y in scores)
        named = [m["meta_info"]["output_token_ids_logprobs"] for m in (a, b)]
        for x, y in zip(*named, strict=True):
            assert [e[0] for e in x] == pytest.approx([e[0] for e in y], abs=1e-4)
    found = [a["meta_info"]["cached_tokens"] for a in two]
    scored = [a["meta_info"]["input_token_logprobs"] for a in two]
    if name == "qwen3-next":
        # Short prompts have no checkpoint to go on from.
        assert any(found)
    else:
        assert all(bool(s) != bool(n) for s, n in zip(scored, found, strict=True))


# -- the mock model's oracle -------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    sampled(
        [
            {
                "page_size": 1,
                "dtype": "float32",
                "attention_backend": "cpu_native",
                "enable_hierarchical_cache": True,
                "hicache_storage_backend": "file",
            },
            {"page_size": 4, "dtype": "bfloat16", "attention_backend": "torch_native"},
            {"page_size": 16, "tp_size": 4},  # each KV head on two ranks
        ],
        key=type,
        ci=2,
    ),
    ids=lambda o: f"page{o['page_size']}-tp{o.get('tp_size', 2)}",
)
def test_oracle(tmp_path: Path, options: dict[str, Any]) -> None:
    """Random requests, some aborted, in a pool so small that page size 1 and 4
    retract; prefixes that it cannot hold come back from host memory and files."""
    if options.get("hicache_storage_backend") is not None:
        folder = json.dumps({"dir": str(tmp_path / "kv")})
        options = options | {"hicache_storage_backend_extra_config": folder}
    model = write_mock_model(tmp_path, vocab_size=1000, max_position_embeddings=400)
    rng = random.Random(options["page_size"])
    number = count(ci=80, full=1000) // options.get("tp_size", 1)
    stems = [[rng.randrange(1000) for _ in range(150)] for _ in range(3)]
    prompts = [
        rng.choice(stems)[: rng.randrange(151)]
        + [rng.randrange(1000) for _ in range(rng.randrange(1, 40))]
        for _ in range(number)
    ]
    lengths = [rng.choice((1, 5, 20, 60)) for _ in range(number)]
    rids = [f"r{i}" for i in range(number)]
    aborted = set(rng.sample(rids, number // 10))
    with sglang.Engine(
        **{"tp_size": 2} | options,
        model_path=str(model),
        max_total_tokens=1200,
        chunked_prefill_size=64,
        max_running_requests=24,
        schedule_conservativeness=0.3,
    ) as engine:
        aborter = threading.Thread(target=_abort, args=(engine, sorted(aborted)))
        aborter.start()
        answers = engine.generate(
            input_ids=prompts,
            sampling_params=[GREEDY | {"max_new_tokens": n} for n in lengths],
            rid=rids,
        )
        aborter.join()
        deadline = time.monotonic() + 20
        while not engine.flush_cache():  # the last aborts are still on their way
            assert time.monotonic() < deadline
        (stats,) = engine.get_server_info()["internal_states"]
        assert stats["num_retracted_reqs"] > 0 or options["page_size"] == 16
        assert stats["num_used_tokens"] == 0
        if "hicache_storage_backend" in options:
            assert stats["hicache_loaded_tokens_total"] > 0
            assert stats["hicache_damaged_units_total"] == 0
    for rid, prompt, wanted, answer in zip(
        rids, prompts, lengths, answers, strict=True
    ):
        output = answer["output_ids"]
        predicted = next_tokens(prompt + output, vocab_size=1000)
        assert output == predicted[len(prompt) - 1 : -1], rid
        if answer["meta_info"]["finish_reason"]["type"] == "abort":
            assert rid in aborted
        else:
            assert len(output) == wanted


def _abort(engine: sglang.Engine, rids: Sequence[str]) -> None:
    for rid in rids:
        time.sleep(0.02)
        engine.abort_request(rid)


# -- decisions, ends and refusals, on one running engine ---------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sglang.Engine]:
    model = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(model, "Qwen3ForCausalLM", vocab_size=VOCAB)
    with sglang.Engine(
        model_path=str(model), tp_size=2, max_total_tokens=POOL_TOKENS
    ) as running:
        yield running


def test_grammars_are_decided_by_rank_0(engine: sglang.Engine) -> None:
    """The same grammar many times, others beside it, bad ones, aborted ones."""
    patterns = ["(ab|cd){4}", "[0-9]{3}-[0-9]{2}", "x+y", "(ab|cd){4}"] * 4
    params = [
        {"regex": p, "temperature": 1.0, "sampling_seed": i, "max_new_tokens": 40}
        for i, p in enumerate(patterns)
    ]
    params[5]["regex"] = None  # one without a grammar in the batch
    rids = [f"g{i}" for i in range(len(patterns))]
    aborter = threading.Thread(target=_abort, args=(engine, ["g2", "g8"]))
    aborter.start()
    answers = engine.generate(["text"] * len(patterns), params, rid=rids)
    aborter.join()
    finished = 0
    for i, answer in enumerate(answers):
        reason = answer["meta_info"]["finish_reason"]["type"]
        if i == 5 or reason != "stop":
            continue
        finished += 1
        assert re.fullmatch(patterns[i], answer["text"]), answer["text"]
    assert finished >= 8
    with pytest.raises(ValueError, match="regex"):
        engine.generate("text", {"regex": "(unclosed"})
    again = engine.generate("text", params[0])
    assert again["output_ids"] == answers[0]["output_ids"]


def test_penalties_stops_and_seeds_are_the_same_twice(engine: sglang.Engine) -> None:
    params = {
        "temperature": 0.8,
        "top_k": 20,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "sampling_seed": 7,
        "stop": ["q"],
        "max_new_tokens": 40,
    }
    first = engine.generate("abc", params)
    assert engine.generate("abc", params)["output_ids"] == first["output_ids"]


def test_the_death_of_a_follower_ends_the_engine(tmp_path: Path) -> None:
    model = write_mock_model(tmp_path, vocab_size=300)
    engine = sglang.Engine(model_path=str(model), tp_size=2, log_level="critical")
    leader, follower = engine.scheduler_pids
    os.kill(follower, signal.SIGKILL)
    with pytest.raises(EngineFailure, match="scheduler (process died|failed)"):
        engine.generate("x", GREEDY | {"max_new_tokens": 200})
    _wait_gone(leader)
    engine.shutdown()


def _wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


FAILING_RANK = """
import json, os, sys, time
from multiprocessing.connection import Connection
import msgspec
ready = Connection(int(sys.argv[1]), readable=False)
rank = json.loads(sys.stdin.readline())["rank"]
if rank == 0:
    time.sleep(60)
{last_words}
"""
REFUSES = 'ready.send_bytes(msgspec.msgpack.encode({"error": "rank 1 says no"}))'


@pytest.mark.parametrize(
    ("last_words", "error", "message"),
    [
        (REFUSES, ValueError, "^rank 1 says no$"),
        ("os._exit(9)", SchedulerDied, "exit code 9"),
    ],
)
def test_a_rank_that_does_not_start(
    last_words: str, error: type[Exception], message: str
) -> None:
    """The other would wait for it: it is ended."""
    script = FAILING_RANK.format(last_words=last_words)
    process = SchedulerProcess.start(
        ServerArgs(tp_size=2, device="cpu"),
        num_threads=2,
        command=(sys.executable, "-c", script),
    )
    with pytest.raises(error, match=message):
        process.wait_ready()
    began = time.monotonic()
    process.stop(0)
    assert time.monotonic() - began < 5
    assert not any(Path(f"/proc/{pid}").exists() for pid in process.pids)


def test_the_parents_death_ends_all_ranks(tmp_path: Path) -> None:
    model = write_mock_model(tmp_path, vocab_size=300)
    script = (
        "import sglang, os\n"
        f"engine = sglang.Engine(model_path={str(model)!r}, tp_size=2)\n"
        "print(*engine.scheduler_pids, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    pids = [int(pid) for pid in result.stdout.split()]
    assert len(pids) == 2
    for pid in pids:
        _wait_gone(pid)


def test_a_size_that_does_not_divide(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "LlamaForCausalLM", intermediate_size=97)
    with pytest.raises(ValueError, match="--tp-size 2 .* intermediate_size 97"):
        sglang.Engine(model_path=str(tmp_path), tp_size=2, load_format="dummy")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
