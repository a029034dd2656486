"""The tokens that a forward gets are compared with the prompt, with proposals and with
what was sampled, whether or not the host knows that yet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_world import MAX_LEN, PAGE, World

from kv_canary.accepted import SampledTokens
from kv_canary.engines.inputs import SampledRows
from kv_canary.explain import explain
from kv_canary.records import UNKNOWN, Request
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.scale import count

register_cpu_ci(est_time=6, suite="cpu")
register_cuda_ci(est_time=20, suite="cuda")

WRONG = 2000
"""No request has this token."""

both_schedules = pytest.mark.parametrize("is_synchronous", [True, False])


def named(found: list[tuple[str, int, int, str]]) -> list[tuple[str, int, str]]:
    return [(rid, position, reasons) for rid, _, position, reasons in found]


@both_schedules
def test_another_token_than_was_sampled_is_named(is_synchronous: bool) -> None:
    world = World(is_synchronous=is_synchronous)
    world.start()
    world.forward({"A": 1})
    found = world.forward({"A": 1}, inputs={("A", 21): WRONG})
    assert found == [("A", world.slot("A", 21), 21, "write_token")]
    (said,) = world.canary.reporter.incidents[-1]["violations"]
    assert said["diagnosis"] == "wrong input of the forward"


def test_the_report_names_the_variable_that_shows_tokens() -> None:
    """Not a flag of the engine that shares the core."""
    world = World()
    world.start()
    world.forward({"A": 1}, inputs={("A", 20): WRONG})
    text = explain(world.canary.reporter.incidents[-1])
    assert "token withheld (KV_CANARY_REPORT_TOKENS=1 shows it)" in text
    assert "--" not in text


@both_schedules
def test_tokens_of_two_rows_that_change_places_are_named(is_synchronous: bool) -> None:
    world = World(is_synchronous=is_synchronous)
    world.start("A", 20)
    world.start("B", 13)
    a, b = world.tokens["A"][20], world.tokens["B"][13]
    found = world.forward({"A": 1, "B": 1}, inputs={("A", 20): b, ("B", 13): a})
    assert named(found) == [("A", 20, "write_token"), ("B", 13, "write_token")]


@both_schedules
def test_a_stale_token_is_named(is_synchronous: bool) -> None:
    world = World(is_synchronous=is_synchronous)
    world.start()
    world.forward({"A": 1})
    stale = world.tokens["A"][20]
    found = world.forward({"A": 1}, inputs={("A", 21): stale})
    assert named(found) == [("A", 21, "write_token")]


@pytest.mark.parametrize("position", [0, 11, 12, 19])
def test_a_changed_token_of_a_prompt_is_named(position: int) -> None:
    """In either chunk."""
    world = World()
    prompt = list(range(20))
    new = world.admission("A", prompt, world.blocks(4))
    inputs = {("A", position): WRONG}
    found = world.forward({"A": 12}, admitted=[new], inputs=inputs)
    found += world.forward({"A": 8}, inputs=inputs)
    assert ("A", position, "write_token") in named(found)
    # Later positions of the row have another history than is due, and no other token.
    assert [n for n in named(found) if n[2] == "write_token"] == [
        ("A", position, "write_token")
    ]


def test_the_last_token_of_a_cached_prompt_is_compared() -> None:
    """A step of one token that nobody sampled."""
    world = World()
    blocks = world.start("A", 16)
    prompt = [*world.tokens["A"][:16], 7]
    b = world.admission("B", prompt, [*blocks[:2], *world.blocks(1)], computed=16)
    found = world.forward({"B": 1}, admitted=[b], inputs={("B", 16): WRONG})
    assert named(found) == [("B", 16, "write_token")]


@pytest.mark.parametrize("wrong", [None, 20, 21, 22])
def test_proposed_tokens_are_compared(wrong: int | None) -> None:
    world = World()
    world.start()
    inputs = {} if wrong is None else {("A", wrong): WRONG}
    step: dict[str, Any] = {"proposed": {"A": [31, 32]}, "accepted": {"A": 1}}
    found = world.forward({"A": 3}, inputs=inputs, **step)
    due = [] if wrong is None else [("A", wrong, "write_token")]
    assert named(found) == due
    if wrong is None:
        found = world.forward({"A": 1}, inputs={("A", 22): WRONG})
        assert named(found) == [("A", 22, "write_token")]


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_proposals_are_judged_on_the_device(accepted: int) -> None:
    """The next prefix is what the sampler accepted: one token more is named, and an
    accepted token that was not the input."""
    step: dict[str, Any] = {"proposed": {"A": [31, 32]}, "accepted": {"A": accepted}}
    for fault in ("none", "length", "token"):
        world = World(judges_ahead=True, is_synchronous=False)
        world.start()
        assert world.forward({"A": 3}, **step) == []
        first = world.computed["A"] + 1
        wrong = {("A", first): WRONG} if fault == "token" else {}
        assert world.forward({"A": 3}, inputs=wrong, **step) == []
        if fault == "length":
            world.computed["A"] += 1
            world.tokens["A"].append(5)
        last = world.computed["A"]
        found = world.forward({"A": 1})
        if fault == "length":
            assert {(rid, position) for rid, _, position, _ in found} >= {("A", last)}
        elif fault == "token" and accepted:
            assert named(found) == [("A", last - 1, "verify_token")]
        else:
            assert found == []


def test_an_engine_that_samples_nothing_is_silent() -> None:
    """As for embeddings: the next input is not known then."""
    world = World()
    world.start()
    sampled = world.canary.sampled
    world.canary.sampled = lambda *_: None  # type: ignore[method-assign]
    world.forward({"A": 1})
    world.canary.sampled = sampled  # type: ignore[method-assign]
    world.tokens["A"][21] = 5
    assert world.forward({"A": 1}) == []


def test_tokens_for_other_rows_than_the_forwards_are_refused() -> None:
    rows = SampledRows(
        req_rows=torch.tensor([1, 2]),
        serials=torch.tensor([1, 2]),
        prefix_lens=torch.tensor([4, 5]),
        ahead=torch.tensor([0, 0]),
    )
    with pytest.raises(RuntimeError, match="for 3 rows after a forward of 2"):
        rows.next_inputs(torch.zeros((3, 1)), None)


def reference(
    tokens: list[int], count: int | None, computed: int, ahead: int
) -> tuple[int, int]:
    """The next token and its position, of one row."""
    if count is None:
        count = next((i for i, t in enumerate(tokens) if t < 0), len(tokens))
    if ahead < 0 or not count or tokens[count - 1] < 0:
        return UNKNOWN, 0
    return tokens[count - 1], computed + ahead + count


rows_of_tokens = st.integers(1, 4).flatmap(
    lambda width: st.lists(
        st.tuples(
            st.lists(st.integers(-1, 9), min_size=width, max_size=width),
            st.integers(0, width),
            st.integers(0, 40),
            st.integers(-1, 5),
        ),
        min_size=1,
        max_size=5,
    )
)


@settings(max_examples=count(ci=40, full=2000), deadline=None)
@given(rows=rows_of_tokens, knows_counts=st.booleans())
def test_the_last_token_that_counts_is_the_next_input(
    rows: list[tuple[list[int], int, int, int]], knows_counts: bool
) -> None:
    tokens, counts, computed, ahead = zip(*rows, strict=True)
    sampled = SampledRows(
        req_rows=torch.arange(len(rows)) + 1,
        serials=torch.arange(len(rows)),
        prefix_lens=torch.tensor(computed),
        ahead=torch.tensor(ahead),
    )
    found: SampledTokens = sampled.next_inputs(
        torch.tensor(tokens), torch.tensor(counts) if knows_counts else None
    )
    due = [
        reference(of_row, n if knows_counts else None, c, a) for of_row, n, c, a in rows
    ]
    is_known = found.tokens != UNKNOWN
    places = (found.prefix_lens + found.extend_lens) * is_known
    assert list(zip(found.tokens.tolist(), places.tolist(), strict=True)) == due


class Traffic:
    """Random steps of a few requests: chunks, decodes, proposals."""

    def __init__(
        self, data: st.DataObject, is_synchronous: bool, judges_ahead: bool
    ) -> None:
        self.draw = data.draw
        self.world = World(is_synchronous=is_synchronous, judges_ahead=judges_ahead)
        self.admitted: list[Any] = []
        for rid in "ABC"[: self.draw(st.integers(1, 3))]:
            length = self.draw(st.integers(1, 3 * PAGE))
            tokens = [self.world.random.randrange(1000) for _ in range(length)]
            blocks = self.world.blocks(-(-(length + 30) // PAGE))
            self.admitted.append(self.world.admission(rid, tokens, blocks))

    def step(self) -> tuple[dict[str, int], dict[str, Any]]:
        """Rows of a step and the arguments of `World.forward`."""
        world, rows = self.world, {}
        step: dict[str, Any] = {"proposed": {}, "accepted": {}}
        for rid, tokens in world.tokens.items():
            left = len(tokens) - world.computed[rid]
            rows[rid] = self.draw(st.integers(1, left)) if left else 0
            # Proposals are only scheduled where the host knows what precedes them, or
            # does not ask.
            knows = world.is_synchronous or world.judges_ahead
            if rows[rid] == left and len(tokens) > 24 and knows:
                drafts = self.draw(st.lists(st.integers(0, 999), max_size=3))
                step["proposed"][rid] = drafts
                step["accepted"][rid] = self.draw(st.integers(0, len(drafts)))
                rows[rid] += len(drafts)
        step["admitted"], self.admitted = self.admitted, []
        return rows, step


@settings(max_examples=count(ci=12, full=600), deadline=None)
@given(
    data=st.data(),
    schedule=st.sampled_from([(True, False), (False, False), (False, True)]),
)
def test_traffic_is_silent_until_one_input_is_wrong(
    data: st.DataObject, schedule: tuple[bool, bool]
) -> None:
    traffic = Traffic(data, *schedule)
    world = traffic.world
    for _ in range(data.draw(st.integers(0, 6))):
        rows, step = traffic.step()
        assert world.forward(rows, **step) == []
    rows, step = traffic.step()
    rid = data.draw(st.sampled_from(sorted(rows)))
    # Nobody but the device knows proposals that are judged ahead.
    known = rows[rid] - len(step["proposed"].get(rid, ())) * world.judges_ahead
    position = world.computed[rid] + data.draw(st.integers(0, known - 1))
    assert position < MAX_LEN
    found = world.forward(rows, inputs={(rid, position): WRONG}, **step)
    assert (rid, position, "write_token") in named(found)
    assert {(r, p) for r, p, reasons in named(found) if "write" in reasons} == {
        (rid, position)
    }


def test_a_rejected_proposal_turns_no_request_back() -> None:
    """The host counts it as accepted for a step, in which nothing may be proposed."""
    world = World(is_synchronous=False, judges_ahead=True)
    world.start()
    for proposed in ([7, 8], [], [], [9], []):
        assert world.forward({"A": 1 + len(proposed)}, proposed={"A": proposed}) == []
    assert not world.canary.again


def test_a_row_that_is_given_away_forgets_its_next_input() -> None:
    world = World()
    world.start()
    row = world.canary.ledger["A"].row
    requests = world.canary.groups[0].state.requests
    assert int(requests[row, Request.NEXT_WORD0]) != UNKNOWN
    b = world.admission("B", [1, 2, 3], world.blocks(2))
    assert world.forward({"B": 2}, released=["A"], admitted=[b]) == []
    assert world.canary.ledger["B"].row == row
    assert int(requests[row, Request.NEXT_WORD0]) == UNKNOWN
