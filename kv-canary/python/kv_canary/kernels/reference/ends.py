"""The end of a forward in torch: lineages advance, findings are gathered."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from kv_canary.findings import RING, STATUS_WORDS
from kv_canary.kernels.reference.rows import (
    load_base_lineages,
    load_starts,
    load_tokens,
)
from kv_canary.records import WriterKind

if TYPE_CHECKING:
    from torch import Tensor

    from kv_canary.state import CanaryState
    from kv_canary.view import ForwardView


def finish_step(state: CanaryState, view: ForwardView, findings: Tensor) -> None:
    """See `launches.finish_step`."""
    advance_lineages(state, view)
    gather_findings(state, view.req_rows, findings)


def gather_findings(state: CanaryState, req_rows: Tensor, findings: Tensor) -> None:
    """See `launches.gather_findings`."""
    findings[:RING] = state.counters
    findings[RING] = state.ring_count[0]
    live = req_rows != 0
    verdicts = state.verdict[req_rows] * live
    findings[STATUS_WORDS:][: len(req_rows)] = verdicts
    state.verdict[req_rows[live]] = 0


def advance_lineages(state: CanaryState, rows: ForwardView) -> None:
    """Publish each row's lineage after its new tokens, or after those that stay."""
    if rows.stay_lens is not None:
        _, counts = load_starts(rows)
        staying = torch.minimum(rows.stay_lens, counts)
        rows = dataclasses.replace(rows, extend_lens=staying, stay_lens=None)
    _, counts = load_starts(rows)
    new = load_tokens(state, rows, WriterKind.NONE)
    values = load_base_lineages(state, rows)
    ends = counts.cumsum(0) - 1
    some = counts > 0
    values[some] = new.lineage[ends[some]]
    published = next(
        part
        for part in (rows.publish_rows, rows.lineage_rows, rows.req_rows)
        if part is not None
    )
    live = rows.req_rows != 0
    state.expected_lineage[published[live]] = values[live]
