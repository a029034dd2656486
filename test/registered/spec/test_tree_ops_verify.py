"""Verification of draft trees: the greedy walk, exact distributions, compaction."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from tree_ops_world import (
    DEVICE,
    assert_same,
    garbage,
    kernels,
    new_result,
    new_tree,
    op,
    random_tree,
)

pytest.importorskip("triton")

from sglang.srt.configs.draft_layout import TreeShape
from sglang.srt.draft_trees.buffers import DraftTree, VerifyResult
from sglang.srt.draft_trees.ops.verify import op as verify_ops
from sglang.srt.draft_trees.ops.verify import triton_sampled as verify_sampled
from sglang.srt.sampling.ops import noise
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.scale import count

register_cpu_ci(est_time=7, suite="cpu")
register_cuda_ci(est_time=60, suite="cuda")

SHAPES = [
    TreeShape(topk=k, num_steps=s, num_draft_tokens=d)
    for k, s, d in [(1, 1, 2), (1, 4, 5), (2, 3, 6), (4, 5, 8), (8, 3, 40)]
]
REFERENCES = {
    "verify_tree_greedy": verify_ops.verify_tree_greedy_ref,
    "verify_tree_target_only": verify_ops.verify_tree_target_only_ref,
    "gather_accepted": verify_ops.gather_accepted_ref,
}


@pytest.fixture(autouse=True)
def same_numbers_every_time() -> None:
    torch.manual_seed(5)


def chosen_op(name: str, implementation: str):
    return (
        REFERENCES[name] if implementation == "reference" else op(name, implementation)
    )


def long(*values: int | list[int]) -> Tensor:
    return torch.tensor(values, device=DEVICE)


def tree_of(
    parents: list[int], tokens: list[int], *, seq_len: int = 7, rows: int = 1
) -> DraftTree:
    """`rows` equal trees from parents within the request."""
    nodes = len(parents)
    shape = TreeShape(topk=nodes, num_steps=1, num_draft_tokens=nodes)
    built = new_tree(rows, shape)
    first = torch.arange(rows, device=DEVICE)[:, None] * nodes
    parent = long(*parents)
    built.parent_index.copy_((first + parent).where(parent >= 0, -1))
    built.tokens.copy_(long(*tokens).expand(rows, -1))
    depths = [0] * nodes
    for node, up in enumerate(parents):
        depths[node] = 0 if up < 0 else depths[up] + 1
    built.positions.copy_((long(*depths) + seq_len).expand(rows, -1))
    return built


def keys_of(seeds: range) -> Tensor:
    return long(*[noise.mix_seed(seed) for seed in seeds])


@pytest.mark.parametrize("implementation", [*kernels(), "reference"])
def test_greedy_by_hand(implementation: str) -> None:
    # root 50 -> A 1, B 2; A -> C 3; B -> E 5; E -> K 6. The target wants B, E, then 9.
    parents, tokens = [-1, 0, 0, 1, 2, 4], [50, 1, 2, 3, 5, 6]
    tree = tree_of(parents, tokens, rows=2)
    targets = long([2, 0, 5, 0, 9, 0], [8, 1, 5, 0, 9, 0])
    shape = TreeShape(topk=2, num_steps=3, num_draft_tokens=6)
    result = new_result(2, shape)
    chosen_op("verify_tree_greedy", implementation)(tree, targets, result=result)
    assert result.accept_index.tolist() == [[0, 2, 4, -1], [6, -1, -1, -1]]
    assert result.accept_lens.tolist() == [3, 1]
    assert result.predict.tolist() == [[2, 0, 5, 0, 9, 0], [8, 0, 0, 0, 0, 0]]
    tokens_out, node_rows = garbage(2, 6), garbage(2, 4)
    bonus = garbage(2)
    chosen_op("gather_accepted", implementation)(
        result, tokens=tokens_out, node_rows=node_rows, bonus_tokens=bonus
    )
    assert tokens_out.tolist() == [[2, 5, 9, 9, 9, 9], [8] * 6]
    assert node_rows.tolist() == [[0, 2, 4, 4], [6] * 4]
    assert bonus.tolist() == [9, 8]


@pytest.mark.parametrize("implementation", [*kernels(), "reference"])
@pytest.mark.parametrize("place", [0, 1, 8, 11, 4000, -2])
def test_a_place_outside_the_tree_has_no_children(
    place: int, implementation: str
) -> None:
    """As a damaged tree names it; places 4 to 7 are those of the damaged one."""
    tree = tree_of([-1, 0, 1, 2], [3, 3, 3, 3], rows=3)
    tree.parent_index[1, 2] = place
    shape = TreeShape(topk=2, num_steps=3, num_draft_tokens=4)
    greedy, sampled = new_result(3, shape), new_result(3, shape)
    targets = torch.full((3, 4), 3, device=DEVICE)
    chosen_op("verify_tree_greedy", implementation)(tree, targets, result=greedy)
    chosen_op("verify_tree_target_only", implementation)(
        tree,
        torch.eye(5, device=DEVICE)[targets.view(-1)],
        torch.ones(12, device=DEVICE),
        keys=keys_of(range(3)),
        threshold_single=1.0,
        threshold_acc=1.0,
        result=sampled,
    )
    for result in (greedy, sampled):
        assert result.accept_lens.tolist() == [4, 2, 4]
        assert result.accept_index[1].tolist() == [4, 5, -1, -1]


def walk(tree: DraftTree, q: int, targets: list[int], steps: int) -> list[int]:
    """The greedy path through the child lists, as far as the target agrees."""
    path, tokens = [0], tree.tokens[q].tolist()
    while len(path) <= steps:
        child = int(tree.next_token[q, path[-1]])
        while child >= 0 and tokens[child] != targets[path[-1]]:
            child = int(tree.next_sibling[q, child])
        if child < 0:
            break
        path.append(child)
    return path


@pytest.mark.parametrize("implementation", [*kernels(), "reference"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_greedy_follows_the_child_lists(shape: TreeShape, implementation: str) -> None:
    rows, nodes, vocab = 5, shape.num_draft_tokens, 9
    lengths = set()
    for _ in range(6):
        tree = random_tree(rows, shape, vocab=vocab)
        targets = torch.randint(0, vocab, (rows, nodes), device=DEVICE)
        # Let the target agree with some node of most nodes' children.
        for node in range(1, nodes):
            parent = tree.parent_index[:, node]
            agrees = torch.rand(rows, device=DEVICE) < 0.7
            at = parent.clamp(min=0)[agrees]
            targets.view(-1)[at] = tree.tokens[:, node][agrees]
        result = new_result(rows, shape)
        verify = chosen_op("verify_tree_greedy", implementation)
        verify(tree, targets, result=result)
        for q in range(rows):
            path = walk(tree, q, targets[q].tolist(), shape.num_steps)
            lengths.add(len(path))
            padding = [-1] * (shape.accept_width - len(path))
            places = [q * nodes + node for node in path]
            assert result.accept_index[q].tolist() == places + padding
            assert int(result.accept_lens[q]) == len(path)
            wanted = [0] * nodes
            for node in path:
                wanted[node] = int(targets[q, node])
            assert result.predict[q].tolist() == wanted
    assert max(lengths) >= min(shape.accept_width, 4)


@pytest.mark.parametrize("implementation", kernels())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("thresholds", [(1.0, 1.0), (0.3, 1.0), (1.0, 0.4)])
def test_sampled_equals_the_reference(
    shape: TreeShape, thresholds: tuple[float, float], implementation: str
) -> None:
    rows, vocab = 6, 30
    for trial in range(count(ci=1, full=4)):
        tree = random_tree(rows, shape, vocab=vocab)
        probs = torch.rand(rows * shape.num_draft_tokens, vocab, device=DEVICE) ** 4
        probs[:, ::3] = 0
        wanted, got = new_result(rows, shape), new_result(rows, shape)
        runs = [("reference", wanted), (implementation, got)]
        for name, result in runs:
            chosen_op("verify_tree_target_only", name)(
                tree,
                probs,
                probs.sum(dim=-1),
                keys=keys_of(range(trial, trial + rows)),
                threshold_single=thresholds[0],
                threshold_acc=thresholds[1],
                result=result,
            )
        assert_same(got, wanted)


@pytest.mark.parametrize("implementation", kernels())
def test_bonus_of_a_large_vocabulary(implementation: str) -> None:
    """Several programs share a row; no rejected id and no id of weight 0 is drawn."""
    tree = tree_of([-1, 0, 0], [1, 4000, 17], rows=4)
    vocab = 5000
    probs = torch.rand(12, vocab, device=DEVICE)
    probs[:, ::2] = 0
    probs[:, 17] = 0
    probs[:, 4000] = 1e-9
    probs[3:6, :4500] = 0
    wanted, got = new_result(4, SHAPES[2]), new_result(4, SHAPES[2])
    for trial in range(5):
        for name, result in (("reference", wanted), (implementation, got)):
            chosen_op("verify_tree_target_only", name)(
                tree,
                probs,
                probs.sum(dim=-1),
                keys=keys_of(range(trial, trial + 4)),
                threshold_single=1.0,
                threshold_acc=1.0,
                result=VerifyResult(
                    predict=result.predict[:, :3].contiguous(),
                    accept_index=result.accept_index,
                    accept_lens=result.accept_lens,
                    rejected=result.rejected,
                ),
            )
        assert_same(got, wanted, "accept_index", "accept_lens", "rejected")


def run_sampled(
    implementation: str,
    tree: DraftTree,
    probs: Tensor,
    keys: Tensor,
    steps: int,
    **thresholds: float,
) -> tuple[Tensor, Tensor]:
    """(tokens gained [rows, steps + 1], counts) of one verification."""
    rows, nodes = tree.tokens.shape
    topk = max(1, nodes - 1)
    result = VerifyResult(
        predict=garbage(rows, nodes),
        accept_index=garbage(rows, steps + 1),
        accept_lens=garbage(rows),
        rejected=garbage(rows, topk),
    )
    chosen_op("verify_tree_target_only", implementation)(
        tree,
        probs,
        probs.sum(dim=-1),
        keys=keys,
        threshold_single=thresholds.get("single", 1.0),
        threshold_acc=thresholds.get("acc", 1.0),
        result=result,
    )
    tokens, node_rows = garbage(rows, steps + 1), garbage(rows, steps + 1)
    verify_ops.gather_accepted_ref(
        result, tokens=tokens, node_rows=node_rows, bonus_tokens=garbage(rows)
    )
    return tokens, result.accept_lens


def chi_square(counts: Tensor, probs: Tensor) -> float:
    """Statistic over the categories that have probability; the others must be empty."""
    possible = probs > 0
    assert int(counts[~possible].sum()) == 0
    expected = probs[possible] * counts.sum()
    return float(((counts[possible] - expected) ** 2 / expected).sum())


# 99.9 % quantiles of chi-square with n degrees of freedom.
LIMIT = {4: 18.5, 5: 20.5, 6: 22.5, 24: 51.2}


@pytest.mark.parametrize("implementation", kernels())
@pytest.mark.parametrize("topk", [1, 4])
def test_tokens_are_distributed_as_the_target(topk: int, implementation: str) -> None:
    """Root with `topk` children, the first of which has children of its own: the first
    token follows the root's distribution, the second that of the node it follows."""
    if implementation == "triton" and DEVICE == "cpu":
        pytest.skip("the interpreter is too slow for so many samples")
    samples = count(ci=100_000, full=400_000)
    vocab = 6
    target = torch.tensor(
        [
            [0.30, 0.05, 0.25, 0.0, 0.15, 0.25],
            [0.10, 0.50, 0.10, 0.10, 0.15, 0.05],
            [0.05, 0.05, 0.20, 0.30, 0.20, 0.20],
        ],
        device=DEVICE,
    )
    parents = [-1, *[0] * topk, *[1] * topk]
    tokens = [0, *[2, 3, 1, 5][:topk], *[1, 4, 0, 3][:topk]]
    chunk = 50_000
    tree = tree_of(parents, tokens, rows=chunk)
    nodes = len(parents)
    # Unscaled weights; distribution 1 follows token 2, distribution 2 any other child.
    probs = target[2].repeat(nodes, 1) * 3
    probs[0], probs[1] = target[0] * 0.5, target[1] * 7
    probs = probs.repeat(chunk, 1)
    parts = [
        run_sampled(
            implementation,
            tree,
            probs,
            keys_of(range(first, first + chunk)),
            steps=2,
        )
        for first in range(0, samples, chunk)
    ]
    gained = torch.cat([tokens for tokens, _ in parts])
    lens = torch.cat([counts for _, counts in parts])
    first = torch.bincount(gained[:, 0], minlength=vocab).cpu()
    assert chi_square(first, target[0].cpu()) < LIMIT[4]
    after = gained[(lens > 1) & (gained[:, 0] == 2), 1]
    assert len(after) > samples / 5
    second = torch.bincount(after, minlength=vocab).cpu()
    assert chi_square(second, target[1].cpu()) < LIMIT[5]
    # The children's share of the root's distribution is accepted.
    mass = float(target[0][tokens[1 : topk + 1]].sum())
    accepted = float((lens > 1).float().mean())
    assert accepted == pytest.approx(mass, abs=4 / samples**0.5)
    # Draft and bonus are independent: as many pairs as the product says.
    pairs = torch.bincount(
        gained[lens > 1, 0] * vocab + gained[lens > 1, 1], minlength=vocab**2
    ).cpu()
    follow = torch.stack([target[1] if t == 2 else target[2] for t in range(vocab)])
    is_child = torch.zeros(vocab)
    is_child[tokens[1 : topk + 1]] = 1
    joint = (target[0].cpu() * is_child)[:, None] * follow.cpu()
    joint = (joint / joint.sum()).view(-1)
    limit = {1: LIMIT[5], 4: LIMIT[24]}[topk]
    assert chi_square(pairs, joint) < limit


