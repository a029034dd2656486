"""`python -m sglang.srt.kv_canary.explain FILE`: an incident in plain words."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MEANING = {
    "verify_lineage": "the token's history is not the one that this row expects",
    "verify_position": "the record stands for another position",
    "verify_token": "the prefix is not the request's own tokens",
    "verify_real_kv": "the KV bytes changed after they were written",
    "verify_torn": "the write of this slot was never finished",
    "verify_freed": "the slot was freed before this read",
    "read_set": "attention read a slot that the request's table does not name",
    "read_scratch": "attention read the scratch page",
    "write_foreign": "the forward wrote into a slot that it does not own",
    "write_alias": "two tokens of one forward went to the same slot",
    "write_scratch": "a live token was written to the scratch page",
    "write_token": "the forward got another token than the oracle says",
    "write_position": "the forward got another position than its row says",
    "phase": "the canary's own launches ran out of order",
}


def explain(incident: dict[str, Any]) -> str:
    """The text of one incident document."""
    violations = incident["violations"]
    lines = [
        f"{incident['time']}  rank {incident['rank']}  forward {incident['forward']}  "
        f"mode {incident['mode']}, real data {incident['real_data']}",
        f"{len(violations)} violation(s)"
        + (f", {incident['dropped']} more not recorded" if incident["dropped"] else ""),
    ]
    for number, violation in enumerate(violations, start=1):
        lines += ["", *_violation(number, violation)]
    return "\n".join(lines)


def _violation(number: int, violation: dict[str, Any]) -> list[str]:
    writer, found = violation["writer"], violation["found"]
    expected = violation["expected"]
    who = violation["rid"] or "no request"
    branch = violation["branch"]
    lines = [
        f"{number}. {violation['diagnosis']}",
        f"   request   {who} ({violation['worker']} pool, found by "
        f"{violation['launch']}, batch row {branch})",
        f"   where     position {violation['position']}, slot {violation['slot']}, "
        f"page {violation['page']}; by the books: {violation['owner']}",
    ]
    lines += [
        f"   because   {MEANING[reason]} [{reason}]" for reason in violation["reasons"]
    ]
    lines.append(
        f"   expected  {_record(expected)}, slot {expected['slot']}, "
        f"fingerprint {expected['fingerprint']}"
    )
    if writer["kind"] == "none":
        lines.append("   found     no record was read: there is none for this slot")
        return lines
    lines.append(
        f"   found     {_record(found)}, fingerprint {found['fingerprint']}, written "
        f"by {writer['kind']} of request {writer['rid'] or 'unknown'} in forward "
        f"{writer['forward']}"
    )
    if "first_wrong_position" in violation:
        lines.append(
            f"   first     position {violation['first_wrong_position']} is the first "
            "whose record is not the request's token"
        )
    return lines


def _record(record: dict[str, Any]) -> str:
    token = f"token {record['token']}, " if "token" in record else ""
    return f"{token}position {record['position']}, lineage {record['lineage']}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sglang.srt.kv_canary.explain",
        description="Print incident files of the KV canary for a human.",
    )
    parser.add_argument("file", type=Path, nargs="+", help="files of the report folder")
    args = parser.parse_args(argv)
    for file in args.file:
        try:
            print(explain(json.loads(file.read_text(encoding="utf-8"))))
        except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
            print(f"{file}: not an incident file: {error!r}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
