"""The canary's knowledge of requests: whose a row is, which token comes next, what a
verification accepted; on every implementation that runs here."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from canary_world import (
    DEVICE,
    Backend,
    World,
    backends,
    decode,
    each_backend,
    entries,
    findings,
    long,
    small_world,
)

from kv_canary.accepted import AcceptedPath, AcceptedWords, SampledTokens
from kv_canary.checks import Reason
from kv_canary.findings import RING, STATUS_WORDS, parse_counters, parse_verdicts
from kv_canary.layout import FingerprintMode
from kv_canary.records import (
    NUM_COUNTERS,
    SENTINEL,
    UNKNOWN,
    Launch,
    Request,
    Ring,
    WriterKind,
    extend_lineage,
    lineage_term,
    pack_word0,
    unpack_word0,
)
from kv_canary.state import CanaryState, create_state
from kv_canary.view import ForwardView
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=15, suite="cpu")
register_cuda_ci(est_time=15, suite="cuda")


def know(w: World, request: int, *, token: int, position: int) -> None:
    """Set what the canary knows of the request in a row."""
    known = w.state.requests[request + 1]
    known[Request.SERIAL] = w.serials[request]
    known[Request.NEXT_WORD0] = pack_word0(token, position)


@each_backend
def test_the_owner_of_a_row(backend: Backend) -> None:
    w = small_world()
    rows = decode(w)
    for i, length in enumerate(w.lens):
        know(w, i, token=w.token(i, length), position=length)
    w.state.requests[2, Request.SERIAL] += 1
    w.write(backend, w.state, rows)
    assert findings(w.state) == [(Reason.ROW_OWNER, 2, w.slot(1, 6), 6)]


@each_backend
def test_the_first_new_token_is_the_one_that_was_noted(backend: Backend) -> None:
    w = small_world()
    rows = w.rows(extends=[2, 2, 1])
    know(w, 0, token=w.token(0, 11) + 1, position=11)
    know(w, 1, token=w.token(1, 6), position=7)
    w.write(backend, w.state, rows)
    assert findings(w.state) == [
        (Reason.WRITE_TOKEN, 1, w.slot(0, 11), 11),
        (Reason.WRITE_POSITION, 2, w.slot(1, 6), 6),
    ]
    expected = {e[Ring.REQ_ROW]: e[Ring.EXPECTED_WORD0] for e in entries(w.state)}
    assert unpack_word0(expected[1]) == (w.token(0, 11) + 1, 11)
    assert unpack_word0(expected[2]) == (w.token(1, 6), 7)


@each_backend
def test_branches_have_no_request(backend: Backend) -> None:
    w = small_world()
    rows = decode(w)
    know(w, 0, token=w.token(0, 11) + 1, position=3)
    w.state.requests[2, Request.SERIAL] = 5
    branches = dataclasses.replace(rows, lineage_rows=rows.req_rows)
    w.write(backend, w.state, branches, WriterKind.DRAFT)
    assert findings(w.state) == []


@each_backend
def test_notes_and_marks(backend: Backend) -> None:
    """A padded row is marked and not noted; a row without a token knows none."""
    w = small_world()
    marks = long([0] * 8).view(2, 4)
    sampled = SampledTokens(
        req_rows=long([3, 1, 0, 2]),
        serials=long([30, 10, 0, 20]),
        tokens=long([7, 0, 9, -1]),
        prefix_lens=long([30, 40, 40, 40]),
        extend_lens=long([10, 1, 2, 3]),
    )
    backend.launch.note_tokens(w.state, sampled, marks)
    words = [pack_word0(7, 40), pack_word0(0, 41), pack_word0(9, 42), UNKNOWN]
    assert marks.tolist() == [[30, 10, 0, 20], words]
    noted = w.state.requests[:, Request.NEXT_WORD0].tolist()
    assert noted[:4] == [UNKNOWN, words[1], UNKNOWN, words[0]]
    assert (w.state.requests[:, Request.SERIAL] == UNKNOWN).all()


@pytest.mark.parametrize("rows", [0, 1, 3, 200])
@pytest.mark.parametrize("has_others", [False, True])
@pytest.mark.parametrize(
    "backend",
    [b for b in backends() if b.name != "native"],
    ids=lambda backend: backend.name,
)
def test_the_words_of_a_step(backend: Backend, has_others: bool, rows: int) -> None:
    """Tokens, findings, those of a second group from the ring's word on, and marks."""
    state = create_state(
        num_slots=8,
        req_rows=rows + 1,
        ring_capacity=8,
        num_managers=1,
        device=DEVICE,
    )
    every = torch.arange(1, rows + 1, device=DEVICE)
    sampled = SampledTokens(
        req_rows=every,
        serials=every + 100,
        tokens=torch.where(every % 3 == 0, -1, every + 5),
        prefix_lens=every * 2,
        extend_lens=every,
    )
    found = torch.arange(STATUS_WORDS + rows, device=DEVICE) * 2
    others = torch.full_like(found, 4097) if has_others else None
    words = torch.full((3 * rows + len(found),), -7, device=DEVICE)
    backend.launch.send_tokens(state, sampled, found, others, words)
    tokens, sent, serials, marks = words.split([rows, len(found), rows, rows])
    assert torch.equal(tokens, sampled.tokens)
    due = found.clone()
    if has_others:
        due[RING:] |= 4097
    assert torch.equal(sent, due)
    assert torch.equal(serials, sampled.serials)
    noted = [
        UNKNOWN if r % 3 == 0 else pack_word0(r + 5, 3 * r) for r in range(1, rows + 1)
    ]
    assert marks.tolist() == noted
    assert state.requests[1:, Request.NEXT_WORD0].tolist() == noted


