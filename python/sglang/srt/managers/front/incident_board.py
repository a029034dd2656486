"""Incidents of the KV canary for all viewers, fetched once for all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from sglang.srt.managers.messages.io_struct import SchedulerStats

# Snapshots between two questions while violations continue.
TURNS_BETWEEN = 8


class IncidentSummary(msgspec.Struct, kw_only=True):
    """An entry of the list. `name` is "<rank>-<number>"; the fields from `diagnosis` on
    describe the first of `num_violations` violations.
    """

    name: str
    time: str
    forward: int
    forward_mode: str | None
    is_healed: bool
    num_violations: int
    diagnosis: str
    reasons: list[str]
    worker: str
    rid: str | None
    slot: int
    page: int


class Incidents(msgspec.Struct, kw_only=True, tag_field="type", tag="incidents"):
    """The newest incidents of all ranks, newest first."""

    incidents: list[IncidentSummary]


class IncidentBoard:
    """The incidents as of the last question.

    Args:
        ask: fetches all incidents that the scheduler keeps, oldest first.

    Attributes:
        event: the event for pages; replaced after every change.
    """

    def __init__(self, ask: Callable[[], Awaitable[list[dict[str, Any]]]]) -> None:
        self._ask = ask
        self._documents: dict[str, dict[str, Any]] = {}
        self._marks = (0, 0)
        self._turns = TURNS_BETWEEN
        self.event = Incidents(incidents=[])

    async def follow(self, stats: SchedulerStats) -> None:
        """Ask again if violations or healings were added since the last question and
        that was long enough ago.

        Raises:
            ApiError: no answer arrived.
        """
        self._turns += 1
        marks = (
            sum(stats.kv_canary_violations_total.values()),
            sum(stats.kv_canary_heals_total.values()),
        )
        if marks != self._marks and self._turns >= TURNS_BETWEEN:
            await self.refresh()
            self._marks, self._turns = marks, 0

    async def refresh(self) -> None:
        """Ask now.

        Raises:
            ApiError: no answer arrived.
        """
        documents = await self._ask()
        self._documents = {_name(document): document for document in documents}
        newest = reversed(self._documents.items())
        self.event = Incidents(incidents=[_summary(*item) for item in newest])

    async def document(self, name: str) -> dict[str, Any] | None:
        """Return one incident, asking for it if not known yet, or None if it does not
        exist.
        """
        if name not in self._documents:
            await self.refresh()
        return self._documents.get(name)


def _name(document: dict[str, Any]) -> str:
    return f"{document['rank']}-{document['number']}"


def _summary(name: str, document: dict[str, Any]) -> IncidentSummary:
    violations = document["violations"]
    first = violations[0]
    return IncidentSummary(
        name=name,
        time=document["time"],
        forward=document["forward"],
        forward_mode=document["forward_mode"],
        is_healed="healing" in document,
        num_violations=len(violations) + document["dropped"],
        diagnosis=first["diagnosis"],
        reasons=first["reasons"],
        worker=first["worker"],
        rid=first["rid"],
        slot=first["slot"],
        page=first["page"],
    )