@pytest.mark.parametrize("implementation", [*kernels(), "reference"])
def test_greedy_rows_in_a_sampled_batch(implementation: str) -> None:
    """One weight per row: the walk is the greedy one, whatever the seed."""
    shape, vocab, rows = SHAPES[3], 12, 8
    tree = random_tree(rows, shape, vocab=vocab)
    targets = torch.randint(0, vocab, tree.tokens.shape, device=DEVICE)
    for node in range(1, 8):
        at = tree.parent_index[:, node].clamp(min=0)
        targets.view(-1)[at[::2]] = tree.tokens[::2, node]
    probs = torch.nn.functional.one_hot(targets.view(-1), vocab).float()
    greedy, sampled = new_result(rows, shape), new_result(rows, shape)
    verify_ops.verify_tree_greedy_ref(tree, targets, result=greedy)
    chosen_op("verify_tree_target_only", implementation)(
        tree,
        probs,
        probs.sum(dim=-1),
        keys=keys_of(range(rows)),
        threshold_single=1.0,
        threshold_acc=1.0,
        result=sampled,
    )
    assert_same(sampled, greedy, "predict", "accept_index", "accept_lens")
    assert int(greedy.accept_lens.max()) > 2


@pytest.mark.parametrize("implementation", [*kernels(), "reference"])
def test_corner_cases_of_sampling(implementation: str) -> None:
    rows = 8 if implementation == "triton" else 40
    keys = keys_of(range(rows))
    # A draft without probability, or outside the vocabulary, is never accepted.
    tree = tree_of([-1, 0, 0, 0], [0, 3, -5, 99], rows=rows)
    probs = torch.tensor([0.5, 0.5, 0.0, 0.0], device=DEVICE).repeat(rows * 4, 1)
    for thresholds in ({}, {"single": 1e-9, "acc": 1e-9}):
        tokens, lens = run_sampled(
            implementation, tree, probs, keys, steps=2, **thresholds
        )
        assert lens.tolist() == [1] * rows
        assert set(tokens[:, 0].tolist()) == {0, 1}
    # Children that have everything leave nothing to draw from.
    tree = tree_of([-1, 0, 0], [0, 0, 1], rows=rows)
    probs = torch.tensor([0.3, 0.7], device=DEVICE).repeat(rows * 3, 1)
    tokens, lens = run_sampled(implementation, tree, probs, keys, steps=2)
    assert lens.tolist() == [2] * rows
    # Rounded down sums reject what should be sure; the draw then ignores that.
    result_tokens = []
    for seed in range(3):
        tokens, lens = run_low_totals(implementation, tree, probs, keys + seed)
        result_tokens += tokens[lens == 1, 0].tolist()
    assert result_tokens and set(result_tokens) <= {0, 1}
    # A low threshold takes the first child that has enough.
    tokens, lens = run_sampled(implementation, tree, probs, keys, steps=2, single=0.3)
    assert tokens[:, 0].tolist() == [0] * rows
    # Where nothing has weight, nothing is accepted.
    tokens, lens = run_sampled(implementation, tree, probs * 0, keys, steps=2)
    assert lens.tolist() == [1] * rows
    assert bool(((tokens >= 0) & (tokens < 2)).all())
    # NaN does not hang, and gives some id.
    tokens, lens = run_sampled(
        implementation, tree, probs * float("nan"), keys, steps=2
    )
    assert lens.tolist() == [1] * rows
    assert bool(((tokens >= 0) & (tokens < 2)).all())


