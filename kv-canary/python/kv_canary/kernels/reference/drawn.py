"""Whose logits gave whose token, in torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

from kv_canary.checks import Reason
from kv_canary.drawn import (
    MASK_WORDS,
    SERIAL_WORD_MASK,
    SLACK_BITS,
    TINY_BITS,
    DrawnTokens,
    MaskWord,
    Sampling,
    SamplingFlag,
    float_bits,
    uniform,
)
from kv_canary.kernels.reference.carried import sum_words
from kv_canary.kernels.reference.report import Report, flag
from kv_canary.records import UNKNOWN, Launch, Ring, pack_word0_tensor
from kv_canary.view import NO_MANAGER

if TYPE_CHECKING:
    from torch import Tensor

    from kv_canary.state import CanaryState

SLACK = 2.0**-SLACK_BITS
TINY = 2.0**-TINY_BITS


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    """Tokens that were drawn.

    Fields:
        index: of each among all tokens; row: of the batch; at: row of the logits.
        token, position, serial: its own, and its request's.
        announced: words of `Sampling`.
    """

    index: Tensor
    row: Tensor
    at: Tensor
    token: Tensor
    position: Tensor
    serial: Tensor
    announced: Tensor

    @classmethod
    def of(cls, drawn: DrawnTokens) -> _Tokens:
        """Return all tokens that are neither padding nor left out."""
        index = torch.arange(len(drawn.tokens), device=drawn.tokens.device)
        row = index // max(drawn.width, 1)
        at = index if drawn.logits_rows is None else drawn.logits_rows
        starts = drawn.prefix_lens + drawn.extend_lens
        tokens = cls(
            index=index,
            row=row,
            at=at,
            token=drawn.tokens,
            position=starts[row] + index % max(drawn.width, 1),
            serial=drawn.serials[row],
            announced=drawn.sampling[drawn.req_rows[row]],
        )
        return tokens.only((drawn.req_rows[row] != 0) & (drawn.tokens >= 0) & (at >= 0))

    def only(self, where: Tensor) -> _Tokens:
        """Return the tokens where a condition holds."""
        return _Tokens(**{f.name: getattr(self, f.name)[where] for f in fields(self)})

    @property
    def is_known(self) -> Tensor:
        """Whether the parameters are announced, and are the request's own."""
        return self.announced[:, Sampling.SERIAL] == self.serial

    def has(self, flag: SamplingFlag) -> Tensor:
        """Whether known parameters have a flag."""
        return self.is_known & (self.announced[:, Sampling.FLAGS] & flag != 0)

    def number(self, word: Sampling) -> Tensor:
        """Return a parameter that is a float32."""
        return float_bits(self.announced[:, word])


def check_drawn(
    state: CanaryState, drawn: DrawnTokens, findings: Tensor | None
) -> None:
    """See `launches.check_drawn`."""
    drawn.check_layout()
    tokens = _Tokens.of(drawn)
    due_sum, found_sum = _row_sums(drawn, tokens)
    due_mask, found_mask = _mask_words(drawn, tokens)
    reasons = _check_rows(drawn, tokens, due_sum != found_sum, due_mask != found_mask)
    is_row = (reasons & Reason.LOGITS_ROW) != 0
    is_mask = (reasons & Reason.GRAMMAR_MASK) != 0
    unknown = torch.full_like(tokens.token, UNKNOWN)
    due = pack_word0_tensor(unknown, tokens.position)
    found = pack_word0_tensor(tokens.token, tokens.position)
    # The forward's own tail has already advanced the clock.
    Report(state, Launch.DRAWN, NO_MANAGER, clock_offset=-1, findings=findings).add(
        {
            Ring.REASONS: reasons,
            Ring.REQ_ROW: drawn.req_rows[tokens.row],
            Ring.SERIAL: tokens.serial,
            Ring.POSITION: tokens.position,
            Ring.EXPECTED_WORD0: torch.where(is_mask, due_mask, due),
            Ring.FOUND_WORD0: torch.where(is_mask, found_mask, found),
            Ring.EXPECTED_LINEAGE: due_sum * is_row,
            Ring.FOUND_LINEAGE: found_sum * is_row,
            Ring.BATCH_ROW: tokens.row,
        }
    )


def _check_rows(
    drawn: DrawnTokens, tokens: _Tokens, other_row: Tensor, other_mask: Tensor
) -> Tensor:
    """Return the reasons of each token.

    Args:
        other_row: whether the head read another row than was due; other_mask: whether
            the words of its mask are not the due ones.
    """
    rows, vocab = drawn.logits.shape
    # Nothing can be read of a row that is not there, or of an id that is none.
    is_there = tokens.at < rows
    is_id = is_there & (tokens.token < vocab)
    reasons = flag(Reason.LOGITS_ROW, other_row | ~is_there)
    failed = tokens.has(SamplingFlag.GRAMMAR) & _has_failed(drawn, tokens)
    reasons |= flag(Reason.GRAMMAR_MASK, is_there & other_mask & ~failed)
    foreign = ~tokens.is_known | (tokens.token >= vocab)
    reasons |= flag(Reason.SAMPLED_TOKEN, is_there & foreign & ~failed)
    readable = is_id & ~failed
    read = tokens.only(readable)
    if len(read.index):
        reasons[readable] |= _check_values(drawn, read)
    return reasons


