"""Configurations of speculative decoding that the tests run.

`SAMPLE` covers every pair of levels that can occur together, in 24 configurations;
`whole_matrix` is every algorithm, tree and page size. Knows no engine.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

MAX_NODES = 64

# Field of `SpecConfig` -> its values in the matrix.
LEVELS: dict[str, tuple[Any, ...]] = {
    "algorithm": ("EAGLE", "EAGLE3", "STANDALONE"),
    "topk": (1, 2, 4, 8),
    "page_size": (1, 4, 16, 64),
    "num_steps": (1, 2, 3, 4, 5, 6),
    "nodes": ("min", "middle", "max"),
    "backend": ("cpu_native", "torch_native"),
    "overlap": (False, True),
    "model": ("demo", "mock", "llama", "qwen3"),
    "variant": (False, True),
}
# Pairs that are not covered: six runs per model are too few.
_UNPAIRED = frozenset({("num_steps", "variant"), ("nodes", "variant")})
# Fields that the whole matrix draws at random.
_DRAWN = ("nodes", "backend", "overlap", "model", "variant")
MATRIX_SEED = 0

Pair = tuple[str, Any, str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecConfig:
    """One configuration of speculative decoding.

    Fields:
        nodes: number of draft tokens relative to the possible range of a tree, or None
            for a chain.
        backend: attention backend, on a CPU.
        model: the demo model, the mock model, or random weights of an architecture.
        variant: a mock head that reads hidden states instead of its own KV; an EAGLE3
            head of a random model with a draft vocabulary. None if there is no such
            choice.
    """

    algorithm: str
    topk: int
    page_size: int
    num_steps: int
    nodes: str | None
    backend: str
    overlap: bool
    model: str
    variant: bool | None

    @property
    def num_draft_tokens(self) -> int:
        least = self.num_steps + 1
        candidates = self.topk + self.topk**2 * (self.num_steps - 1)
        most = min(candidates + 1, MAX_NODES)
        sizes = {None: least, "min": least, "middle": (least + most) // 2, "max": most}
        return sizes[self.nodes]

    @property
    def breadth_flag(self) -> str:
        """Return the flag that sets `topk`."""
        if self.algorithm == "NGRAM":
            return "speculative_ngram_max_bfs_breadth"
        return "speculative_eagle_topk"

    def __str__(self) -> str:
        """Return the id of the test."""
        order = "overlap" if self.overlap else "in-order"
        variant = "-variant" if self.variant else ""
        tree = f"k{self.topk}-s{self.num_steps}-d{self.num_draft_tokens}"
        return (
            f"{self.model}{variant}-{self.algorithm}-{tree}-p{self.page_size}-"
            f"{self.backend}-{order}"
        )

    def canonical(self) -> SpecConfig:
        """Return this configuration without choices that have no effect."""
        heads = {"mock": ("EAGLE", "EAGLE3"), "demo": ()}.get(self.model, ("EAGLE3",))
        return replace(
            self,
            nodes=None if self.topk == 1 else self.nodes or "min",
            variant=bool(self.variant) if self.algorithm in heads else None,
        )


# algorithm, top-k, page size, steps, nodes, backend, overlap, model, variant
_SAMPLE = """
    EAGLE3     1 64 1 -      torch_native no  qwen3 yes
    STANDALONE 2 16 1 middle cpu_native   yes mock  -
    EAGLE      4  4 1 max    cpu_native   yes demo  -
    STANDALONE 8  1 1 min    cpu_native   no  llama -
    EAGLE      1  4 2 -      cpu_native   no  llama -
    EAGLE      2 16 2 max    cpu_native   no  mock  no
    STANDALONE 4 64 2 min    cpu_native   yes demo  -
    EAGLE3     8  1 2 middle torch_native yes qwen3 no
    STANDALONE 1  1 3 -      torch_native yes demo  -
    EAGLE3     2  4 3 min    cpu_native   yes llama yes
    EAGLE      4 16 3 max    cpu_native   no  qwen3 -
    EAGLE3     8 64 3 middle cpu_native   yes mock  yes
    EAGLE      1  4 4 -      torch_native no  mock  no
    STANDALONE 2  1 4 max    torch_native yes qwen3 -
    EAGLE3     4 64 4 middle cpu_native   no  llama no
    STANDALONE 8 16 4 min    cpu_native   no  demo  -
    STANDALONE 1 16 5 -      torch_native yes llama -
    EAGLE3     2 64 5 max    cpu_native   no  demo  -
    EAGLE      4  1 5 min    cpu_native   yes mock  yes
    STANDALONE 8  4 5 middle cpu_native   yes qwen3 -
    STANDALONE 1  1 6 -      cpu_native   yes mock  -
    EAGLE      2  4 6 middle cpu_native   no  demo  -
    EAGLE3     4 16 6 min    torch_native no  qwen3 yes
    EAGLE      8 64 6 max    cpu_native   no  llama -
