"""Recording of what the host announces and what was sampled, in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kv_canary.findings import RING
from kv_canary.records import UNKNOWN, Expected, Request, pack_word0_tensor

if TYPE_CHECKING:
    from torch import Tensor

    from kv_canary.accepted import SampledTokens
    from kv_canary.state import CanaryState


def expect_rows(
    state: CanaryState, rows: Tensor, values: Tensor, seeds: Tensor | None
) -> None:
    """See `launches.expect_rows`."""
    state.expected_lineage[rows] = values[Expected.LINEAGE]
    state.requests[rows, Request.SERIAL] = values[Expected.SERIAL]
    state.requests[rows, Request.NEXT_WORD0] = UNKNOWN
    if seeds is not None:
        seeds[rows] = values[Expected.SEED]


def note_tokens(state: CanaryState, sampled: SampledTokens, marks: Tensor) -> None:
    """See `launches.note_tokens`."""
    req_rows, serials, tokens, prefix_lens, extend_lens = sampled
    words = pack_word0_tensor(tokens, prefix_lens + extend_lens)
    word0 = torch.where(tokens >= 0, words, UNKNOWN)
    live = req_rows != 0
    state.requests[req_rows[live], Request.NEXT_WORD0] = word0[live]
    marks[0], marks[1] = serials, word0


def send_tokens(
    state: CanaryState,
    sampled: SampledTokens,
    findings: Tensor,
    other_findings: Tensor | None,
    words: Tensor,
) -> None:
    """See `launches.send_tokens`."""
    rows = len(sampled.tokens)
    sizes = [rows, len(findings), 2 * rows]
    tokens, found, marks = words.split_with_sizes(sizes)
    tokens.copy_(sampled.tokens)
    found.copy_(findings)
    if other_findings is not None:
        found[RING:] |= other_findings[RING:]
    note_tokens(state, sampled, marks.view(2, rows))
