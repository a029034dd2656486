"""The pool of a draft model (EAGLE): what it holds, and the forwards that are checked.

A draft model shares the slots and the table of its target. Its slot p belongs to token
p + 1, from which its KV was made. What stays there is written by its prefill and by the
forward that follows each verification; what its draft steps write in between is written
again by that forward, and read by nobody else.

These two are checked by launches around them, outside of their graphs: the prefix that
they read, all of which the draft steps before them have read too, and what they store.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch

from kv_canary.engines.hooks import problem_with
from kv_canary.engines.sglang import hooks_of
from kv_canary.engines.sglang.batch import DRAFT_EXTEND

SHIFTING = ("EAGLE", "EAGLE3", "NEXTN")
"""Algorithms under which the prefix cache tells prefixes apart by the token after them,
which a shared slot of the draft model depends on."""


def unseen_because(args: Any) -> str | None:
    """Why the pool of a `ServerArgs`' draft model is not checked; None: it is."""
    name = str(getattr(args, "speculative_algorithm", None)).upper()
    if name not in SHIFTING:
        return f"of {name} prefixes are shared whose next tokens differ"
    if getattr(args, "enable_multi_layer_eagle", False):
        return "there is one for each layer"
    if getattr(args, "speculative_adaptive", False):
        return "the number of its tokens changes"
    if not _knows_tails():
        return "this version stores another token at the end of a chunk than follows it"
    return problem_with(hooks_of.DRAFT_EXTEND)


def _knows_tails() -> bool:
    module, _, name = hooks_of.TAILS.partition(":")
    try:
        return hasattr(importlib.import_module(module), name)
    except ImportError:
        return False


def extend_after(batch: Any, result: Any) -> Any:
    """The forward of a draft model after a verification, as a `ForwardBatch`: a chain
    of the tokens that were accepted, and then of any.

    Args:
        batch: the `ScheduleBatch` that was verified; its lengths are those before.
        result: of the verification.
    """
    rows = len(batch.seq_lens)
    tokens = result.next_token_ids.view(rows, -1)
    nodes = tokens.shape[1]
    place = torch.arange(nodes, device=tokens.device)
    return SimpleNamespace(
        forward_mode=SimpleNamespace(name=DRAFT_EXTEND),
        batch_size=rows,
        rids=[request.rid for request in batch.reqs],
        input_ids=tokens.reshape(-1),
        req_pool_indices=batch.req_pool_indices,
        seq_lens=batch.seq_lens,
        positions=(batch.seq_lens[:, None] + place).view(-1),
        out_cache_loc=batch.out_cache_loc,
        spec_info=SimpleNamespace(draft_token_num=nodes, custom_mask=None),
    )