@each_backend
@pytest.mark.parametrize("has_seeds", [False, True])
def test_a_prefill_is_announced(backend: Backend, has_seeds: bool) -> None:
    w = small_world()
    w.state.requests[:, Request.NEXT_WORD0] = 7
    before = w.state.expected_lineage.clone()
    seeds = long([0] * len(w.state.requests)) if has_seeds else None
    values = long([[5, 6], [50, 60], [500, 600]])
    backend.launch.expect_rows(w.state, long([3, 1]), values, seeds)
    assert w.state.expected_lineage[[1, 3]].tolist() == [6, 5]
    assert w.state.expected_lineage[2] == before[2]
    assert w.state.requests[1:4].tolist() == [[600, UNKNOWN], [-1, 7], [500, UNKNOWN]]
    if seeds is not None:
        assert seeds[:4].tolist() == [0, 60, 0, 50]


@each_backend
def test_positions_follow_the_prefix(backend: Backend) -> None:
    w = small_world()
    rows = w.rows(extends=[3, 1, 1])
    rows.positions[1] += 4
    w.write(backend, w.state, rows)
    assert findings(w.state) == [(Reason.WRITE_POSITION, 1, w.slot(0, 12), 16)]
    (entry,) = entries(w.state)
    assert unpack_word0(entry[Ring.EXPECTED_WORD0]) == (w.token(0, 12), 12)


@each_backend
def test_draft_inputs_are_what_was_published(backend: Backend) -> None:
    """Slot p of a draft's pool holds token p + 1; a draft step reads proposals."""
    w = small_world(draft=True)
    rows = w.rows(extends=[2, 2, 2])
    published = w.published().clone()
    published[2, 7 + 1] += 1
    w.head(backend, w.state, rows, WriterKind.DRAFT, published=published)
    assert findings(w.state) == []
    w.head(backend, w.state, rows, WriterKind.DRAFT_EXTEND, published=published)
    assert findings(w.state) == [(Reason.WRITE_TOKEN, 2, w.slot(1, 7), 7)]


#  0 - 1 - 3     4 - 5
#   \- 2
PARENTS = [-1, 0, 0, 1, -1, 4]
DEPTHS = [0, 1, 1, 2, 0, 1]


def tree(w: World) -> ForwardView:
    rows = w.rows(extends=[4, 0, 2])
    positions = [w.lens[0 if t < 4 else 2] + DEPTHS[t] for t in range(6)]
    mask = torch.zeros(6, 4, dtype=torch.bool)
    for t, parent in enumerate(PARENTS):
        mask[t] = mask[parent] if parent >= 0 else False
        mask[t, t % 4] = True
    return dataclasses.replace(
        rows,
        parent_index=long(PARENTS),
        positions=long(positions),
        tree_mask=mask.to(DEVICE),
        max_depth=4,
    )


@each_backend
def test_a_sound_tree_is_silent(backend: Backend) -> None:
    w = small_world()
    w.write(backend, w.state, tree(w), WriterKind.VERIFY)
    assert findings(w.state) == []


