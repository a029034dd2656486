"""`python -m kv_canary.explain FILE`: an incident in plain words."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Names of `records.WriterKind`, whose module would load torch.
POISON, NONE = "poison", "none"
# Of `records.Launch`.
SWEEP = "sweep"

MEANING = {
    "verify_lineage": "the token's history is not the one that this row expects",
    "verify_position": "the record is of another position",
    "verify_token": "the prefix is not the request's own tokens",
    "verify_real_kv": "the KV bytes changed after they were written",
    "verify_torn": "the write of this slot was never finished",
    "verify_freed": "the slot held nothing when it was read",
    "read_set": "attention read a slot that the request's table does not name",
    "read_scratch": "attention read the scratch page",
    "write_foreign": "the forward wrote into a slot that it does not own",
    "write_alias": "two tokens of one forward went to the same slot",
    "write_scratch": "a live token was written to the scratch page",
    "write_token": "the forward got another token than was published, or than the "
    "oracle says",
    "write_position": "the forward got another position than its row says",
    "phase": "the canary's own launches ran out of order",
}


def explain(incident: dict[str, Any]) -> str:
    """The text of one incident document."""
    violations = incident["violations"]
    lines = [
        f"{incident['time']}  rank {incident['rank']}  forward {incident['forward']} "
        f"({incident['forward_mode'] or 'of unknown mode'})  mode {incident['mode']}, "
        f"real data {incident['real_data']}",
        f"{len(violations)} violation(s)"
        + (f", {incident['dropped']} more not recorded" if incident["dropped"] else ""),
    ]
    number = 1
    for run in _runs(violations):
        lines += ["", *_violation(number, run)]
        number += len(run)
    return "\n".join(map(_printable, lines))


def _printable(line: str) -> str:
    """Escaped as in JSON: clients choose the ids of their requests."""
    return re.sub(r"[^ -~]", lambda found: json.dumps(found[0])[1:-1], line)


def _request(rid: str | None, *, otherwise: str) -> str:
    return otherwise if rid is None else json.dumps(rid)


def _runs(violations: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Group equal violations of consecutive positions, in order."""
    runs: list[list[dict[str, Any]]] = []
    for violation in violations:
        if runs and _continues(runs[-1][-1], violation):
            runs[-1].append(violation)
        else:
            runs.append([violation])
    return runs


_SAME = ("rid", "worker", "launch", "branch", "reasons", "diagnosis", "owner", "writer")
# In the violations of draft steps only.
_SAME_IF_ANY = ("step",)


def _continues(before: dict[str, Any], violation: dict[str, Any]) -> bool:
    is_next = violation["position"] == before["position"] + 1
    return (
        is_next
        and all(violation[name] == before[name] for name in _SAME)
        and all(violation.get(name) == before.get(name) for name in _SAME_IF_ANY)
    )


def _violation(number: int, run: list[dict[str, Any]]) -> list[str]:
    """The text of a run; expected and found are those of its first violation."""
    violation = run[0]
    numbers = f"{number}" if len(run) == 1 else f"{number} to {number + len(run) - 1}"
    places = ", ".join(_span(name, run) for name in ("position", "slot", "page"))
    lines = [
        f"{numbers}. {violation['diagnosis']}",
        f"   request   {_request(violation['rid'], otherwise='no request')} "
        f"({violation['worker']} pool, found by {violation['launch']}, "
        f"{_row(violation)})",
        f"   where     {places}; held by: {violation['owner']}",
    ]
    lines += [
        f"   because   {MEANING[reason]} [{reason}]" for reason in violation["reasons"]
    ]
    lines += _record_lines(violation)
    if "first_wrong_position" in violation:
        lines.append(
            f"   first     position {violation['first_wrong_position']} is the first "
            "whose record is not the request's token"
        )
    return lines


def _row(violation: dict[str, Any]) -> str:
    """The step and the branch of a draft step; elsewhere the row of the batch."""
    branch = violation["branch"]
    if violation["launch"] == SWEEP:
        return "prefix cache"
    if branch < 0:
        return "no row"
    if "step" not in violation:
        return f"batch row {branch}"
    return f"draft step {violation['step']}, branch {branch}"


def _span(name: str, run: list[dict[str, Any]]) -> str:
    values = [violation[name] for violation in run]
    if min(values) == max(values):
        return f"{name} {values[0]}"
    if sorted(set(values)) != list(range(min(values), max(values) + 1)):
        return f"{name}s {', '.join(map(str, values))}"
    return f"{name}s {values[0]} to {values[-1]}"


def _record_lines(violation: dict[str, Any]) -> list[str]:
    writer, expected = violation["writer"], violation["expected"]
    by = f"request {_request(writer['rid'], otherwise='unknown')}"
    if writer["kind"] == POISON and not writer["forward"]:
        return ["   found     a slot that was never written"]
    if writer["kind"] == POISON:
        return [
            f"   found     a freed slot: its last owner was {by}, it was freed before "
            f"forward {writer['forward']}"
        ]
    first = (
        f"   expected  {_record(expected)}, slot {expected['slot']}, "
        f"fingerprint {expected['fingerprint']}"
    )
    if writer["kind"] == NONE:
        return [first, "   found     no record was read: there is none for this slot"]
    return [
        first,
        f"   found     {_record(violation['found'])}, fingerprint "
        f"{violation['found']['fingerprint']}, written by {writer['kind']} of {by} in "
        f"forward {writer['forward']}",
    ]


def _record(record: dict[str, Any]) -> str:
    token = f"token {record['token']}, " if "token" in record else ""
    return f"{token}position {record['position']}, lineage {record['lineage']}"


def main(
    argv: Sequence[str] | None = None, *, prog: str = "python -m kv_canary.explain"
) -> int:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Print incident files of the KV canary for a human.",
    )
    parser.add_argument("file", type=Path, nargs="+", help="files of the report folder")
    args = parser.parse_args(argv)
    for file in args.file:
        try:
            print(explain(json.loads(file.read_text(encoding="utf-8"))))
        except (OSError, ValueError, KeyError, TypeError) as error:
            # The repr of an error in the encoding holds the whole file.
            why = f"{type(error).__name__}: {error}"
            print(f"{file}: not an incident file: {why}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
