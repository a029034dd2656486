"""The parts of a recorder's log: references to existing objects."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from sglang.srt.forward.batch import ForwardMode
    from sglang.srt.managers.messages.io_struct import (
        GenerateReq,
        GrammarDecision,
        SchedulerRequest,
    )
    from sglang.srt.mem_cache.page_ledger import IntArray


@dataclass(slots=True, kw_only=True)
class Noted:
    """A request: its message and its tokens, which keep growing.

    Fields:
        end: type and length of its finish, and HTTP status, or None if unfinished.
    """

    request: GenerateReq
    tokens: array[int]
    prompt_len: int
    end: tuple[str, int, int | None] | None = None


class LoggedLaunch(NamedTuple):
    """A launched batch, as references; see `RecordedLaunch`."""

    forward_mode: ForwardMode
    clocks: list[int]
    serials: IntArray
    starts: IntArray
    ends: IntArray
    taken: list[IntArray]
    given: list[IntArray]

    @property
    def mode(self) -> str:
        """Name of the mode. Looked up on demand, because that takes a while and records
        are rare.
        """
        return self.forward_mode.name


class Round(NamedTuple):
    """A round: its input, the serials accepted in it, and its launch.

    Fields:
        shape: as in `StepInput`.
    """

    messages: list[SchedulerRequest]
    grammars: list[GrammarDecision]
    shape: int
    resolves: bool
    accepted: Sequence[int]
    launch: LoggedLaunch | None
