"""The plugin inside SGLang, on classes with SGLang's methods and fields: clean traffic
is silent, faults of each class are named, and it cannot be there without checking."""

from __future__ import annotations

import importlib.metadata
import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_world
import torch
from sglang_world import (
    DRAFTS,
    OWNERS,
    VOCABULARY,
    Req,
    Runner,
    World,
    path_in,
    plugged,
    upload,
)

from kv_canary.checks import reason_labels
from kv_canary.engines import cli, hooks
from kv_canary.engines.hooks import Refusal, problem_with
from kv_canary.engines.settings import Mode, Settings
from kv_canary.engines.sglang import (
    attachment,
    draft,
    hooks_of,
    plugin,
)
from kv_canary.engines.sglang.limits import LIMITS, refused_by
from kv_canary.engines.sglang.row_registry import RowRegistry, request_salt
from kv_canary.engines.sglang.tree import find_trees, make_chains
from kv_canary.faults.catalogue import by_host_name
from kv_canary.faults.fault import HostEngine
from kv_canary.faults.sglang import planting, selftest
from kv_canary.faults.sglang.planters import PLANTERS, RunnerScene
from kv_canary.faults.sglang.planting import is_named
from kv_canary.records import Counter, request_lineage
from kv_canary.reporter import CanaryViolation
from kv_canary.violation import Violation
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.scale import count

register_cpu_ci(est_time=6, suite="cpu")
register_cuda_ci(est_time=30, suite="cuda")

LOG = Settings(mode=Mode.LOG, real_data="all")
RAISE = Settings(mode=Mode.RAISE, real_data="all")
KINDS = ("whole", "scattered", "latent")


@pytest.fixture(autouse=True)
def owners(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The hooks find the classes of the world."""
    real = hooks.load_owner

    def load(place: str) -> Any:
        return OWNERS[place] if place in OWNERS else real(place)

    monkeypatch.setattr(hooks, "load_owner", load)
    monkeypatch.setattr(hooks_of, "load_owner", load)
    yield
    plugin.unregister()


def tokens(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(n)]


def fill(world: World, rng: random.Random, requests: int = 3) -> None:
    """Requests that share a prefix, some tokens long."""
    shared = tokens(rng, 20)
    for number in range(requests):
        world.begin(Req(f"r{number}", shared + tokens(rng, rng.randrange(4, 12))))
        world.end(f"r{number}")
        world.begin(Req(f"R{number}", shared + tokens(rng, rng.randrange(4, 12))))
    for _ in range(3):
        world.decode()


def traffic(world: World, rng: random.Random, steps: int, *, drafts: bool) -> None:
    shared = [tokens(rng, rng.randrange(8, 40)) for _ in range(3)]
    number = 0
    for _ in range(steps):
        if len(world.running) < 4 and rng.random() < 0.7:
            prefix = rng.choice(shared)[: rng.randrange(40)]
            req = Req(f"q{number}", prefix + tokens(rng, rng.randrange(1, 20)))
            number += 1
            if rng.random() < 0.3:
                world.begin(req, upto=len(req.tokens) // 2 + 1)
            if len(req.prefix_indices) < len(req.tokens):
                world.begin(req)
        if world.running and drafts and rng.random() < 0.5:
            world.speculate(rng)
        elif world.running:
            world.decode()
        ended = [r for r, req in world.running.items() if len(req.tokens) > 90]
        if world.running and rng.random() < 0.2:
            ended.append(rng.choice(list(world.running)))
        for rid in dict.fromkeys(ended):
            world.end(rid, caches=rng.random() < 0.5 and len(world.cache) < 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("drafts", [False, True])
def test_clean_traffic_is_silent(kind: str, page_size: int, drafts: bool) -> None:
    options = {"speculative_algorithm": "EAGLE"} if drafts else {}
    with plugged(RAISE):
        world = World(RAISE, kind=kind, page_size=page_size, **options)
        rng = random.Random(page_size)
        traffic(world, rng, count(ci=25, full=300), drafts=drafts)
    canary = world.canary
    assert canary.reporter.total == 0
    counters = canary.counters()
    assert counters[Counter.TAIL_LAUNCHES] == canary.forwards
    assert counters[Counter.VERIFIED_SLOTS] > 10 * canary.forwards


@pytest.fixture
def tails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version whose draft models store the right token at the end of a chunk."""
    monkeypatch.setattr(draft, "_knows_tails", lambda: True)


@pytest.mark.usefixtures("tails")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [1, 4])
def test_the_pool_of_a_draft_model_is_seen(kind: str, page_size: int) -> None:
    with plugged(RAISE):
        options = {"speculative_algorithm": "EAGLE", "drafts": True}
        world = World(RAISE, kind=kind, page_size=page_size, **options)
        world.decode = lambda: world.speculate(rng)  # type: ignore[method-assign]
        rng = random.Random(page_size)
        traffic(world, rng, count(ci=25, full=300), drafts=True)
        drafter = world.drafter
        assert drafter is not None
        canary = attachment.get_canary(drafter.draft_runner)
        assert canary is world.canary.draft and canary is not None
        assert canary.forwards == world.canary.forwards > 10
        assert canary.reporter.total == 0
        reads = canary.groups[0].state.counters[Counter.VERIFIED_SLOTS]
        assert reads > 10 * canary.forwards
        # A slot of a prefix, then one that a verification filled.
        for request, back in ((0, 20), (1, 2)):
            req = list(world.running.values())[request]
            slot = int(world.table[req.req_pool_idx, len(req.tokens) - 1 - back])
            pool = drafter.draft_runner.token_to_kv_pool
            pool.layers[-1][slot] += 1
            with pytest.raises(CanaryViolation, match=rf"tag=draft.*slot_idx={slot} "):
                world.speculate(rng)
                world.settle()
            pool.layers[-1][slot] -= 1


