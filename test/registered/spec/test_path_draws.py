"""Verifications that draw along the accepted paths accept what those do that draw after
every node."""

from __future__ import annotations

import itertools
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor
from tree_ops_world import DEVICE, garbage, new_result, random_tree

pytest.importorskip("triton")

from sglang.srt.configs.draft_layout import TreeShape
from sglang.srt.draft_trees.buffers import DraftTree, VerifyResult
from sglang.srt.draft_trees.ops.verify import triton_greedy
from sglang.srt.draft_trees.ops.verify.op import verify_tree_greedy, walk_tree_ref
from sglang.srt.sampling import sampler
from sglang.srt.sampling.ops.draw.triton import draw
from sglang.srt.sampling.ops.softmax_rows import op as softmax_op
from sglang.srt.sampling.ops.softmax_rows.triton import softmax_rows
from sglang.srt.sampling.penalties import TokenHistory
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo, SamplingRow
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative import eagle_utils
from sglang.srt.speculative.eagle_utils import AcceptThresholds, Decision
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=15, suite="cpu")
register_cuda_ci(est_time=30, suite="cuda")

ON_GPU = DEVICE == "cuda"
SHAPE = TreeShape(topk=4, num_steps=3, num_draft_tokens=16)
LIKELY = 6
EXACT = AcceptThresholds(single=1.0, acc=1.0)
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 1.2, "min_p": 0.1},
    {"temperature": 1.1, "top_k": 9, "top_p": 0.95, "min_p": 0.01},
]
PENALTIES: dict[str, Any] = {"frequency_penalty": 0.5, "logit_bias": {3: 1.5}}
KINDS = [PARAMS[:1], PARAMS]


