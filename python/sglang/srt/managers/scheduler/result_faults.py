"""Compares the tokens that requests keep from a step with the device's record.

For each row the device records the request and the last token with its position, from
the sampler's own result. The copy to the host and the bookkeeping of results come
between that and the client. Knows nothing about reports.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from kv_canary.checks import Reason
from kv_canary.findings import parse_counters
from kv_canary.records import (
    HALF_BITS,
    RING_WORDS,
    UNKNOWN,
    Counter,
    Launch,
    Ring,
    pack_word0,
    ring_tag,
    unpack_word0,
)
from kv_canary.view import NO_MANAGER

if TYPE_CHECKING:
    from sglang.srt.managers.batch.forward_result import GenerationBatchResult
    from sglang.srt.managers.batch.req import Req
    from sglang.srt.managers.batch.schedule_batch import LaunchRecord, StepStart

_TARGET = 0


def find_result_faults(
    launched: LaunchRecord,
    result: GenerationBatchResult,
    before: StepStart,
    failures: Collection[int],
    serials: list[int],
    words: list[int],
) -> list[list[int]]:
    """Return ring entries for rows whose request does not keep what the device
    recorded, and for rows that the host could not process.

    A request keeps all new tokens, or the first ones if it ended or lost its grammar
    among them. A request that had already ended, was aborted or no longer uses the step
    keeps none.

    Args:
        launched, result: of a step that was processed.
        before: the step's requests before that.
        failures: rows whose processing raised an error.
        serials, words: the marks of the step, [R] each.
    """
    found = []
    for row, (req, serial, word) in enumerate(
        zip(launched.reqs, serials, words, strict=True)
    ):
        tokens = req.tokens
        last = len(tokens) - 1
        # The case of nearly every row of a plain step.
        if failures and row in failures:
            reason = Reason.HOST_RECORDS
            if not _is_kept(launched, result, before, row, serial, word):
                reason |= Reason.RESULT_TOKEN
            found.append(
                _entry(req, row, word, reason, forward=_forward_number(result))
            )
            continue
        is_last = serial == req.serial and word == last << HALF_BITS | tokens[last]
        is_plain = result.stride == 1 and not launched.is_chunked[row]
        # A negative token would form the word of a row that sampled nothing.
        if is_last and is_plain and tokens[last] >= 0:
            continue
        if req.serial in launched.dropped:
            continue
        if not _is_kept(launched, result, before, row, serial, word):
            reason = Reason.RESULT_TOKEN
            found.append(
                _entry(req, row, word, reason, forward=_forward_number(result))
            )
    return found


def idle_fault(*, forward: int) -> list[int]:
    """Return an entry for host records that contradict each other at idle.

    Args:
        forward: number of the newest forward.
    """
    entry = [0] * RING_WORDS
    entry[Ring.REASONS] = Reason.HOST_RECORDS
    entry[Ring.SLOT] = entry[Ring.EXPECTED_SLOT] = entry[Ring.POSITION] = -1
    entry[Ring.BATCH_ROW] = -1
    entry[Ring.EXPECTED_WORD0] = entry[Ring.FOUND_WORD0] = pack_word0(-1, -1)
    entry[Ring.CLOCK] = forward
    entry[Ring.TAG] = ring_tag(Launch.IDLE, NO_MANAGER, _TARGET)
    return entry


def _forward_number(result: GenerationBatchResult) -> int:
    """Number of the target's forward that ended the step; forwards are numbered from 1
    as they end.
    """
    return parse_counters(result.findings[_TARGET])[Counter.TAIL_LAUNCHES]


def _is_kept(
    launched: LaunchRecord,
    result: GenerationBatchResult,
    before: StepStart,
    row: int,
    serial: int,
    word: int,
) -> bool:
    req = launched.reqs[row]
    if serial != req.serial:
        return False
    if launched.is_chunked[row]:
        return word == UNKNOWN and len(req.tokens) == before.lengths[row]
    if word == UNKNOWN:
        return False
    token, position = unpack_word0(word)
    begin = row * result.stride
    count = 1 if result.accept_lens is None else result.accept_lens[row]
    gained = result.tokens[begin : begin + count]
    if not gained or gained[-1] != token:
        return False
    first = position + 1 - count
    if req.is_finished or req.grammar_failure is not None:
        # It may have ended before this step, or within it before the last token.
        kept = list(req.tokens[first:])
        return len(kept) <= count and kept == gained[: len(kept)]
    return len(req.tokens) == position + 1 and list(req.tokens[first:]) == gained


def _entry(req: Req, row: int, word: int, reason: Reason, *, forward: int) -> list[int]:
    """Return an entry whose expected word is the device's record and whose found word
    is the host's.
    """
    entry = [0] * RING_WORDS
    last = len(req.tokens) - 1
    entry[Ring.REASONS] = reason
    entry[Ring.REQ_ROW] = req.req_pool_idx
    entry[Ring.SERIAL] = req.serial
    entry[Ring.SLOT] = entry[Ring.EXPECTED_SLOT] = -1
    entry[Ring.POSITION] = last
    entry[Ring.EXPECTED_WORD0] = word
    entry[Ring.FOUND_WORD0] = pack_word0(req.tokens[last], last)
    entry[Ring.CLOCK] = forward
    entry[Ring.BATCH_ROW] = row
    entry[Ring.TAG] = ring_tag(Launch.RESULT, NO_MANAGER, _TARGET)
    return entry