@pytest.mark.usefixtures("tails")
def test_a_wrong_token_of_a_draft_model_is_named() -> None:
    """Its prefill stores another token than that which follows."""
    rng = random.Random(12)
    with plugged(RAISE):
        world = World(RAISE, speculative_algorithm="EAGLE", drafts=True)
        world.begin(Req("a", tokens(rng, 30)), upto=20)
        req = world.running["a"]
        req.origin_input_ids[20] ^= 1
        with pytest.raises(CanaryViolation, match=r"tag=draft.*rid=.a.*position=19"):
            world.begin(req)
            world.settle()


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"speculative_algorithm": "STANDALONE"}, "whose next tokens differ"),
        ({"enable_multi_layer_eagle": True}, "one for each layer"),
        ({"speculative_adaptive": True}, "number of its tokens changes"),
        ({}, "another token at the end of a chunk"),
    ],
)
def test_a_draft_model_that_is_not_seen_is_named(
    options: dict[str, Any], because: str, caplog: pytest.LogCaptureFixture
) -> None:
    with plugged(RAISE):
        world = World(
            RAISE, drafts=True, **{"speculative_algorithm": "EAGLE", **options}
        )
        world.begin(Req("a", [1, 2, 3]))
        world.speculate(random.Random(0))
    assert f"not checked ({because}" in caplog.text or because in caplog.text
    assert world.canary.draft is None and world.canary.forwards == 2


def planted(name: str, seed: int, **options: Any) -> tuple[list[Any], list[Violation]]:
    found: list[Violation] = []
    rng = random.Random(f"{name} {seed}")
    with plugged(LOG):
        world = World(LOG, **options)
        fill(world, rng)
        examine = world.canary.reporter.examine
        world.canary.reporter.examine = lambda *args, **kwargs: [  # type: ignore
            found.append(finding.violation) or finding
            for finding in examine(*args, **kwargs)
        ]
        batch = world.decode_batch()
        allocator = world.runner.token_to_kv_pool_allocator
        scene = RunnerScene(
            batch=batch,
            pool=world.runner.token_to_kv_pool,
            table=world.table,
            free=(allocator.free_pages * world.page_size).tolist(),
            rng=rng,
        )
        with PLANTERS[name](scene) as due:
            world.run(batch)
            world.settle()
    assert world.canary.forwards
    return list(due), found


@pytest.mark.parametrize("name", PLANTERS)
def test_a_fault_is_named(name: str) -> None:
    for seed in range(count(ci=2, full=20)):
        for kind, page_size in (("whole", 1), ("latent", 4)):
            due, found = planted(name, seed, kind=kind, page_size=page_size)
            assert is_named(due, found), (seed, kind, due, found)


def test_a_store_that_is_skipped_is_named() -> None:
    with plugged(RAISE):
        world = World(RAISE)
        fill(world, random.Random(1))
        world.runner.model.skips = {1}
        with pytest.raises(CanaryViolation, match="write_missing"):
            world.decode()


