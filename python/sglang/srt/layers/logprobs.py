"""Log-probabilities of tokens and of the most likely alternatives, for rows that ask.

Owns the numbers and their way to the host. Knows nothing of requests, penalties or
grammars: it takes the logits that the token was drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

# Logits (rows x vocabulary) that one step of `prompt_logprobs` works on.
_CHUNK_ELEMENTS = 1 << 24


class HostLogprob(NamedTuple):
    """One row on the host: its token's logprob and the top alternatives, best first.

    `top` holds at most as many (logprob, token id) pairs as the row asked for; ids that
    the row could not have produced (logprob -inf) are left out.
    """

    logprob: float
    top: list[tuple[float, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobRequest:
    """The rows of a batch that want logprobs.

    Fields:
        rows: [R'] int64 on the device, or None for every row.
        top_ks: host; alternatives wanted, for each of these rows.
    """

    rows: torch.Tensor | None
    top_ks: tuple[int, ...]

    @classmethod
    def build(
        cls,
        rows: Sequence[int],
        top_ks: Sequence[int],
        *,
        device: torch.device | str,
    ) -> LogprobRequest:
        """A request from host row indices and their top-k; once per composition."""
        if len(rows) != len(top_ks):
            raise ValueError(f"{len(rows)} rows but {len(top_ks)} top_ks")
        indices = torch.tensor(list(rows), dtype=torch.int64)
        if torch.device(device).type != "cpu":
            indices = indices.pin_memory().to(device, non_blocking=True)
        return cls(rows=indices, top_ks=tuple(top_ks))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobResult:
    """Logprobs of R' rows in one tensor, so that one copy brings them to the host.

    Fields:
        packed: int32 [R', 1 + 2 K]; the bits of the token's logprob, of the K best
            logprobs, then the K ids. K is the largest of `top_ks`.
        top_ks: host; alternatives that each row asked for.
    """

    packed: torch.Tensor
    top_ks: tuple[int, ...]

    @property
    def token_logprobs(self) -> torch.Tensor:
        """[R'] float32."""
        return self.packed[:, 0].view(torch.float32)

    @property
    def top_values(self) -> torch.Tensor:
        """[R', K] float32, descending."""
        k = self.packed.shape[1] // 2
        return self.packed[:, 1 : 1 + k].view(torch.float32)

    @property
    def top_ids(self) -> torch.Tensor:
        """[R', K] int32."""
        return self.packed[:, 1 + self.packed.shape[1] // 2 :]

    def with_packed(self, packed: torch.Tensor) -> LogprobResult:
        """The same result after the caller copied `packed` elsewhere."""
        return LogprobResult(packed=packed, top_ks=self.top_ks)

    def to_host(self) -> list[HostLogprob]:
        """Python numbers, one entry per row. Waits for the device."""
        host = self.with_packed(self.packed.cpu())
        return [
            HostLogprob(
                logprob,
                [
                    (v, i)
                    for v, i in zip(values[:k], ids[:k], strict=True)
                    if v != float("-inf")
                ],
            )
            for logprob, values, ids, k in zip(
                host.token_logprobs.tolist(),
                host.top_values.tolist(),
                host.top_ids.tolist(),
                self.top_ks,
                strict=True,
            )
        ]


def compute_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, request: LogprobRequest
) -> LogprobResult:
    """Log-softmax of the chosen rows, at their tokens and at their best ids.

    Args:
        logits: [R, V] float32: bias, penalties, mask and temperature applied; top-p,
            top-k and min-p not applied.
        token_ids: [R] int64.
        request: the chosen rows.
    """
    if request.rows is not None:
        logits = logits.index_select(0, request.rows)
        token_ids = token_ids.index_select(0, request.rows)
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, token_ids[:, None])
    k = min(max(request.top_ks, default=0), logits.shape[1])
    if k == 0:
        packed = chosen.view(torch.int32)
    else:
        values, ids = logprobs.topk(k, dim=-1)
        packed = torch.cat(
            (chosen.view(torch.int32), values.view(torch.int32), ids.to(torch.int32)),
            dim=1,
        )
    return LogprobResult(packed=packed, top_ks=request.top_ks)


def prompt_logprobs(
    logits: torch.Tensor, next_tokens: torch.Tensor, *, top_k: int = 0
) -> LogprobResult:
    """Logprobs of the tokens that follow prompt positions, a chunk of rows at a time.

    Args:
        logits: [T, V] of T prompt positions; any float dtype.
        next_tokens: [T] int64, the token after each position.
        top_k: alternatives per position.
    """
    n_rows, vocab_size = logits.shape
    step = max(1, _CHUNK_ELEMENTS // vocab_size)
    parts = [
        compute_logprobs(
            logits[i : i + step].float(),
            next_tokens[i : i + step],
            LogprobRequest(rows=None, top_ks=(top_k,) * min(step, n_rows - i)),
        )
        for i in range(0, n_rows, step)
    ]
    return concat_logprobs(parts)


def concat_logprobs(parts: Sequence[LogprobResult]) -> LogprobResult:
    """One result with the rows of all `parts`, which have the same K (chunks of one
    prompt); no parts give an empty result."""
    if not parts:
        return LogprobResult(packed=torch.empty((0, 1), dtype=torch.int32), top_ks=())
    if len(parts) == 1:
        return parts[0]
    return LogprobResult(
        packed=torch.cat([part.packed for part in parts]),
        top_ks=tuple(k for part in parts for k in part.top_ks),
    )
