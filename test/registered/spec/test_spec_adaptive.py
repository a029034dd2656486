"""Shapes of drafts that change in the middle of requests, plain decoding among them:
the same output as without speculation, under the KV canary."""

from __future__ import annotations

import dataclasses
import json
import logging
from types import SimpleNamespace

import pytest
import torch

from sglang.srt.configs.attention_backends import ATTENTION_BACKENDS
from sglang.srt.configs.draft_layout import TreeShape
from sglang.srt.managers.scheduler.draft_shapes import DraftShapes
from sglang.srt.managers.scheduler.shape_chooser import PLAIN, ShapeChooser
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative import eagle_catch_up
from sglang.srt.speculative.eagle_catch_up import PlainStates
from sglang.srt.utils.paths import bundled_demo_model_path
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import is_full
from sglang.test.spec_adaptive import run_in_turn
from sglang.test.spec_matrix import SpecConfig, whole_matrix
from sglang.test.spec_parity import check_no_leak, live_requests
from sglang.test.spec_world import (
    ModelFolders,
    References,
    plain_engine,
    spec_engine,
)

register_cpu_ci(est_time=12, suite="cpu", full_time=600)


def config(algorithm, topk, steps, nodes, page, model, *, overlap):
    return SpecConfig(
        algorithm=algorithm,
        topk=topk,
        page_size=page,
        num_steps=steps,
        nodes=nodes,
        backend="cpu_native",
        overlap=overlap,
        model=model,
        variant=False,
    )


