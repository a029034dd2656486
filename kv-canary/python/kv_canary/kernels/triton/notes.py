"""Triton kernels that record what the host announces and what was sampled."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kv_canary.findings import RING as FINDINGS_RING
from kv_canary.kernels.triton.grid import cdiv
from kv_canary.kernels.triton.hash import pack_word0
from kv_canary.records import UNKNOWN as RECORDS_UNKNOWN
from kv_canary.records import Expected, Request

if TYPE_CHECKING:
    from torch import Tensor

    from kv_canary.accepted import SampledTokens
    from kv_canary.state import CanaryState

UNKNOWN = tl.constexpr(RECORDS_UNKNOWN)
NEXT_WORD = tl.constexpr(int(Request.NEXT_WORD0))
SERIAL_WORD = tl.constexpr(int(Request.SERIAL))
REQUEST_WORDS = tl.constexpr(len(Request))
RING = tl.constexpr(FINDINGS_RING)
LINEAGE_ROW = tl.constexpr(int(Expected.LINEAGE))
SEED_ROW = tl.constexpr(int(Expected.SEED))
SERIAL_ROW = tl.constexpr(int(Expected.SERIAL))


@triton.jit(do_not_specialize=["num_rows"])
def expect_kernel(
    expected_lineage, requests, seeds, rows, values, num_rows, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < num_rows
    req = tl.load(rows + i, mask=mask, other=0)
    lineage = tl.load(values + LINEAGE_ROW * num_rows + i, mask=mask, other=0)
    tl.store(expected_lineage + req, lineage, mask=mask)
    serial = tl.load(values + SERIAL_ROW * num_rows + i, mask=mask, other=0)
    known = requests + req * REQUEST_WORDS
    tl.store(known + SERIAL_WORD, serial, mask=mask)
    tl.store(known + NEXT_WORD, tl.zeros_like(serial) + UNKNOWN, mask=mask)
    if seeds is not None:
        seed = tl.load(values + SEED_ROW * num_rows + i, mask=mask, other=0)
        tl.store(seeds + req, seed, mask=mask)


@triton.jit
def note(requests, marks, row, num_rows, req, serial, token, position, mask):
    """Record the token that each row must have next, and store its mark."""
    word0 = tl.where(token >= 0, pack_word0(token, position), UNKNOWN)
    tl.store(requests + req * REQUEST_WORDS + NEXT_WORD, word0, mask=mask & (req != 0))
    tl.store(marks + row, serial, mask=mask)
    tl.store(marks + num_rows + row, word0, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_findings"])
def note_kernel(
    requests,
    req_rows,
    serials,
    tokens,
    prefix_lens,
    extend_lens,
    findings,
    other_findings,
    words,
    num_rows,
    num_findings,
    BLOCK: tl.constexpr,
):
    """Record tokens and store marks in `words`, after tokens and findings if given.

    `other_findings` belong to a second group of slots; both are united.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < num_rows
    marks = words
    if findings is not None:
        marks = words + num_rows + num_findings
        step = tl.num_programs(0) * BLOCK
        for begin in range(tl.program_id(0) * BLOCK, num_findings, step):
            i = begin + tl.arange(0, BLOCK)
            inside = i < num_findings
            found = tl.load(findings + i, mask=inside, other=0)
            if other_findings is not None:
                found |= tl.load(other_findings + i, mask=inside & (i >= RING), other=0)
            tl.store(words + num_rows + i, found, mask=inside)
    req = tl.load(req_rows + row, mask=mask, other=0)
    serial = tl.load(serials + row, mask=mask, other=0)
    token = tl.load(tokens + row, mask=mask, other=-1)
    if findings is not None:
        tl.store(words + row, token, mask=mask)
    position = tl.load(prefix_lens + row, mask=mask, other=0)
    position += tl.load(extend_lens + row, mask=mask, other=0)
    note(requests, marks, row, num_rows, req, serial, token, position, mask)


_NOTE_BLOCK = 128


def expect_rows(
    state: CanaryState, rows: Tensor, values: Tensor, seeds: Tensor | None
) -> None:
    count = len(rows)
    expect_kernel[(cdiv(count, _NOTE_BLOCK),)](
        state.expected_lineage,
        state.requests,
        seeds,
        rows,
        values,
        count,
        BLOCK=_NOTE_BLOCK,
        num_warps=1,
    )


def note_tokens(state: CanaryState, sampled: SampledTokens, marks: Tensor) -> None:
    send_tokens(state, sampled, None, None, marks)


def send_tokens(
    state: CanaryState,
    sampled: SampledTokens,
    findings: Tensor | None,
    other_findings: Tensor | None,
    words: Tensor,
) -> None:
    count = len(sampled.req_rows)
    note_kernel[(cdiv(max(count, 1), _NOTE_BLOCK),)](
        state.requests,
        *sampled,
        findings,
        other_findings,
        words,
        count,
        0 if findings is None else len(findings),
        BLOCK=_NOTE_BLOCK,
        num_warps=1,
    )