@each_backend
def test_only_the_root_has_no_parent(backend: Backend) -> None:
    """Whatever its position, and though it sees itself alone."""
    w = small_world()
    rows = tree(w)
    assert rows.parent_index is not None and rows.tree_mask is not None
    rows.parent_index[3] = -1
    rows.tree_mask[3] = False
    rows.tree_mask[3, 3] = True
    w.write(backend, w.state, rows, WriterKind.VERIFY)
    (entry,) = entries(w.state)
    assert entry[Ring.REASONS] == Reason.TREE_SHAPE
    assert entry[Ring.SLOT] == int(rows.out_cache_loc[3])


@each_backend
@pytest.mark.parametrize("node, column", [(3, 0), (3, 1), (3, 3), (2, 1), (5, 3)])
def test_a_mask_that_is_not_the_tree_s(
    backend: Backend, node: int, column: int
) -> None:
    w = small_world()
    rows = tree(w)
    assert rows.tree_mask is not None
    rows.tree_mask[node, column] ^= True
    w.write(backend, w.state, rows, WriterKind.VERIFY)
    assert {e[Ring.REASONS] for e in entries(w.state)} == {Reason.TREE_SHAPE}


@each_backend
@pytest.mark.parametrize("node, parent", [(1, 3), (5, 0), (2, 2), (3, 5), (4, -2)])
def test_a_parent_that_none_can_be(backend: Backend, node: int, parent: int) -> None:
    """After its child, of another request, itself, or no place at all."""
    w = small_world()
    rows = dataclasses.replace(tree(w), tree_mask=None)
    assert rows.parent_index is not None
    rows.parent_index[node] = parent
    w.head(backend, w.state, rows, WriterKind.VERIFY)
    rows_found = {e[Ring.SLOT] for e in entries(w.state)}
    assert int(rows.out_cache_loc[node]) in rows_found
    assert all(e[Ring.REASONS] & Reason.TREE_SHAPE for e in entries(w.state))


@each_backend
def test_positions_by_node_number(backend: Backend) -> None:
    w = small_world()
    rows = tree(w)
    rows.positions[2] = w.lens[0] + 2
    w.write(backend, w.state, rows, WriterKind.VERIFY)
    place = w.lens[0] + 2
    assert findings(w.state) == [(Reason.WRITE_POSITION, 1, w.slot(0, place), place)]
    (entry,) = entries(w.state)
    assert unpack_word0(entry[Ring.EXPECTED_WORD0])[1] == w.lens[0] + 1


def accepted(w: World) -> AcceptedPath:
    """Trees of four nodes; the paths 0 - 1 - 3, 0, and 0 - 2."""
    lens = [3, 1, 2]
    parents = [[-1, 0, 0, 1], [-1, 4, 4, 5], [-1, 8, 8, 9]]
    paths = [[0, 1, 3], [4, -1, -1], [8, 10, -1]]
    gained = [[101, 103, 199], [299, 299, 299], [302, 399, 399]]
    predict = torch.zeros(12, dtype=torch.int64)
    tokens = torch.arange(12) % 4 + torch.tensor([100, 200, 300]).repeat_interleave(4)
    for path, names, length in zip(paths, gained, lens, strict=True):
        for node, token in zip(path[:length], names, strict=False):
            predict[node] = token
    return AcceptedPath(
        req_rows=long([1, 2, 3]),
        serials=long(w.serials),
        prefix_lens=long(w.lens),
        tokens=tokens.view(3, 4).to(DEVICE),
        parent_index=long(parents),
        predict=predict.view(3, 4).to(DEVICE),
        accept_index=long(paths),
        accept_lens=long(lens),
        gained=long(gained),
        choices=predict.view(3, 4).clone().to(DEVICE),
    )


def note(
    backend: Backend,
    w: World,
    path: AcceptedPath,
    *,
    draft: CanaryState | None = None,
    checks: bool = True,
) -> AcceptedWords:
    """End a verification; without `draft` the draft's pool is one of its own."""
    words = AcceptedWords.of(path)
    words.words.fill_(-7)
    if draft is None:
        draft = small_world(draft=True).state
    salts = long(w.salts)
    backend.launch.finish_accepted(w.state, draft, path, salts, checks, words)
    return words


def lineages_after(w: World, path: AcceptedPath, lens: list[int]) -> list[int]:
    """Of each row over its root and what it gained but the last token."""
    return [
        extend_lineage(
            w.lineage(i, w.lens[i]),
            [int(path.tokens[i, 0]), *path.gained[i].tolist()][:length],
            start_position=w.lens[i],
            salt=w.salts[i],
        )
        for i, length in enumerate(lens)
    ]


