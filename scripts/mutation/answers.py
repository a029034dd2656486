"""What clients have received, and how it differs from the right answers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from scripts.mutation.asks import Ask


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """The right answer to a request.

    Fields:
        reason: type of its finish reason.
        matched: the stop that it matched, or None.
    """

    output: list[int]
    text: str
    reason: str | None
    matched: int | str | None


@dataclass(kw_only=True)
class Received:
    """One output, as its client has received it.

    Fields:
        failure: the error that the client got instead of the rest, or empty.
        verified: number of verifications, and of tokens accepted in them.
    """

    ask: Ask
    is_aborted: bool = False
    output: list[int] = field(default_factory=list)
    text: str = ""
    reason: str | None = None
    matched: int | str | None = None
    failure: str = ""
    messages_after_end: int = 0
    verified: tuple[int, int] = (0, 0)

    @property
    def is_answered(self) -> bool:
        return self.reason is not None or bool(self.failure)

    def as_due(self) -> Due:
        return Due(
            output=self.output,
            text=self.text,
            reason=self.reason,
            matched=self.matched,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a run without faults yields: the right answers, and the verifications of
    an engine that speculates, by request.
    """

    answers: dict[str, Due]
    verified: dict[str, tuple[int, int]]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Expected:
        verified = {rid: (a, b) for rid, (a, b) in raw["verified"].items()}
        answers = {rid: Due(**due) for rid, due in raw["answers"].items()}
        return cls(answers=answers, verified=verified)


def wrong_tokens(received: Received, due: Due) -> int:
    """Count tokens that differ from the right ones; a text that differs counts as
    one.
    """
    pairs = zip(received.output, due.output, strict=False)
    return sum(a != b for a, b in pairs) + has_wrong_text(received, due)


def has_wrong_text(received: Received, due: Due) -> bool:
    if received.reason == "abort" or received.failure:
        # The last character may be incomplete, or text was held back.
        return False
    if received.reason is None or len(received.output) != len(due.output):
        return not due.text.startswith(received.text)
    return received.text != due.text


def has_wrong_end(received: Received, due: Due) -> bool:
    """Whether a request ended with other tokens in number or for another reason."""
    if received.messages_after_end:
        return True
    if received.reason == "abort":
        return not received.is_aborted
    count = len(received.output)
    ends = (received.reason, received.matched, count)
    return received.is_answered and ends != (due.reason, due.matched, len(due.output))
