"""Faults of the hidden states and candidates that a draft hands on beside its KV."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from sglang.srt.speculative import eagle_draft_phase, eagle_worker_v2
from sglang.srt.speculative.eagle_draft_worker import EagleDraftWorker

if TYPE_CHECKING:
    from torch import Tensor

    from sglang.faults.steps.site import Fault, FaultSite
    from sglang.srt.draft_trees.buffers import DraftCandidates, VerifyResult
    from sglang.srt.forward.batch import ForwardBatch


def stash_nothing(site: FaultSite) -> None:
    """Keep a request's old hidden state for the next iteration."""

    def fault(
        stash: Fault, rows: Tensor, candidates: DraftCandidates, hidden: Tensor
    ) -> None:
        for row in site.candidates()[:1] if site.is_decode else []:
            old = site.worker.draft_worker.relay.hidden_states
            assert old is not None
            hidden = hidden.clone()
            hidden[row] = old[rows[row]]
            site.harm(row)
        stash(rows, candidates, hidden)

    site.wrap(site.worker.draft_worker.relay, "stash", fault)


def stash_swapped(site: FaultSite) -> None:
    """Stash the candidates of two requests in each other's row."""

    def fault(
        stash: Fault, rows: Tensor, candidates: DraftCandidates, hidden: Tensor
    ) -> None:
        for a, b in site.pairs()[:1] if site.is_decode else []:
            candidates = type(candidates)(
                probs=_swapped(candidates.probs, a, b),
                ids=_swapped(candidates.ids, a, b),
            )
            site.harm(a, b)
        stash(rows, candidates, hidden)

    site.wrap(site.worker.draft_worker.relay, "stash", fault)


def gather_neighbours(site: FaultSite) -> None:
    """Start a request's iteration from another one's hidden state."""

    def fault(gather: Fault, rows: Tensor) -> tuple[DraftCandidates, Tensor]:
        candidates, hidden = gather(rows)
        for a, b in site.pairs()[:1]:
            hidden = hidden.clone()
            hidden[a] = hidden[b]
            site.harm(a)
        return candidates, hidden

    site.wrap(site.worker.draft_worker.relay, "gather", fault)


def take_other_nodes(site: FaultSite) -> None:
    """Extend the draft with the hidden states of the nodes after the accepted ones."""

    def fault(gather: Fault, result: VerifyResult, **out: Any) -> None:
        gather(result, **out)
        for row in site.candidates()[:1]:
            nodes = result.predict.shape[1]
            first = row * nodes
            taken = out["node_rows"][row]
            taken.copy_(first + (taken - first + 1) % nodes)
            site.harm(row)

    site.wrap(eagle_worker_v2, "gather_accepted", fault)


def extend_head_swapped(site: FaultSite) -> None:
    """Let the draft propose two requests' next tokens by each other's last hidden
    state."""

    def fault(make_batch: Fault, *args: Any, **options: Any) -> ForwardBatch:
        batch: ForwardBatch = make_batch(*args, **options)
        rows = batch.logits_rows
        for a, b in site.pairs()[:1]:
            assert rows is not None
            batch = dataclasses.replace(batch, logits_rows=_swapped(rows, a, b))
            site.harm(a, b)
        return batch

    draft_worker = site.worker.draft_worker
    assert isinstance(draft_worker, EagleDraftWorker)
    site.wrap(draft_worker.extend, "batch", fault)


def descend_swapped(site: FaultSite) -> None:
    """Let the first branches of two requests go on from each other's hidden state."""

    def fault(select: Fault, level: int, **out: Any) -> None:
        select(level, **out)
        topk, rows = out["shape"].topk, out["hidden_rows"]
        for a, b in site.pairs()[:1]:
            rows.copy_(_swapped(rows, a * topk, b * topk))
            site.harm(a, b)

    site.wrap(eagle_draft_phase, "select_top_k", fault)


def descend_neighbours(site: FaultSite) -> None:
    """Let a branch go on from the hidden state of a branch that is not its parent."""

    def fault(select: Fault, level: int, **out: Any) -> None:
        select(level, **out)
        if not level:
            return  # all branches follow the root
        topk, rows = out["shape"].topk, out["hidden_rows"]
        for row in site.candidates()[:1]:
            branch, first = row * topk + site.rng.randrange(topk), row * topk
            rows[branch] = first + (rows[branch] - first + 1) % topk
            site.harm(row)

    site.wrap(eagle_draft_phase, "select_top_k", fault)


def _swapped(values: Tensor, a: int, b: int) -> Tensor:
    other = values.clone()
    other[[a, b]] = values[[b, a]]
    return other