@each_backend
def test_a_sound_path_is_noted(backend: Backend) -> None:
    w = small_world()
    path = accepted(w)
    marks = note(backend, w, path).marks
    assert findings(w.state) == []
    words = [
        pack_word0(token, length + gained)
        for token, length, gained in zip(
            (199, 299, 399), w.lens, (3, 1, 2), strict=True
        )
    ]
    assert marks.tolist() == [w.serials, words]
    assert w.state.requests[1:4, Request.NEXT_WORD0].tolist() == words
    without = dataclasses.replace(path, choices=None)
    note(backend, w, without)
    assert findings(w.state) == []


@each_backend
def test_lineages_advance_over_what_stays(backend: Backend) -> None:
    w = small_world()
    path = accepted(w)
    path.prefix_lens[1] = 0
    w.state.expected_lineage[2] = 17  # left by an earlier owner of the row
    others = w.state.expected_lineage.clone()
    note(backend, w, path, checks=False)
    due = lineages_after(w, path, [3, 1, 2])
    due[1] = lineage_term(200, 0, w.salts[1])
    assert w.state.expected_lineage[1:4].tolist() == due
    assert torch.equal(w.state.expected_lineage[4:], others[4:])
    assert int(w.state.ticket) == 0


@each_backend
def test_the_words_of_a_verification(backend: Backend) -> None:
    """Tokens, lengths, and the findings of both pools, those of this very launch too;
    verdicts are cleared, those of other rows stay. A padded row has none."""
    w, drafts = small_world(), small_world(draft=True)
    path = accepted(w)
    path.req_rows[2] = 0
    path.gained[0, 1] = 5
    lineage = int(w.state.expected_lineage[3])
    for state, verdicts in ((w.state, [9, 8, 7, 6]), (drafts.state, [1, 2, 3, 4])):
        state.verdict[:4] = torch.tensor(verdicts, dtype=torch.int32)
        state.counters[:] = torch.arange(len(state.counters)) * verdicts[0]
    drafts.state.ring_count.fill_(5)
    words = note(backend, w, path, draft=drafts.state)
    assert torch.equal(words.gained, path.gained)
    assert torch.equal(words.accept_lens, path.accept_lens)
    found = words.findings.tolist()
    assert parse_counters(found) == [9 * i for i in range(NUM_COUNTERS)]
    assert found[RING:] == [1, 8 | Reason.ACCEPT_PATH, 7, 0]
    found = words.draft_findings.tolist()
    assert parse_counters(found) == list(range(NUM_COUNTERS))
    assert found[RING:] == [5, 2, 3, 0]
    assert w.state.verdict[:4].tolist() == [9, 0, 0, 6]
    assert drafts.state.verdict[:4].tolist() == [1, 0, 0, 4]
    assert int(w.state.expected_lineage[3]) == lineage
    # The parts are all there is, in order.
    assert -7 not in words.words.tolist()
    parts = [part.reshape(-1) for part in words[1:]]
    assert torch.equal(torch.cat(parts), words.words)


@each_backend
def test_drafts_without_kv_have_no_findings(backend: Backend) -> None:
    w = small_world()
    path = accepted(w)
    w.state.verdict[1] = 9
    words = AcceptedWords.of(path, has_draft=False)
    words.words.fill_(-7)
    backend.launch.finish_accepted(w.state, None, path, long(w.salts), True, words)
    assert not len(words.draft_findings) and -7 not in words.words.tolist()
    assert parse_verdicts(words.findings.tolist()) == [9, 0, 0]
    assert words.marks[0].tolist() == w.serials


@each_backend
def test_many_rows_end_together(backend: Backend) -> None:
    """More rows than a program gathers at once, and no row at all."""
    for rows in (0, 150):
        state = create_state(
            num_slots=8,
            req_rows=rows + 1,
            ring_capacity=8,
            num_managers=1,
            device=DEVICE,
        )
        every = long(list(range(1, rows + 1)))
        state.verdict[1:] = every.int()
        nodes = every[:, None] * 10
        path = AcceptedPath(
            req_rows=every,
            serials=every + 100,
            prefix_lens=every,
            tokens=nodes,
            parent_index=torch.full_like(nodes, -1),
            predict=nodes + 1,
            accept_index=torch.arange(rows, device=DEVICE)[:, None],
            accept_lens=torch.ones_like(every),
            gained=nodes + 1,
        )
        words = AcceptedWords.of(path)
        salts = torch.zeros_like(every)
        backend.launch.finish_accepted(state, state.clone(), path, salts, True, words)
        assert parse_verdicts(words.findings.tolist()) == every.tolist()
        assert parse_verdicts(words.draft_findings.tolist()) == every.tolist()
        due = [lineage_term(10 * r, r, 0) for r in range(1, rows + 1)]
        assert state.expected_lineage[1:].tolist() == due


