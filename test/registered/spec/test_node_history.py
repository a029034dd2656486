"""The tokens on the path to each node of a draft tree, as penalties count them."""

from __future__ import annotations

import random

import pytest
import torch

from sglang.srt.configs.draft_layout import TreeShape
from sglang.srt.draft_trees.buffers import DraftTree
from sglang.srt.speculative.eagle_utils import node_history
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="cpu")

WIDTH = 40


def random_tree(
    rng: random.Random, *, lens: list[int], nodes: int
) -> tuple[DraftTree, list[list[list[int]]]]:
    """Trees over prefixes of these lengths, and the path to each node."""
    shape = TreeShape(topk=4, num_steps=5, num_draft_tokens=nodes)
    tree = DraftTree.allocate(len(lens), shape, device="cpu")
    paths: list[list[list[int]]] = []
    for q, length in enumerate(lens):
        of_row: list[list[int]] = []
        for node in range(nodes):
            parents = [i for i in range(node) if len(of_row[i]) < 5]
            of_row.append([*(of_row[rng.choice(parents)] if node else []), node])
            tree.positions[q, node] = length + len(of_row[node]) - 1
            tree.mask[q, node, of_row[node]] = True
            tree.tokens[q, node] = 1000 * (q + 1) + node
        paths.append(of_row)
    return tree, paths


@pytest.mark.parametrize("spare", [0, 3, 100])
@pytest.mark.parametrize("seed", range(5))
def test_the_history_of_a_node_is_its_prefix_and_its_path(
    seed: int, spare: int
) -> None:
    """Whatever bound is given, as long as it holds."""
    rng = random.Random(seed)
    lens, nodes = [rng.randrange(1, 30) for _ in range(3)], 9
    tree, paths = random_tree(rng, lens=lens, nodes=nodes)
    table = torch.arange(6 * WIDTH, dtype=torch.int32).view(6, WIDTH)
    rows = [4, 1, 2]
    history = node_history(
        tree,
        token_table=table,
        req_pool_indices=torch.tensor(rows),
        max_len=max(lens) + 5 + spare,
    )
    for q, (row, length) in enumerate(zip(rows, lens, strict=True)):
        for node in range(nodes):
            place = q * nodes + node
            own = int(history.req_pool_indices[place])
            count = int(history.lens[place])
            known = history.token_table[own, :count].tolist()
            path = [1000 * (q + 1) + i for i in paths[q][node]]
            assert known == [*table[row, :length].tolist(), *path]
            assert count <= history.max_len


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