@pytest.mark.parametrize("fault", ["mask", "position", "token", "path", "bytes"])
def test_a_fault_in_a_tree_is_named(fault: str) -> None:
    """A tree's shape, its inputs, an accepted path that is none, and bytes of accepted
    tokens that do not move with their records."""
    rng, text = random.Random(fault), {"mask": "tree_shape"}
    text |= {"position": "write_position", "token": "write_token"}
    with plugged(RAISE):
        world = World(RAISE, speculative_algorithm="EAGLE")
        fill(world, rng)
        batch, trees = world.verify_batch(rng)
        if fault == "mask":
            width = int(batch.seq_lens[0]) + DRAFTS
            batch.spec_info.custom_mask[2 * width - DRAFTS] ^= True
        elif fault == "position":
            batch.positions[DRAFTS + 3] += 1
        elif fault == "token":
            batch.input_ids[0] += 1
        if fault in text:
            with pytest.raises(CanaryViolation, match=text[fault]):
                world.run(batch)
            return
        world.run(batch)
        paths = [path_in(tree, DRAFTS - 1) for tree in trees]
        if fault == "path":
            stray = next(n for n in range(2, DRAFTS) if trees[0][n] != 0)
            paths[0] = [0, stray]
        world.accept(batch, paths)
        if fault == "bytes":
            first = next(iter(world.running.values()))
            slot = int(world.table[first.req_pool_idx, len(first.tokens) - 2])
            world.runner.token_to_kv_pool.layers[0][slot] += 1
        with pytest.raises(CanaryViolation, match="verify"):
            world.speculate(rng)


@pytest.mark.parametrize("options", [{}, {"speculative_algorithm": "EAGLE"}])
def test_a_whole_history_of_another_request_is_named(options: dict[str, str]) -> None:
    """Sound in itself; only the host's tokens say that it is another's."""
    rng = random.Random(10)
    with plugged(RAISE):
        world = World(RAISE, **options)
        for rid in "ab":
            world.begin(Req(rid, tokens(rng, 20)))
        world.decode()
        batch = world.decode_batch()
        a, b = (world.running[rid].req_pool_idx for rid in "ab")
        world.table[a, :21], world.table[b, :21] = (
            world.table[b, :21].clone(),
            world.table[a, :21].clone(),
        )
        with pytest.raises(CanaryViolation, match="=verify_token rid=.a.*position=20"):
            world.run(batch)


def test_a_forward_outside_of_the_runner_records_nothing() -> None:
    """As a capture and its warm-up are."""
    with plugged(RAISE):
        world = World(RAISE)
        fill(world, random.Random(11))
        slots = world.canary.counters()[Counter.TAIL_SLOTS]
        batch = world.decode_batch()
        world.runner.model.forward(batch.input_ids, batch.positions, batch)
        assert world.canary.counters()[Counter.TAIL_SLOTS] == slots


def test_slots_are_poisoned_when_the_next_forward_begins() -> None:
    """Not before: one that still runs may read them."""
    with plugged(LOG):
        world = World(LOG)
        fill(world, random.Random(3))
        req = world.running["R0"]
        slot = int(world.table[req.req_pool_idx, 25])
        held = world.canary.groups[0].state.tail[slot, 0].clone()
        world.runner.token_to_kv_pool_allocator.free(upload([slot]))
        assert world.canary.groups[0].state.tail[slot, 0] == held
        world.decode()
        world.settle()
        (incident,) = world.canary.reporter.incidents
        found = incident["violations"][0]
        assert (found["rid"], found["slot"], found["position"]) == ("R0", slot, 25)
        assert world.canary.owner(slot).text == "request 'R0'"
        world.runner.token_to_kv_pool_allocator.clear()
        world.decode()
        world.settle()
        assert world.canary.reporter.counts["verify_freed"] > 20


def test_a_request_that_was_never_announced_is_an_error() -> None:
    with plugged(RAISE):
        world = World(RAISE)
        fill(world, random.Random(4))
        batch = world.decode_batch()
        batch.rids[1] = "somebody"
        with pytest.raises(RuntimeError, match="'somebody'.*prepare_for_extend"):
            world.run(batch)


def test_a_forward_that_goes_past_the_checks_is_an_error() -> None:
    with plugged(RAISE):
        world = World(RAISE)
        fill(world, random.Random(5))
        world.runner.model.forward = lambda *_: None  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="DECODE forward ran that was not"):
            world.decode()


def test_a_runner_without_a_canary_may_not_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(RAISE)
    with plugged(RAISE), pytest.raises(RuntimeError, match="nothing is attached"):
        world.begin(Req("a", [1, 2, 3]))
    with plugged(LOG):
        world.begin(Req("b", [1, 2, 3]))
        world.decode()
    assert caplog.text.count("NOTHING IS CHECKED") == 1


