"""Ring entries of one damage, and the reports about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kv_canary.checks import Reason
from kv_canary.evidence import Owner
from kv_canary.records import (
    TOKEN_MASK,
    Launch,
    Ring,
    WriterKind,
    pack_word0,
    pack_word3,
)
from kv_canary.reporter import (
    ViolationReporter,
)
from kv_canary.serials import SerialMap
from kv_canary.violation import Violation, parse_entry
from sglang.srt.kv_canary.config import CanaryConfig, CanaryMode, RealData
from sglang.srt.kv_canary.runner.violation_reporter import create_reporter

READER, WRITER = 5, 9
NASTY = 'a "quoted"\nkv_canary violation: rid=\\ \u2028 id'


def entry(**changes: int) -> list[int]:
    """A ring entry: request 5 finds a record of request 9 in its slot."""
    values = {
        "REASONS": Reason.VERIFY_LINEAGE | Reason.VERIFY_TOKEN,
        "REQ_ROW": 3,
        "SERIAL": READER,
        "SLOT": 77,
        "POSITION": 12,
        "EXPECTED_WORD0": pack_word0(TOKEN_MASK, 12),
        "FOUND_WORD0": pack_word0(101, 12),
        "EXPECTED_LINEAGE": 1,
        "FOUND_LINEAGE": -1,
        "FOUND_WORD3": pack_word3(40, WriterKind.DECODE, WRITER),
        "CLOCK": 42,
        "BATCH_ROW": 1,
        "EXPECTED_SLOT": 78,
        "FOUND_FINGERPRINT": 0xAB,
        "COMPUTED_FINGERPRINT": -2,
        "TAG": Launch.VERIFY,
    } | changes
    return [int(values[column.name]) for column in Ring]


def violation(page_size: int = 4, **changes: int) -> Violation:
    rids = {READER: "reader", WRITER: "writer"}
    return parse_entry(entry(**changes), page_size=page_size, rid_of=dict(rids))


def reporter(
    *, rank: int = 0, reader: str = "reader", **config: Any
) -> ViolationReporter:
    serials = SerialMap()
    serials.add(READER, reader)
    serials.add(WRITER, "writer")
    settings = CanaryConfig(mode=CanaryMode.RAISE, real_data=RealData.ALL, **config)
    return create_reporter(settings, page_size=4, serials=serials, rank=rank)


def owner_of(slot: int) -> Owner:
    return Owner(f"owner of {slot}")


def incident(tmp_path: Path, *, with_tokens: bool) -> dict[str, Any]:
    report = reporter(report_dir=tmp_path, report_tokens=with_tokens, rank=1)
    report.report(
        [entry()],
        dropped=0,
        owner_of=owner_of,
        mode_of=lambda found: "decode",
        details=lambda found: {"first_wrong_position": found.position - 4},
    )
    (file,) = tmp_path.iterdir()
    document: dict[str, Any] = json.loads(file.read_text())
    assert document == report.incidents[-1]
    return document
