"""What the speculative algorithms differ in, apart from their models."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftKind:
    """One `--speculative-algorithm`.

    Fields:
        has_model: whether a model drafts, with a KV pool of its own. Otherwise drafts
            are made on the host, from tokens, so each iteration waits for the previous
            result.
        token_offset: slot p of the draft's pool holds token p + this: 1 for a head,
            which reads a token together with the target's state of the previous
            position.
        lead: tokens that have KV in the draft's pool but not yet in the target's when
            an iteration begins. A separate language model has read the newest token; a
            head has it one slot earlier.
    """

    has_model: bool = True
    token_offset: int = 0
    lead: int = 0


DRAFT_KINDS = {
    "EAGLE": DraftKind(token_offset=1),
    "EAGLE3": DraftKind(token_offset=1),
    "NEXTN": DraftKind(token_offset=1),
    "STANDALONE": DraftKind(lead=1),
    "NGRAM": DraftKind(has_model=False),
}
