"""Engines of the promise run: small, most of them on the mock model."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from scripts.mutation.models import CONTEXT, DRAFTS, MODELS
from scripts.mutation.targets import Kind
from sglang.test.harness import EngineHarness

SWEEP_INTERVAL = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One configuration of an engine and its clients.

    Fields:
        slots: number of KV slots, small enough to force evictions and retractions.
        model: a key of `MODELS`.
        draft: a key of `DRAFTS`, or empty without speculation.
        tree: top-k, steps and nodes.
        longest_stem: tokens of the longest prefix that requests share.
        asks: a key of `asks.PARAMS`: what requests ask for.
        damage_every: steps between two damages that the engine has to heal, or 0 to run
            it in mode `raise` without any.
        has_front: whether clients talk to the front, in this process.
        ranks: number of ranks of tensor parallelism.
        options: further arguments of the server.
    """

    name: str
    kind: Kind
    page_size: int
    slots: int
    requests: int
    rows: int = 12
    model: str = "mock"
    draft: str = ""
    tree: tuple[int, int, int] = (1, 1, 2)
    longest_stem: int = 110
    asks: str = "greedy"
    damage_every: int = 0
    has_front: bool = False
    ranks: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def vocab(self) -> int:
        return MODELS[self.model].vocab

    @property
    def longest(self) -> int:
        """Largest number of tokens of a request's prompt and output but one."""
        return min(CONTEXT, self.slots // 2) - 1

    @property
    def has_draft_oracle(self) -> bool:
        """Whether the drafts of every request can be predicted."""
        is_mock = bool(self.draft) and MODELS[self.model].is_mock
        return is_mock and self.kind is Kind.SPEC

    def reference(self) -> World:
        """Return the world that shows the right answers: without speculation, damage
        and ranks.
        """
        options = {k: v for k, v in self.options.items() if k not in EVENTS | TIERS}
        return replace(self, draft="", damage_every=0, ranks=1, options=options)


WINDOWS = {"swa_full_tokens_ratio": 0.5}
# The endpoint is added when the engine is built.
EVENTS = {"kv_events_config": '{"publisher": "zmq", "endpoint": "ipc://%s"}'}
TREE, SMALL_TREE, CHAIN = (4, 4, 12), (4, 3, 8), (1, 3, 4)
# More states than rows of requests, so that there are checkpoints, but not for all.
STATES = {"max_mamba_cache_size": 20, "mamba_track_interval": 16}
TIERS = {"enable_hierarchical_cache": True, "hicache_ratio": 3.0}
WORLDS = (
    World(name="plain-1", kind=Kind.PLAIN, page_size=1, slots=420, requests=36),
    World(name="plain-16", kind=Kind.PLAIN, page_size=16, slots=592, requests=36),
    World(
        name="eagle-1",
        kind=Kind.SPEC,
        page_size=1,
        slots=560,
        requests=20,
        rows=8,
        draft="eagle-hidden",
        tree=TREE,
    ),
    World(
        name="eagle-16",
        kind=Kind.SPEC,
        page_size=16,
        slots=704,
        requests=20,
        rows=8,
        draft="eagle-attention",
        tree=SMALL_TREE,
    ),
    World(
        name="eagle3-chain",
        kind=Kind.SPEC,
        page_size=1,
        slots=480,
        requests=20,
        rows=8,
        draft="eagle3-attention",
        tree=CHAIN,
    ),
    World(
        name="windows-4",
        kind=Kind.LAYOUT,
        page_size=4,
        slots=560,
        requests=20,
        model="windows",
        options=WINDOWS,
    ),
    World(
        name="windows-eagle",
        kind=Kind.LAYOUT,
        page_size=1,
        slots=640,
        requests=14,
        rows=8,
        model="windows",
        draft="eagle-windows",
        tree=TREE,
        options=WINDOWS,
    ),
    World(
        name="states-1",
        kind=Kind.STATE,
        page_size=1,
        slots=560,
        requests=30,
        model="states",
        options=STATES,
    ),
    World(
        name="states-16",
        kind=Kind.STATE,
        page_size=16,
        slots=704,
        requests=30,
        model="states",
        options=STATES,
    ),
    World(
        name="states-eagle",
        kind=Kind.STATE,
        page_size=1,
        slots=640,
        requests=16,
        rows=8,
        model="states",
        draft="eagle-states",
        tree=TREE,
        options=STATES,
    ),
    World(
        name="tiers-1",
        kind=Kind.TIERS,
        page_size=1,
        slots=560,
        requests=30,
        longest_stem=260,
        options=TIERS,
    ),
    World(
        name="tiers-windows",
        kind=Kind.TIERS,
        page_size=16,
        slots=592,
        requests=20,
        model="windows",
        longest_stem=260,
        options=WINDOWS | TIERS,
    ),
    World(
        name="tiers-states",
        kind=Kind.TIERS,
        page_size=1,
        slots=560,
        requests=20,
        model="states",
        longest_stem=260,
        options=STATES | TIERS,
    ),
    World(
        name="latents-eagle",
        kind=Kind.LAYOUT,
        page_size=4,
        slots=560,
        requests=10,
        rows=6,
        model="latents",
        draft="eagle-latents",
        tree=SMALL_TREE,
    ),
    World(
        name="chunks-4",
        kind=Kind.LAYOUT,
        page_size=4,
        slots=440,
        requests=20,
        options={"disable_radix_cache": True},
    ),
    World(
        name="events-16",
        kind=Kind.LAYOUT,
        page_size=16,
        slots=512,
        requests=20,
        options=EVENTS,
    ),
    World(
        name="sampled-1",
        kind=Kind.SAMPLING,
        page_size=1,
        slots=480,
        requests=24,
        asks="sampled",
    ),
    World(
        name="sampled-eagle",
        kind=Kind.SAMPLING,
        page_size=4,
        slots=600,
        requests=16,
        rows=8,
        draft="eagle-hidden",
        tree=TREE,
        asks="sampled",
    ),
    World(
        name="grammars-4",
        kind=Kind.GRAMMAR,
        page_size=4,
        slots=320,
        requests=20,
        model="bytes",
        asks="grammars",
    ),
    World(
        name="grammars-eagle",
        kind=Kind.GRAMMAR,
        page_size=1,
        slots=520,
        requests=14,
        rows=8,
        model="bytes",
        draft="eagle-bytes",
        tree=TREE,
        asks="grammars",
    ),
    World(
        name="front-1",
        kind=Kind.FRONT,
        page_size=1,
        slots=560,
        requests=14,
        model="bytes",
        asks="texts",
        has_front=True,
    ),
    World(
        name="front-eagle",
        kind=Kind.FRONT,
        page_size=4,
        slots=800,
        requests=10,
        rows=8,
        model="bytes",
        draft="eagle-bytes",
        tree=TREE,
        asks="texts",
        has_front=True,
        options={"stream_interval": 3},
    ),
    World(
        name="heal-4",
        kind=Kind.HEAL,
        page_size=4,
        slots=480,
        requests=12,
        model="bytes",
        asks="texts",
        damage_every=9,
        has_front=True,
    ),
    World(
        name="heal-eagle",
        kind=Kind.HEAL,
        page_size=4,
        slots=800,
        requests=14,
        rows=8,
        draft="eagle-hidden",
        tree=TREE,
        asks="mixed",
        damage_every=9,
    ),
    World(
        name="heal-windows",
        kind=Kind.HEAL,
        page_size=4,
        slots=500,
        requests=14,
        model="windows",
        damage_every=9,
        options=WINDOWS,
    ),
    World(
        name="ranks-4",
        kind=Kind.RANKS,
        page_size=4,
        slots=480,
        requests=12,
        asks="mixed",
        ranks=2,
    ),
)


def worlds_for(kinds: Kind) -> list[World]:
    return [world for world in WORLDS if world.kind & kinds]


class ModelFolders:
    """Models on disk, written once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._sockets = itertools.count()
        self.targets: dict[str, Path] = {}
        for name, model in MODELS.items():
            self.targets[name] = _written(root / name, model.write)
        self.drafts: dict[str, Path] = {}
        for name, draft in DRAFTS.items():
            write = draft.bind(self.targets[draft.model])
            self.drafts[name] = _written(root / name, write)

    def new_socket(self) -> Path:
        """Return a path that no other engine uses, of this process or its parent."""
        return self._root / f"{os.getpid()}-{next(self._sockets)}"


def _written(folder: Path, write: Callable[[Path], object]) -> Path:
    write(folder)
    return folder


def build(
    world: World, folders: ModelFolders, *, overlap: bool, canary: bool
) -> EngineHarness:
    options: dict[str, Any] = {"kv_canary": "none"}
    if canary:
        has_radix = not world.options.get("disable_radix_cache", False)
        options = {
            "kv_canary": "heal" if world.damage_every else "raise",
            "kv_canary_heal_limit": 0,
            "kv_canary_real_data": "all",
            "kv_canary_sweep_interval": SWEEP_INTERVAL if has_radix else 0,
        }
        if not world.damage_every:
            del options["kv_canary_heal_limit"]
    if world.draft:
        topk, num_steps, nodes = world.tree
        options |= {
            "speculative_algorithm": DRAFTS[world.draft].algorithm,
            "speculative_draft_model_path": str(folders.drafts[world.draft]),
            "speculative_eagle_topk": topk,
            "speculative_num_steps": num_steps,
            "speculative_num_draft_tokens": nodes,
        }
    options |= world.options
    if "kv_events_config" in options:
        # An engine keeps its endpoint until its process ends.
        options["kv_events_config"] %= folders.new_socket()
    return EngineHarness(
        folders.targets[world.model],
        overlap=overlap,
        device="cpu",
        dtype="float32",
        page_size=world.page_size,
        max_total_tokens=world.slots,
        max_running_requests=world.rows,
        chunked_prefill_size=48,
        schedule_conservativeness=0.1,
        skip_tokenizer_init=not MODELS[world.model].has_text,
        tp_size=world.ranks,
        **options,
    )
