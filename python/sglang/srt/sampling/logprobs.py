"""Log-probabilities of tokens and of the most likely alternatives, for rows that ask.

Owns the numbers and their way to the host. Knows nothing of requests, penalties or
grammars; it takes the logits that the token was drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

# Logits (rows x vocabulary) that one step of `prompt_logprobs` works on.
_CHUNK_ELEMENTS = 1 << 24

TokenIds = tuple[int, ...]


class HostLogprob(NamedTuple):
    """One row on the host: its token's logprob and the top alternatives, best first.

    `top` holds at most as many (logprob, token id) pairs as the row asked for, without
    ids that the row could not have produced (logprob -inf). `named` holds a pair for
    each token id that the row named, in its order.
    """

    logprob: float
    top: list[tuple[float, int]]
    named: Sequence[tuple[float, int]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobRequest:
    """The rows of a batch that want logprobs.

    Fields:
        rows: [R'] int64 on the device, or None for every row.
        top_ks: on the host; alternatives wanted for each of these rows.
        named: on the host; token ids wanted for each of these rows.
        named_ids: [R', M] int64 on the device, `named` padded with id 0, or None if no
            row names any.
    """

    rows: torch.Tensor | None
    top_ks: tuple[int, ...]
    named: tuple[TokenIds, ...]
    named_ids: torch.Tensor | None = None

    @classmethod
    def build(
        cls,
        rows: Sequence[int] | None,
        top_ks: Sequence[int],
        *,
        device: torch.device | str,
        named: Sequence[TokenIds] = (),
    ) -> LogprobRequest:
        """Build a request from host row indices, their top-k and the token ids they
        name; once per batch composition."""
        if rows is not None and len(rows) != len(top_ks):
            raise ValueError(f"{len(rows)} rows but {len(top_ks)} top_ks")
        return cls(
            rows=None if rows is None else _upload(list(rows), device),
            top_ks=tuple(top_ks),
            named=tuple(named) or ((),) * len(top_ks),
            named_ids=_padded(named, device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobResult:
    """Logprobs of R' rows in one tensor, so that one copy brings them to the host.

    Fields:
        packed: int32 [R', 1 + 2 K + M]: the bits of the token's logprob, the bits of
            the K best logprobs, the K ids, and the bits of the named ids' logprobs.
            K is the largest of `top_ks`.
        num_top: K.
        top_ks: on the host; alternatives that each row asked for.
        named: on the host; token ids that each row named.
    """

    packed: torch.Tensor
    num_top: int
    top_ks: tuple[int, ...]
    named: tuple[TokenIds, ...]

    @property
    def token_logprobs(self) -> torch.Tensor:
        """[R'] float32."""
        return self.packed[:, 0].view(torch.float32)

    @property
    def top_values(self) -> torch.Tensor:
        """[R', K] float32, descending."""
        return self.packed[:, 1 : 1 + self.num_top].view(torch.float32)

    @property
    def top_ids(self) -> torch.Tensor:
        """[R', K] int32."""
        return self.packed[:, 1 + self.num_top : 1 + 2 * self.num_top]

    @property
    def named_values(self) -> torch.Tensor:
        """[R', M] float32; entries past a row's own ids are meaningless."""
        return self.packed[:, 1 + 2 * self.num_top :].view(torch.float32)

    def with_packed(self, packed: torch.Tensor) -> LogprobResult:
        """Return the same result after the caller copied `packed` elsewhere."""
        return replace(self, packed=packed)

    def to_host(self) -> list[HostLogprob]:
        """Return Python numbers, one entry per row. Waits for the device."""
        host = self.with_packed(self.packed.cpu())
        return [
            HostLogprob(
                logprob,
                [
                    (v, i)
                    for v, i in zip(values[:k], ids[:k], strict=True)
                    if v != float("-inf")
                ],
                list(zip(named, names, strict=False)),
            )
            for logprob, values, ids, k, named, names in zip(
                host.token_logprobs.tolist(),
                host.top_values.tolist(),
                host.top_ids.tolist(),
                self.top_ks,
                host.named_values.tolist(),
                self.named,
                strict=True,
            )
        ]


def compute_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, request: LogprobRequest
) -> LogprobResult:
    """Compute log-softmax of the chosen rows at their tokens, their best ids and the
    ids they name.

    Args:
        logits: [R, V] float32, with bias, penalties, mask and temperature applied, but
            not top-p, top-k and min-p.
        token_ids: [R] int64.
        request: the chosen rows.
    """
    if request.rows is not None:
        logits = logits.index_select(0, request.rows)
        token_ids = token_ids.index_select(0, request.rows)
    logprobs = torch.log_softmax(logits, dim=-1)
    parts = [logprobs.gather(1, token_ids[:, None]).view(torch.int32)]
    k = min(max(request.top_ks, default=0), logits.shape[1])
    if k:
        values, ids = logprobs.topk(k, dim=-1)
        parts += [values.view(torch.int32), ids.to(torch.int32)]
    if request.named_ids is not None:
        parts.append(logprobs.gather(1, request.named_ids).view(torch.int32))
    return LogprobResult(
        packed=parts[0] if len(parts) == 1 else torch.cat(parts, dim=1),
        num_top=k,
        top_ks=request.top_ks,
        named=request.named,
    )


def prompt_logprobs(
    logits: torch.Tensor,
    next_tokens: torch.Tensor,
    *,
    top_k: int = 0,
    named: TokenIds = (),
) -> LogprobResult:
    """Compute logprobs of the tokens after prompt positions, a chunk of rows at a time.

    Args:
        logits: [T, V] of T prompt positions; any float dtype.
        next_tokens: [T] int64, the token after each position.
        top_k: alternatives per position.
        named: token ids whose logprobs are wanted at each position.
    """
    n_rows, vocab_size = logits.shape
    step = max(1, _CHUNK_ELEMENTS // vocab_size)
    named_ids = _padded([named], logits.device)
    parts = []
    for i in range(0, n_rows, step):
        count = min(step, n_rows - i)
        request = LogprobRequest(
            rows=None,
            top_ks=(top_k,) * count,
            named=(named,) * count,
            named_ids=None if named_ids is None else named_ids.expand(count, -1),
        )
        parts.append(
            compute_logprobs(
                logits[i : i + step].float(), next_tokens[i : i + step], request
            )
        )
    return concat_logprobs(parts)


def concat_logprobs(parts: Sequence[LogprobResult]) -> LogprobResult:
    """Concatenate the rows of all `parts`, which have the same columns (chunks of one
    prompt). No parts give an empty result."""
    if not parts:
        empty = torch.empty((0, 1), dtype=torch.int32)
        return LogprobResult(packed=empty, num_top=0, top_ks=(), named=())
    if len(parts) == 1:
        return parts[0]
    return replace(
        parts[0],
        packed=torch.cat([part.packed for part in parts]),
        top_ks=tuple(k for part in parts for k in part.top_ks),
        named=tuple(ids for part in parts for ids in part.named),
    )


def _padded(
    named: Sequence[TokenIds], device: torch.device | str
) -> torch.Tensor | None:
    """Return [len(named), M] int64 on the device, padded with id 0, or None if all are
    empty."""
    width = max(map(len, named), default=0)
    if width == 0:
        return None
    return _upload([[*ids, *(0,) * (width - len(ids))] for ids in named], device)


def _upload(
    values: list[int] | list[list[int]], device: torch.device | str
) -> torch.Tensor:
    host = torch.tensor(values, dtype=torch.int64)
    if torch.device(device).type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)