# Without measuring costs.
ADAPTIVE = {"speculative_adaptive": True, "skip_server_warmup": True}
CHOSEN = (
    (config("EAGLE3", 4, 3, "middle", 1, "mock", overlap=True), 1),
    (config("EAGLE", 2, 4, "middle", 4, "mock", overlap=False), 3),
    (config("STANDALONE", 1, 4, None, 16, "mock", overlap=True), 7),
    (config("NGRAM", 3, 5, "min", 4, "mock", overlap=True), 3),
    (config("STANDALONE", 4, 3, "min", 16, "llama", overlap=False), 2),
    (config("EAGLE", 1, 3, None, 1, "qwen3", overlap=True), 20),
    (config("EAGLE3", 4, 5, "min", 4, "llama", overlap=True), 5),
)
# Backends that plan on the host for one shape are refused.
WHOLE = tuple(
    (each, 3)
    for each in whole_matrix()
    if each.model != "demo" and not ATTENTION_BACKENDS[each.backend].needs_cpu_seq_lens
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return ModelFolders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def references(folders):
    return References(folders, requests=24)


@pytest.mark.parametrize(
    ("config", "iterations"), [*CHOSEN, *(WHOLE if is_full() else ())], ids=str
)
def test_same_output_while_the_shape_changes(folders, references, config, iterations):
    engine = run_in_turn(
        folders, references, config, iterations=iterations, kv_canary="raise"
    )
    served = engine.scheduler.stats_snapshot()
    assert sum(served.kv_canary_violations_total.values()) == 0


class FewDrafts:
    """Plain decoding, with one draft in `every` iterations."""

    def __init__(self, every):
        self._every, self._asked = every, 0

    def choose(self, rows, behind):
        self._asked += 1
        return PLAIN if self._asked % self._every else 1


def calls_of(owner, name):
    """Record the calls of a method."""
    found, method = [], getattr(owner, name)

    def record(*args, **options):
        found.append(args)
        return method(*args, **options)

    setattr(owner, name, record)
    return found


def lens_by_position(scheduler):
    """Record how many tokens each verification of the only request accepts, by its
    length before."""
    found, process = {}, scheduler._results.process

    def record(launched, result, *args, **options):
        (req,) = launched.reqs
        if launched.shape is not None:
            found[len(req.tokens)] = result.accept_lens[0]
        return process(launched, result, *args, **options)

    scheduler._results.process = record
    return found


@pytest.fixture
def short_ring(monkeypatch):
    """Drafts lapse after 20 plain steps."""
    monkeypatch.setattr(eagle_catch_up, "MAX_BEHIND", 20)


@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE"])
@pytest.mark.parametrize("radix", [True, False])
def test_a_lapsed_draft_is_prefilled_again(folders, short_ring, algorithm, radix):
    """When something is drafted, and not before: the same output, drafts that are
    accepted again, and nothing computed by the draft meanwhile."""
    wanted = config(algorithm, 1, 3, None, 4, "mock", overlap=True)
    engine = spec_engine(
        folders, wanted, **ADAPTIVE, kv_canary="raise", disable_radix_cache=not radix
    )
    scheduler, turn = engine.scheduler, [PLAIN]
    assert scheduler.env.max_behind == 20
    scheduler.shapes.policy = SimpleNamespace(choose=lambda rows, behind: turn[0])
    prompts = [list(range(100, 120 + 30 * i)) for i in range(3)]
    rids = [engine.submit(p, max_new_tokens=90, ignore_eos=True) for p in prompts]
    for _ in range(6):
        scheduler.step()
    ran = calls_of(scheduler.worker.draft_worker.draft_runner, "run_model")
    for _ in range(45):
        scheduler.step()
    assert not ran
    assert scheduler.stats_snapshot().num_retracted_reqs == 0
    assert all(req.behind > 40 for req in live_requests(scheduler))
    assert scheduler.batches.behind() > 4 * 3 * 40
    turn[0] = 1
    answers = engine.run()
    assert scheduler.stats_snapshot().num_retracted_reqs == 3
    plain = plain_engine(folders.target("mock"))
    for rid, prompt in zip(rids, prompts, strict=True):
        due = plain.generate(prompt, max_new_tokens=90, ignore_eos=True).output_ids
        assert answers[rid].output_ids == due
    assert scheduler.stats_snapshot().spec_accept_length > 1.5
    check_no_leak(engine)


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
@pytest.mark.parametrize("pause", [2, 9, 24] if is_full() else [24])
def test_drafts_after_a_pause_are_as_good(folders, algorithm, pause):
    """The draft has caught up, over several extends if need be: as many of its tokens
    are accepted as of a draft after a prefill of the same tokens."""
    wanted = config(algorithm, 1, 3, None, 4, "demo", overlap=False)
    engine = spec_engine(folders, wanted, **ADAPTIVE, disable_radix_cache=True)
    engine.scheduler.shapes.policy = FewDrafts(pause)
    found = lens_by_position(engine.scheduler)
    prompt = [1000 + i * 7 % 300 for i in range(40)]
    paused = engine.generate(prompt, max_new_tokens=110, ignore_eos=True)
    lens = dict(found)
    assert sum(lens.values()) > 1.2 * len(lens)
    engine.scheduler.shapes.policy = FewDrafts(1)
    for length in lens:
        found.clear()
        known = (prompt + paused.output_ids)[: length - 1]
        engine.generate(known, max_new_tokens=6, ignore_eos=True)
        assert found[length] == lens[length]


def test_what_a_draft_lacks_is_not_cached(folders):
    """A request that ends behind leaves only the prefix that both pools have."""
    wanted = config("EAGLE3", 1, 3, None, 4, "mock", overlap=False)
    engine = spec_engine(folders, wanted, **ADAPTIVE, kv_canary="raise")
    engine.scheduler.shapes.policy = FewDrafts(10**9)
    prompt = list(range(100, 120))
    first = engine.generate(prompt, max_new_tokens=11, ignore_eos=True)
    again = engine.generate(
        prompt + first.output_ids, max_new_tokens=8, ignore_eos=True
    )
    assert again.cached_tokens <= len(prompt)
    assert again.cached_tokens >= len(prompt) - 4


def test_slots_are_taken_many_at_once(folders):
    """On a CPU, and always those that an iteration may need."""
    wanted = config("EAGLE3", 1, 3, None, 1, "mock", overlap=True)
    engine = spec_engine(folders, wanted, **ADAPTIVE, kv_canary="raise")
    env = engine.scheduler.env
    engine.scheduler.shapes.policy = FewDrafts(20)
    engine.submit(list(range(100, 120)), max_new_tokens=80, ignore_eos=True)
    held = []
    while engine.scheduler.step() or engine.scheduler.has_work():
        held += [
            (req.allocated_len, req.allocated_len - req.committed_len)
            for req in live_requests(engine.scheduler)
            if req.allocated_len > req.committed_len
        ]
    most = env.decode_reserve
    assert env.decode_spare > 8
    assert {most, most - env.decode_spare} <= {ahead for _, ahead in held}
    # A result may come between taking slots and looking here.
    gained = env.shape.accept_width
    assert all(most - env.decode_spare - gained <= ahead <= most for _, ahead in held)
    assert len({allocated for allocated, _ in held}) < len(held) / 8


def test_requests_that_have_ended_do_not_count(folders):
    """The shape is chosen for those that will decode, also when others take over."""
    wanted = config("EAGLE3", 1, 3, None, 1, "mock", overlap=False)
    engine = spec_engine(folders, wanted, **ADAPTIVE)
    seen = []
    engine.scheduler.shapes.policy = SimpleNamespace(
        choose=lambda rows, behind: seen.append(rows) or PLAIN
    )
    for first, count in ((100, 2), (200, 3)):
        for i in range(count):
            prompt = list(range(first + i, first + 30))
            engine.submit(prompt, max_new_tokens=9, ignore_eos=True)
        while engine.io.requests or live_requests(engine.scheduler):
            engine.scheduler.step()
    assert set(seen) <= {1, 2, 3}


@pytest.mark.parametrize("steps", [1, 3, 4, 11])
def test_states_that_wait_are_those_that_were_kept(steps):
    """A row's newest states, also if another request had the row and its positions."""
    ring = PlainStates(rows=4, length=4, width=2, dtype=torch.float32, device="cpu")
    due, rng = {}, torch.Generator().manual_seed(steps)
    lens = {1: 5, 2: 9, 3: 0}
    for step in range(steps):
        if step == 2:
            lens[2] = 8
        rows = [row for row in lens if row < 3 or step % 2]
        states = torch.rand(len(rows), 2, generator=rng)
        at = [lens[row] for row in rows]
        ring.keep(torch.tensor(rows), torch.tensor(at), states)
        for row, position, state in zip(rows, at, states, strict=True):
            due[row, position % 4] = (position, state)
            lens[row] = position + 1
    for (row, _), (position, state) in due.items():
        out = torch.empty(1, 2)
        ring.take(torch.tensor([row]), torch.tensor([[position]]), out=out)
        assert torch.equal(out[0], state)


def test_costs_are_measured_before_the_engine_is_ready(folders):
    """And leave no trace: no tokens are cached or counted, and all rows are free."""
    wanted = config("EAGLE3", 2, 3, "min", 4, "mock", overlap=False)
    engine = spec_engine(
        folders,
        wanted,
        speculative_adaptive=True,
        kv_canary="raise",
        max_total_tokens=16384,
    )
    scheduler = engine.scheduler
    chooser = scheduler.shapes.policy
    assert isinstance(chooser, ShapeChooser)
    for index in range(len(scheduler.shapes.ladder)):
        for rows in (1, 4):
            assert 0 < chooser.costs.measured(index, rows) < 10
    stats = scheduler.stats_snapshot()
    assert stats.num_requests_total == stats.generation_tokens_total == 0
    assert scheduler.cache.total_size() == 0
    check_no_leak(engine)
    prompt = list(range(100, 130))
    plain = plain_engine(folders.target("mock"))
    options = {"max_new_tokens": 60, "ignore_eos": True}
    due = plain.generate(prompt, **options).output_ids
    assert engine.generate(prompt, **options).output_ids == due
    assert chooser.costs.is_known(scheduler.shapes._indices[scheduler.batches.shape], 1)


def test_without_costs_the_shape_is_that_of_the_flags(folders, caplog):
    wanted = config("EAGLE3", 2, 3, "min", 4, "mock", overlap=False)
    with caplog.at_level(logging.WARNING):
        engine = spec_engine(folders, wanted, **ADAPTIVE)
    assert "--skip-server-warmup" in caplog.text
    shapes = engine.scheduler.shapes
    assert {shapes.policy.choose(n, int) for n in (1, 99)} == {len(shapes.ladder) - 1}


FLAGS = {
    "model_path": str(bundled_demo_model_path()),
    "device": "cpu",
    "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": 5,
    "speculative_eagle_topk": 4,
    "speculative_num_draft_tokens": 8,
    "speculative_adaptive": True,
}
TABLED = {"shapes": [[1, 1, 2], [3, 4, 8]], "table": {"1": [3, 4, 8], "16": None}}


def shapes_of(tmp_path, config, **options):
    path = tmp_path / "shapes.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    flags = FLAGS | {"speculative_adaptive_config": str(path)} | options
    return DraftShapes(ServerArgs(**flags))


def test_a_table_by_batch_size(tmp_path):
    shapes = shapes_of(tmp_path, TABLED)
    small, wide = TreeShape.chain(1), TreeShape(topk=4, num_steps=3, num_draft_tokens=8)
    assert shapes.ladder == (None, small, wide)
    assert [shapes.policy.choose(n, int) for n in (1, 15, 16, 200)] == [2, 2, 0, 0]
    assert not shapes.measures


def test_a_replay_needs_no_file(tmp_path):
    args = ServerArgs(
        **FLAGS, speculative_adaptive_config=json.dumps({"candidate_steps": [2, 1]})
    )
    again = ServerArgs(
        **FLAGS, speculative_adaptive_config=args.speculative_adaptive_config
    )
    assert again.tree_shapes == (TreeShape.chain(1), TreeShape.chain(2))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("[1]", ["must be one JSON object"]),
        ("{", ["not JSON"]),
        ({"steps": [1]}, ['"steps"', "candidate_steps"]),
        ({"shapes": []}, ['"shapes"', "not empty"]),
        ({"shapes": [[1, 1]]}, ["[1, 1]", "draft tokens"]),
        ({"shapes": [[3, 1, 9]]}, ["[3, 1, 9]", "use 4 .. 4"]),
        ({"shapes": [[3, 8, 9]]}, ["[3, 8, 9]", "--speculative-eagle-topk 4"]),
        ({"shapes": [[1, 1, 2]], "candidate_steps": [1]}, ["exclude"]),
        ({"candidate_steps": list(range(1, 9))}, ["8 shapes", "at most 6"]),
        ({"candidate_steps": ["3"]}, ["'3'", "draft tokens"]),
        (TABLED | {"table": {"2": None}}, ["beginning with"]),
        (TABLED | {"table": {"1": None, "-4": None}}, ['"-4"']),
        (TABLED | {"table": {"1": [2, 1, 3]}}, ["[2, 1, 3]", "no graphs", "[1, 1, 2]"]),
    ],
)
def test_a_wrong_configuration_is_named(tmp_path, config, words):
    with pytest.raises(ValueError, match="--speculative-adaptive-config") as refused:
        shapes_of(tmp_path, config)
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speculative_adaptive_config": "/no/such.json"}, ["/no/such.json", "read"]),
        (
            {"speculative_adaptive": False, "speculative_adaptive_config": "{}"},
            ["no effect", "--speculative-adaptive"],
        ),
        (
            {
                "speculative_algorithm": None,
                "speculative_num_steps": None,
                "speculative_eagle_topk": None,
                "speculative_num_draft_tokens": None,
            },
            ["--speculative-adaptive", "--speculative-algorithm"],
        ),
    ],
)
def test_flags_without_effect_are_refused(options, words):
    with pytest.raises(ValueError, match="speculative") as refused:
        ServerArgs(**FLAGS | options)
    for word in words:
        assert word in str(refused.value)


def test_a_backend_that_plans_on_the_host_is_refused(monkeypatch):
    able = dataclasses.replace(
        ATTENTION_BACKENDS["cpu_native"], needs_cpu_seq_lens=True
    )
    monkeypatch.setitem(ATTENTION_BACKENDS, "cpu_native", able)
    with pytest.raises(ValueError, match="--attention-backend cpu_native"):
        ServerArgs(**FLAGS)


def test_ladder_of_the_flags(folders):
    wanted = config("EAGLE3", 4, 5, "min", 4, "mock", overlap=False)
    engine = spec_engine(folders, wanted, **ADAPTIVE)
    flags = TreeShape(topk=4, num_steps=5, num_draft_tokens=6)
    assert engine.scheduler.shapes.ladder == (
        None,
        TreeShape.chain(1),
        TreeShape.chain(3),
        flags,
    )


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
