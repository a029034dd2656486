"""The pool of a draft model (EAGLE): its contents, and the forwards that are checked.

A draft model shares the slots and the table of its target. Its slot p belongs to token
p + 1, from which its KV was made. Lasting KV is written by its prefill and by the
forward after each verification. Its draft steps write KV in between, which only they
read and which that forward overwrites.

These two forwards are checked by launches around them, outside their graphs: the prefix
they read, all of which the preceding draft steps have also read, and what they store.
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
"""Algorithms whose prefix cache tells prefixes apart by the token after them. A shared
slot of the draft model depends on that token."""


def unseen_because(args: Any) -> str | None:
    """Return why the pool of a `ServerArgs`' draft model is not checked, or None."""
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
    """Return a draft model's forward after a verification as a `ForwardBatch`: a chain
    of the accepted tokens, followed by arbitrary ones.

    Args:
        batch: the `ScheduleBatch` that was verified, with its lengths before that.
        result: result of the verification.
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
