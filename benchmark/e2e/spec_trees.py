"""The shape of a draft tree on a command line."""

from __future__ import annotations

from typing import NamedTuple


class Tree(NamedTuple):
    """Written topk,steps,draft tokens."""

    topk: int
    steps: int
    nodes: int

    @classmethod
    def parse(cls, text: str) -> Tree:
        topk, steps, nodes = (int(part) for part in text.split(","))
        return cls(topk, steps, nodes)

    def flags(self) -> dict[str, int]:
        return {
            "speculative_eagle_topk": self.topk,
            "speculative_num_steps": self.steps,
            "speculative_num_draft_tokens": self.nodes,
        }
