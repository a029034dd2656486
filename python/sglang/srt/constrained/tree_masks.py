"""Computes token masks for the nodes of a draft tree by walking the grammar along
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from sglang.srt.constrained.base_grammar import Grammar


def fill_tree_masks(
    grammar: Grammar,
    *,
    tokens: Sequence[int],
    next_token: Sequence[int],
    next_sibling: Sequence[int],
    masks: Tensor,
    accepted: npt.NDArray[np.int32],
) -> None:
    """Write the mask of tokens allowed after each node that the grammar reaches.

    Nodes below a disallowed token keep their mask, because verification never reaches
    them.

    Args:
        grammar: the grammar after the root's token; unchanged on return.
        tokens: token of each node; the root's is unused.
        next_token, next_sibling: first child and next sibling of each node, or -1.
        masks: int32 [D, words] on the host.
        accepted: [D]; written, the tokens that the grammar has accepted at each node.

    Raises:
        GrammarLimitError: the grammar has grown to a limit and is lost.
    """

    def visit(node: int) -> None:
        grammar.fill_mask(masks[node])
        accepted[node] = grammar.num_accepted
        child = next_token[node]
        while child != -1:
            token = tokens[child]
            if _allows(masks[node], token):
                grammar.accept(token)
                try:
                    visit(child)
                finally:
                    grammar.rollback(1)
            child = next_sibling[child]

    visit(0)


def _allows(mask: Tensor, token: int) -> bool:
    return bool(int(mask[token // 32]) >> (token % 32) & 1)
