"""Triton kernel that checks whose logits gave whose token.

`state` is the tuple from `args.py`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from kv_canary.checks import Reason
from kv_canary.drawn import (
    MASK_WORDS,
    NOISE_BITS,
    SAMPLING_WORDS,
    SERIAL_WORD_MASK,
    SLACK_BITS,
    TINY_BITS,
    MaskWord,
    Sampling,
    SamplingFlag,
)
from kv_canary.drawn import NOISE_STEP as DRAWN_NOISE_STEP
from kv_canary.kernels.triton.args import state_args
from kv_canary.kernels.triton.carried import carried_term
from kv_canary.kernels.triton.grid import cdiv
from kv_canary.kernels.triton.hash import mix64, pack_word0
from kv_canary.kernels.triton.report import RingFinding, report_one
from kv_canary.records import UNKNOWN as RECORDS_UNKNOWN
from kv_canary.records import Launch, ring_tag
from kv_canary.view import NO_MANAGER

if TYPE_CHECKING:
    from torch import Tensor

    from kv_canary.drawn import DrawnTokens
    from kv_canary.state import CanaryState

LOGITS_ROW = tl.constexpr(int(Reason.LOGITS_ROW))
GRAMMAR_MASK = tl.constexpr(int(Reason.GRAMMAR_MASK))
LOGITS_NOT_FINITE = tl.constexpr(int(Reason.LOGITS_NOT_FINITE))
SAMPLED_TOKEN = tl.constexpr(int(Reason.SAMPLED_TOKEN))
ANNOUNCED_WORDS = tl.constexpr(SAMPLING_WORDS)
SERIAL = tl.constexpr(int(Sampling.SERIAL))
KEY = tl.constexpr(int(Sampling.KEY))
TEMPERATURE = tl.constexpr(int(Sampling.TEMPERATURE))
TOP_K = tl.constexpr(int(Sampling.TOP_K))
TOP_P = tl.constexpr(int(Sampling.TOP_P))
MIN_P = tl.constexpr(int(Sampling.MIN_P))
FLAGS = tl.constexpr(int(Sampling.FLAGS))
PROMPT_LEN = tl.constexpr(int(Sampling.PROMPT_LEN))
GREEDY = tl.constexpr(int(SamplingFlag.GREEDY))
EDITED = tl.constexpr(int(SamplingFlag.EDITED))
GRAMMAR = tl.constexpr(int(SamplingFlag.GRAMMAR))
ALL_FLAGS = tl.constexpr(sum(SamplingFlag))
MASK_SERIAL = tl.constexpr(MaskWord.SERIAL - MASK_WORDS)
MASK_ACCEPTED = tl.constexpr(MaskWord.ACCEPTED - MASK_WORDS)
OWN_BITS = tl.constexpr(SERIAL_WORD_MASK)
NOISE_STEP = tl.constexpr(DRAWN_NOISE_STEP)
NOISE_SHIFT = tl.constexpr(64 - NOISE_BITS)
NOISE_MASK = tl.constexpr((1 << NOISE_BITS) - 1)
NOISE_UNIT = tl.constexpr(2.0**-NOISE_BITS)
SLACK = tl.constexpr(2.0**-SLACK_BITS)
TINY = tl.constexpr(2.0**-TINY_BITS)
UNKNOWN = tl.constexpr(RECORDS_UNKNOWN)
INF = tl.constexpr(float("inf"))


class Drawn(NamedTuple):
    """The matrices of `DrawnTokens`, hidden states as 32-bit words, and the elements
    between their rows.

    `edited`, `edited_rows`, `kept` and `masks` are all there or all None, because the
    kernel is compiled for each pattern of None, and whether a batch needs them changes
    as it runs. What is not given stands for memory that is never read.
    """

    logits: Tensor
    logits_stride: int
    inputs: Tensor | None
    inputs_stride: int
    hidden: Tensor | None
    hidden_stride: int
    hidden_words: int
    edited: Tensor | None
    edited_rows: Tensor | None
    edited_stride: int
    kept: Tensor | None
    kept_stride: int
    masks: Tensor | None
    sampling: Tensor
    vocab: int


class Given(NamedTuple):
    """Which matrices are given: elements between the rows of `masks`, or 0; rows of
    `edited`; whether there is `kept`. The kernel is not specialized on these."""

    masks_stride: Any
    num_edited: Any
    has_kept: Any


class Token(NamedTuple):
    """A token whose checks are under way.

    Fields:
        index: of the token among all; id: the token itself; at: row of its logits.
        serial, position: its request and place.
        announced: the words of its request row; is_known: whether they are its
            request's. Otherwise `flags` are 0.
        is_there: whether the row of the logits exists; is_id: whether the token is an
            id of it.
    """

    index: Any
    id: Any
    at: Any
    serial: Any
    position: Any
    announced: Any
    is_known: Any
    flags: Any
    is_there: Any
    is_id: Any


class MaskWords(NamedTuple):
    """The words that a mask must have, those that it has, whether it allows the token,
    and whether its grammar failed."""

    due: Any
    found: Any
    is_allowed: Any
    has_failed: Any


class Values(NamedTuple):
    """What a token is chosen by.

    Fields:
        edited, logits: pointers to its rows; `is_edited`: whether the former counts.
        is_there: False if its edited row is missing.
        bits: pointer to the mask, read if `is_masked`.
        own: the token's value, divided by `temperature` like all.
    """

    edited: Any
    logits: Any
    is_edited: Any
    is_there: Any
    bits: Any
    is_masked: Any
    temperature: Any
    own: Any


class WeightSums(NamedTuple):
    """Of a row's weights, where the token's own is 1: the sums of all and of ids before
    it, and the largest."""

    total: Any
    lower: Any
    largest: Any


@triton.jit
def _sum_row(words, width, BLOCK: tl.constexpr):
    """Return the sum of a row of 32-bit words."""
    terms = tl.zeros([BLOCK], dtype=tl.int64)
    for begin in range(0, width, BLOCK):
        j = begin + tl.arange(0, BLOCK)
        inside = j < width
        term = carried_term(tl.load(words + j, mask=inside, other=0), j)
        terms += tl.where(inside, term, 0)
    return tl.sum(terms, axis=0)


@triton.jit
def _load_float(announced, WORD: tl.constexpr):
    return tl.load(announced + WORD).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _uniform(key, position):
    """The float64 in [0, 1) that belongs to a key and a position."""
    mixed = mix64(key + (position + 1) * NOISE_STEP)
    return ((mixed >> NOISE_SHIFT) & NOISE_MASK).to(tl.float64) * NOISE_UNIT


@triton.jit
def _is_hit(token, lower, own, total):
    """Whether the noise lies in the token's interval."""
    target = _uniform(tl.load(token.announced + KEY), token.position) * total
    slack = SLACK * total
    is_inside = (lower - slack <= target) & (target <= lower + own + slack)
    # A token without a measurable share of the total overflows it.
    return is_inside & (total < INF)