@pytest.fixture
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a CPU draws; a GPU always does with Triton."""
    if ON_GPU or request.param == "triton":
        if not ON_GPU:
            monkeypatch.setattr(softmax_op, "LEAST_VOCAB", 0)
        monkeypatch.setattr(sampler, "softmax_rows", softmax_rows)
        monkeypatch.setattr(sampler, "draw", draw)
        monkeypatch.setattr(eagle_utils, "walk_tree", triton_greedy.walk_tree)
    name: str = request.param
    return name


def verify(
    monkeypatch: pytest.MonkeyPatch, at_once: int, *arguments: Any, **options: Any
) -> tuple[Decision, VerifyResult]:
    monkeypatch.setattr(eagle_utils, "_ROWS_AT_ONCE", at_once)
    result = new_result(len(arguments[0].tokens), SHAPE)
    decision = eagle_utils.accept_drafts(
        *arguments, **options, thresholds=EXACT, result=result
    )
    return decision, result


def propose_what_is_drawn(tree: DraftTree, result: VerifyResult) -> None:
    """Let a child of the last accepted node, if it has one, propose the token drawn
    after that; rather a child that has children."""
    parents = tree.parent_index.view(-1).tolist()
    for q, length in enumerate(result.accept_lens.tolist()):
        last = int(result.accept_index[q, length - 1])
        children = [node for node, parent in enumerate(parents) if parent == last]
        if children:
            child = max(children, key=lambda node: (node in parents, -node))
            tree.tokens.view(-1)[child] = result.predict.view(-1)[last]


def history_of(tree: DraftTree, table: Tensor) -> TokenHistory:
    return eagle_utils.node_history(
        tree,
        token_table=table.to(torch.int32),
        req_pool_indices=torch.arange(len(table), device=DEVICE),
        max_len=128,
    )


@pytest.mark.parametrize(
    ("form", "kinds", "edits"),
    [
        *[("reference", *case) for case in itertools.product(KINDS, (False, True))],
        ("triton", PARAMS, False),
    ],
    indirect=["form"],
)
def test_accepts_what_draws_after_all_nodes_accept(
    form: str,
    kinds: list[dict[str, Any]],
    edits: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(5)
    # The interpreter takes seconds a row.
    bs, vocab = (7, 32000) if ON_GPU else (3 if form == "triton" else 7, 20)
    tree = random_tree(bs, SHAPE, vocab=LIKELY)
    params = [
        SamplingParams(**kinds[q % len(kinds)], **(PENALTIES if edits else {}))
        for q in range(bs)
    ]
    rows = [SamplingRow(params=p, seed=q) for q, p in enumerate(params)]
    info = SamplingBatchInfo.from_rows(rows, vocab_size=vocab, device=DEVICE)
    logits = torch.randn(bs * SHAPE.num_draft_tokens, vocab, device=DEVICE)
    given = (tree, logits.bfloat16(), info)
    table = torch.randint(0, LIKELY, (bs, 128), device=DEVICE)
    for _ in range(2):
        history = history_of(tree, table) if edits else None
        _, wanted = verify(monkeypatch, 1 << 20, *given, history=history)
        propose_what_is_drawn(tree, wanted)
    history = history_of(tree, table) if edits else None
    after_all, wanted = verify(monkeypatch, 1 << 20, *given, history=history)
    along, found = verify(monkeypatch, 0, *given, history=history)
    for name in ("predict", "accept_index", "accept_lens"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    assert found.accept_lens.max() > 2
    path = found.accept_index[found.accept_index >= 0]
    assert along.choices is not None and after_all.choices is not None
    assert torch.equal(along.choices.view(-1)[path], after_all.choices.view(-1)[path])
    assert torch.equal(along.logits, after_all.logits)
    assert along.made is not None and after_all.made is not None
    assert along.made.kept is not None and after_all.made.kept is not None
    is_drawn = ~info.greedy_rows[path // SHAPE.num_draft_tokens]
    drawn = path[is_drawn]
    assert torch.equal(along.made.kept[drawn], after_all.made.kept[drawn])


def test_rank_0_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(4)
    tree = random_tree(2, SHAPE, vocab=LIKELY)
    row = SamplingRow(params=SamplingParams(top_p=0.9), seed=1)
    vocab = 32000 if ON_GPU else 20
    info = SamplingBatchInfo.from_rows([row] * 2, vocab_size=vocab, device=DEVICE)
    logits = torch.randn(2 * SHAPE.num_draft_tokens, vocab, device=DEVICE)
    theirs = torch.full((2, SHAPE.num_draft_tokens), LIKELY + 1, device=DEVICE)
    theirs[0, 0] = tree.tokens[0, 1]

    def agree(choices: Tensor) -> Tensor:
        return choices.copy_(theirs)

    decision, result = verify(
        monkeypatch, 0, tree, logits, info, history=None, agree=agree
    )
    assert result.accept_lens.tolist() == [2, 1]
    assert result.predict[:, 0].tolist() == theirs[:, 0].tolist()
    assert decision.choices is not None and torch.equal(decision.choices, theirs)


@pytest.mark.parametrize("walk", [walk_tree_ref, triton_greedy.walk_tree])
def test_a_walk_names_the_choice_to_make_next(walk: Any) -> None:
    torch.manual_seed(5)
    bs, nodes = 5, SHAPE.num_draft_tokens
    tree = random_tree(bs, SHAPE, vocab=LIKELY)
    targets = torch.randint(0, LIKELY, (bs, nodes), device=DEVICE)
    choices = torch.full_like(targets, -1)
    whole, part = new_result(bs, SHAPE), new_result(bs, SHAPE)
    verify_tree_greedy(tree, targets, result=whole)
    rows = garbage(bs)
    for depth in range(SHAPE.accept_width + 1):
        walk(tree, choices, result=part, rows=rows)
        for q, row in enumerate(rows.tolist()):
            is_open = depth < int(whole.accept_lens[q])
            assert row == (int(whole.accept_index[q, depth]) if is_open else -1)
        at = rows[rows >= 0]
        choices.view(-1)[at] = targets.view(-1)[at]
    for f in fields(whole):
        if f.name != "rejected":
            assert torch.equal(getattr(part, f.name), getattr(whole, f.name)), f.name


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
