"""Engines of the promise run: small, on the mock model, with the canary."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.mutation.targets import BOTH, PLAIN, SPEC
from sglang.test.harness import EngineHarness
from sglang.test.tiny_models import write_mock_draft, write_mock_model

VOCAB, CONTEXT = 1000, 512
SWEEP_INTERVAL = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One configuration of an engine.

    Fields:
        draft: kind and source of the mock draft, or empty without speculation.
        tree: top-k, steps and nodes.
        slots: number of KV slots, small enough to force evictions and retractions.
    """

    name: str
    page_size: int
    slots: int
    requests: int
    rows: int = 12
    draft: tuple[str, ...] = ()
    tree: tuple[int, int, int] = (1, 1, 2)

    @property
    def kind(self) -> str:
        return SPEC if self.draft else PLAIN


WORLDS = (
    World(name="plain-1", page_size=1, slots=420, requests=36),
    World(name="plain-16", page_size=16, slots=592, requests=36),
    World(
        name="eagle-1",
        page_size=1,
        slots=612,
        requests=20,
        rows=8,
        draft=("EAGLE", "hidden"),
        tree=(4, 4, 12),
    ),
    World(
        name="eagle-16",
        page_size=16,
        slots=960,
        requests=20,
        rows=8,
        draft=("EAGLE", "attention"),
        tree=(4, 3, 8),
    ),
    World(
        name="eagle3-chain",
        page_size=1,
        slots=480,
        requests=20,
        rows=8,
        draft=("EAGLE3", "attention"),
        tree=(1, 3, 4),
    ),
)


def worlds_for(kind: str) -> list[World]:
    return [w for w in WORLDS if kind == BOTH or w.kind == kind]


class ModelFolders:
    """Mock models on disk, written once."""

    def __init__(self, root: Path) -> None:
        self.target = self._sized(write_mock_model, root / "target")
        self.drafts = {
            world.draft: self._sized(
                write_mock_draft,
                root / "-".join(world.draft),
                kind=world.draft[0],
                source=world.draft[1],
            )
            for world in WORLDS
            if world.draft
        }

    @staticmethod
    def _sized(write: Any, folder: Path, **options: Any) -> Path:
        written: Path = write(
            folder, vocab_size=VOCAB, max_position_embeddings=CONTEXT, **options
        )
        return written


def build(
    world: World, folders: ModelFolders, *, overlap: bool, canary: bool
) -> EngineHarness:
    options: dict[str, Any] = {"kv_canary": "none"}
    if canary:
        options = {
            "kv_canary": "raise",
            "kv_canary_real_data": "all",
            "kv_canary_sweep_interval": SWEEP_INTERVAL,
        }
    if world.draft:
        topk, num_steps, nodes = world.tree
        options |= {
            "speculative_algorithm": world.draft[0],
            "speculative_draft_model_path": str(folders.drafts[world.draft]),
            "speculative_eagle_topk": topk,
            "speculative_num_steps": num_steps,
            "speculative_num_draft_tokens": nodes,
        }
    return EngineHarness(
        folders.target,
        overlap=overlap,
        device="cpu",
        dtype="float32",
        page_size=world.page_size,
        max_total_tokens=world.slots,
        max_running_requests=world.rows,
        chunked_prefill_size=48,
        schedule_conservativeness=0.1,
        skip_tokenizer_init=True,
        **options,
    )