def _check_values(drawn: DrawnTokens, tokens: _Tokens) -> Tensor:
    """Return the reasons that follow from the values in each token's row."""
    logits = drawn.logits[tokens.at].float()
    allowed = _allowed(drawn, tokens)
    is_wild = (logits.isnan() | (logits == torch.inf)).any(dim=1)
    is_wild |= _own(logits, tokens) == -torch.inf
    reasons = flag(Reason.LOGITS_NOT_FINITE, is_wild)
    # NaN wins over every id, also over those that the mask allows.
    reasons |= flag(Reason.GRAMMAR_MASK, ~_own(allowed, tokens) & ~is_wild)
    if drawn.draws:
        is_due = _is_chosen(drawn, tokens, logits, allowed)
        is_judged = tokens.is_known & ~is_wild
        reasons |= flag(Reason.SAMPLED_TOKEN, is_judged & ~is_due)
    return reasons


def _own(values: Tensor, tokens: _Tokens) -> Tensor:
    """Return the values of the tokens themselves, of [n, V]."""
    return values.gather(1, tokens.token[:, None])[:, 0]


# -- rows of the head ---------------------------------------------------------


def _row_sums(drawn: DrawnTokens, tokens: _Tokens) -> tuple[Tensor, Tensor]:
    """Return sums of the hidden rows that are due, and of those that the head read."""
    words = drawn.words
    if words is None:
        nothing = torch.zeros_like(tokens.index)
        return nothing, nothing
    inputs, hidden = words
    ends = tokens.index + 1
    if drawn.hidden_ends is not None:
        ends = drawn.hidden_ends[tokens.index]
    return _sum_rows(hidden, ends - 1), _sum_rows(inputs, tokens.at)


def _sum_rows(words: Tensor, rows: Tensor) -> Tensor:
    """Return the sums of rows of int32 words, 0 for rows that are not there."""
    is_there = (rows >= 0) & (rows < len(words))
    sums = torch.zeros_like(rows)
    sums[is_there] = sum_words(words[rows[is_there]].long())
    return sums


# -- masks --------------------------------------------------------------------


def _mask_word(drawn: DrawnTokens, tokens: _Tokens, word: MaskWord) -> Tensor:
    """Return a word of each token's mask row, 0 without a mask."""
    found = torch.zeros_like(tokens.at)
    if drawn.masks is not None:
        is_there = tokens.at < len(drawn.masks)
        words = drawn.masks[:, word - MASK_WORDS].long()
        found[is_there] = words[tokens.at[is_there]]
    return found


def _has_failed(drawn: DrawnTokens, tokens: _Tokens) -> Tensor:
    """Whether the grammar failed, so that the token will be discarded."""
    own = tokens.serial & SERIAL_WORD_MASK
    is_own = _mask_word(drawn, tokens, MaskWord.SERIAL) == own
    return is_own & (_mask_word(drawn, tokens, MaskWord.ACCEPTED) == UNKNOWN)


def _mask_words(drawn: DrawnTokens, tokens: _Tokens) -> tuple[Tensor, Tensor]:
    """Return the words that each mask row must have, and those that it has. Without
    known parameters these are alike."""
    serial = _mask_word(drawn, tokens, MaskWord.SERIAL)
    accepted = _mask_word(drawn, tokens, MaskWord.ACCEPTED)
    found = pack_word0_tensor(serial, accepted)
    gained = tokens.position - tokens.announced[:, Sampling.PROMPT_LEN]
    own = pack_word0_tensor(tokens.serial & SERIAL_WORD_MASK, gained)
    none = pack_word0_tensor(torch.zeros_like(serial), accepted)
    due = torch.where(tokens.has(SamplingFlag.GRAMMAR), own, none)
    return torch.where(tokens.is_known, due, found), found


