"""The parts of a recorder's log: references to objects that exist already."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import (
        GenerateReq,
        GrammarDecision,
        SchedulerRequest,
    )
    from sglang.srt.mem_cache.page_ledger import IntArray


@dataclass(slots=True, kw_only=True)
class Noted:
    """A request: its message and its tokens, which go on growing.

    Fields:
        end: type and length of its finish, and HTTP status; None: it has not ended.
    """

    request: GenerateReq
    tokens: array[int]
    prompt_len: int
    end: tuple[str, int, int | None] | None = None


class Launch(NamedTuple):
    """A batch that was launched, as references; see `RecordedLaunch`."""

    mode: str
    clocks: list[int]
    serials: IntArray
    starts: IntArray
    ends: IntArray
    taken: list[IntArray]
    given: list[IntArray]


@dataclass(slots=True)
class Round:
    """A round: its input, the requests that were accepted in it, its launch."""

    messages: list[SchedulerRequest]
    grammars: list[GrammarDecision]
    resolves: bool
    accepted: list[int] = field(default_factory=list)
    launch: Launch | None = None
