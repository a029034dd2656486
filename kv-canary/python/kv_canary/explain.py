"""`python -m kv_canary.explain FILE`: an incident in plain words."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from kv_canary.checks import CHECKS, CHECKS_BY_LABEL, Check, Shows
from kv_canary.command_line import ends_with_its_reader
from kv_canary.incident_file import read_incident
from kv_canary.records import Launch, WriterKind

POISON, NONE = (kind.name.lower() for kind in (WriterKind.POISON, WriterKind.NONE))
SWEEP = Launch.SWEEP.name.lower()
TIER = Launch.TIER.name.lower()
TOKENS_OPTION = "--kv-canary-report-tokens"
"""What shows token ids, unless the incident says otherwise."""
_WORDS = ("expected", "found")


def explain(incident: dict[str, Any]) -> str:
    """Return the text of one incident document."""
    option = incident.get("tokens_option", TOKENS_OPTION)
    violations = [_with_hint(v, option) for v in incident["violations"]]
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
    if "healing" in incident:
        lines += ["", *_healing(incident["healing"])]
    if "replay" in incident:
        lines += ["", f"replay it: {incident['replay']}"]
    return "\n".join(map(_printable, lines))


def _with_hint(violation: dict[str, Any], option: str) -> dict[str, Any]:
    """Return the violation with the option that would show its tokens."""
    words = {name: {**violation[name], "option": option} for name in _WORDS}
    return {**violation, **words}


def _healing(done: dict[str, Any]) -> list[str]:
    """Return which requests were recomputed or ended because of the incident."""
    lines = [
        f"healed: {done['num_recomputed']} request(s) recomputed, {done['num_ended']} "
        f"ended, {done['cached_tokens_cut']} cached token(s) dropped"
        + _watched(done, "pages")
        + _watched(done, "checkpoints")
    ]
    for name, text in (("recomputed", "runs again"), ("ended", "ended with an error")):
        lines += [
            f"   {_request(about['rid'], otherwise='no request')} {text} with "
            f"{about['tokens']} tokens ({about['pool']} pool); {about['sent']} of "
            f"{about['output_tokens']} output tokens were sent before"
            for about in done[name]
        ]
    return lines


def _watched(done: dict[str, Any], what: str) -> str:
    """Return which pages or checkpoints are watched, if any."""
    # Incidents of version 0.1.0 have no checkpoints.
    slots = done.get(f"{what}_watched", ())
    return f", {what} watched: {', '.join(map(str, slots))}" if slots else ""


def _printable(line: str) -> str:
    """Escape a line as in JSON: clients choose the ids of their requests."""
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


_SAME = (
    *("rid", "worker", "launch", "batch_row", "branch", "reasons", "diagnosis"),
    *("owner", "writer"),
)
# Fields that only some violations have.
_SAME_IF_ANY = ("step", "group", "layer", "kv_head")


def _continues(before: dict[str, Any], violation: dict[str, Any]) -> bool:
    is_next = violation["position"] == before["position"] + 1
    return (
        is_next
        and all(violation[name] == before[name] for name in _SAME)
        and all(violation.get(name) == before.get(name) for name in _SAME_IF_ANY)
    )


def _violation(number: int, run: list[dict[str, Any]]) -> list[str]:
    """Return the text of a run, with what its first violation expected and found."""
    violation = run[0]
    numbers = f"{number}" if len(run) == 1 else f"{number} to {number + len(run) - 1}"
    places = ", ".join(_span(name, run) for name in ("position", "slot", "page"))
    lines = [
        f"{numbers}. {violation['diagnosis']}",
        f"   request   {_request(violation['rid'], otherwise='no request')} "
        f"({_pool(violation)}, found by {violation['launch']}, {_row(violation)})",
        f"   where     {places}{_head(violation)}; held by: {violation['owner']}",
    ]
    lines += [
        f"   because   {CHECKS_BY_LABEL[reason].means(_group(violation))} [{reason}]"
        for reason in violation["reasons"]
    ]
    for part in _parts(violation):
        lines += [f"   {name:<10}{text}" for name, text in part(violation)]
    if "first_wrong_position" in violation:
        lines.append(
            f"   first     position {violation['first_wrong_position']} is the first "
            "whose record is not the request's token"
        )
    if "state_layer" in violation:
        lines.append(f"   first     {_state_place(violation)} is not finite")
    lines.append(f"   look at   {violation['look_at']}")
    return lines


def _state_place(violation: dict[str, Any]) -> str:
    layer = f"the recurrent state of layer {violation['state_layer']}"
    if "state_head" not in violation:
        return layer
    return f"{layer}, head {violation['state_head']},"


def _head(violation: dict[str, Any]) -> str:
    """Return the layer and head whose bytes differ, as far as known."""
    if "layer" not in violation:
        return ""
    head = f", KV head {violation['kv_head']}" if "kv_head" in violation else ""
    return f", layer {violation['layer']}{head}"


def _group(violation: dict[str, Any]) -> str:
    group: str = violation.get("group", "full")
    return group


def _pool(violation: dict[str, Any]) -> str:
    group = _group(violation)
    which = "" if group == "full" else f" of group {group}"
    return f"{violation['worker']} pool{which}"


def _row(violation: dict[str, Any]) -> str:
    """Return the step and branch of a draft step, else the row of the batch."""
    row = violation["batch_row"]
    if violation["launch"] == SWEEP:
        return "prefix cache"
    if violation["launch"] == TIER:
        return "before it was read"
    if row < 0:
        return "no row"
    if "step" not in violation:
        return f"batch row {row}"
    return f"draft step {violation['step']}, branch {violation['branch']}"


def _span(name: str, run: list[dict[str, Any]]) -> str:
    values = [violation[name] for violation in run]
    if min(values) == max(values):
        return f"{name} {values[0]}"
    if max(values) - min(values) != len(set(values)) - 1:
        return f"{name}s {', '.join(map(str, values))}"
    return f"{name}s {values[0]} to {values[-1]}"


# Lines of a violation: names and texts.
_Lines = list[tuple[str, str]]


def _input_lines(violation: dict[str, Any]) -> _Lines:
    """Return the token that was due, and the one found instead."""
    inputs = [c for c in _checks(violation) if c.shows is Shows.INPUT]
    if any(check.shows is Shows.MASK for check in _checks(violation)):
        # The words hold the mask's instead.
        return []
    sources = inputs[0].sources
    return [
        ("expected", f"{_input(violation['expected'])}, {sources.due}"),
        ("found", f"{_input(violation['found'])}, {sources.found}"),
    ]


def _phase_lines(violation: dict[str, Any]) -> _Lines:
    due, found = (violation[name]["phase"] for name in ("expected", "found"))
    return [("expected", f"phase {due}"), ("found", f"phase {found}")]


def _state_lines(violation: dict[str, Any]) -> _Lines:
    """Return the sums of the state that was handed on (`carried.py`)."""
    due, found = (violation[name]["lineage"] for name in ("expected", "found"))
    return [("expected", f"a state with sum {due}"), ("found", f"sum {found}")]


def _fold_lines(violation: dict[str, Any]) -> _Lines:
    """Return how many tokens a layer must have folded into its state, and has."""
    lasts = (violation[name]["position"] for name in ("expected", "found"))
    # A slot without tokens has no last position.
    due, found = (0 if last is None else last + 1 for last in lasts)
    counter = int(violation["found"]["fingerprint"], 16)
    # A slot that is freed, or new, counts from far below zero.
    seen = f"{found} tokens" if found >= 0 else "the state of a freed or new slot"
    return [
        ("expected", f"{due} tokens folded"),
        ("found", f"{seen}, by counter {counter} of the slot"),
    ]


def _mask_lines(violation: dict[str, Any]) -> _Lines:
    """Return the grammar mask that was due, and the one that was applied."""
    return [
        ("expected", _mask(violation["expected"])),
        ("found", _mask(violation["found"])),
    ]


def _write_lines(violation: dict[str, Any]) -> _Lines:
    """Return the token that is written, and what its slot held before."""
    held = ("slot held", _found(violation, with_bytes=False))
    if any(check.shows is Shows.INPUT for check in _checks(violation)):
        # Only the record's writer is known; its words hold the input instead.
        return [("slot held", _writer(violation))]
    expected = violation["expected"]
    text = f"{_record(expected)}; by the row it belongs into {_slot(expected['slot'])}"
    return [("writes", text), held]


def _alias_lines(violation: dict[str, Any]) -> _Lines:
    return [
        ("writes", _record(violation["expected"])),
        ("slot has", _found(violation, with_bytes=False)),
    ]


def _record_lines(violation: dict[str, Any]) -> _Lines:
    """Return the record that was due, and the one that was read."""
    kind, expected = violation["writer"]["kind"], violation["expected"]
    found = ("found", _found(violation, with_bytes=True))
    if kind == POISON:
        return [found]
    slot = _slot(expected["slot"])
    if kind == NONE:
        return [("expected", f"position {expected['position']}, {slot}"), found]
    text = f"{_record(expected)}, {slot}, fingerprint {expected['fingerprint']}"
    return [("expected", text), found]


def _unit_lines(violation: dict[str, Any]) -> _Lines:
    """Return where a unit came from."""
    return [
        (
            "unit",
            f"{violation['unit']}, in {violation['tier']}, from {violation['sender']}",
        )
    ]


_Part = Callable[[dict[str, Any]], _Lines]
_PARTS: dict[Shows, _Part] = {
    Shows.PHASE: _phase_lines,
    Shows.STATE: _state_lines,
    Shows.FOLDS: _fold_lines,
    Shows.MASK: _mask_lines,
    Shows.INPUT: _input_lines,
    Shows.WRITE: _write_lines,
    Shows.ALIAS: _alias_lines,
    Shows.UNIT: _unit_lines,
    Shows.RECORD: _record_lines,
}


def _checks(violation: dict[str, Any]) -> list[Check]:
    reasons = violation["reasons"]
    return [check for check in CHECKS if check.label in reasons]


def _parts(violation: dict[str, Any]) -> list[_Part]:
    others = {check.shows for check in _checks(violation)} - {Shows.RECORD}
    shown = others or {Shows.RECORD}
    return [part for shows, part in _PARTS.items() if shows in shown]


def _found(violation: dict[str, Any], *, with_bytes: bool) -> str:
    """Return the record in the slot."""
    if violation["writer"]["kind"] in (POISON, NONE):
        return _writer(violation)
    found = violation["found"]
    bytes_ = f", fingerprint {found['fingerprint']}" if with_bytes else ""
    if with_bytes and "bytes_of_slot" in found:
        bytes_ += f", now with the bytes of slot {found['bytes_of_slot']}"
    return f"{_record(found)}{bytes_}, {_writer(violation)}"


def _writer(violation: dict[str, Any]) -> str:
    writer = violation["writer"]
    by = f"request {_request(writer['rid'], otherwise='unknown')}"
    if writer["kind"] == NONE:
        return "no record was read: this slot has none"
    if writer["kind"] != POISON:
        return f"written by {writer['kind']} of {by} in forward {writer['forward']}"
    if not writer["forward"]:
        return "a slot that was never written"
    return (
        f"a freed slot: its last owner was {by}, it was freed before forward "
        f"{writer['forward']}"
    )


def _input(word: dict[str, Any]) -> str:
    token = f"token withheld ({word['option']} shows it)"
    if "token" in word:
        known = word["token"] is not None
        token = f"token {word['token']}" if known else "an unknown token"
    return f"{token}, position {word['position']}"


def _mask(record: dict[str, Any]) -> str:
    if not record["mask_serial"]:
        return "no grammar mask"
    return (
        f"a grammar mask of the request with serial {record['mask_serial']} after "
        f"{record['mask_accepted']} tokens"
    )


def _slot(slot: int) -> str:
    return "an unknown slot" if slot < 0 else f"slot {slot}"


def _record(record: dict[str, Any]) -> str:
    token = f"token {record['token']}, " if "token" in record else ""
    return f"{token}position {record['position']}, lineage {record['lineage']}"


@ends_with_its_reader
def main(
    argv: Sequence[str] | None = None,
    *,
    prog: str = "python -m kv_canary.explain",
    version: str | None = None,
) -> int:
    """Run the CLI and return its exit code.

    Args:
        version: the text for `--version`; kv-canary's by default.
    """
    version = version or f"kv-canary {metadata.version('kv-canary')}"
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Print incident files of the KV canary for a human.",
    )
    parser.add_argument("file", type=Path, nargs="+", help="files of the report folder")
    parser.add_argument("--version", action="version", version=version)
    args = parser.parse_args(argv)
    for file in args.file:
        try:
            text = _explain_file(file)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 1
        print(text)
    return 0


def _explain_file(file: Path) -> str:
    """Return the text of an incident file.

    Raises:
        ValueError: the file is not an incident; names the file.
    """
    incident = read_incident(file)
    try:
        return explain(incident)
    # A document of another shape fails at the first field that it lacks.
    except (
        *(ValueError, KeyError, TypeError, IndexError, AttributeError),
        *(OverflowError, RecursionError),
    ) as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ValueError(f"{file}: not an incident file: {why}") from error


if __name__ == "__main__":
    sys.exit(main())
