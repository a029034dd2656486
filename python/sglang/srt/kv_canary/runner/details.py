"""What only the host can add to an incident."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from kv_canary.records import POISON_WORD, prefix_lineages, unpack_word0
from sglang.srt.utils.salt_chain import TOKEN_MASK, Namespace, lineage_salt

if TYPE_CHECKING:
    from kv_canary.violation import Violation
    from sglang.srt.kv_canary.single_forward_manager.manager import CanaryTarget

_OF_HISTORY = {"verify_lineage", "verify_token"}

# Recent namespaces, whose lineages are compared with that of a wrong record.
MAX_NAMESPACES = 64


class Reader(Protocol):
    """A running request: its tokens so far, and the namespace of its KV."""

    tokens: array[int]
    namespace: str | None


ReaderOf = Callable[[int], Reader | None]
"""A running request by its serial; None: it is not running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBooks:
    """What the host knows of requests.

    Fields:
        reader_of: running requests.
        namespaces: of recent requests.
    """

    reader_of: ReaderOf = lambda serial: None
    namespaces: Sequence[str | None] = ()
    _lineages: dict[tuple[int, str | None], Any] = field(default_factory=dict)

    def other_namespace(self, violation: Violation) -> str | None:
        """Say how the namespace of the found record differs from the reader's, or
        return None unless the record has the reader's own tokens in another one."""
        reader = self.reader_of(violation.serial)
        if reader is None or not 0 <= violation.position < len(reader.tokens):
            return None
        for name in self.namespaces:
            if name == reader.namespace:
                continue
            lineages = self._lineages.get((violation.serial, name))
            if lineages is None:
                tokens = np.array(reader.tokens, dtype=np.int64)
                lineages = prefix_lineages(tokens, salt=lineage_salt(name))
                self._lineages[violation.serial, name] = lineages
            if lineages[violation.position] == violation.found_lineage:
                return Namespace.of(name).difference(Namespace.of(reader.namespace))
        return None


def details(
    violation: Violation, *, target: CanaryTarget, books: HostBooks
) -> dict[str, Any]:
    """Further fields of an incident of the target's primary group; waits for the
    device.

    For a wrong lineage `look_at`, if the record is of the same tokens in another
    namespace. For `verify_token` the first position, if any, whose slot in the device's
    table does not hold the request's own token; for `logits_not_finite` the state that
    is not.
    """
    primary = target.groups[0]
    if target.is_draft or violation.group != primary.name:
        return {}
    if "logits_not_finite" in violation.labels:
        states = target.states
        return {} if states is None else states.where_not_finite(violation.req_row)
    if not _OF_HISTORY & set(violation.labels):
        return {}
    other = books.other_namespace(violation)
    if other is not None:
        return {
            "look_at": "the key of the prefix cache, and the row's salt: the record is "
            f"of the same tokens under {other}"
        }
    if "verify_token" not in violation.labels:
        return {}
    reader = books.reader_of(violation.serial)
    if reader is None:
        return {}
    return _first_wrong_position(violation, target, reader.tokens)


def _first_wrong_position(
    violation: Violation, target: CanaryTarget, tokens: array[int]
) -> dict[str, Any]:
    primary = target.groups[0]
    row = target.req_to_token_pool.req_to_token[violation.req_row]
    slots = row[: min(violation.position + 1, len(tokens))].to(torch.int64)
    tail = primary.state.tail
    is_inside = (slots >= 0) & (slots < len(tail))
    words = torch.where(is_inside, tail[slots * is_inside, 0], POISON_WORD)
    for position, (word, token) in enumerate(zip(words.tolist(), tokens, strict=False)):
        is_own = unpack_word0(word) == (token & TOKEN_MASK, position)
        if word == POISON_WORD or not is_own:
            return {"first_wrong_position": position}
    return {}
