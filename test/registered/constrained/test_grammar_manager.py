"""GrammarManager: results off the loop, cancel, deadlines, fair shares, renewal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from grammar_world import FakeGrammar, SlowBackend, World, wait_for

from sglang.srt.constrained import grammar_manager
from sglang.srt.constrained.base_grammar import (
    CompilerUnavailableError,
    GrammarLimitError,
)
from sglang.srt.constrained.grammar_manager import CompilerLimits
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="cpu")

Make = Callable[..., World]


@pytest.fixture
def make() -> Iterator[Make]:
    worlds: list[World] = []

    def build(*, is_slow: bool = False, **options: object) -> World:
        world = World(SlowBackend(), **options)  # type: ignore[arg-type]
        worlds.append(world)
        if not is_slow:
            world.backend.go.set()
        return world

    yield build
    for world in worlds:
        world.close()
        assert world.backend.closed


def test_poll_never_waits(make: Make) -> None:
    world = make(is_slow=True)
    world.submit("r", "x")
    # The compiler goes on only after this returns.
    assert world.poll() == {}
    assert world.manager.num_waiting() == 1
    world.backend.go.set()
    assert isinstance(world.poll_until(1)["r"], FakeGrammar)
    assert world.manager.num_waiting() == world.manager.num_compiling() == 0


def test_equal_sources_compile_once_and_do_not_share_state(make: Make) -> None:
    world = make(is_slow=True)
    world.submit("a", "same")
    wait_for(lambda: world.backend.started == ["same"])
    # While it compiles, for this client and for others.
    world.submit("b", "same")
    world.submit("c", "same", client="other")
    world.backend.go.set()
    found = world.poll_until(3)
    found["d"] = world.ask("d", "same")
    assert world.backend.compiled == ["same"]
    assert len({id(g) for g in found.values()}) == 4
    assert world.ask("e", "other") and world.backend.compiled == ["same", "other"]


def test_errors_reach_every_request_and_those_of_sources_are_kept(make: Make) -> None:
    world = make()
    for rid, source in (("a", "bad"), ("b", "crash"), ("c", "fine"), ("d", "bad")):
        world.submit(rid, source)
    found = world.poll_until(4)
    assert "invalid regex: bad" in str(found["a"]) == str(found["d"])
    assert isinstance(found["b"], KeyError)
    assert isinstance(found["c"], FakeGrammar)
    assert isinstance(world.ask("e", "bad"), ValueError)
    assert isinstance(world.ask("f", "crash"), KeyError)
    assert world.backend.compiled.count("bad") == 1
    assert world.backend.compiled.count("crash") == 2


def test_what_is_too_complex_is_refused_unseen_for_a_while(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make()
    for rid in "ab":
        assert "too complex" in str(world.ask(rid, "complex"))
    assert world.backend.compiled == ["complex"]
    monkeypatch.setattr(grammar_manager, "TOO_COMPLEX_SECONDS", 0.0)
    fresh = make()
    for rid in "ab":
        assert "too complex" in str(fresh.ask(rid, "complex"))
    assert fresh.backend.compiled == ["complex"] * 2


@pytest.mark.parametrize("deaths", [1, 2, 3])
def test_a_compiler_that_was_killed_starts_once_more(make: Make, deaths: int) -> None:
    world = make()
    world.backend.deaths = deaths
    first = world.ask("a", "killed")
    assert isinstance(first, FakeGrammar if deaths == 1 else CompilerUnavailableError)
    assert world.backend.compiled == ["killed"] * 2
    # Nothing of it is remembered.
    assert isinstance(world.ask("b", "killed"), FakeGrammar)


def test_the_least_recently_used_goes_beyond_the_budget_of_bytes(make: Make) -> None:
    world = make(max_bytes=250)
    for source in ("a", "b", "a", "c", "a", "b"):
        world.ask("r", source)
        assert world.library.used_bytes <= 250
    assert world.backend.compiled == ["a", "b", "c", "b"]


def test_a_grammar_is_measured_once_for_all_who_start_from_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a millisecond each: a call of 4,000 prompts stopped the engine for two
    seconds."""
    world = make(max_bytes=1000)
    world.ask("first", "a")
    measure, sizes = FakeGrammar.shared_bytes, list[int]()

    def measured(grammar: FakeGrammar) -> int:
        sizes.append(measure(grammar))
        return sizes[-1]

    monkeypatch.setattr(FakeGrammar, "shared_bytes", measured)
    for i in range(40):
        world.submit(f"r{i}", "a")
    assert len(world.poll_until(40)) == 40
    assert len(sizes) <= 3
    assert world.library.used_bytes == sizes[-1]


def test_a_worn_grammar_counts_with_what_it_has_grown_to(make: Make) -> None:
    world = make(max_bytes=1000)
    running = world.ask("r", "a")
    world.ask("s", "b")
    assert len(world.library) == 2
    assert isinstance(running, FakeGrammar)
    running.worn[0] = 900
    world.ask("t", "b")
    assert len(world.library) == 1
    # One that is larger than the budget serves until the next.
    assert isinstance(big := world.ask("u", "c"), FakeGrammar)
    big.worn[0] = 5000
    world.ask("v", "c")
    assert world.backend.compiled == ["a", "b", "c"]


