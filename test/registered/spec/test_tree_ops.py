"""Selection of draft candidates and tree building, against models in plain Python."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from tree_ops_world import (
    DEVICE,
    assert_same,
    garbage,
    kernels,
    new_levels,
    new_tree,
    op,
    proposals,
    random_levels,
    reference,
)

from sglang.srt.configs.draft_layout import TreeShape
from sglang.srt.draft_trees.buffers import DraftLevels
from sglang.srt.draft_trees.ops.tree.op import build_tree_ref, top_k_probs
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.scale import count, sampled

register_cpu_ci(est_time=5, suite="cpu")
register_cuda_ci(est_time=60, suite="cuda")

NAN, INF = float("nan"), float("inf")
SHAPES = [
    TreeShape(topk=k, num_steps=s, num_draft_tokens=d)
    for k, s, d in [
        (1, 1, 2),
        (1, 4, 5),
        (2, 1, 3),
        (2, 3, 6),
        (4, 5, 8),
        (3, 2, 13),
        (8, 5, 32),
        (8, 5, 64),
    ]
]


@pytest.fixture(autouse=True)
def same_numbers_every_time() -> None:
    torch.manual_seed(11)


def top_k(logits: torch.Tensor, k: int, implementation: str) -> tuple[list, list]:
    rows = logits.shape[0]
    probs, ids = garbage(rows, k, dtype=torch.float32), garbage(rows, k)
    op("top_k_probs", implementation)(logits, probs=probs, ids=ids)
    return probs.tolist(), ids.tolist()


@pytest.mark.parametrize("implementation", kernels())
@pytest.mark.parametrize(
    ("vocab", "dtype"),
    sampled(
        itertools.product(
            [8, 2048, 5000], [torch.float32, torch.bfloat16, torch.float16]
        ),
        key=lambda case: case[0],
        ci=3 if DEVICE == "cuda" else 2,
    ),
)
def test_top_k_probs(vocab: int, dtype: torch.dtype, implementation: str) -> None:
    logits = (torch.randn(7, vocab, device=DEVICE) * 3).to(dtype)
    logits[1] = logits[1].round()  # ties
    logits[2] = 0.0
    logits[3, ::2] = -INF
    for k in (1, 2, 8):
        probs, ids = top_k(logits, k, implementation)
        for row, (ps, found) in enumerate(zip(probs, ids, strict=True)):
            values = logits[row].double().tolist()
            order = sorted(range(vocab), key=lambda i: (-values[i], i))
            assert found == order[:k]
            softmax = torch.softmax(logits[row].double(), dim=-1)
            wanted = [1.0] if k == 1 else softmax[found].tolist()
            assert ps == pytest.approx(wanted, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("implementation", [*kernels(), "reference"])
def test_top_k_probs_of_bad_logits(implementation: str) -> None:
    logits = torch.tensor(
        [
            [NAN, 1.0, 2.0, NAN, -INF],
            [NAN, NAN, NAN, NAN, NAN],
            [1.0, INF, 0.0, INF, 2.0],
            [-INF, -INF, -INF, -INF, -INF],
        ],
        device=DEVICE,
    )
    if implementation == "reference":
        probs, ids = garbage(4, 3, dtype=torch.float32), garbage(4, 3)
        reference("top_k_probs")(logits, probs=probs, ids=ids)
        probs, ids = probs.tolist(), ids.tolist()
    else:
        probs, ids = top_k(logits, 3, implementation)
    assert ids == [[2, 1, 0], [0, 1, 2], [1, 3, 4], [0, 1, 2]]
    assert probs[0] == pytest.approx([0.7310586, 0.2689414, 0.0])
    assert probs[1:] == [[0.0] * 3] * 3


def test_top_k_of_a_small_vocabulary_names_the_flag() -> None:
    logits, ids = torch.zeros(1, 3, device=DEVICE), garbage(1, 4)
    with pytest.raises(ValueError, match="speculative-eagle-topk"):
        top_k_probs(logits, probs=garbage(1, 4, dtype=torch.float32), ids=ids)


def select_in_python(
    shape: TreeShape, levels: list[tuple[list, list]], hot: list[int]
) -> tuple[list[dict], list[list[tuple[int, int]]]]:
    """Candidates (score, token, parent's flat index) of one request, and per level the
    branches as (token, row of the forward they come from)."""
    k = shape.topk
    flat, beams = [], []
    beam: list[dict] = []
    for level, (p, ids) in enumerate(levels):
        new = []
        for row in range(len(p)):
            for column in range(k):
                score = torch.tensor(p[row][column], dtype=torch.float32)
                if level:
                    score = torch.tensor(beam[row]["score"]) * score
                new.append(
                    {
                        "score": float(score),
                        "token": hot[ids[row][column]],
                        "parent": beam[row]["place"] if level else -1,
                        "row": row,
                        "place": len(flat) + len(new),
                    }
                )
        flat += new
        beam = new if level == 0 else sorted(new, key=lambda c: -c["score"])[:k]
        beams.append([(c["token"], c["row"]) for c in beam])
    return flat, beams


@pytest.mark.parametrize("implementation", [*kernels(), "reference"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("coarse", [False, True])
def test_select_top_k(shape: TreeShape, coarse: bool, implementation: str) -> None:
    rows, vocab, k = 3, 40, shape.topk
    hot = torch.randperm(90, device=DEVICE)[:vocab]
    steps = list(proposals(rows, shape, vocab, coarse=coarse))
    levels = new_levels(rows, shape)
    is_ref = implementation == "reference"
    chosen = reference if is_ref else lambda name: op(name, implementation)
    tokens, sources = [], []
    for level, (p, ids) in enumerate(steps):
        input_ids, hidden_rows = garbage(rows * k), garbage(rows * k)
        chosen("select_top_k")(
            level,
            shape=shape,
            topk_p=p,
            topk_index=ids,
            hot_token_id=hot,
            levels=levels,
            input_ids=input_ids,
            hidden_rows=hidden_rows,
        )
        tokens.append(input_ids.view(rows, k).tolist())
        sources.append(hidden_rows.view(rows, k).tolist())
    for q in range(rows):
        own = [
            (p.view(rows, -1, k)[q].tolist(), ids.view(rows, -1, k)[q].tolist())
            for p, ids in steps
        ]
        flat, beams = select_in_python(shape, own, hot.tolist())
        assert levels.scores[q].tolist() == [c["score"] for c in flat]
        assert levels.tokens[q].tolist() == [c["token"] for c in flat]
        parents = levels.parents[q].tolist()
        assert [parents[c["place"] // k] for c in flat] == [c["parent"] for c in flat]
        for level, beam in enumerate(beams):
            assert tokens[level][q] == [token for token, _ in beam]
            of = [q] * k if level == 0 else [q * k + row for _, row in beam]
            assert sources[level][q] == of


@pytest.mark.parametrize("implementation", kernels())
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_select_top_k_of_bad_scores(bad: float, implementation: str) -> None:
    shape, rows = TreeShape(topk=4, num_steps=3, num_draft_tokens=9), 2
    runs = []
    for select in (op("select_top_k", implementation), reference("select_top_k")):
        torch.manual_seed(3)
        levels, outs = new_levels(rows, shape), []
        for level, (p, ids) in enumerate(proposals(rows, shape, 20, coarse=False)):
            p[::2, 1] = bad
            p[1, 0] = 0.0
            outs += [garbage(rows * 4), garbage(rows * 4)]
            select(
                level,
                shape=shape,
                topk_p=p,
                topk_index=ids,
                hot_token_id=None,
                levels=levels,
                input_ids=outs[-2],
                hidden_rows=outs[-1],
            )
        runs.append((levels, torch.stack(outs)))
    assert_same(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])


def build(levels: DraftLevels, shape: TreeShape, implementation: str, lens: list[int]):
    built = new_tree(len(lens), shape)
    chosen = build_tree_ref
    if implementation != "reference":
        chosen = op("build_tree", implementation)
    chosen(
        levels,
        shape=shape,
        root_tokens=torch.arange(1000, 1000 + len(lens), device=DEVICE),
        seq_lens=torch.tensor(lens, device=DEVICE),
        tree=built,
    )
    return built


@pytest.mark.parametrize("implementation", [*kernels(), "reference"])
def test_build_tree_by_hand(implementation: str) -> None:
    # Two branches of three levels: A .6, B .3; C .42, D .12; E .27, F .015; then C and
    # E go on: G .21, H .168; K .216, L .027.
    shape = TreeShape(topk=2, num_steps=3, num_draft_tokens=6)
    scores = [0.6, 0.3, 0.42, 0.12, 0.27, 0.015, 0.21, 0.168, 0.216, 0.027]
    levels = DraftLevels(
        scores=torch.tensor([scores], device=DEVICE),
        tokens=torch.arange(10, 20, device=DEVICE)[None],
        parents=torch.tensor([[-1, 0, 1, 2, 4]], device=DEVICE),
        beam_scores=torch.zeros(1, 2, device=DEVICE),
    )
    built = build(levels, shape, implementation, [7])
    assert built.selected[0].tolist() == [0, 1, 2, 4, 8]
    assert built.tokens[0].tolist() == [1000, 10, 11, 12, 14, 18]
    assert built.parent_index[0].tolist() == [-1, 0, 0, 1, 2, 4]
    assert built.next_token[0].tolist() == [1, 3, 4, -1, 5, -1]
    assert built.next_sibling[0].tolist() == [-1, 2, -1, -1, -1, -1]
    assert built.positions[0].tolist() == [7, 8, 8, 9, 9, 10]
    rows = ["".join(str(int(x)) for x in row) for row in built.mask[0]]
    assert rows == ["100000", "110000", "101000", "110100", "101010", "101011"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_built_trees_are_trees_of_the_best(shape: TreeShape) -> None:
    for coarse in (False, True):
        rows, k = 4, shape.topk
        levels = random_levels(rows, shape, coarse=coarse)
        built = build(levels, shape, "reference", [5, 1, 70, 9])
        nodes = shape.num_draft_tokens
        for q in range(rows):
            scores, parents = levels.scores[q].tolist(), levels.parents[q].tolist()
            order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
            selected = sorted(order[: nodes - 1])
            assert built.selected[q].tolist() == selected
            where = {place: i + 1 for i, place in enumerate(selected)} | {-1: 0}
            for i, place in enumerate(selected, start=1):
                ancestors, at = [i], place
                while at >= 0:
                    at = parents[at // k]
                    ancestors.append(where[at])
                assert int(built.parent_index[q, i]) == q * nodes + ancestors[1]
                assert int(built.positions[q, i]) == [5, 1, 70, 9][q] + (
                    len(ancestors) - 1
                )
                seen = built.mask[q, i].nonzero()[:, 0].tolist()
                assert seen == sorted(ancestors)
            for i in range(nodes):
                chain, child = [], int(built.next_token[q, i])
                while child >= 0:
                    chain.append(child)
                    child = int(built.next_sibling[q, child])
                own = (built.parent_index[q] == q * nodes + i).nonzero()[:, 0]
                assert chain == own.tolist()


@pytest.mark.parametrize("implementation", kernels())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_build_tree_equals_the_reference(shape: TreeShape, implementation: str) -> None:
    for coarse in (False, True):
        levels = random_levels(3, shape, coarse=coarse)
        lens = [4, 900, 17]
        wanted = build(levels, shape, "reference", lens)
        assert_same(build(levels, shape, implementation, lens), wanted)


@pytest.mark.parametrize("implementation", kernels())
def test_garbage_ends_and_stays_in_range(implementation: str) -> None:
    shape = TreeShape(topk=4, num_steps=4, num_draft_tokens=16)
    rows, nodes = 3, 16
    for trial in range(count(ci=12, full=100)):
        torch.manual_seed(trial)
        levels = random_levels(rows, shape)
        bad = torch.rand_like(levels.scores) < trial / 12
        values = torch.tensor([NAN, INF, -INF, -1.0, 0.0, 9.0], device=DEVICE)
        picks = torch.randint(0, 6, bad.shape, device=DEVICE)
        levels.scores[bad] = values[picks][bad]
        lost = torch.rand(levels.parents.shape, device=DEVICE) < 0.2
        levels.parents[lost] = torch.randint(-5, 99, (int(lost.sum()),), device=DEVICE)
        wanted = build(levels, shape, "reference", [3, 3, 3])
        assert_same(build(levels, shape, implementation, [3, 3, 3]), wanted)
        first = nodes * torch.arange(rows, device=DEVICE)[:, None]
        parents = wanted.parent_index - first
        index = torch.arange(nodes, device=DEVICE)
        linked = wanted.parent_index >= 0
        assert bool((parents < index)[linked].all())
        assert bool((parents >= 0)[linked].all())
        for links in (wanted.next_token, wanted.next_sibling):
            assert bool(((links == -1) | (links > index)).all())
            assert bool((links < nodes).all())
        assert int(wanted.positions.max()) <= 3 + shape.num_steps
        # An unlinked node sees itself and the prefix only, whose end is the root.
        alone = ~linked
        assert bool((wanted.positions[alone] == 3).all())
        assert bool((wanted.mask[alone].sum(dim=-1) == 1).all())


def test_no_tree_of_these_numbers() -> None:
    for numbers in [(2, 3, 3), (1, 3, 5), (2, 3, 12), (0, 1, 2), (2, 0, 2)]:
        topk, steps, nodes = numbers
        with pytest.raises(ValueError, match="topk="):
            TreeShape(topk=topk, num_steps=steps, num_draft_tokens=nodes)
    assert TreeShape(topk=2, num_steps=3, num_draft_tokens=11).num_candidates == 10


def test_narrow_shares_memory() -> None:
    shape = SHAPES[3]
    built = new_tree(4, shape)
    first = built.narrow(2)
    first.tokens.fill_(5)
    assert first.mask.shape == (2, 6, 6)
    assert built.tokens[:2].eq(5).all() and not built.tokens[2:].eq(5).any()
    assert math.prod(first.selected.shape) == 10


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