@each_backend
@pytest.mark.parametrize("lens", [[0, 9, 3], [3, 3, 3]])
def test_a_path_that_is_made_up_is_not_checked(
    backend: Backend, lens: list[int]
) -> None:
    w = small_world()
    path = accepted(w)
    path.accept_lens[:] = long(lens)
    path.predict.zero_()
    words = note(backend, w, path, checks=False)
    assert findings(w.state) == []
    kept = [min(n, 3) for n in lens]
    assert w.state.expected_lineage[1:4].tolist() == lineages_after(w, path, kept)
    last = [int(path.gained[i, max(n, 1) - 1]) for i, n in enumerate(kept)]
    places = [w.lens[i] + n for i, n in enumerate(lens)]
    due = [pack_word0(*word) for word in zip(last, places, strict=True)]
    assert words.marks[1].tolist() == due


FAULTS = {
    "a node of another request": ("accept_index", (0, 1), 9, 1),
    "no child of the node before": ("parent_index", (0, 3), 2, 2),
    "not the token that was predicted": ("tokens", (0, 3), 7, 2),
    "the root is another node": ("accept_index", (0, 0), 1, 0),
    "the root of another request": ("accept_index", (1, 0), 0, 0),
    "a token gained that was not predicted": ("gained", (2, 1), 5, 1),
    "not the target's choice": ("choices", (2, 2), 5, 1),
    "one node too many": ("accept_lens", (2,), 3, 2),
    "no node": ("accept_lens", (1,), 0, 0),
    "more nodes than a path has": ("accept_lens", (1,), 9, 0),
}


@each_backend
@pytest.mark.parametrize("fault", FAULTS)
def test_a_path_in_doubt(backend: Backend, fault: str) -> None:
    w = small_world()
    name, place, value, at = FAULTS[fault]
    path = accepted(w)
    getattr(path, name)[place] = value
    words = note(backend, w, path)
    request = place[0]
    (entry,) = entries(w.state)
    assert entry[Ring.REASONS] == Reason.ACCEPT_PATH
    assert entry[Ring.REQ_ROW] == request + 1
    assert entry[Ring.POSITION] == w.lens[request] + at
    assert entry[Ring.TAG] & 255 == Launch.ACCEPT
    assert parse_verdicts(words.findings.tolist())[request] == Reason.ACCEPT_PATH


@each_backend
@pytest.mark.parametrize("is_greedy", [False, True])
def test_one_node_too_few(backend: Backend, is_greedy: bool) -> None:
    """The tree could have given more, if the target's choice alone decides."""
    w = small_world()
    path = accepted(w)
    path.accept_lens[0] = 2
    if not is_greedy:
        path = dataclasses.replace(path, choices=None)
    note(backend, w, path)
    due = [(Reason.ACCEPT_PATH, 1, -1, w.lens[0] + 1)]
    assert findings(w.state) == (due if is_greedy else [])


@each_backend
def test_a_store_that_does_not_happen(backend: Backend) -> None:
    """All words of new slots are filled before the model, and looked at after it."""
    w = small_world(mode=FingerprintMode.ALL)
    rows = w.rows(extends=[2, 1, 3])
    w.head(backend, w.state, rows)
    words = w.fingerprint.k_words, w.fingerprint.v_words
    assert words[0] is not None and words[1] is not None
    words[0][1, w.slot(0, 12)] = SENTINEL
    words[1][0, w.slot(2, 21), -1] = SENTINEL
    w.tail(backend, w.state, rows)
    assert findings(w.state) == sorted(
        [
            (Reason.WRITE_MISSING, 1, w.slot(0, 12), 12),
            (Reason.WRITE_MISSING, 3, w.slot(2, 21), 21),
        ]
    )


@each_backend
def test_new_slots_are_filled_before_the_model(backend: Backend) -> None:
    w = small_world(mode=FingerprintMode.ALL)
    rows = w.rows(extends=[2, 1, 3])
    before = w.k.clone()
    backend.launch.write_head(w.state, rows, w.checks())
    k, v = w.fingerprint.k_words, w.fingerprint.v_words
    assert k is not None and v is not None
    slots = rows.out_cache_loc
    assert (k[:, slots] == SENTINEL).all() and (v[:, slots] == SENTINEL).all()
    others = torch.ones(w.num_slots, dtype=torch.bool, device=DEVICE)
    others[slots] = False
    assert torch.equal(w.k[:, others], before[:, others])


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
