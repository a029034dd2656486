"""What bias, penalties and bans of stops make of logits, computed again from what each
request announced: the sampler's own values would hide its mistakes.

Uses no list of rows that the scheduler keeps. Nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kv_canary.drawn import Sampling, SamplingFlag, float_bits
from kv_canary.runtime.uploads import upload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo, SamplingRow

IntArray = np.ndarray[Any, np.dtype[np.int64]]
_BANNED = float("-inf")
# Repetition, frequency, presence.
_PENALTIES = slice(Sampling.REPETITION, Sampling.PRESENCE + 1)


class EditBounds(NamedTuple):
    """What the host knows of a batch's edits, so that memory can be reserved.

    Fields:
        num_rows: requests with edits.
        max_len: upper bound of a request's tokens.
    """

    num_rows: int
    max_len: int

    @classmethod
    def of(
        cls, info: SamplingBatchInfo, seq_lens_cpu: IntArray, *, ahead: int = 0
    ) -> EditBounds | None:
        """Return the bounds of a batch, or None if nothing edits logits.

        Args:
            seq_lens_cpu: [R], which the device may exceed by `ahead`.
        """
        if not info.edits_logits:
            return None
        count = sum(row.edits_logits for row in info.rows)
        return cls(count, int(seq_lens_cpu.max()) + ahead)


class EditedLogits(NamedTuple):
    """`edited` and `edited_rows` of `DrawnTokens`."""

    values: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """Tokens to be chosen, W for each of R rows.

    Fields:
        req_rows, serials: int64 [R].
        starts: int64 [R], position of each row's first token.
        gained: int64 [R, W], the tokens: each follows those before it.
        at: int64 [R, W], rows of the logits, or None for row i.
        logits: [N, V].
        masks: bits of allowed ids in int32 [N, >= ceil(V / 32)], or None.
    """

    req_rows: Tensor
    serials: Tensor
    starts: Tensor
    gained: Tensor
    at: Tensor | None
    logits: Tensor
    masks: Tensor | None

    @property
    def width(self) -> int:
        return self.gained.shape[1]


class _Entries(NamedTuple):
    """Ids of request rows, int64 [M] each, with float32 [M] values to be added."""

    req_rows: Tensor
    ids: Tensor
    values: Tensor


class _Kinds(NamedTuple):
    """Which edits some announced request has."""

    repetition: bool
    output: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Edited:
    """The E rows of a batch that have edits, and E * W tokens of theirs.

    Fields:
        rows: [E], rows of the batch; some row if there are fewer. None: row i.
        req_rows: [E].
        words: [E, words of `Sampling`].
        lens: [E, W], position of each token.
        gained: [E, W], as in `Positions`.
    """

    rows: Tensor | None
    req_rows: Tensor
    words: Tensor
    lens: Tensor
    gained: Tensor

    @property
    def width(self) -> int:
        return self.lens.shape[1]

    def of_tokens(self, of_rows: Tensor) -> Tensor:
        """Return what belongs to each row for each of its tokens, [E * W, ...]."""
        return of_rows if self.width == 1 else of_rows.repeat_interleave(self.width, 0)

    def at(self, due: Positions) -> Tensor | slice:
        """Return the rows of the logits, E * W of them."""
        if due.at is None:
            # W is 1 then.
            return slice(0, len(self.req_rows)) if self.rows is None else self.rows
        at = due.at if self.rows is None else due.at[self.rows]
        return at.reshape(-1).clamp(min=0)

    def places(self, table_rows: int) -> Tensor:
        """Return the index among E of each request row, or -1, [table rows]."""
        places = self.req_rows.new_full((table_rows,), -1)
        order = torch.arange(len(self.req_rows), device=places.device)
        return places.index_copy_(0, self.req_rows, order)


class EditTable:
    """The edits that requests announced.

    Args:
        sampling: `DrawnTokens.sampling`.
        token_table: int32 [table rows, width], the tokens of each request row.
    """

    def __init__(self, sampling: Tensor, token_table: Tensor) -> None:
        self._sampling = sampling
        self._token_table = token_table
        self._columns = torch.arange(token_table.shape[1], device=sampling.device)
        # By request row; the last announcement counts.
        self._announced: dict[int, SamplingRow] = {}
        self._kinds = _Kinds(False, False)
        self._bias: _Entries | None = None
        self._stops: _Entries | None = None
        self._is_stale = False

    def announce(self, rows: Sequence[int], requests: Sequence[SamplingRow]) -> None:
        """Announce the requests in rows of the table."""
        for row, request in zip(rows, requests, strict=True):
            if request.edits_logits:
                self._announced[row] = request
            elif self._announced.pop(row, None) is None:
                continue
            self._is_stale = True

    def edit(self, due: Positions, bounds: EditBounds) -> EditedLogits:
        """Return the edited logits of a batch's rows with edits.

        Bias is added; then a seen id's logit is divided by the repetition penalty if it
        is positive, else multiplied; then `count * frequency + (count > 0) * presence`
        of the output is subtracted; then stop ids of young rows are banned, unless the
        grammar allows nothing else.
        """
        if self._is_stale:
            self._upload()
        edited, rows = self._edited(due, bounds.num_rows)
        at = edited.at(due)
        values = due.logits[at].to(torch.float32, copy=True)
        if self._bias is not None:
            self._add(values, self._bias, self._bias.values[:, None], edited)
        if any(self._kinds):
            values = self._penalize(values, edited, bounds.max_len)
        if self._stops is not None:
            values = self._ban(values, due, edited, at)
        return EditedLogits(values, rows)

    def _upload(self) -> None:
        bias: list[tuple[int, int, float]] = []
        stops: list[tuple[int, int, float]] = []
        repetition = output = False
        for row, request in self._announced.items():
            params = request.params
            repetition |= params.repetition_penalty != 1
            output |= params.frequency_penalty != 0 or params.presence_penalty != 0
            for token_id, value in (params.logit_bias or {}).items():
                bias.append((row, token_id, value))
            if params.min_new_tokens > 0:
                stops += [(row, token_id, _BANNED) for token_id in request.stop_ids]
        self._kinds = _Kinds(repetition, output)
        device = self._sampling.device
        self._bias, self._stops = _entries(bias, device), _entries(stops, device)
        self._is_stale = False

    def _edited(self, due: Positions, count: int) -> tuple[_Edited, Tensor]:
        """Return the rows with edits, `count` of them by the host, and `edited_rows`.
        If there are more, the ones after them are said to be missing."""
        words = self._sampling[due.req_rows]
        edits = (words[:, Sampling.FLAGS] & SamplingFlag.EDITED) != 0
        edits &= words[:, Sampling.SERIAL] == due.serials
        rows, req_rows, starts, gained = None, due.req_rows, due.starts, due.gained
        if count == len(req_rows):
            place = self._columns[:count]
        else:
            place = edits.cumsum(0) - 1
            edits &= place < count
            where = torch.where(edits, place, count)
            batch_rows = self._columns[: len(where)]
            rows = where.new_zeros(count + 1).index_copy_(0, where, batch_rows)[:count]
            words, req_rows = words[rows], req_rows[rows]
            starts, gained = starts[rows], gained[rows]
        steps = self._columns[: due.width]
        edited_rows = place[:, None] * due.width + steps
        return _Edited(
            rows=rows,
            req_rows=req_rows,
            words=words,
            lens=starts[:, None] + steps,
            gained=gained,
        ), torch.where(edits[:, None], edited_rows, -1).view(-1)

    def _penalize(self, values: Tensor, edited: _Edited, max_len: int) -> Tensor:
        columns = self._columns[: max_len + edited.width]
        tokens = self._token_table[:, : len(columns)][edited.req_rows].long()
        if edited.width > 1:
            # What was gained a moment ago may not be in the table yet. Past its end it
            # would be another token's, but is not read there.
            where = edited.lens.clamp(max=len(columns) - 1)
            tokens.scatter_(1, where, edited.gained)
            tokens = edited.of_tokens(tokens)
        known = columns < edited.lens.view(-1, 1)
        # Ids of contents are beyond the vocabulary; no penalty counts them.
        tokens.masked_fill_(~known, 0).clamp_(max=values.shape[1] - 1)
        numbers = float_bits(edited.words[:, _PENALTIES])
        repetition, frequency, presence = edited.of_tokens(numbers).split(1, dim=1)

        def count(where: Tensor) -> Tensor:
            return torch.zeros_like(values).scatter_add_(1, tokens, where.float())

        if self._kinds.repetition:
            scale = (count(known) > 0) * (repetition - 1) + 1
            values = torch.where(values > 0, values / scale, values * scale)
        if self._kinds.output:
            prompts = edited.of_tokens(edited.words[:, Sampling.PROMPT_LEN, None])
            counts = count(known & (columns >= prompts))
            values = values - counts * frequency - (counts > 0) * presence
        return values

    def _ban(
        self, values: Tensor, due: Positions, edited: _Edited, at: Tensor | slice
    ) -> Tensor:
        assert self._stops is not None
        gained = edited.lens - edited.words[:, Sampling.PROMPT_LEN, None]
        is_young = gained < edited.words[:, Sampling.MIN_NEW_TOKENS, None]
        place = edited.places(len(self._sampling))[self._stops.req_rows].clamp(min=0)
        added = torch.where(is_young[place], self._stops.values[:, None], 0.0)
        banned = values.clone()
        self._add(banned, self._stops, added, edited)
        if due.masks is None:
            return banned
        masks = due.masks[at]
        ids = torch.arange(values.shape[1], device=values.device)
        allowed = masks[:, ids // 32] >> (ids % 32) & 1 != 0
        grammar = edited.words[:, Sampling.FLAGS] & SamplingFlag.GRAMMAR != 0
        allowed |= ~edited.of_tokens(grammar)[:, None]
        is_dead = banned.masked_fill(~allowed, _BANNED).amax(dim=1) == _BANNED
        return torch.where(is_dead[:, None], values, banned)

    def _add(
        self, values: Tensor, entries: _Entries, added: Tensor, edited: _Edited
    ) -> None:
        """Add [M, W] or [M, 1] to `values` [E * W, V] at the entries of rows that are
        in the batch, in place."""
        width = edited.width
        place = edited.places(len(self._sampling))[entries.req_rows, None]
        added = torch.where(place >= 0, added, 0.0).expand(-1, width)
        rows = place.clamp(min=0) * width + self._columns[:width]
        ids = entries.ids[:, None].expand(-1, width)
        values.index_put_((rows.reshape(-1), ids.reshape(-1)), added.reshape(-1), True)


def _entries(
    listed: Sequence[tuple[int, int, float]], device: torch.device
) -> _Entries | None:
    if not listed:
        return None
    rows, ids, values = zip(*listed, strict=True)
    return _Entries(
        upload(torch.tensor(rows), device),
        upload(torch.tensor(ids), device),
        upload(torch.tensor(values, dtype=torch.float32), device),
    )