def _allowed(drawn: DrawnTokens, tokens: _Tokens) -> Tensor:
    """Return which ids the grammar of each token allows, bool [n, V]."""
    vocab = drawn.logits.shape[1]
    allowed = torch.ones(
        len(tokens.at), vocab, dtype=torch.bool, device=tokens.at.device
    )
    if drawn.masks is not None:
        masked = tokens.has(SamplingFlag.GRAMMAR)
        ids = torch.arange(vocab, device=tokens.at.device)
        words = drawn.masks[tokens.at[masked]][:, ids // 32]
        allowed[masked] = words >> (ids % 32) & 1 != 0
    return allowed


# -- draws --------------------------------------------------------------------


def _is_chosen(
    drawn: DrawnTokens, tokens: _Tokens, logits: Tensor, allowed: Tensor
) -> Tensor:
    """Whether the announced parameters choose each token from its row."""
    values, is_there = _edited(drawn, tokens, logits)
    greedy = tokens.has(SamplingFlag.GREEDY)
    is_best = ~(allowed & ~(values <= _own(values, tokens)[:, None])).any(dim=1)
    temperatures = tokens.number(Sampling.TEMPERATURE).masked_fill(greedy, 1.0)
    is_drawn = _is_drawn(drawn, tokens, values / temperatures[:, None], allowed)
    return torch.where(greedy, is_best, is_drawn) & is_there


def _edited(
    drawn: DrawnTokens, tokens: _Tokens, logits: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the values that each token is chosen by, [n, V], and whether they are
    there."""
    edits = tokens.has(SamplingFlag.EDITED)
    if drawn.edited is None or drawn.edited_rows is None:
        return logits, ~edits
    rows = drawn.edited_rows[tokens.index]
    is_there = (rows >= 0) & (rows < len(drawn.edited))
    values = logits.clone()
    read = edits & is_there
    values[read] = drawn.edited[rows[read]]
    return values, ~edits | is_there


def _is_drawn(
    drawn: DrawnTokens, tokens: _Tokens, scaled: Tensor, allowed: Tensor
) -> Tensor:
    """Whether the noise draws each token from `scaled`, logits that were divided."""
    # Divided first, as a sampler does: the quotient's rounding is part of the weight.
    weights = (scaled - _own(scaled, tokens)[:, None]).exp()
    weights = weights.masked_fill(~allowed, 0.0)
    filtered = _is_filtered(tokens, vocab=scaled.shape[1])
    is_drawn = _is_hit(tokens, weights.double(), own=1.0)
    if drawn.kept is None:
        return is_drawn & ~filtered
    kept = drawn.kept[tokens.at]
    is_kept = _is_filter_right(tokens, weights, kept)
    is_kept &= _is_hit(tokens, kept.double(), own=_own(kept, tokens).double())
    return torch.where(filtered, is_kept, is_drawn)


def _is_filtered(tokens: _Tokens, *, vocab: int) -> Tensor:
    """Whether top-k, top-p or min-p restrict each row."""
    return (
        (tokens.announced[:, Sampling.TOP_K] < vocab)
        | (tokens.number(Sampling.TOP_P) < 1)
        | (tokens.number(Sampling.MIN_P) > 0)
    )


def _is_hit(tokens: _Tokens, weights: Tensor, *, own: Tensor | float) -> Tensor:
    """Whether the noise lies in the interval of each token. The intervals follow the
    order of the ids; `own` is the token's weight."""
    total = weights.sum(dim=1)
    ids = torch.arange(weights.shape[1], device=weights.device)
    lower = (weights * (ids < tokens.token[:, None])).sum(dim=1)
    target = uniform(tokens.announced[:, Sampling.KEY], tokens.position) * total
    slack = SLACK * total
    is_inside = (lower - slack <= target) & (target <= lower + own + slack)
    # A token without a measurable share of the total overflows it.
    return is_inside & total.isfinite()


def _is_filter_right(tokens: _Tokens, weights: Tensor, kept: Tensor) -> Tensor:
    """Whether `kept` [n, V] are probabilities of just the ids that top-k, top-p and
    min-p leave of `weights` [n, V], where each token has weight 1.

    An id may go if k others stay, if these have a mass of p, or if it is below the
    floor of min-p. One may stay if not more than k do, if the others lack mass, and if
    it is not below the floor. Ids that go are never larger than ids that stay.
    """
    stays = kept > 0
    own = _own(kept, tokens)
    # Rounding may have made a tie of weights that are as close as this.
    is_other = (kept - weights * own[:, None]).abs() > SLACK * kept + TINY
    smallest = weights.masked_fill(~stays, torch.inf).amin(dim=1)
    dropped = weights.masked_fill(stays, 0.0).amax(dim=1)
    count = stays.sum(dim=1)
    total = weights.double().sum(dim=1)
    mass = (weights.double() * stays).sum(dim=1)
    floor = tokens.number(Sampling.MIN_P) * weights.amax(dim=1)
    top_k = tokens.announced[:, Sampling.TOP_K]
    top_p = tokens.number(Sampling.TOP_P).double()
    may_go = (count >= top_k) | (mass >= (top_p - SLACK) * total)
    may_go |= dropped * (1 - SLACK) <= floor
    may_stay = (count <= top_k) & (mass - smallest < (top_p + SLACK) * total)
    may_stay &= floor * (1 - SLACK) <= smallest
    is_prefix = dropped <= smallest * (1 + SLACK)
    return (own > 0) & may_go & may_stay & is_prefix & ~(stays & is_other).any(dim=1)
