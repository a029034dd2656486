"""Logit edits that depend on a request's tokens: bias, penalties, minimum length.

Stateless: counts are built from the token table when a step needs them, so nothing has
    to
follow retractions, speculation or overlap. Knows nothing of requests or grammars.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHistory:
    """Where each row's known tokens are.

    Tokens of row r are `token_table[req_pool_indices[r], :lens[r]]`: the prompt
    (`prompt_lens[r]` of them), then the output.

    Fields:
        token_table: int32 [table rows, width].
        req_pool_indices: [R] int64.
        lens: [R] int64.
        max_len: a host-side upper bound of `lens`, so that not the whole width is read.
            None reads the whole width.
    """

    token_table: torch.Tensor
    req_pool_indices: torch.Tensor
    lens: torch.Tensor
    max_len: int | None = None


def apply_logit_bias(logits: torch.Tensor, info: SamplingBatchInfo) -> None:
    """Add the bias entries to `logits` [R, V] float32, in place."""
    bias = info.logit_bias
    if bias is not None and bias.values is not None:
        logits.index_put_((bias.rows, bias.ids), bias.values, accumulate=True)


def apply_penalties(
    logits: torch.Tensor, info: SamplingBatchInfo, history: TokenHistory
) -> None:
    """Apply repetition, then frequency and presence penalties in place.

    Repetition (over prompt and output): a seen token's logit is divided by the penalty
    if it is positive, otherwise multiplied. Frequency and presence (only over the
    output): `logit -= count * frequency + (count > 0) * presence`.

    `logits` [R, V] float32. Rows without a penalty keep their bits.
    """
    rows = info.penalty_rows
    if rows is None:
        return
    every_row = rows.numel() == logits.shape[0]
    block = logits if every_row else logits.index_select(0, rows)
    floats = info.floats if every_row else info.floats.index_select(1, rows)
    prompt_lens = info.prompt_lens if every_row else info.prompt_lens[rows]
    tokens, known, output = _history_block(
        history, None if every_row else rows, prompt_lens
    )
    frequency, presence, repetition = floats[3:, :, None].unbind(0)
    if info.has_repetition_penalty:
        # Sums and clamps instead of torch.where, which torch does not vectorise on the
        # CPU. The scale of an unseen id is exactly 1.
        seen = _count(tokens, known, like=block).clamp_(max=1.0)
        scale = seen * (repetition - 1.0) + 1.0
        block = block.clamp(min=0.0) / scale + block.clamp(max=0.0) * scale
    if info.has_output_penalty:
        counts = _count(tokens, output, like=block)
        block = block - counts * frequency - counts.clamp(max=1.0) * presence
    if every_row:
        logits.copy_(block)
    else:
        logits.index_copy_(0, rows, block)


def ban_stop_tokens(
    logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor
) -> None:
    """Ban the stop ids of rows that have fewer than `min_new_tokens` output tokens.

    `logits` [R, V] float32, in place; `positions` [R] int64, the index of the token to
    be sampled.
    """
    stops = info.stop_tokens
    if stops is None:
        return
    too_short = positions - info.prompt_lens < info.min_new_tokens
    ban = too_short[stops.rows]
    banned = torch.zeros_like(ban, dtype=logits.dtype).masked_fill_(ban, float("-inf"))
    logits.index_put_((stops.rows, stops.ids), banned, accumulate=True)


def _history_block(
    history: TokenHistory, rows: torch.Tensor | None, prompt_lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return token ids [P, W] int64 (0 if unknown) and the masks known, output [P,
    W]."""
    table_rows, lens = history.req_pool_indices, history.lens
    if rows is not None:
        table_rows, lens = table_rows[rows], lens[rows]
    width = history.token_table.shape[1]
    if history.max_len is not None:
        width = min(width, history.max_len)
    tokens = history.token_table[:, :width].index_select(0, table_rows)
    index = torch.arange(width, device=tokens.device)
    known = index < lens[:, None]
    output = known & (index >= prompt_lens[:, None])
    return tokens.long().masked_fill_(~known, 0), known, output


def _count(
    tokens: torch.Tensor, valid: torch.Tensor, *, like: torch.Tensor
) -> torch.Tensor:
    """Return [P, V] float32: how often each id occurs among the valid `tokens` [P,
    W]. Ids of contents are beyond the vocabulary and count as its last token: only
    outputs count where a prompt has them."""
    ids = tokens.clamp(max=like.shape[1] - 1)
    return torch.zeros_like(like).scatter_add_(1, ids, valid.to(like.dtype))