def run_low_totals(
    implementation: str, tree: DraftTree, probs: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor]:
    """As if the sums were twice what the weights add up to."""
    rows, nodes = tree.tokens.shape
    result = VerifyResult(
        predict=garbage(rows, nodes),
        accept_index=garbage(rows, 3),
        accept_lens=garbage(rows),
        rejected=garbage(rows, 2),
    )
    chosen_op("verify_tree_target_only", implementation)(
        tree,
        probs,
        probs.sum(dim=-1) * 2,
        keys=keys,
        threshold_single=1.0,
        threshold_acc=1.0,
        result=result,
    )
    return result.predict, result.accept_lens


def test_coins_are_those_of_the_sampler() -> None:
    """The walk accepts the only child exactly where `noise.uniform` of the token's
    position lies below its probability."""
    rows, p = 200, 0.37
    tree = tree_of([-1, 0], [0, 1], seq_len=11, rows=rows)
    probs = torch.tensor([1 - p, p], device=DEVICE).repeat(rows * 2, 1)
    coins = noise.uniform(keys_of(range(rows)), long(12).expand(rows).contiguous())
    for implementation in ("native" if DEVICE == "cpu" else "triton", "reference"):
        _, lens = run_sampled(
            implementation, tree, probs, keys_of(range(rows)), steps=1
        )
        total = float(probs[0].sum())
        assert (lens == 2).tolist() == (coins * total < probs[0, 1]).tolist()
    assert verify_sampled.BONUS_STREAM == verify_ops.BONUS_STREAM