"""
_NGRAM_SAMPLE = """
    NGRAM      1  1 3 -      cpu_native   no  demo  -
    NGRAM      4 16 5 middle cpu_native   yes llama -
    NGRAM      8  4 6 min    torch_native no  mock  -
    NGRAM      2 64 2 max    cpu_native   yes mock  -
    NGRAM      3  1 4 middle cpu_native   yes gemma3 -
    NGRAM      8 16 6 middle cpu_native   no  mistral -
"""


def _sample(rows: str) -> Iterator[SpecConfig]:
    words: dict[str, bool | None] = {"yes": True, "no": False, "-": None}
    for line in rows.strip().splitlines():
        algorithm, topk, page, steps, nodes, backend, overlap, model, variant = (
            line.split()
        )
        yield SpecConfig(
            algorithm=algorithm,
            topk=int(topk),
            page_size=int(page),
            num_steps=int(steps),
            nodes=None if nodes == "-" else nodes,
            backend=backend,
            overlap=overlap == "yes",
            model=model,
            variant=words[variant],
        )


SAMPLE: tuple[SpecConfig, ...] = tuple(_sample(_SAMPLE))
# Apart: its drafts know nothing of models.
NGRAM_SAMPLE: tuple[SpecConfig, ...] = tuple(_sample(_NGRAM_SAMPLE))


def whole_matrix() -> list[SpecConfig]:
    """Return every algorithm, top-k, page size and number of steps.

    The other fields are drawn, so that a run takes minutes and not days.
    """
    trees = list(
        itertools.product(
            *(LEVELS[f] for f in ("algorithm", "topk", "page_size", "num_steps"))
        )
    )
    rng = random.Random(MATRIX_SEED)
    found = []
    for algorithm, topk, page_size, steps in trees:
        config = SpecConfig(
            algorithm=algorithm,
            topk=topk,
            page_size=page_size,
            num_steps=steps,
            **{field: rng.choice(LEVELS[field]) for field in _DRAWN},
        )
        found.append(config.canonical())
    return found


def pairs(config: SpecConfig) -> set[Pair]:
    """Return the pairs of levels that this configuration exercises."""
    return {
        (first, getattr(config, first), second, getattr(config, second))
        for first, second in itertools.combinations(LEVELS, 2)
        if (first, second) not in _UNPAIRED
        and getattr(config, first) is not None
        and getattr(config, second) is not None
    }


def possible_pairs() -> set[Pair]:
    """Return the pairs of levels that some configuration has."""
    found: set[Pair] = set()
    base = SAMPLE[0]
    kinds = itertools.product(LEVELS["algorithm"], LEVELS["topk"], LEVELS["model"])
    for algorithm, topk, model in kinds:
        kind = replace(base, algorithm=algorithm, topk=topk, model=model)
        for first, second in itertools.combinations(LEVELS, 2):
            for one, two in itertools.product(LEVELS[first], LEVELS[second]):
                wanted = replace(kind, **{first: one, second: two}).canonical()
                if (getattr(wanted, first), getattr(wanted, second)) == (one, two):
                    found |= {(first, one, second, two)}
    return {pair for pair in found if (pair[0], pair[2]) not in _UNPAIRED}


def most_covering(configs: Sequence[SpecConfig], count: int) -> list[SpecConfig]:
    """Choose `count` of them, each adding most pairs to those before."""
    chosen: list[SpecConfig] = []
    covered: set[Pair] = set()
    left = list(configs)
    for _ in range(min(count, len(left))):
        best = max(left, key=lambda config: len(pairs(config) - covered))
        left.remove(best)
        chosen.append(best)
        covered |= pairs(best)
    return chosen
