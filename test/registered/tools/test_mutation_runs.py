"""Planted faults act and are gone afterwards; what becomes of them is told rightly."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from kv_canary.op import all_ops
from scripts.mutation.answers import (
    Due,
    Expected,
    Received,
    has_wrong_text,
    wrong_tokens,
)
from scripts.mutation.asks import Ask
from scripts.mutation.campaign import healthy_run, in_world, is_right
from scripts.mutation.mutants import mutants
from scripts.mutation.outcomes import WorldRow, classify, lost, worst
from scripts.mutation.planting import (
    EquivalentError,
    NotPlantableError,
    on_references,
    planted,
    running_function,
)
from scripts.mutation.report import counts, table
from scripts.mutation.runner import Send, run_all
from scripts.mutation.runs import Run
from scripts.mutation.sites import Mutant
from scripts.mutation.targets import module_path
from scripts.mutation.worlds import WORLDS, ModelFolders
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=25, suite="lab")

SRT = "sglang.srt."
ALLOCATOR = SRT + "mem_cache.allocator"
WORLD = {world.name: world for world in WORLDS}


def fault(
    module: str, qualname: str, before: str, after: str, *, operator: str = ""
) -> Mutant:
    """The fault of the catalogue with these words; the first of several."""
    source = module_path(module).read_text(encoding="utf-8")
    return next(
        mutant
        for mutant in mutants(module, source)
        if (mutant.qualname, mutant.before, mutant.after) == (qualname, before, after)
        and operator in mutant.operator
    )


def by_hand(module: str, qualname: str, before: str, after: str) -> Mutant:
    """A fault that replaces text which occurs once."""
    source = module_path(module).read_text(encoding="utf-8")
    assert source.count(before) == 1, before
    return Mutant(
        module=module,
        qualname=qualname,
        line=1,
        operator="hand",
        before=before,
        after=after,
        source=source.replace(before, after),
    )


# -- planting --------------------------------------------------------------------------


def test_a_planted_fault_acts_and_is_gone_afterwards() -> None:
    allocator = TokenToKVPoolAllocator(size=8)
    mutant = fault(
        ALLOCATOR,
        "BaseAllocator.available_size",
        "self._ledger.num_free",
        "self._ledger.num_pages",
    )
    allocator.alloc(3)
    with planted(mutant):
        assert allocator.available_size() == 8
    assert allocator.available_size() == 5


@pytest.mark.parametrize(
    ("module", "qualname"),
    [
        (ALLOCATOR, "BaseAllocator.num_free_pages"),
        (ALLOCATOR, "BaseAllocator.free_group"),
        (SRT + "managers.batch.schedule_batch", "ScheduleBatch.prepare_for_extend"),
        (SRT + "draft_trees.draft_input", "EagleDraftInput.prepare_for_decode"),
        (
            SRT + "speculative.eagle_worker_v2",
            "EAGLEWorkerV2.forward_batch_generation",
        ),
        (SRT + "draft_trees.ops.tree.op", "build_tree_ref"),
    ],
    ids=["property", "contextmanager", "classmethod", "static", "inference", "op"],
)
def test_the_function_is_found_below_its_wrappers(module: str, qualname: str) -> None:
    function = running_function(module, qualname)
    assert function.__code__.co_filename == str(module_path(module))
    assert function.__code__.co_name == qualname.rpartition(".")[2]


def test_code_without_another_meaning_is_equivalent() -> None:
    same = by_hand(
        ALLOCATOR,
        "BaseAllocator.available_size",
        "return self._ledger.num_free * self.page_size",
        "return (self._ledger.num_free * self.page_size)",
    )
    with pytest.raises(EquivalentError), planted(same):
        pass


def test_other_free_variables_cannot_be_planted() -> None:
    closed = by_hand(
        ALLOCATOR,
        "BaseAllocator.available_size",
        "return self._ledger.num_free * self.page_size",
        "return self._ledger.num_free * __class__.__len__()",
    )
    with pytest.raises(NotPlantableError), planted(closed):
        pass


def test_only_the_named_ops_run_their_references() -> None:
    module = SRT + "draft_trees.ops.tree.op"
    ops = [op for op in all_ops() if op.reference.__module__ == module]
    others = [op for op in all_ops() if op.reference.__module__ != module]
    before = [op.__globals__["_on_cpu"] for op in others]
    assert ops
    with on_references([module]):
        assert all(op.__globals__["_on_cpu"] is op.reference for op in ops)
        assert [op.__globals__["_on_cpu"] for op in others] == before
    assert not any(op.__globals__["_on_cpu"] is op.reference for op in ops)


# -- what becomes of a fault -----------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> ModelFolders:
    torch.set_num_threads(1)
    return ModelFolders(tmp_path_factory.mktemp("mutation"))


@cache
def expected_of(name: str, folders: ModelFolders) -> Expected:
    world = WORLD[name]
    expected, run = healthy_run(world, folders, seed=1, seconds=10.0)
    assert is_right(run), run
    assert not run.wrong_drafts
    assert bool(run.healed) == bool(world.damage_every)
    # Pools are small, and a healed request was not retracted.
    assert run.retracted or world.damage_every or world.ranks > 1
    return expected


def outcome_of(
    mutant: Mutant,
    folders: ModelFolders,
    name: str,
    *references: str,
    limit: float = 10.0,
) -> WorldRow:
    world, expected = WORLD[name], expected_of(name, folders)
    with planted(mutant, references=references):
        return in_world(world, folders, 1, expected, limit)


def test_input_shifted_by_one_column_is_named_before_a_token_leaves(
    folders: ModelFolders,
) -> None:
    mutant = by_hand(
        SRT + "managers.batch.schedule_batch",
        "ScheduleBatch._decode_forward_batch",
        "input_ids=table[self.req_pool_indices, positions].long()",
        "input_ids=table[self.req_pool_indices, positions - 1].long()",
    )
    row = outcome_of(mutant, folders, "plain-1")
    assert (row.outcome, row.changes, row.wrong_sent) == ("before", "tokens", 0)
    assert row.end == "violation"


def test_a_wrong_token_that_is_sent_shows_whatever_names_it(
    folders: ModelFolders,
) -> None:
    mutant = by_hand(
        SRT + "managers.scheduler.output_streamer",
        "OutputStreamer._output",
        "output_ids=list(req.tokens[req.prompt_len + start : req.prompt_len + stop]),",
        "output_ids=list(req.tokens[req.prompt_len : req.prompt_len + stop - start]),",
    )
    row = outcome_of(mutant, folders, "plain-16")
    assert row.outcome in ("never", "after")
    assert row.changes == "tokens"
    assert row.wrong_sent > 0


def test_a_slot_that_is_not_given_back_is_a_leak(folders: ModelFolders) -> None:
    mutant = by_hand(
        ALLOCATOR,
        "BaseAllocator._release",
        "        self._ledger.give(pages)",
        "        self._ledger.give(pages[:-1])",
    )
    row = outcome_of(mutant, folders, "plain-1")
    assert row.outcome in ("leak", "guard", "hang")
    assert row.wrong_sent == 0


def test_worse_drafts_are_told_from_wrong_tokens(folders: ModelFolders) -> None:
    tree = SRT + "draft_trees.ops.tree.op"
    mutant = by_hand(
        tree, "_best", "stable=True).indices[:, :k]", "stable=True).indices[:, -k:]"
    )
    row = outcome_of(mutant, folders, "eagle-1", tree)
    assert row.changes == "drafts"
    assert row.outcome in ("drafts unseen", "drafts named")
    assert row.wrong_sent == 0


def test_a_result_taken_wrongly_is_named_before_a_token_leaves(
    folders: ModelFolders,
) -> None:
    mutant = by_hand(
        SRT + "managers.scheduler.result_processor",
        "BatchResultProcessor._take_tokens",
        "            req.append(new_tokens)\n",
        "            req.append([token ^ 1 for token in new_tokens])\n",
    )
    row = outcome_of(mutant, folders, "plain-16")
    assert (row.outcome, row.changes, row.wrong_sent) == ("before", "tokens", 0)


def test_an_endless_loop_ends_as_hang(folders: ModelFolders) -> None:
    mutant = by_hand(
        SRT + "managers.scheduler.batch_selector",
        "BatchSelector._get_new_prefill_batch",
        "        adder = self._fill_prefill_adder()\n",
        "        adder = self._fill_prefill_adder()\n        while True: pass\n",
    )
    row = outcome_of(mutant, folders, "plain-1", limit=1.0)
    assert row.outcome == "hang"


def test_a_standstill_is_stopped(folders: ModelFolders) -> None:
    mutant = by_hand(
        SRT + "managers.scheduler.batch_selector",
        "BatchSelector._get_new_prefill_batch",
        "        adder = self._fill_prefill_adder()\n",
        "        return None\n",
    )
    row = outcome_of(mutant, folders, "plain-1")
    assert (row.outcome, row.end) == ("guard", "error")


def test_an_output_that_is_too_short_is_no_wrong_token(folders: ModelFolders) -> None:
    mutant = by_hand(
        SRT + "managers.batch.req",
        "Req.finish_by_length",
        "length=at), at=at)",
        "length=at), at=at - 1)",
    )
    row = outcome_of(mutant, folders, "plain-1")
    assert (row.outcome, row.wrong_sent) == ("ends", 0)


def test_a_fault_in_the_stream_ends_the_request_with_an_error(
    folders: ModelFolders,
) -> None:
    mutant = by_hand(
        SRT + "managers.scheduler.output_streamer",
        "OutputStreamer._output",
        "output_ids=list(req.tokens[req.prompt_len + start : req.prompt_len + stop]),",
        "output_ids=list(req.tokens[req.prompt_len : req.prompt_len + stop - start]),",
    )
    row = outcome_of(mutant, folders, "front-1")
    assert (row.outcome, row.changes, row.wrong_sent) == ("before", "tokens", 0)
    assert row.end == "idle"
    assert "kv_canary: output of request" in row.detail


def test_a_fault_in_a_healing_that_sends_wrong_tokens_shows(
    folders: ModelFolders,
) -> None:
    # Every check of a healing asks this.
    mutant = by_hand(
        "kv_canary.findings",
        "is_clean",
        "    return not any(words[RING:])",
        "    return True or not any(words[RING:])",
    )
    row = outcome_of(mutant, folders, "heal-windows")
    assert row.outcome == "never"
    assert row.wrong_sent > 0


def test_two_ranks_that_part_are_stopped(folders: ModelFolders) -> None:
    mutant = by_hand(
        SRT + "managers.worker.tp_worker",
        "TpModelWorker.sample",
        "            self._group.broadcast(sampled.token_ids)",
        "            sampled.token_ids[0] += self._group.rank",
    )
    row = outcome_of(mutant, folders, "ranks-4")
    assert row.outcome in ("guard", "named, no effect", "before", "stopped")
    assert row.wrong_sent == 0


def run(
    end: str,
    *,
    wrong: int = 0,
    drafts: int = 0,
    ends: int = 0,
    failed: int = 0,
    named: int = 0,
    lost: int = 0,
) -> Run:
    return Run(
        end=end,
        detail="",
        steps=9,
        sent=90,
        wrong_sent=wrong,
        wrong_ends=ends,
        verified={},
        wrong_drafts=drafts,
        retracted=0,
        failed=failed + named,
        named=named,
        lost=lost,
    )


@pytest.mark.parametrize(
    ("watched", "unwatched", "outcome"),
    [
        (run("idle"), None, "none"),
        (run("idle", wrong=1), None, "never"),
        (run("violation", wrong=1), None, "after"),
        (run("violation"), run("idle", wrong=1), "before"),
        (run("violation"), run("idle", drafts=1), "drafts named"),
        (run("violation"), run("idle"), "named, no effect"),
        (run("idle", drafts=1), None, "drafts unseen"),
        (run("error"), run("idle", wrong=1), "stopped"),
        (run("error", wrong=1), None, "never"),
        (run("error"), run("error"), "guard"),
        (run("leak"), run("leak"), "leak"),
        (run("stall"), None, "hang"),
        (run("time"), None, "hang"),
        (run("idle", ends=1), None, "ends"),
        (run("idle", named=1, ends=1), run("idle", wrong=1), "before"),
        (run("idle", named=1, wrong=1), None, "after"),
        (run("idle", named=1, ends=1), run("idle"), "named, no effect"),
        (run("idle", failed=1, ends=1), run("idle", wrong=1), "stopped"),
        (run("idle", failed=1, ends=1), run("idle"), "guard"),
        (run("idle", lost=1), None, "lost"),
    ],
)
def test_outcomes_of_one_world(
    watched: Run, unwatched: Run | None, outcome: str
) -> None:
    assert classify("plain-1", 1, watched, unwatched).outcome == outcome


def test_the_worst_world_speaks_for_a_fault() -> None:
    named = classify("a", 1, run("violation"), run("idle", wrong=2))
    sent = classify("b", 1, run("idle", wrong=2), None)
    crash = classify("c", 1, run("error"), run("error"))
    assert worst([crash, named]) is named
    assert worst([crash, named, sent]) is sent
    assert worst([lost("d", 1, "killed"), crash]).outcome == "hang"


def test_an_answer_is_compared_with_the_right_one() -> None:
    due = Due(output=[1, 2, 3], text="abc", reason="length", matched=None)
    ask = Ask(prompt=[7], params={"max_new_tokens": 3}, stream=True, extra_key=None)

    def received(output: list[int], text: str, reason: str | None = None) -> Received:
        return Received(ask=ask, output=output, text=text, reason=reason)

    assert wrong_tokens(received([1, 2], "ab"), due) == 0
    assert wrong_tokens(received([1, 3], "ab"), due) == 1
    assert has_wrong_text(received([1, 2], "ac"), due)
    assert has_wrong_text(received([1, 2, 3], "ab", "length"), due)
    # An aborted output may end with half a character.
    assert not has_wrong_text(received([1, 2], "a?", "abort"), due)


# -- children and tables ---------------------------------------------------------------


def test_a_silent_child_is_killed_and_others_go_on() -> None:
    def sleeps(send: Send) -> None:
        send({"begun": 1})
        time.sleep(600)

    def dies(send: Send) -> None:
        raise RuntimeError

    works: list[Callable[[Send], None]] = [sleeps, dies, lambda send: send({"x": 3})]
    done = sorted(run_all(works, jobs=2, silence=1.0), key=lambda d: d.job)
    assert [d.end for d in done] == ["killed", "died", "done"]
    assert [d.messages for d in done] == [[{"begun": 1}], [], [{"x": 3}]]


def test_shares_count_what_changes_tokens_and_was_not_stopped() -> None:
    def row(outcome: str, changes: str = "tokens") -> dict[str, object]:
        return {
            "area": "relay",
            "outcome": outcome,
            "changes": changes,
            "seconds": 1.0,
            "why": "",
            "place": "relay.py:1",
            "function": "f",
            "operator": "drop",
            "before": "a",
            "after": "b",
        }

    rows = [row(name) for name in ("never", "after", "before", "before", "stopped")]
    rows += [row("drafts unseen", "drafts"), row("none", "other")]
    found = counts(rows, "faults")
    assert (found["change_tokens"], found["change_tokens_stopped"]) == (4, 1)
    assert found["share_named_before"] == 0.5
    assert found["share_drafts_named"] == 0.0
    text = "\n".join(table(rows, "faults"))
    assert "relay.py:1" in text
    assert text.splitlines()[1].split()[0] == "relay"


def test_models_of_all_worlds_are_written_once(folders: ModelFolders) -> None:
    assert all(isinstance(folders.drafts[w.draft], Path) for w in WORLDS if w.draft)
    assert all(folders.targets[w.model].is_dir() for w in WORLDS)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
