"""Ring entries, verdicts and phases in the canary's Triton kernels.

`state` is the tuple from `args.py`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kv_canary.checks import Reason
from kv_canary.findings import RING as FINDINGS_RING
from kv_canary.findings import STATUS_WORDS
from kv_canary.records import RING_WORDS, Ring

PHASE_REASON = tl.constexpr(int(Reason.PHASE))
ENTRY_WORDS = tl.constexpr(RING_WORDS)
MAX_THREADS = tl.constexpr(128)
RING = tl.constexpr(FINDINGS_RING)
STATUS = tl.constexpr(STATUS_WORDS)


class RingFinding(NamedTuple):
    """The words of a ring entry in the order of `Ring`, scalars or [N] for N entries.
    None stands for 0."""

    reasons: Any
    req_row: Any
    serial: Any
    slot: Any
    position: Any
    expected_word0: Any
    found_word0: Any
    expected_lineage: Any
    found_lineage: Any
    found_word3: Any
    clock: Any
    batch_row: Any
    expected_slot: Any
    found_fingerprint: Any
    computed_fingerprint: Any
    tag: Any


if RingFinding._fields != tuple(word.name.lower() for word in Ring):
    raise TypeError("the fields of RingFinding are not the words of Ring")


class ReportSite(NamedTuple):
    """A launch that finds something: the forward's number, its manager, its tag."""

    clock: Any
    manager: Any
    tag: Any


@triton.jit
def agree_across_warps(reasons):
    """Return the reasons [N] that the first warp sees to all warps of a program with up
    to MAX_THREADS threads.

    With fewer elements than threads each warp looks at all of them, and warps drift
    apart: they may see different words of a record that another program is writing. If
        each
    branched on what it saw, they would meet at the wrong barriers. A sum over the warps
    goes through shared memory, so that they agree.
    """
    COPIES: tl.constexpr = MAX_THREADS // reasons.shape[0]
    if COPIES > 1:
        is_first = (tl.arange(0, COPIES) == 0)[:, None]
        reasons = tl.sum(tl.where(is_first, reasons[None, :], 0), axis=0)
    return reasons


@triton.jit
def report(state, finding):
    """Append a ring entry for each of N elements with reasons, and set the verdict of
    its request row.

    Words are int64 [N] or scalars, `slot` is [N], `req_row` a scalar. All warps have to
    agree on `reasons`.
    """
    bad = finding.reasons != 0
    count = tl.sum(bad.to(tl.int32), axis=0)
    if count > 0:
        begin = tl.atomic_add(state.ring_count, count.to(tl.int64))
        place = begin + tl.cumsum(bad.to(tl.int32), axis=0) - 1
        keep = bad & (place < state.capacity)
        entry = state.ring + place * ENTRY_WORDS
        zeros = tl.zeros_like(finding.slot)
        for word in tl.static_range(ENTRY_WORDS):
            if finding[word] is None:
                tl.store(entry + word, zeros, mask=keep)
            else:
                tl.store(entry + word, zeros + finding[word], mask=keep)
        verdict = state.verdict + finding.req_row + zeros
        tl.atomic_or(verdict, finding.reasons.to(tl.int32), mask=bad)


@triton.jit
def report_one(state, finding, findings=None):
    """Append one ring entry and set the verdict of its request row; all scalars.

    `findings` were gathered before. They get the ring's count and the verdict, which
    the next gather must not tell again.
    """
    place = tl.atomic_add(state.ring_count, 1)
    column = tl.arange(0, ENTRY_WORDS)
    entry = tl.zeros([ENTRY_WORDS], dtype=tl.int64)
    for word in tl.static_range(ENTRY_WORDS):
        if finding[word] is not None:
            entry = tl.where(column == word, finding[word], entry)
    keep = (column < ENTRY_WORDS) & (place < state.capacity)
    tl.store(state.ring + place * ENTRY_WORDS + column, entry, mask=keep)
    if findings is None:
        tl.atomic_or(state.verdict + finding.req_row, finding.reasons)
    else:
        verdict = findings + STATUS + finding.batch_row
        tl.atomic_or(verdict, finding.reasons.to(tl.int64))
        tl.atomic_max(findings + RING, place + 1)


@triton.jit
def step_phase(state, site, DUE: tl.constexpr, NEXT: tl.constexpr):
    """Move the manager's phase from DUE to NEXT; report and repair a breach."""
    if site.manager >= 0:
        found = tl.load(state.phase + site.manager)
        # Warps drift apart. A warp that came here after the store below would take the
        # branch alone, and from then on meet the others at the wrong barriers.
        tl.debug_barrier()
        if found != DUE:
            breach = RingFinding(
                reasons=PHASE_REASON,
                req_row=0,
                serial=0,
                slot=-1,
                position=-1,
                expected_word0=DUE,
                found_word0=found.to(tl.int64),
                expected_lineage=None,
                found_lineage=None,
                found_word3=None,
                clock=site.clock,
                batch_row=-1,
                expected_slot=-1,
                found_fingerprint=None,
                computed_fingerprint=None,
                tag=site.tag,
            )
            report_one(state, breach)
        tl.store(state.phase + site.manager, NEXT)
