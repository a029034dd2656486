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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Edited:
    """The E rows of a batch that have edits, and E * W tokens of theirs.

    Fields:
        rows: [E], rows of the batch; some row if there are fewer.
        places: [table rows], the index among E of a request row, or -1.
        words: [E, words of `Sampling`].
        lens: [E, W], position of each token.
    """

    rows: Tensor
    places: Tensor
    words: Tensor
    lens: Tensor

    def number(self, word: Sampling) -> Tensor:
        """Return a float parameter, [E * W, 1]."""
        values = float_bits(self.words[:, word])
        return values.repeat_interleave(self.lens.shape[1])[:, None]


class EditTable:
    """The edits that requests announced.

    Args:
        sampling: `DrawnTokens.sampling`.
        token_table: int32 [table rows, width], the tokens of each request row.
    """

    def __init__(self, sampling: Tensor, token_table: Tensor) -> None:
        self._sampling = sampling
        self._token_table = token_table
        # By request row; the last announcement counts.
        self._announced: dict[int, SamplingRow] = {}
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
        at = _of_rows(edited.rows, due.width) if due.at is None else due.at[edited.rows]
        values = due.logits[at.reshape(-1).clamp(min=0)].float()
        if self._bias is not None:
            _add(values, self._bias, self._bias.values[:, None], edited)
        if any(row.params.has_penalty for row in self._announced.values()):
            values = self._penalize(values, due, edited, bounds.max_len)
        if self._stops is not None:
            values = self._ban(values, due, edited, at)
        return EditedLogits(values, rows)

    def _upload(self) -> None:
        bias: list[tuple[int, int, float]] = []
        stops: list[tuple[int, int, float]] = []
        for row, request in self._announced.items():
            for token_id, value in (request.params.logit_bias or {}).items():
                bias.append((row, token_id, value))
            if request.params.min_new_tokens > 0:
                stops += [(row, token_id, _BANNED) for token_id in request.stop_ids]
        device = self._sampling.device
        self._bias, self._stops = _entries(bias, device), _entries(stops, device)
        self._is_stale = False

    def _edited(self, due: Positions, count: int) -> tuple[_Edited, Tensor]:
        """Return the rows with edits, `count` of them by the host, and `edited_rows`.
        If there are more, the ones after them are said to be missing."""
        words = self._sampling[due.req_rows]
        edits = (words[:, Sampling.FLAGS] & SamplingFlag.EDITED) != 0
        edits &= words[:, Sampling.SERIAL] == due.serials
        place = edits.cumsum(0) - 1
        is_taken = edits & (place < count)
        where = torch.where(is_taken, place, count)
        batch_rows = torch.arange(len(where), device=where.device)
        rows = where.new_zeros(count + 1).index_copy_(0, where, batch_rows)[:count]
        places = where.new_full((len(self._sampling),), -1)
        places.index_copy_(0, due.req_rows, torch.where(is_taken, place, -1))
        steps = torch.arange(due.width, device=where.device)
        edited = _Edited(
            rows=rows,
            places=places,
            words=words[rows],
            lens=due.starts[rows][:, None] + steps,
        )
        return edited, torch.where(
            is_taken[:, None], place[:, None] * due.width + steps, -1
        ).view(-1)

    def _penalize(
        self, values: Tensor, due: Positions, edited: _Edited, max_len: int
    ) -> Tensor:
        width = due.width
        table = self._token_table[due.req_rows[edited.rows]]
        tokens = table[:, : max_len + width].long()
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        # What was gained a moment ago may not be in the table yet. Past its end it
        # would be another token's, but is not read there.
        tokens.scatter_(
            1, edited.lens.clamp(max=len(columns) - 1), due.gained[edited.rows]
        )
        lens = edited.lens.view(-1, 1)
        prompts = edited.words[:, Sampling.PROMPT_LEN].repeat_interleave(width)
        known = columns < lens
        output = known & (columns >= prompts[:, None])
        tokens = tokens.repeat_interleave(width, dim=0).masked_fill_(~known, 0)

        def count(where: Tensor) -> Tensor:
            return torch.zeros_like(values).scatter_add_(1, tokens, where.float())

        repetition = edited.number(Sampling.REPETITION)
        scale = (count(known) > 0) * (repetition - 1) + 1
        values = torch.where(values > 0, values / scale, values * scale)
        counts = count(output)
        values = values - counts * edited.number(Sampling.FREQUENCY)
        return values - (counts > 0) * edited.number(Sampling.PRESENCE)

    def _ban(
        self, values: Tensor, due: Positions, edited: _Edited, at: Tensor
    ) -> Tensor:
        assert self._stops is not None
        gained = edited.lens - edited.words[:, Sampling.PROMPT_LEN, None]
        is_young = gained < edited.words[:, Sampling.MIN_NEW_TOKENS, None]
        place = edited.places[self._stops.req_rows].clamp(min=0)
        added = torch.where(is_young[place], self._stops.values[:, None], 0.0)
        banned = values.clone()
        _add(banned, self._stops, added, edited)
        if due.masks is None:
            return banned
        masks = due.masks[at.reshape(-1).clamp(min=0)]
        ids = torch.arange(values.shape[1], device=values.device)
        allowed = masks[:, ids // 32] >> (ids % 32) & 1 != 0
        grammar = edited.words[:, Sampling.FLAGS] & SamplingFlag.GRAMMAR != 0
        allowed |= ~grammar.repeat_interleave(due.width)[:, None]
        is_dead = banned.masked_fill(~allowed, _BANNED).amax(dim=1) == _BANNED
        return torch.where(is_dead[:, None], values, banned)


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


def _of_rows(rows: Tensor, width: int) -> Tensor:
    """Return the indices of W tokens of each row, [E, W]."""
    return rows[:, None] * width + torch.arange(width, device=rows.device)


def _add(values: Tensor, entries: _Entries, added: Tensor, edited: _Edited) -> None:
    """Add [M, W] or [M, 1] to `values` [E * W, V] at the entries of rows that are in
    the batch, in place."""
    width = edited.lens.shape[1]
    place = edited.places[entries.req_rows]
    added = torch.where(place[:, None] >= 0, added, 0.0).expand(-1, width)
    rows = _of_rows(place.clamp(min=0), width)
    ids = entries.ids[:, None].expand(-1, width)
    values.index_put_((rows.reshape(-1), ids.reshape(-1)), added.reshape(-1), True)
