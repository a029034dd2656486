"""Engines with recurrent states, and requests that share and leave checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang.test.canary_traffic import CONTEXT, VOCAB, Lengths
from sglang.test.tiny_models import MOCK_STATE, write_mock_draft, write_mock_model

ROWS, STATES = 8, 72
# Prompts with checkpoints inside; no answer outlives its second one.
LENGTHS = Lengths(shared=96, own=range(40, 100), generated=range(8, 32))
# (page size, overlap, tokens of a chunk).
ENGINES = [(1, False, 64), (1, True, -1), (16, False, -1), (16, True, 64)]


def write_model(folder: Path) -> Path:
    return write_mock_model(
        folder, vocab_size=VOCAB, max_position_embeddings=CONTEXT, **MOCK_STATE
    )


def drafting(folder: Path, tree: tuple[int, int, int]) -> dict[str, Any]:
    """Options for drafts of trees of (topk, steps, nodes)."""
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
    draft = write_mock_draft(folder / "draft", kind="EAGLE", source="hidden", **sizes)
    topk, steps, nodes = tree
    return {
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": str(draft),
        "speculative_eagle_topk": topk,
        "speculative_num_steps": steps,
        "speculative_num_draft_tokens": nodes,
    }


def options(page_size: int, overlap: bool, chunk: int) -> dict[str, Any]:
    return {
        "page_size": page_size,
        "overlap": overlap,
        "disable_overlap_schedule": not overlap,
        "chunked_prefill_size": chunk,
        "max_total_tokens": 4096,
        "max_running_requests": ROWS,
        "max_mamba_cache_size": STATES,
        "mamba_track_interval": 32,
        "skip_tokenizer_init": True,
    }
