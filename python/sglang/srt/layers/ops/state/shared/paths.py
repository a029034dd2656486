"""Paths through draft trees that were accepted, as commits read them. Knows no
states.
"""

from __future__ import annotations

from torch import Tensor


def accepted(path: Tensor, path_lens: Tensor) -> list[list[int]]:
    """Return the accepted nodes of each row, read on the host.

    Args:
        path: [B, P] int64, indices among all nodes, padded at the end.
        path_lens: [B] int64, 0 .. P.
    """
    pairs = zip(path.tolist(), path_lens.tolist(), strict=True)
    return [nodes[:length] for nodes, length in pairs]
