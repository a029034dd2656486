"""Verification of draft trees against the target model, and the steps after it. Knows
no models and no requests; callers pass the target's logits or probabilities.

The children of a node are the nodes of its tree whose `parent_index` names it, in
ascending order; a node that names a place outside its tree has no parent. Each op
writes into tensors of the caller, has fixed shapes and does not wait for the device;
the references of both verifications read everything on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang.srt.sampling.ops import noise
from sglang.srt.utils.dispatch import Op

if TYPE_CHECKING:
    from sglang.srt.draft_trees.buffers import DraftTree, VerifyResult

_NATIVE = "sglang.srt.draft_trees.ops.verify.native:"
_TRITON = "sglang.srt.draft_trees.ops.verify."

# Makes the bonus draw independent of the coin at the same position.
BONUS_STREAM = 0x5851F42D4C957F2D


def verify_tree_greedy_ref(
    tree: DraftTree, target_ids: Tensor, *, result: VerifyResult
) -> None:
    """Follow the target's own choices through the tree.

    From the root on, the child whose token is the target's choice at the current node
    is accepted, up to S times; the choice at the last accepted node is the bonus.

    Args:
        tree: b trees of D nodes.
        target_ids: [b, D] int64, the target's choice after each node.
        result: b rows, written; S is the width of its `accept_index` less one.
    """
    steps = result.accept_index.shape[1] - 1
    for q, choices in enumerate(target_ids.tolist()):
        tokens = tree.tokens[q].tolist()
        children = _children(tree, q)
        path = [0]
        while len(path) <= steps:
            wanted = choices[path[-1]]
            matches = [c for c in children[path[-1]] if tokens[c] == wanted]
            if not matches:
                break
            path.append(matches[0])
        _record(result, q, path, [choices[node] for node in path])


verify_tree_greedy = Op(
    reference=verify_tree_greedy_ref,
    native=_NATIVE + "verify_tree_greedy",
    triton=_TRITON + "triton_greedy:verify_tree_greedy",
    place="tree.tokens",
)


def walk_tree_ref(
    tree: DraftTree, target_ids: Tensor, *, result: VerifyResult, rows: Tensor
) -> None:
    """Follow the target's choices as far as they have been made: `verify_tree_greedy`
    where a negative choice has not, and proposed tokens are at least 0.

    Args:
        rows: [b] int64, written: the last node of each path among all b * D nodes if
            the choice after it has not been made, or -1.
    """
    verify_tree_greedy(tree, target_ids, result=result)
    ends = result.accept_index.gather(1, result.accept_lens[:, None] - 1)[:, 0]
    is_open = target_ids.view(-1)[ends] < 0
    rows.copy_(ends.where(is_open, -1))


walk_tree = Op(
    reference=walk_tree_ref,
    triton=_TRITON + "triton_greedy:walk_tree",
    place="tree.tokens",
)


def verify_tree_target_only_ref(
    tree: DraftTree,
    target_probs: Tensor,
    totals: Tensor,
    *,
    keys: Tensor,
    threshold_single: float,
    threshold_acc: float,
    result: VerifyResult,
) -> None:
    """Accept drafts so that every token is distributed as the target's own.

    At the current node with distribution p, a coin u decides. The first child is
    accepted for which the sum of p over it and its elder siblings exceeds u *
    threshold_acc, or whose own p is at least threshold_single; a child with p = 0 never
    is. Up to S drafts are accepted. The bonus is drawn from p without the rejected
    children of the last accepted node (from p itself if they had all of it). With both
    thresholds at 1 the children get their share of p and the bonus the rest: exactly p.
    Lower thresholds accept more and change the distribution.

    Coins and draws are pure functions of (key, index of the token they decide), see
    `sampling/ops/noise.py`. Each index is decided once, with a separate stream for the
    bonus. A row of `target_probs` with one nonzero weight decodes greedily.

    Args:
        tree: b trees of D nodes; siblings propose distinct tokens.
        target_probs: [b * D, V] float32, rows contiguous; weights after temperature and
            filters, which need not sum to 1.
        totals: [b * D] float32, row sums of `target_probs`.
        keys: [b] int64, `noise.mix_seed` of the requests' seeds.
        threshold_single, threshold_acc: above 0, at most 1.
        result: b rows, written; S is the width of its `accept_index` less one.
    """
    rows, nodes = tree.tokens.shape
    steps = result.accept_index.shape[1] - 1
    # Coins of all nodes; only those on the accepted path are used.
    decides = tree.positions + 1
    coins = noise.uniform(keys.repeat_interleave(nodes), decides.view(-1))
    draws = noise.uniform(
        (keys ^ BONUS_STREAM).repeat_interleave(nodes), decides.view(-1)
    )
    for q in range(rows):
        tokens = tree.tokens[q].tolist()
        children = _children(tree, q)
        path, rejected = [0], list[int]()
        while len(path) <= steps:
            place = q * nodes + path[-1]
            total = float(totals[place])
            accepted, rejected, mass = None, list[int](), 0.0
            for child in children[path[-1]]:
                p = _weight(target_probs[place], tokens[child])
                mass += p
                is_likely = p >= threshold_single * total
                if p > 0 and (
                    float(coins[place]) * total * threshold_acc < mass or is_likely
                ):
                    accepted = child
                    break
                rejected.append(tokens[child])
            if accepted is None:
                break
            path.append(accepted)
        if len(path) > steps:
            rejected = []
        last = q * nodes + path[-1]
        bonus = _draw(target_probs[last], rejected, float(draws[last]))
        _record(result, q, path, [tokens[node] for node in path[1:]] + [bonus])
        width = result.rejected.shape[1]
        padded = (rejected + [-1] * width)[:width]
        result.rejected[q] = torch.tensor(padded)


verify_tree_target_only = Op(
    reference=verify_tree_target_only_ref,
    native=_NATIVE + "verify_tree_target_only",
    triton=_TRITON + "triton_sampled:verify_tree_target_only",
    place="tree.tokens",
)


def _weight(weights: Tensor, token: int) -> float:
    """Return the weight of a proposed token; 0 if it is outside the vocabulary."""
    return float(weights[token]) if 0 <= token < weights.shape[0] else 0.0


def _draw(weights: Tensor, rejected: list[int], noise_value: float) -> int:
    """Return the first id whose cumulative weight, without `rejected`, exceeds the
    noise."""
    rest = weights.double().clone()
    rest[[token for token in rejected if 0 <= token < len(rest)]] = 0.0
    if not float(rest.sum()) > 0:
        rest = weights.double()
    sums = rest.cumsum(dim=0)
    return min(int((sums <= noise_value * sums[-1]).sum()), len(rest) - 1)


def _children(tree: DraftTree, q: int) -> list[list[int]]:
    nodes = tree.tokens.shape[1]
    first = q * nodes
    children: list[list[int]] = [[] for _ in range(nodes)]
    for node, parent in enumerate(tree.parent_index[q].tolist()):
        if first <= parent < first + nodes:
            children[parent - first].append(node)
    return children


def _record(
    result: VerifyResult, q: int, path: list[int], following: list[int]
) -> None:
    """Write one request's accepted path and the tokens that follow its nodes."""
    nodes = result.predict.shape[1]
    result.predict[q] = 0
    result.predict[q, path] = torch.tensor(following, device=result.predict.device)
    result.accept_index[q] = -1
    places = torch.tensor(path, device=result.predict.device) + q * nodes
    result.accept_index[q, : len(path)] = places
    result.accept_lens[q] = len(path)


def gather_accepted_ref(
    result: VerifyResult,
    *,
    tokens: Tensor,
    node_rows: Tensor,
    bonus_tokens: Tensor,
) -> None:
    """Move everything that belongs to the accepted path to the front.

    Args:
        result: result of the verification, for b requests.
        tokens: [b, W] int64, W >= S + 1, written: tokens gained, in order, padded with
            the last one so that every entry is in the vocabulary.
        node_rows: [b, S + 1] int64, written: indices of the accepted path among all b *
            D nodes, padded with the last one. The draft extend reads these rows of
            hidden states.
        bonus_tokens: [b] int64, written: the last token gained, which is the next root.
    """
    last = result.accept_lens[:, None] - 1
    column = torch.arange(tokens.shape[1], device=tokens.device)
    places = result.accept_index.gather(1, torch.minimum(column, last))
    flat = result.predict.view(-1)
    tokens.copy_(flat[places])
    node_rows.copy_(places[:, : node_rows.shape[1]])
    bonus_tokens.copy_(flat[places[:, -1]])


gather_accepted = Op(
    reference=gather_accepted_ref,
    native=_NATIVE + "gather_accepted",
    triton=_TRITON + "triton_greedy:gather_accepted",
    place="result.predict",
)
