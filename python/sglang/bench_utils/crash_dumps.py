"""Reads the requests of a crash dump to send them again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.bench_utils.datasets import BenchRequest
from sglang.srt.managers.front.crash_dump import FORMAT
from sglang.srt.utils.json_file import parse_json_object, read_text_file

MAX_BYTES = 4 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpedRequests:
    """The requests of a dump, in the order of their arrival.

    Fields:
        arrivals: seconds after the first one.
        skipped: number of requests with embeddings instead of a prompt, which a dump
            omits.
    """

    requests: list[BenchRequest]
    arrivals: list[float]
    skipped: int


def read_crash_dump(path: Path) -> DumpedRequests:
    """Read a file of `--crash-dump-folder`.

    Raises:
        ValueError: the file cannot be read, is not a crash dump or is truncated; names
            the line.
    """
    try:
        lines = read_text_file(path, max_bytes=MAX_BYTES).splitlines()
    except ValueError as error:
        raise ValueError(f"--replay {error}") from error
    head = _object(lines[0]) if lines else None
    if head is None or head.get("format") != FORMAT:
        raise ValueError(f"--replay {path} is not a crash dump")
    requests, arrivals, skipped = [], [], 0
    shared: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines[1:], start=2):
        entry = _object(line)
        try:
            if entry is None:
                raise TypeError("no object")
            if "shared" in entry:
                shared[entry["shared"]] = entry
            elif entry["has_input_embeds"]:
                skipped += 1
            else:
                requests.append(_request(entry, shared))
                arrivals.append(float(entry["seconds"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"--replay {path}, line {number}: not a request of a crash dump "
                f"({type(error).__name__}: {error})"
            ) from error
    found = len(requests) + skipped
    if found != head.get("requests"):
        raise ValueError(
            f"--replay {path} is cut: {found} of {head.get('requests')} requests are "
            "there"
        )
    return DumpedRequests(requests=requests, arrivals=arrivals, skipped=skipped)


def _object(line: str) -> dict[str, Any] | None:
    try:
        return parse_json_object(line, where="a line")
    except ValueError:
        return None


def _request(entry: dict[str, Any], shared: dict[int, dict[str, Any]]) -> BenchRequest:
    body = entry["request"]
    ids = shared[body["input_ids"]]["input_ids"]
    params = shared[body["sampling_params"]]["sampling_params"]
    if not isinstance(ids, list) or not isinstance(params, dict):
        raise TypeError("input_ids and sampling_params")
    if entry["seed"] is not None:
        params = params | {"sampling_seed": entry["seed"]}
    # Drop request ids, because requests that are sent again would share them.
    options = {name: value for name, value in body.items() if name != "rid"}
    return BenchRequest(
        text="",
        input_ids=ids,
        output_len=int(params.get("max_new_tokens", 128)),
        ids_only=True,
        body=options | {"input_ids": ids, "sampling_params": params},
    )
