"""The Triton functions that `speculative/ops` calls on CUDA tensors, under one name."""

from __future__ import annotations

from sglang.srt.speculative.triton_ops.build import build_tree
from sglang.srt.speculative.triton_ops.select import select_top_k
from sglang.srt.speculative.triton_ops.slots import (
    accepted_moves,
    branch_shifts,
    branch_table,
    branch_token_indices,
    draft_out_cache_loc,
    duplicate_prefix_tail,
    tail_cache_loc,
)
from sglang.srt.speculative.triton_ops.top_k import top_k_probs
from sglang.srt.speculative.triton_ops.verify import (
    gather_accepted,
    verify_tree_greedy,
)
from sglang.srt.speculative.triton_ops.verify_sampled import verify_tree_target_only

__all__ = [
    "accepted_moves",
    "branch_shifts",
    "branch_table",
    "branch_token_indices",
    "build_tree",
    "draft_out_cache_loc",
    "duplicate_prefix_tail",
    "gather_accepted",
    "select_top_k",
    "tail_cache_loc",
    "top_k_probs",
    "verify_tree_greedy",
    "verify_tree_target_only",
]
