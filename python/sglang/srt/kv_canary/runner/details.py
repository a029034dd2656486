"""What only the host can add to an incident."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from kv_canary.records import POISON_WORD, unpack_word0

if TYPE_CHECKING:
    from kv_canary.violation import Violation
    from sglang.srt.kv_canary.single_forward_manager.manager import CanaryTarget

TokensOf = Callable[[int], Sequence[int] | None]
"""The tokens of a running request by its serial; None: it is not running."""


def details(
    violation: Violation, *, target: CanaryTarget, tokens_of: TokensOf
) -> dict[str, int]:
    """Further fields of an incident of the target's primary group; waits for the
    device. For `verify_token` the first position, if any, whose slot in the device's
    table does not hold the request's own token; for `logits_not_finite` the state that
    is not."""
    primary = target.groups[0]
    if target.is_draft or violation.group != primary.name:
        return {}
    if "logits_not_finite" in violation.labels:
        states = target.states
        return {} if states is None else states.where_not_finite(violation.req_row)
    if "verify_token" not in violation.labels:
        return {}
    tokens = tokens_of(violation.serial)
    if tokens is None:
        return {}
    row = target.req_to_token_pool.req_to_token[violation.req_row]
    slots = row[: min(violation.position + 1, len(tokens))].to(torch.int64)
    tail = primary.state.tail
    is_inside = (slots >= 0) & (slots < len(tail))
    words = torch.where(is_inside, tail[slots * is_inside, 0], POISON_WORD)
    for position, (word, token) in enumerate(zip(words.tolist(), tokens, strict=False)):
        if word == POISON_WORD or unpack_word0(word) != (token, position):
            return {"first_wrong_position": position}
    return {}
