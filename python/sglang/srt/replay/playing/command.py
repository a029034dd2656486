"""`python -m sglang.srt.kv_canary.replay INCIDENT`: replay an incident to see if it
recurs.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kv_canary.command_line import ends_with_its_reader
from kv_canary.incident_file import read_incident as read_incident_file
from sglang.srt.replay.playing.bisect import bisect
from sglang.srt.replay.playing.player import CannotReplay, Played, Setting, play
from sglang.srt.replay.playing.verdict import describe, judge, violation_key
from sglang.srt.replay.recording.identity import differences, model_digest
from sglang.srt.replay.recording.record_file import BadRecord, RecordFile, read_record
from sglang.srt.utils.paths import resolve_model_path
from sglang.version import VERSION_TEXT

RECORD_SUFFIX = ".record"
REPRODUCED = 0
NOT_REPRODUCED = 1
CANNOT_REPLAY = 2


@ends_with_its_reader
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0 if the same violation appears at the same forward (or,
    with --bisect, a difference was found), 1 if not, and 2 if it cannot be replayed.
    """
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.CRITICAL)
    try:
        return _run(args)
    except (BadRecord, CannotReplay) as error:
        print(f"cannot replay: {error}", file=sys.stderr)
        return CANNOT_REPLAY


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sglang.srt.kv_canary.replay",
        description="Drive a scheduler through what was recorded before an incident of "
        "the KV canary. Exit code 0: the same violation appears at the same forward; "
        "1: it does not; 2: it cannot be replayed.",
    )
    parser.add_argument("--version", action="version", version=VERSION_TEXT)
    parser.add_argument(
        "incident",
        type=Path,
        help="JSON file from the report folder, or the record next to it",
    )
    parser.add_argument("--model-path", help="current path of the model")
    parser.add_argument(
        "--speculative-draft-model-path", help="current path of the draft model"
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="device to use; unset: the recorded device",
    )
    parser.add_argument(
        "--bisect",
        action="store_true",
        help="find the first forward whose state differs from a run without faults",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="replay even if the model or version differs from the record",
    )
    return parser


def _run(args: argparse.Namespace) -> int:
    path: Path = args.incident
    if path.suffix == RECORD_SUFFIX:
        path = path.with_suffix(".json")
    incident = read_incident(path)
    record = read_record(path.with_name(_record_name(incident, path)))
    setting = Setting(
        model_path=args.model_path,
        draft_model_path=args.speculative_draft_model_path,
        device=args.device,
    )
    _check_same(record, setting, is_forced=args.force)
    print(f"incident    {describe(incident['violations'][0])}")
    print(f"            {incident['violations'][0]['diagnosis']}")
    print(f"record      {_about(record)}")
    if args.bisect:
        return _bisect(record, setting)
    return _replay(incident, record, setting)


def read_incident(path: Path) -> dict[str, Any]:
    """Read an incident document.

    Raises:
        BadRecord: it is not an incident, or truncated.
    """
    try:
        incident = read_incident_file(path)
    except ValueError as error:
        raise BadRecord(str(error)) from error
    try:
        for violation in incident["violations"]:
            describe(violation)
            _check_violation(violation)
    except (KeyError, TypeError, RecursionError) as error:
        kind = type(error).__name__
        raise BadRecord(f"{path}: not an incident file, or cut ({kind})") from error
    return incident


def _check_violation(violation: dict[str, Any]) -> None:
    """Raises:
    TypeError: a value that is compared with a replay has the wrong type.
    """
    for name, kind in (("diagnosis", str), ("forward", int)):
        if not isinstance(violation[name], kind):
            raise TypeError(name)
    hash(violation_key(violation))


def _record_name(incident: dict[str, Any], path: Path) -> str:
    name = incident.get("record")
    if not isinstance(name, str):
        raise BadRecord(
            f"{path}: it has no record; the server ran without --kv-canary-record, or "
            "had written one of this kind of incident in the minute before"
        )
    if Path(name).name != name:
        raise BadRecord(f"{path}: its record {name!r} is not a file beside it")
    return name


def _check_same(record: RecordFile, setting: Setting, *, is_forced: bool) -> None:
    """Reject a different model or version.

    Raises:
        CannotReplay: names what differs.
    """
    flags = record.origin.server_args
    paths = {
        "target": setting.target_path(flags),
        "draft": setting.draft_path(flags),
    }
    try:
        models = {
            role: model_digest(resolve_model_path(path))
            for role, path in paths.items()
            if path is not None
        }
    except (ValueError, OSError) as error:
        raise CannotReplay(
            f"the recorded model is not here: {error}; --model-path says where it is"
        ) from error
    found = differences(record.origin, models=models)
    if found and not is_forced:
        text = "; ".join(found)
        raise CannotReplay(f"{text}; --force replays all the same")
    for text in found:
        print(f"note        {text}")


def _about(record: RecordFile) -> str:
    origin = record.origin
    since = "the engine's start" if record.checkpoint is None else "a checkpoint"
    tokens = "their tokens" if origin.has_tokens else "other tokens in their place"
    return (
        f"{record.num_launches} batches from {since} on, {len(record.requests)} "
        f"requests with {tokens}; rank {origin.rank}, {origin.device}, version "
        f"{origin.version}"
    )


def _replay(incident: dict[str, Any], record: RecordFile, setting: Setting) -> int:
    played = play(record, setting)
    _print_decisions(played)
    verdict = judge(incident, played.incidents)
    if verdict.is_reproduced:
        print(
            f"reproduced  the same violation at forward {incident['forward']} "
            f"({verdict.num_same} of {verdict.num_recorded} as recorded)"
        )
        return REPRODUCED
    other = verdict.nearest
    shown = "no violation" if other is None else f"instead {describe(other)}"
    print(f"not reproduced  {shown}")
    if played.difference is None and played.error is None:
        print(
            "            not host-side: a bit flip or a race leaves the decisions as "
            "they were"
        )
    return NOT_REPRODUCED


def _print_decisions(played: Played) -> None:
    difference = played.difference
    if difference is None:
        print(f"decisions   all {played.num_launches} batches as recorded")
    else:
        print(
            f"decisions   forward {difference.forward} is the first that differs: "
            f"{difference.field} {difference.recorded} recorded, "
            f"{difference.replayed} replayed"
        )
    if played.other_tokens:
        print(
            f"tokens      {played.other_tokens} of the forced tokens are not those "
            "that the model chooses here"
        )
    if played.error is not None:
        print(f"error       {played.error}")


def _bisect(record: RecordFile, setting: Setting) -> int:
    found = bisect(record, setting)
    if found is None:
        print(
            "bisect      no forward differs from a run without faults; not host-side: "
            "a bit flip or a race leaves the decisions as they were"
        )
        return NOT_REPRODUCED
    print(
        f"bisect      forward {found.forward} ({found.pool}) is the first that differs "
        f"from a run without faults: {found.field}"
    )
    print(f"            {found.ours}, without faults {found.others}")
    return REPRODUCED


if __name__ == "__main__":
    sys.exit(main())