def test_those_that_start_together_find_what_they_were_promised(make: Make) -> None:
    """The budget holds one: what is installed must not evict what others start from."""
    world = make(is_slow=True, max_bytes=150)
    world.backend.go.set()
    world.ask("r", "a")
    world.submit("s", "b")
    wait_for(lambda: world.backend.compiled == ["a", "b"])
    time.sleep(0.05)
    for rid, source in (("t", "a"), ("u", "b"), ("v", "a"), ("w", "c")):
        world.submit(rid, source)
    found = world.poll_until(5)
    assert {rid: g.source for rid, g in found.items()} == {  # type: ignore[union-attr]
        "s": "b", "t": "a", "u": "b", "v": "a", "w": "c",
    }  # fmt: skip
    assert len(world.library) == 1


def test_a_worn_grammar_serves_until_it_is_compiled_again(make: Make) -> None:
    world = make(renew_bytes=150)
    old = world.ask("a", "x")
    assert isinstance(old, FakeGrammar)
    old.worn[0] = 60
    for rid in "bc":
        assert world.ask(rid, "x").worn is old.worn  # type: ignore[union-attr]
    wait_for(lambda: world.backend.compiled == ["x", "x"])
    wait_for(lambda: world.poll() == {} and not world.manager.num_compiling())
    new = [world.ask(rid, "x") for rid in "def"]
    assert all(g.worn is not old.worn for g in new)  # type: ignore[union-attr]
    assert world.backend.compiled == ["x", "x"]


def test_outputs_beyond_every_limit_never_fail(make: Make) -> None:
    """A template that fails after 10 masks, while 200 outputs of 7 masks follow it."""
    world = make()
    world.backend.max_masks = 10
    row = torch.zeros(14, dtype=torch.int32)
    resumed = 0
    for i in range(200):
        grammar = world.ask(f"r{i}", "x")
        assert isinstance(grammar, FakeGrammar), grammar
        for step in range(7):
            try:
                grammar.fill_mask(row)
            except GrammarLimitError:
                world.resume(f"again{i}", "x", list(range(step)))
                again = world.poll_until(1)[f"again{i}"]
                assert isinstance(again, FakeGrammar)
                grammar, resumed = again, resumed + 1
                grammar.fill_mask(row)
    assert resumed >= 50
    assert world.backend.resumed[0] == ("x", [0, 1, 2])
    assert len(world.backend.compiled) <= 200


def test_one_that_cannot_resume_is_told(make: Make) -> None:
    world = make()
    world.resume("r", "hopeless", [1, 2])
    assert isinstance(world.poll_until(1)["r"], GrammarLimitError)
    assert world.manager.num_waiting() == 0


def test_waiting_is_bounded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(grammar_manager, "time", clock)
    limits = CompilerLimits(timeout_s=0.05, threads=1, share=1)
    world = make(is_slow=True, limits=limits)
    world.submit("a", "x")
    world.submit("b", "y")
    wait_for(lambda: world.backend.started == ["x"])
    assert world.poll() == {}
    now[0] += 0.06
    found = world.poll()
    for rid in "ab":
        assert isinstance(found[rid], CompilerUnavailableError)
        assert "regex was not compiled within 0.05 seconds" in str(found[rid])
    wait_for(lambda: world.backend.cancelled == ["x"])
    assert world.backend.started == ["x"] and world.manager.num_compiling() == 0


def test_a_client_may_have_so_many_that_wait(make: Make) -> None:
    limits = CompilerLimits(threads=1, share=1, max_waiting=3)
    world = make(is_slow=True, limits=limits)
    world.submit("first", "s", client="hog")
    wait_for(lambda: world.backend.started == ["s"])
    for i in range(5):
        world.submit(f"r{i}", f"s{i}", client="hog")
    world.submit("other", "o", client="other")
    refused = world.poll_until(2)
    assert set(refused) == {"r3", "r4"}
    assert all(isinstance(e, CompilerUnavailableError) for e in refused.values())
    world.backend.go.set()
    assert set(world.poll_until(5)) == {"first", "r0", "r1", "r2", "other"}


def test_slow_sources_of_one_client_do_not_stop_another(make: Make) -> None:
    world = make()
    for i in range(60):
        world.submit(f"r{i}", f"slow{i}", client="hog")
    wait_for(lambda: len(world.backend.started) == 2)
    for i in range(20):
        found = world.ask(f"o{i}", f"x{i}", client=f"c{i % 3}")
        assert isinstance(found, FakeGrammar)
    assert len([s for s in world.backend.started if s.startswith("slow")]) == 2
    world.backend.go_slow.set()
    assert len(world.poll_until(60)) == 60


def test_what_nobody_waits_for_is_dropped_or_killed(make: Make) -> None:
    world = make()
    for i in range(60):
        world.submit(f"r{i}", f"slow{i}", client="gone")
    world.submit("stays", "slow59", client="stays")
    wait_for(lambda: len(world.backend.started) == 3)
    # Those that wait first: a compiler that is freed would take one of them.
    for i in reversed(range(60)):
        world.manager.cancel(f"r{i}")
    world.manager.cancel("never seen")
    wait_for(lambda: len(world.backend.cancelled) == 2)
    assert world.manager.num_compiling() == 1
    world.backend.go_slow.set()
    assert set(world.poll_until(1)) == {"stays"}
    assert set(world.backend.started) == {"slow0", "slow1", "slow59"}
    # Of a grammar that is ready and not yet fetched, too.
    world.submit("late", "slow59")
    world.manager.cancel("late")
    assert world.poll() == {} and world.manager.num_waiting() == 0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
