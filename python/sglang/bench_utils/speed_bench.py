"""Prompts of SPEED-Bench (arXiv 2604.09557), and acceptance counted by class of text.

How many drafts are accepted depends on the text: random prompts say nothing about it.
The file has one JSON object a line, as the data set has rows; `category` and `turns`
are read. Knows no server.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from sglang.bench_utils.report import format_table, rate

if TYPE_CHECKING:
    from sglang.bench_utils.metrics import RequestRecord

FLAG = "--dataset-path"
# The data set has at most 200 MB; a file that is much larger is another one.
MAX_BYTES = 1 << 30


class Row(msgspec.Struct):
    """One row. The first of `turns` is asked; later ones depend on answers."""

    category: str
    turns: list[str]


def read_rows(path: str | None) -> list[Row]:
    """Read the rows of a file.

    Raises:
        ValueError: there is no such file, or a line is not a row; names the line.
    """
    if path is None:
        raise ValueError(f"--dataset-name speed-bench needs {FLAG}, a .jsonl file")
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{FLAG} {path}: no such file")
    if file.stat().st_size > MAX_BYTES:
        raise ValueError(
            f"{FLAG} {path} has {file.stat().st_size} bytes; rows of SPEED-Bench have "
            f"at most {MAX_BYTES}"
        )
    decoder, rows = msgspec.json.Decoder(Row), []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"{FLAG} {path}, line {number}: {error}") from error
            if not row.turns or not row.turns[0]:
                raise ValueError(f"{FLAG} {path}, line {number}: turns has no prompt")
            rows.append(row)
    if not rows:
        raise ValueError(f"{FLAG} {path} holds no row")
    return rows


class Acceptance(NamedTuple):
    """Figures of a class of text.

    Fields:
        accept_length: output tokens per verification, or None without any.
        output_throughput: output tokens per second and request, from first to last.
    """

    requests: int
    output_tokens: int
    accept_length: float | None
    output_throughput: float


def by_category(
    categories: Sequence[str | None], records: Sequence[RequestRecord]
) -> dict[str, dict[str, Any]]:
    """Count the answered requests of each category, and of all (`overall`). Requests
    without a category do not count."""
    groups: dict[str, list[RequestRecord]] = defaultdict(list)
    for category, record in zip(categories, records, strict=True):
        if category is not None and record.error is None:
            groups[category].append(record)
    found = {name: _acceptance(groups[name])._asdict() for name in sorted(groups)}
    if found:
        everything = [record for group in groups.values() for record in group]
        found["overall"] = _acceptance(everything)._asdict()
    return found


def _acceptance(records: Sequence[RequestRecord]) -> Acceptance:
    verifications = sum(record.verifications for record in records)
    verified = sum(record.verified_tokens for record in records)
    tokens = sum(record.output_tokens for record in records)
    return Acceptance(
        requests=len(records),
        output_tokens=tokens,
        accept_length=verified / verifications if verifications else None,
        output_throughput=rate(tokens, sum(record.latency for record in records)),
    )


def category_table(found: dict[str, dict[str, Any]]) -> str:
    """Return the figures as a table."""
    columns = ("Category", "requests", "accept length", "tok/s per request")
    rows = [
        (name, own["requests"], own["accept_length"], own["output_throughput"])
        for name, own in found.items()
    ]
    return format_table(columns, rows)