@pytest.mark.parametrize("implementation", kernels())
@pytest.mark.parametrize("width", [4, 9])
def test_gather_accepted(width: int, implementation: str) -> None:
    shape, rows = TreeShape(topk=2, num_steps=3, num_draft_tokens=8), 7
    result = new_result(rows, shape)
    result.predict.copy_(torch.randint(0, 999, (rows, 8), device=DEVICE))
    result.accept_lens.copy_(torch.arange(rows, device=DEVICE) % 4 + 1)
    result.accept_index.fill_(-1)
    for q, length in enumerate(result.accept_lens.tolist()):
        path = sorted(torch.randperm(7)[: length - 1].tolist())
        nodes = [0] + [n + 1 for n in path]
        result.accept_index[q, :length] = long(*nodes) + q * 8
    outs = []
    for name in ("reference", implementation):
        tokens, nodes = garbage(rows, width), garbage(rows, 4)
        bonus = garbage(rows)
        chosen_op("gather_accepted", name)(
            result, tokens=tokens, node_rows=nodes, bonus_tokens=bonus
        )
        outs.append((tokens, nodes, bonus))
    for wanted, got in zip(*outs, strict=True):
        assert torch.equal(wanted, got)
    flat = result.predict.view(-1)
    for q, length in enumerate(result.accept_lens.tolist()):
        places = result.accept_index[q, :length]
        assert outs[0][0][q, :length].tolist() == flat[places].tolist()
        assert outs[0][1][q, :length].tolist() == places.tolist()
        assert int(outs[0][2][q]) == int(flat[places[-1]])


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