@triton.jit
def _scan_best(logits, own, begin, step, vocab, BLOCK: tl.constexpr):
    """Return whether a part of a row has NaN or +inf, and whether it has a larger value
    than `own`."""
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(begin, vocab, step):
        v = first + tl.arange(0, BLOCK)
        x = tl.load(logits + v, mask=v < vocab, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(largest, x, propagate_nan=tl.PropagateNan.ALL)
    is_wild = (largest != largest) | (largest == INF)
    wild = tl.max(is_wild.to(tl.int32), axis=0) != 0
    return wild, tl.max((largest > own).to(tl.int32), axis=0) != 0


@triton.jit
def _read_values(drawn, token, is_greedy, given):
    """Return what the token is chosen by."""
    is_edited = (token.flags & EDITED) != 0
    is_masked = (token.flags & GRAMMAR) != 0
    is_there = is_edited == 0
    logits = drawn.logits + token.at * drawn.logits_stride
    # Any pointers, which are not read unless matrices are given.
    edited = logits
    bits = logits
    value = tl.load(logits + token.id).to(tl.float32)
    if drawn.edited is not None:
        is_asked = is_edited & (given.num_edited != 0)
        row = tl.load(drawn.edited_rows + token.index, mask=is_asked, other=-1)
        is_edited = is_asked & (row >= 0) & (row < given.num_edited)
        is_there = is_there | is_edited
        edited = drawn.edited + tl.where(is_edited, row, 0) * drawn.edited_stride
        e = tl.load(edited + token.id, mask=is_edited, other=0.0)
        value = tl.where(is_edited, e, value)
        is_masked = is_masked & (given.masks_stride != 0)
        bits = drawn.masks + token.at * given.masks_stride
    temperature = tl.where(is_greedy, 1.0, _load_float(token.announced, TEMPERATURE))
    return Values(
        edited=edited,
        logits=logits,
        is_edited=is_edited,
        is_there=is_there,
        bits=bits,
        is_masked=is_masked,
        temperature=temperature,
        own=tl.div_rn(value, temperature),
    )


@triton.jit
def _scale(drawn, values, x, v):
    """Return logits `x` of ids `v` as the token is chosen by them, and which of them
    count."""
    allowed = v < drawn.vocab
    if drawn.edited is not None:
        e = tl.load(values.edited + v, mask=allowed & values.is_edited, other=0.0)
        x = tl.where(values.is_edited, e, x)
        word = tl.load(values.bits + v // 32, mask=allowed & values.is_masked, other=-1)
        allowed = allowed & (((word >> (v % 32)) & 1) != 0)
    # Divided first, as a sampler does: its rounding is part of the weight.
    return tl.div_rn(x, values.temperature), allowed


@triton.jit
def _scan_kept(drawn, kept, token, values, sums, BLOCK: tl.constexpr):
    """Return whether the noise draws the token from the weights that filters left, and
    whether these are what the filters should leave; see the reference."""
    own_kept = tl.load(kept + token.id)
    totals = tl.zeros([BLOCK], dtype=tl.float32)
    lowers = tl.zeros([BLOCK], dtype=tl.float32)
    masses = tl.zeros([BLOCK], dtype=tl.float32)
    counts = tl.zeros([BLOCK], dtype=tl.int32)
    others = tl.zeros([BLOCK], dtype=tl.int32)
    dropped = tl.zeros([BLOCK], dtype=tl.float32)
    smallest = tl.full([BLOCK], float("inf"), tl.float32)
    for first in range(0, drawn.vocab, BLOCK):
        v = first + tl.arange(0, BLOCK)
        inside = v < drawn.vocab
        x = tl.load(values.logits + v, mask=inside, other=0.0).to(tl.float32)
        scaled, allowed = _scale(drawn, values, x, v)
        weight = tl.where(allowed, tl.exp(scaled - values.own), 0.0)
        probability = tl.load(kept + v, mask=inside, other=0.0)
        stays = probability > 0
        difference = tl.abs(probability - weight * own_kept)
        is_other = difference > probability * SLACK + TINY
        totals += probability
        lowers += tl.where(v < token.id, probability, 0.0)
        masses += tl.where(stays, weight, 0.0)
        counts += stays.to(tl.int32)
        others |= (stays & is_other).to(tl.int32)
        dropped = tl.maximum(dropped, tl.where(stays, 0.0, weight))
        smallest = tl.minimum(smallest, tl.where(stays, weight, float("inf")))
    total = tl.sum(totals.to(tl.float64), axis=0)
    lower = tl.sum(lowers.to(tl.float64), axis=0)
    mass = tl.sum(masses.to(tl.float64), axis=0)
    count = tl.sum(counts, axis=0)
    gone = tl.max(dropped, axis=0)
    least = tl.min(smallest, axis=0)
    top_k = tl.load(token.announced + TOP_K)
    top_p = _load_float(token.announced, TOP_P).to(tl.float64)
    floor = _load_float(token.announced, MIN_P) * sums.largest
    may_go = (count >= top_k) | (mass >= (top_p - SLACK) * sums.total)
    may_go = may_go | (gone * (1 - SLACK) <= floor)
    may_stay = (count <= top_k) & (mass - least < (top_p + SLACK) * sums.total)
    may_stay = may_stay & (floor * (1 - SLACK) <= least)
    is_right = may_go & may_stay & (gone <= least * (1 + SLACK))
    is_right = is_right & (tl.max(others, axis=0) == 0) & (own_kept > 0)
    return is_right & _is_hit(token, lower, own_kept.to(tl.float64), total)


@triton.jit
def _is_drawn(drawn, token, values, sums, given, BLOCK: tl.constexpr):
    """Whether the noise draws the token, given the sums of its row."""
    top_k = tl.load(token.announced + TOP_K)
    top_p = _load_float(token.announced, TOP_P)
    min_p = _load_float(token.announced, MIN_P)
    if (top_k < drawn.vocab) | (top_p < 1) | (min_p > 0):
        hit = top_k < 0
        if drawn.kept is not None:  # noqa: SIM102 - known when it is compiled
            if given.has_kept != 0:
                kept = drawn.kept + token.at * drawn.kept_stride
                hit = _scan_kept(drawn, kept, token, values, sums, BLOCK)
    else:
        hit = _is_hit(token, sums.lower, 1.0, sums.total)
    return hit


@triton.jit
def _scan_weights(drawn, token, values, given, BLOCK: tl.constexpr):
    """Scan a whole row. Return whether its logits have NaN or +inf, whether another id
    has a larger value, and whether the noise draws the token.

    Sums of a thread have few terms, so float32 holds them; the threads' sums are added
    up in float64.
    """
    totals = tl.zeros([BLOCK], dtype=tl.float32)
    lowers = tl.zeros([BLOCK], dtype=tl.float32)
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    wilds = tl.zeros([BLOCK], dtype=tl.int32)
    betters = tl.zeros([BLOCK], dtype=tl.int32)
    v = tl.arange(0, BLOCK)
    ahead = tl.load(values.logits + v, mask=v < drawn.vocab, other=float("-inf"))
    for first in range(0, drawn.vocab, BLOCK):
        v = first + tl.arange(0, BLOCK)
        x = ahead.to(tl.float32)
        # One program per row has nobody to hide the wait for the next values.
        following = v + BLOCK
        inside = following < drawn.vocab
        ahead = tl.load(values.logits + following, mask=inside, other=float("-inf"))
        wilds |= ((x != x) | (x == INF)).to(tl.int32)
        scaled, allowed = _scale(drawn, values, x, v)
        betters |= (allowed & ((scaled <= values.own) == 0)).to(tl.int32)
        weight = tl.where(allowed, tl.exp(scaled - values.own), 0.0)
        totals += weight
        lowers += tl.where(v < token.id, weight, 0.0)
        largest = tl.maximum(largest, weight)
    wild = tl.max(wilds, axis=0) != 0
    better = tl.max(betters, axis=0) != 0
    sums = WeightSums(
        total=tl.sum(totals.to(tl.float64), axis=0),
        lower=tl.sum(lowers.to(tl.float64), axis=0),
        largest=tl.max(largest, axis=0),
    )
    return wild, better, _is_drawn(drawn, token, values, sums, given, BLOCK)


@triton.jit
def _check_all(drawn, token, own, given, BLOCK: tl.constexpr):
    """Return the reasons of a token whose values are edited, masked or drawn from. Its
    own logit is `own`."""
    is_greedy = (token.flags & GREEDY) != 0
    values = _read_values(drawn, token, is_greedy, given)
    wild, better, hit = _scan_weights(drawn, token, values, given, BLOCK)
    chosen = tl.where(is_greedy, better == 0, hit) & values.is_there
    reasons = tl.where(chosen, 0, SAMPLED_TOKEN)
    return tl.where(wild | (own == float("-inf")), LOGITS_NOT_FINITE, reasons)


@triton.jit
def _check_best(drawn, token, own, DRAWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the reasons in this program's part of a row that only its best value
    decides."""
    split = tl.program_id(1)
    logits = drawn.logits + token.at * drawn.logits_stride
    step = tl.num_programs(1) * BLOCK
    wild, better = _scan_best(logits, own, split * BLOCK, step, drawn.vocab, BLOCK)
    reasons = tl.where(wild, LOGITS_NOT_FINITE, 0)
    if DRAWS:
        is_other = token.is_known & better & (wild == 0)
        reasons |= tl.where(is_other, SAMPLED_TOKEN, 0)
    # Every program sees the token's own logit, and the first one reports it.
    of_own = tl.where(split == 0, LOGITS_NOT_FINITE, 0)
    is_finite = (own > float("-inf")) & (own < INF)
    return tl.where(is_finite, reasons, of_own)


@triton.jit
def _check_values(
    drawn,
    token,
    given,
    DRAWS: tl.constexpr,
    BEST_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the reasons that follow from the values in the token's row."""
    own = tl.load(drawn.logits + token.at * drawn.logits_stride + token.id)
    own = own.to(tl.float32)
    is_shared = (token.is_known == 0) | ((token.flags & ALL_FLAGS) == GREEDY)
    if not DRAWS:
        is_shared = is_shared | True
    reasons = 0
    if is_shared:
        reasons = _check_best(drawn, token, own, DRAWS, BEST_BLOCK)
    elif tl.program_id(1) == 0:
        reasons = _check_all(drawn, token, own, given, BLOCK)
    return reasons


@triton.jit
def _sum_hidden(drawn, token, hidden_ends, num_hidden, BLOCK: tl.constexpr):
    """Return the sums of the row that is due, and of the one that the head read; 0 for
    a row that is not there."""
    due_sum = token.index * 0
    found_sum = token.index * 0
    if drawn.inputs is not None:
        end = token.index + 1
        if hidden_ends is not None:
            end = tl.load(hidden_ends + token.index)
        if (end > 0) & (end <= num_hidden):
            due = drawn.hidden + (end - 1) * drawn.hidden_stride
            due_sum = _sum_row(due, drawn.hidden_words, BLOCK)
        if token.is_there:
            found = drawn.inputs + token.at * drawn.inputs_stride
            found_sum = _sum_row(found, drawn.hidden_words, BLOCK)
    return due_sum, found_sum


@triton.jit
def _load_mask(drawn, token, masks_stride, mask_words):
    """Load the words of the token's mask; 0 without one."""
    has_grammar = (token.flags & GRAMMAR) != 0
    nothing = token.index * 0
    serial = nothing
    accepted = nothing
    is_allowed = token.index == token.index
    if drawn.masks is not None:
        bits = drawn.masks + token.at * masks_stride
        words = bits + mask_words
        is_given = masks_stride != 0
        is_there = token.is_there & is_given
        serial += tl.load(words + MASK_SERIAL, mask=is_there, other=0)
        accepted += tl.load(words + MASK_ACCEPTED, mask=is_there, other=0)
        is_read = token.is_id & has_grammar & is_given
        word = tl.load(bits + token.id // 32, mask=is_read, other=-1)
        is_allowed = ((word >> (token.id % 32).to(tl.int32)) & 1) != 0
    own = token.serial & OWN_BITS
    gained = token.position - tl.load(token.announced + PROMPT_LEN)
    due = tl.where(has_grammar, pack_word0(own, gained), pack_word0(nothing, accepted))
    found = pack_word0(serial, accepted)
    return MaskWords(
        due=tl.where(token.is_known, due, found),
        found=found,
        is_allowed=is_allowed,
        has_failed=has_grammar & (serial == own) & (accepted == UNKNOWN),
    )


@triton.jit(
    do_not_specialize=[
        *("num_logits", "num_hidden", "width", "tag", "masks_stride", "mask_words"),
        *("num_edited", "has_kept"),
    ],
    do_not_specialize_on_alignment=[
        *("req_rows", "serials", "prefix_lens", "extend_lens", "tokens"),
        *("logits_rows", "hidden_ends", "findings"),
    ],
)
def drawn_kernel(  # noqa: PLR0913 - numbers in a tuple would be specialized on
    state,
    drawn,
    req_rows,
    serials,
    prefix_lens,
    extend_lens,
    tokens,
    logits_rows,
    hidden_ends,
    findings,
    num_logits,
    num_hidden,
    width,
    masks_stride,
    mask_words,
    num_edited,
    has_kept,
    tag,
    DRAWS: tl.constexpr,
    WORD_BLOCK: tl.constexpr,
    BEST_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Check a token per program. Programs of one token share its row if only its best
    value matters; the first one does everything else.

    Of the programs that share a row, each that finds something appends an entry.
    """
    i = tl.program_id(0).to(tl.int64)
    row = i // width
    req = tl.load(req_rows + row)
    id_ = tl.load(tokens + i)
    at = i
    if logits_rows is not None:
        at = tl.load(logits_rows + i)
    if (req != 0) & (id_ >= 0) & (at >= 0):
        serial = tl.load(serials + row)
        announced = drawn.sampling + req * ANNOUNCED_WORDS
        is_known = tl.load(announced + SERIAL) == serial
        is_there = at < num_logits
        start = tl.load(prefix_lens + row) + tl.load(extend_lens + row)
        token = Token(
            index=i,
            id=id_,
            at=at,
            serial=serial,
            position=start + i % width,
            announced=announced,
            is_known=is_known,
            flags=tl.where(is_known, tl.load(announced + FLAGS), 0),
            is_there=is_there,
            is_id=is_there & (id_ < drawn.vocab),
        )
        given = Given(masks_stride, num_edited, has_kept)
        mask = _load_mask(drawn, token, masks_stride, mask_words)
        is_read = is_there & (mask.has_failed == 0)
        reasons = 0
        due_sum = i * 0
        found_sum = i * 0
        if tl.program_id(1) == 0:
            due_sum, found_sum = _sum_hidden(
                drawn, token, hidden_ends, num_hidden, WORD_BLOCK
            )
            is_other = (due_sum != found_sum) | (is_there == 0)
            reasons = tl.where(is_other, LOGITS_ROW, 0)
            is_other = (mask.due != mask.found) | (mask.is_allowed == 0)
            reasons |= tl.where(is_other & is_read, GRAMMAR_MASK, 0)
            is_other = (is_known == 0) | (id_ >= drawn.vocab)
            reasons |= tl.where(is_other & is_read, SAMPLED_TOKEN, 0)
        if token.is_id & is_read:
            reasons |= _check_values(drawn, token, given, DRAWS, BEST_BLOCK, BLOCK)
        # NaN wins over every id, also over those that the mask allows.
        is_lost = ((reasons & LOGITS_NOT_FINITE) != 0) & (mask.due == mask.found)
        reasons = tl.where(is_lost, reasons & ~GRAMMAR_MASK, reasons)
        if reasons != 0:
            is_mask = (reasons & GRAMMAR_MASK) != 0
            is_row = (reasons & LOGITS_ROW) != 0
            due = pack_word0(i * 0 + UNKNOWN, token.position)
            found = pack_word0(id_, token.position)
            finding = RingFinding(
                reasons=reasons,
                req_row=req,
                serial=serial,
                slot=-1,
                position=token.position,
                expected_word0=tl.where(is_mask, mask.due, due),
                found_word0=tl.where(is_mask, mask.found, found),
                expected_lineage=tl.where(is_row, due_sum, 0),
                found_lineage=tl.where(is_row, found_sum, 0),
                found_word3=None,
                # The forward's own tail has already advanced the clock.
                clock=tl.load(state.clock) - 1,
                batch_row=row,
                expected_slot=-1,
                found_fingerprint=None,
                computed_fingerprint=None,
                tag=tag,
            )
            report_one(state, finding, findings)


_WORD_BLOCK = 1024
_BEST_BLOCK = 8192
# Elements that a thread takes at a time if it weighs them.
_EACH = 8
# Programs that share a row: as many as it has blocks if few rows must fill the device.
_MAX_SPLITS = 16
_WARP = 32
_SHARED_ROWS = 64


def splits_of(tokens: int, vocab: int) -> int:
    """Return the programs per row: 1 from 64 rows on."""
    wanted = min(_MAX_SPLITS, _SHARED_ROWS // tokens)
    return max(1, min(wanted, cdiv(vocab, _BEST_BLOCK)))


def check_drawn(
    state: CanaryState, drawn: DrawnTokens, findings: Tensor | None
) -> None:
    drawn.check_layout()
    count, vocab = len(drawn.tokens), drawn.logits.shape[1]
    if not count:
        return
    matrices = _matrices(state, drawn)
    # The same for every batch: another number is another kernel to compile.
    warps = 16 if vocab > _BEST_BLOCK else 4
    block = triton.next_power_of_2(max(vocab, 1))
    drawn_kernel[(count, splits_of(count, vocab))](
        state=state_args(state),
        drawn=matrices,
        req_rows=drawn.req_rows,
        serials=drawn.serials,
        prefix_lens=drawn.prefix_lens,
        extend_lens=drawn.extend_lens,
        tokens=drawn.tokens,
        logits_rows=drawn.logits_rows,
        hidden_ends=drawn.hidden_ends,
        findings=findings,
        num_logits=drawn.logits.shape[0],
        num_hidden=0 if drawn.hidden is None else drawn.hidden.shape[0],
        width=drawn.width,
        masks_stride=_stride(drawn.masks),
        mask_words=0 if drawn.masks is None else drawn.masks.shape[1],
        num_edited=0 if drawn.edited is None else drawn.edited.shape[0],
        has_kept=int(drawn.kept is not None),
        tag=ring_tag(Launch.DRAWN, NO_MANAGER, state.pool),
        DRAWS=drawn.draws,
        WORD_BLOCK=_WORD_BLOCK,
        BEST_BLOCK=min(_BEST_BLOCK, block),
        BLOCK=min(_EACH * warps * _WARP, block),
        num_warps=warps,
    )


def _matrices(state: CanaryState, drawn: DrawnTokens) -> Drawn:
    inputs, hidden = drawn.words or (None, None)
    edited, kept, masks = drawn.edited, drawn.kept, drawn.masks
    edited_rows, vocab = drawn.edited_rows, drawn.logits.shape[1]
    if not (edited is None and kept is None and masks is None):
        # Any memory stands for a matrix that is not given; it is never read.
        unread = state.verdict
        edited = unread.view(torch.float32) if edited is None else edited
        edited_rows = state.counters if edited_rows is None else edited_rows
        kept = unread.view(torch.float32) if kept is None else kept
        masks = unread if masks is None else masks
    return Drawn(
        logits=drawn.logits,
        logits_stride=_stride(drawn.logits),
        inputs=inputs,
        inputs_stride=_stride(inputs),
        hidden=hidden,
        hidden_stride=_stride(hidden),
        hidden_words=0 if hidden is None else hidden.shape[1],
        edited=edited,
        edited_rows=edited_rows,
        edited_stride=_stride(drawn.edited) or vocab,
        kept=kept,
        kept_stride=_stride(drawn.kept) or vocab,
        masks=masks,
        sampling=drawn.sampling,
        vocab=vocab,
    )


def _stride(t: Tensor | None) -> int:
    """Return the elements between rows, 0 only if there is no matrix."""
    if t is None:
        return 0
    return t.stride(0) if t.shape[0] > 1 else t.shape[1]
