"""A request between two steps, as plain data: its memory and its progress."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

# msgspec resolves the annotations.
from sglang.srt.mem_cache.groups.saved_states import SavedHold  # noqa: TC001
from sglang.srt.mem_cache.page_ledger import IntArray  # noqa: TC001

if TYPE_CHECKING:
    from sglang.srt.managers.batch.req import Req
    from sglang.srt.mem_cache.groups.state_runs import StateRuns
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.tree_node import TreeNode


@dataclass(frozen=True, kw_only=True)
class SavedReq:
    """An unfinished request between two steps.

    Fields:
        num_tokens: number of prompt and output tokens so far.
        row: row in `req_to_token`, or 0 if the request holds no memory.
        run: index of the saved run whose path it has locked, or -1 for the root.
        slots: int64 [allocated], the slots in its row.
        num_heals, healed_len: fields of `Req.heals`. score_from: field of
            `Req.logprobs`.
        hidden_until: field of `Req.hidden`.
        states: its checkpoints of recurrent state; None: nothing holds any.
        Others: the attributes of `Req` with the same names.
    """

    serial: int
    num_tokens: int
    row: int
    committed: int
    protected: int
    run: int
    slots: IntArray
    no_cache: bool
    is_chunked: bool
    was_admitted: bool
    cached_tokens: int
    num_restarts: int
    num_heals: int
    healed_len: int
    score_from: int | None
    hidden_until: int
    abort_message: str | None
    seed: int
    branch_len: int = 0
    states: SavedHold | None = None


def save_req(
    req: Req,
    rows: ReqToTokenPool,
    runs: dict[int, int],
    checkpoints: StateRuns | None,
) -> SavedReq:
    """Save the state of `req`.

    Args:
        runs: index of each saved run by the serial of its node.
    """
    row, node = req.req_pool_idx, req.last_node
    states = None
    if checkpoints is not None and req.holds:
        states = checkpoints.hold_of(req.holds).save()
    slots = np.empty(0, dtype=np.int64)
    if row:
        slots = rows.row_slots(row, 0, req.allocated_len).numpy()
    return SavedReq(
        serial=req.serial,
        num_tokens=len(req.tokens),
        row=row,
        committed=req.committed_len,
        protected=req.cache_protected_len,
        run=-1 if node is None or node.parent is None else runs[node.serial],
        slots=slots,
        no_cache=req.no_cache,
        is_chunked=req.is_chunked,
        was_admitted=req.was_admitted,
        cached_tokens=req.cached_tokens,
        num_restarts=req.num_restarts,
        num_heals=req.heals.count,
        healed_len=req.heals.num_tokens,
        score_from=req.logprobs.score_from,
        hidden_until=req.hidden.until,
        abort_message=req.abort_message,
        seed=req.sampling_row.seed,
        branch_len=req.branch_len,
        states=states,
    )


def load_req(req: Req, saved: SavedReq, *, node: TreeNode) -> None:
    """Restore a saved request's state into a new request.

    Args:
        node: the locked node of the saved tree, or the root if nothing is locked.
    """
    req.req_pool_idx = saved.row
    req.committed_len = saved.committed
    req.allocated_len = len(saved.slots)
    req.cache_protected_len = saved.protected
    req.last_node = node if saved.row else None
    req.branch_len = saved.branch_len
    req.no_cache = saved.no_cache
    req.is_chunked = saved.is_chunked
    req.was_admitted = saved.was_admitted
    req.cached_tokens = saved.cached_tokens
    req.num_restarts = saved.num_restarts
    req.heals.count = saved.num_heals
    req.heals.num_tokens = saved.healed_len
    req.logprobs.score_from = saved.score_from
    req.hidden.begin = req.hidden.until = saved.hidden_until
    req.abort_message = saved.abort_message
    # Already sent, to a client that is not here.
    req.sent.tokens = req.output_len
    req.logprobs.is_wanted = False