def test_what_cannot_be_seen_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with plugged(RAISE), pytest.raises(Refusal, match="pp_size > 1: later stages"):
        World(RAISE, pp_size=2)
    with plugged(LOG):
        world = World(LOG, pp_size=2)
        assert attachment.get_canary(world.runner) is None
        assert "NOTHING IS CHECKED" in caplog.text
        world.begin(Req("a", [1, 2, 3]))
    swept = Settings(mode=Mode.RAISE, sweep_interval=3)
    with plugged(swept), pytest.raises(Refusal, match="KV_CANARY_SWEEP_INTERVAL"):
        World(swept)


def test_every_limit_names_its_option() -> None:
    values = {"disaggregation_mode": "prefill", "speculative_algorithm": "DFLASH"}
    for limit in LIMITS:
        name = limit.name.removesuffix(" > 1")
        args = SimpleNamespace(**{name: values.get(name, 2)})
        assert refused_by(args) == [f"{limit.name}: {limit.why}"]
    assert not refused_by(SimpleNamespace(pp_size=1, speculative_algorithm="eagle"))


@pytest.mark.parametrize(
    ("place", "value", "text"),
    [
        ("k_buffer", None, "looked for a pool with k_buffer and v_buffer"),
        ("kv_cache_layout", "hnd", "found layout 'hnd'"),
        ("k_scale_buffer", [1], "scales beside K and V"),
        ("post_capture_active", True, "after the graphs' capture"),
        ("size", 7, "with 8 slots"),
    ],
)
def test_other_pools_are_refused(
    place: str, value: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sglang_world.Pool.__init__

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        setattr(self, place, value)

    monkeypatch.setattr(sglang_world.Pool, "__init__", make)
    with plugged(RAISE), pytest.raises(Refusal, match=text):
        World(RAISE)


def test_a_draft_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    runner = Runner(8, 1, "whole", SimpleNamespace())
    runner.is_draft_worker = True
    with plugged(RAISE):
        runner.alloc_memory_pool()
    assert attachment.get_canary(runner) is None
    assert "draft model is not checked" in caplog.text


def stock(monkeypatch: pytest.MonkeyPatch, version: str = "0.5.17") -> None:
    """As if the stock SGLang were installed."""
    real = importlib.metadata.version

    def installed(name: str) -> str:
        return version if name == plugin.DISTRIBUTION else real(name)

    monkeypatch.setattr(plugin, "_has_registry", lambda: True)
    monkeypatch.setattr(plugin.importlib.metadata, "version", installed)


def test_without_the_variable_nothing_is_wrapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock(monkeypatch)
    monkeypatch.delenv("KV_CANARY", raising=False)
    before = dict(vars(Runner))
    plugin.register()
    assert dict(vars(Runner)) == before


def test_it_is_wrapped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stock(monkeypatch)
    monkeypatch.setenv("KV_CANARY", "raise")
    before = Runner.forward
    plugin.register()
    wrapped = Runner.forward
    plugin.register()
    assert Runner.forward is wrapped is not before
    plugin.unregister()
    assert Runner.forward is before


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("method", r"ModelRunner\.sample, found no such method"),
        ("field", "ForwardBatch with rids, found"),
        ("version", "sglang 0.5.11 or later .* found sglang 0.5.9"),
        ("registry", "HookRegistry, found none"),
        ("setting", "KV_CANARY_REAL_DATA='some'"),
    ],
)
def test_an_unknown_engine_ends_the_process(
    change: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As nothing less does: SGLang swallows the exceptions of plugins."""
    stock(monkeypatch, "0.5.9" if change == "version" else "0.5.12")
    monkeypatch.setenv("KV_CANARY", "raise")
    if change == "method":
        monkeypatch.delattr(Runner, "sample")
    elif change == "field":
        fewer = type("Batch", (), {"__dataclass_fields__": {}})
        monkeypatch.setitem(OWNERS, hooks_of.BATCH.owner, fewer)
        text = "looked for the dataclass|ForwardBatch with"
    elif change == "registry":
        monkeypatch.setattr(plugin, "_has_registry", lambda: False)
    elif change == "setting":
        monkeypatch.setenv("KV_CANARY_REAL_DATA", "some")
    with pytest.raises(SystemExit, match=text):
        try:
            plugin.register()
        except Exception:
            pytest.fail("an Exception would be swallowed")
    if change == "method":
        monkeypatch.setenv("KV_CANARY", "log")
        plugin.register()


def test_the_doctor_knows_sglang(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plugin.host_version() is None  # the engine of this repository is another
    stock(monkeypatch)
    monkeypatch.delenv("KV_CANARY", raising=False)
    monkeypatch.delenv(plugin.VARIABLE, raising=False)
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "engine: sglang 0.5.17" in text and "vllm" not in text
    assert "wraps " + hooks_of.FORWARD.place in text
    assert "enable_hierarchical_cache: KV is brought" in text
    monkeypatch.setenv(plugin.VARIABLE, "other,more")
    assert cli.main(["doctor"]) == 1
    assert "MISSING kv_canary in SGLANG_PLUGINS='other,more'" in capsys.readouterr().out
    monkeypatch.delattr(Runner, "sample")
    assert cli.main(["doctor"]) == 1
    assert "1 of 12 are not as expected" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_self_test_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert not selftest.run("plain", 1)
    assert "needs a CUDA device, and there is none" in capsys.readouterr().out


@pytest.mark.parametrize("kind", selftest.KINDS)
def test_faults_are_planted_by_plan(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part of the self-test in the engine's process, through the entry point."""
    stock(monkeypatch)
    monkeypatch.setenv("KV_CANARY", "log")
    monkeypatch.setenv("KV_CANARY_REAL_DATA", "all")
    mode, faults = selftest.KINDS[kind]
    file = tmp_path / f"outcomes.{mode}.1"
    monkeypatch.setenv(planting.PLAN, str(file))
    plugin.register()
    rng = random.Random(9)
    world = World(LOG, speculative_algorithm="EAGLE" if kind == "eagle" else None)
    fill(world, rng)
    for _ in range(3 * len(faults)):
        world.speculate(rng) if kind == "eagle" else world.decode()
    outcomes = [json.loads(line) for line in file.read_text().splitlines()]
    assert [outcome["fault"] for outcome in outcomes] == list(faults)
    assert [o for o in outcomes if not o["named"]] == []
    for outcome in outcomes:
        due = reason_labels(by_host_name(HostEngine.SGLANG)[outcome["fault"]].reasons)
        assert any(label in line for line in outcome["found"] for label in due), outcome


def test_the_older_method_of_pools_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hooks_of.POOL.found().method == "alloc_memory_pool"
    monkeypatch.delattr(Runner, "alloc_memory_pool")
    assert "init_memory_pool, found no such" in str(problem_with(hooks_of.POOL))
    older = lambda self, pre_model_load_memory: None  # noqa: E731
    monkeypatch.setattr(Runner, "init_memory_pool", older, raising=False)
    assert hooks_of.POOL.found().method == "init_memory_pool"


def test_histories_are_those_of_the_tokens() -> None:
    registry, rng = RowRegistry(), random.Random(6)
    for step in range(40):
        n = rng.randrange(1, 30)
        req = Req(f"r{step % 3}", tokens(rng, n), tokens(rng, 5))
        if step % 3 == 2:
            req.lora_id = "adapter"
        req.req_pool_idx = 1 + step % 2
        salt = request_salt(req)
        for prefix in sorted(rng.sample(range(n + 5), min(3, n + 5))):
            req.prefix_indices = torch.zeros(prefix)
            row = registry.announce(req)
            assert row.lineage == request_lineage(req.tokens[:prefix], salt)
        assert registry.find_rows([req.rid]) == [row]
        registry.announce(Req(f"other{step}", [], req_pool_idx=req.req_pool_idx))
        with pytest.raises(RuntimeError, match=req.rid):
            registry.find_rows([req.rid])
    assert len(registry.rows()) == 2
    short = Req("short", [1, 2], req_pool_idx=1, prefix_indices=torch.zeros(3))
    with pytest.raises(RuntimeError, match="3 tokens in its KV, but only 2"):
        registry.announce(short)


def test_trees_are_read_from_masks() -> None:
    rng = random.Random(7)
    for _ in range(count(ci=20, full=400)):
        prefix = [rng.randrange(9) for _ in range(rng.randrange(1, 4))]
        nodes = rng.randrange(1, 9)
        masks, due = [], []
        for row, length in enumerate(prefix):
            mask = torch.eye(nodes, dtype=torch.bool)
            due.append(-1)
            for node in range(1, nodes):
                parent = rng.randrange(node)
                mask[node] |= mask[parent]
                due.append(row * nodes + parent)
            whole = torch.ones(nodes, length, dtype=torch.bool)
            masks.append(torch.cat((whole, mask), dim=1).view(-1))
        spare = torch.zeros(rng.randrange(5), dtype=torch.bool)
        found = find_trees(torch.cat((*masks, spare)), torch.tensor(prefix), nodes)
        assert found.parents.tolist() == due
        assert found.mask is not None and found.mask.shape == (len(due), nodes)
    chain = make_chains(2, 3, torch.device("cpu"))
    assert chain.parents.tolist() == [-1, 0, 1, -1, 3, 4]
