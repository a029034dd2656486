"""Finds the first forward that differs from a run without faults."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kv_canary.violation import POOLS
from sglang.srt.replay.playing.player import Setting, play
from sglang.srt.replay.playing.states import StateDifference, first_difference

if TYPE_CHECKING:
    from sglang.srt.replay.recording.record_file import RecordFile


def bisect(record: RecordFile, setting: Setting) -> StateDifference | None:
    """Find the first forward whose recorded decisions differ from a clean run. If the
    record says which faults were planted, find the first forward whose state differs in
    a replay with these faults.

    Raises:
        CannotReplay: the record cannot be replayed.
    """
    clean = play(record, replace(setting, with_faults=False, with_states=True))
    planted = play(record, replace(setting, with_faults=True, with_states=True))
    found = []
    if clean.difference is not None:
        decided = clean.difference
        found.append(
            StateDifference(
                pool=POOLS[0],
                forward=decided.forward,
                field=decided.field,
                ours=decided.recorded,
                others=decided.replayed,
            )
        )
    state = first_difference(planted.states, clean.states)
    if state is not None:
        found.append(state)
    # A forward's state precedes the decisions that follow from it.
    return min(found, key=lambda difference: difference.forward, default=None)
