"""Clients share the engine: turns at admission, and places in a full batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from scheduler_world import (
    KINDS,
    check_answer,
    engine,
    prompt_of,
    watched_engine,
    write_models,
)
from test_admission import make_req

from sglang.srt.managers.batch.req import Req
from sglang.srt.managers.scheduler.client_shares import (
    in_turns,
    is_decode_due,
    who_yields,
)
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.spec_parity import check_no_leak

register_cpu_ci(est_time=8, suite="cpu")

PLACES = 6


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("models"))


def reqs(spec: str, *, size: int = 10) -> list[Req]:
    """A request for each letter, which names its client."""
    made = [make_req(prompt_of(size), new=size) for _ in spec]
    for req, client in zip(made, spec, strict=True):
        req.client = client
    return made


def names(found: list[Req]) -> str:
    return "".join(req.client for req in found)


def test_a_client_alone_sees_nothing() -> None:
    waiting = reqs("aaaa")
    waiting[2].heals.count = 1
    assert list(in_turns(waiting, reqs("bb"))) == waiting
    assert who_yields(reqs("aaaa"), reqs("aaaa")) == []


@pytest.mark.parametrize(
    ("waiting", "running", "order"),
    [
        ("aaab", "", "abaa"),
        ("aaabbc", "", "abcaba"),
        ("aab", "aa", "baa"),
        ("bbbbba", "b", "abbbbb"),
        ("aabb", "cc", "abab"),
    ],
)
def test_clients_take_turns(waiting: str, running: str, order: str) -> None:
    queue = reqs(waiting)
    found = list(in_turns(queue, reqs(running)))
    assert names(found) == order
    for client in set(waiting):
        own = [req for req in found if req.client == client]
        assert own == [req for req in queue if req.client == client]


def test_turns_are_weighted_by_tokens() -> None:
    queue = [*reqs("aa", size=100), *reqs("bbbbbbbbbbbb", size=10)]
    assert names(list(in_turns(queue, []))) == "a" + "b" * 10 + "abb"


def test_healed_requests_come_first() -> None:
    queue = reqs("aabb")
    queue[1].heals.count = 1
    assert list(in_turns(queue, reqs("a")))[0] is queue[1]


@pytest.mark.parametrize(
    ("waiting", "running", "yielding"),
    [
        ("b", "aaaa", "a"),
        ("bbbb", "aaaa", "aa"),
        ("bc", "aaaa", "aa"),
        ("b", "a", ""),
        ("b", "aab", ""),
        ("b", "aaab", "a"),
        ("a", "aab", ""),
        ("c", "aaabb", "a"),
        ("", "aaaa", ""),
        ("b", "", ""),
    ],
)
def test_who_has_most_yields(waiting: str, running: str, yielding: str) -> None:
    assert names(who_yields(reqs(waiting), reqs(running))) == yielding


def test_the_request_that_loses_least_yields() -> None:
    running = reqs("aaaa")
    for req, output in zip(running, (3, 1, 5, 1), strict=True):
        req.append(range(output))
    assert who_yields(reqs("b"), running)[0] in (running[1], running[3])


@pytest.mark.parametrize(
    ("prefilled", "running", "is_due"),
    [
        ("a", "b", True),
        ("aab", "bc", True),
        ("a", "a", False),
        ("ab", "aabb", False),
        ("a", "", False),
    ],
)
def test_who_had_no_part_in_a_prefill_decodes(
    prefilled: str, running: str, is_due: bool
) -> None:
    assert is_decode_due(reqs(prefilled), reqs(running)) == is_due


@pytest.mark.parametrize("kind", KINDS)
def test_one_client_does_not_keep_all_places(models: Path, kind: str) -> None:
    """The others' short answers come before any of its long ones, and all are right."""
    harness = watched_engine(models, kind, max_running_requests=PLACES)
    prompts = {f"long{i}": prompt_of(60, start=7 * i) for i in range(2 * PLACES)}
    prompts |= {f"short{i}": prompt_of(20, start=300 + i) for i in range(3)}
    counts = {rid: 90 if rid.startswith("long") else 4 for rid in prompts}

    def submit(kind: str) -> None:
        for rid, prompt in prompts.items():
            if rid.startswith(kind):
                harness.submit(
                    prompt,
                    rid=rid,
                    client=kind,
                    max_new_tokens=counts[rid],
                    ignore_eos=True,
                )

    submit("long")
    for _ in range(8):
        harness.scheduler.step()
    batch = harness.scheduler.running
    assert batch is not None and len(batch.reqs) == PLACES
    submit("short")
    order: list[str] = []

    def look(_: int) -> None:
        ended = harness.collect(keep=True)
        order.extend(
            rid
            for rid, answer in ended.items()
            if answer.finish_reason is not None and rid not in order
        )

    answers = harness.run(on_step=look)
    assert sorted(order[:3]) == ["short0", "short1", "short2"]
    for rid, prompt in prompts.items():
        check_answer(prompt, answers[rid].output_ids, counts[rid])
    assert 1 <= harness.scheduler.stats_snapshot().num_retracted_reqs <= 3
    check_no_leak(harness)


@pytest.mark.parametrize(
    ("kind", "client"), [*((kind, "many") for kind in KINDS), ("plain", "one")]
)
def test_prefills_of_one_client_do_not_stop_the_outputs_of_others(
    models: Path, kind: str, client: str
) -> None:
    """Prompts without outputs never take part in a decode step: a queue of them kept
    everybody else waiting until it was empty. A client alone still prefills first."""
    harness = watched_engine(models, kind, max_running_requests=PLACES)
    running = prompt_of(20)
    harness.submit(
        running, rid="running", client="one", max_new_tokens=8, ignore_eos=True
    )
    while harness.scheduler.running is None:
        harness.scheduler.step()
    for i in range(20 * PLACES):
        harness.submit(
            prompt_of(9, start=i), rid=f"{i}", client=client, max_new_tokens=1
        )
    left: list[int] = []

    def look(_: int) -> None:
        answer = harness.collect(keep=True).get("running")
        if answer is not None and answer.finish_reason is not None:
            left.append(len(harness.scheduler.batches.waiting))

    answers = harness.run(on_step=look)
    # One prefill at most for each of its steps.
    least = (20 - 8 - 2) * PLACES if client == "many" else 0
    assert left[0] >= least and bool(left[0]) == bool(least)
    check_answer(running, answers["running"].output_ids, 8)
    assert len(answers) == 1 + 20 * PLACES
    check_no_leak(harness)


def test_one_client_does_not_fill_the_queue(models: Path) -> None:
    harness = engine(models, "plain", max_queued_requests=16, max_running_requests=1)
    for client, count in (("a", 20), ("b", 3)):
        for i in range(count):
            harness.submit(
                prompt_of(9), rid=f"{client}{i}", client=client, max_new_tokens=2
            )
    answers = harness.run()
    served = [
        rid
        for rid, answer in answers.items()
        if answer.finish_reason is not None and answer.finish_reason.type != "abort"
    ]
    assert sorted(served) == sorted([*(f"a{i}" for i in range(16)), "b0"])


def test_nobody_yields_to_the_own_client(models: Path) -> None:
    harness = engine(models, "plain", max_running_requests=PLACES)
    rids = [
        harness.submit(prompt_of(20, start=i), max_new_tokens=10, ignore_eos=True)
        for i in range(3 * PLACES)
    ]
    answers = harness.run()
    assert set(answers) == set(rids)
    assert harness.scheduler.stats_snapshot().num_retracted_reqs == 0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
