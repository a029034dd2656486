"""The inputs of a forward: what the host knows of them, and what the sampler drew.

A row's first new token is usually the one that was sampled last, which the device may
know before the host does. All others are known to the host: prompts, and proposals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kv_canary.accepted import SampledTokens
from kv_canary.records import UNKNOWN, Request
from kv_canary.runtime.uploads import upload

if TYPE_CHECKING:
    from torch import Tensor

    from kv_canary.engines.block_ledger import BlockLedger
    from kv_canary.engines.proposals import Proposals
    from kv_canary.engines.step import ForwardReads, RowStep
    from kv_canary.state import CanaryState


def sampled_counts(tokens: Tensor) -> Tensor | None:
    """Return how many tokens [R] of each row of [R, n] are sampled: those before the
    first negative one. None if there is at most one."""
    if tokens.shape[1] == 1:
        return None
    return (tokens >= 0).cumprod(dim=1).sum(dim=1)


def known_inputs(
    reads: ForwardReads, rows: Mapping[str, RowStep], ledger: BlockLedger
) -> tuple[Tensor, Tensor] | None:
    """Return tokens and positions [T] that a forward is due to get, as `oracle` of its
    view; tokens are negative if unknown. None if each row only has the token that was
    sampled last."""
    steps = [rows[rid] for rid in reads.rids]
    if all(s.scheduled == 1 and s.computed >= ledger[s.rid].given for s in steps):
        return None
    tokens = np.full(reads.num_tokens, UNKNOWN, dtype=np.int64)
    positions = np.full(reads.num_tokens, UNKNOWN, dtype=np.int64)
    begin = 0
    for step in steps:
        if ledger[step.rid].is_estimated:
            begin += step.scheduled
            continue
        first, end = step.computed, step.computed + step.scheduled
        known = ledger[step.rid].tokens[first : end - step.drafts]
        tokens[begin : begin + len(known)] = known
        begin += step.scheduled
        positions[begin - step.scheduled : begin] = np.arange(first, end)
        if step.drafts:
            tokens[begin - step.drafts : begin] = step.proposed
    device = reads.input_ids.device
    return (
        upload(torch.from_numpy(tokens), device),
        upload(torch.from_numpy(positions), device),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """The rows of a forward whose next tokens are not known yet; int64 [R] each.

    Fields:
        req_rows, serials, prefix_lens: as in `ForwardView`.
        ahead: known tokens after the first new one, or -1 if nothing is sampled.
        each_is_due: whether something is sampled for each row, as the host knows.
        proposals: those that are judged on the device, if any.
    """

    req_rows: Tensor
    serials: Tensor
    prefix_lens: Tensor
    ahead: Tensor
    each_is_due: bool = False
    proposals: Proposals | None = None

    def next_inputs(self, tokens: Tensor, counts: Tensor | None) -> SampledTokens:
        """Return each row's next input.

        Args:
            tokens, counts: see `EngineCanary.sampled`.

        Raises:
            RuntimeError: there are tokens for another number of rows.
        """
        if len(tokens) != len(self.req_rows):
            raise RuntimeError(
                f"kv_canary: the engine sampled for {len(tokens)} rows after a forward "
                f"of {len(self.req_rows)}"
            )
        if counts is None:
            counts = sampled_counts(tokens)
        tokens = tokens.long()
        last, extend_lens = tokens[:, 0], self.ahead + 1
        is_sampled = last >= 0 if counts is None else counts > 0
        if tokens.shape[1] > 1:
            assert counts is not None
            last = tokens.gather(1, (counts.long() - 1).clamp(min=0)[:, None])[:, 0]
            extend_lens = self.ahead + counts
        if not self.each_is_due:
            is_sampled &= self.ahead >= 0
        return SampledTokens(
            req_rows=self.req_rows,
            serials=self.serials,
            tokens=torch.where(is_sampled, last, UNKNOWN),
            prefix_lens=self.prefix_lens,
            extend_lens=extend_lens,
        )

    def forget(self, state: CanaryState) -> None:
        """Make the next inputs unknown: the engine sampled nothing."""
        next_inputs = state.requests[:, Request.NEXT_WORD0]
        next_inputs.index_fill_(0, self.req_rows, UNKNOWN)
