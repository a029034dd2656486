"""`explain`: the text of an incident."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from violation_world import (
    READER,
    WRITER,
    entry,
    incident,
    owner_of,
    reporter,
)

from kv_canary.checks import Reason
from kv_canary.command_line import READER_GONE
from kv_canary.evidence import Owner
from kv_canary.explain import NONE, POISON, SWEEP, explain, main
from kv_canary.records import (
    POISON_WORD,
    TAG_POOL_SHIFT,
    TOKEN_MASK,
    Launch,
    Phase,
    WriterKind,
    pack_word0,
    pack_word3,
)
from kv_canary.serials import SerialMap
from kv_canary.violation import pool_number
from sglang.srt.kv_canary.config import CanaryConfig, CanaryMode, RealData
from sglang.srt.kv_canary.runner.violation_reporter import create_reporter
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="cpu")

OF_STATE = pool_number(is_draft=False, group="state") << TAG_POOL_SHIFT
UNKNOWN_TOKENS = dict.fromkeys(
    ("EXPECTED_WORD0", "FOUND_WORD0"), pack_word0(TOKEN_MASK, 12)
)
FREED = pack_word3(0, WriterKind.POISON, 0)

GOLDEN_TEXT = """\
T  rank 1  forward 42 (decode)  mode raise, real data all
1 violation(s)

1. aliased with request writer
   request   "reader" (target pool, found by verify, batch row 1)
   where     position 12, slot 77, page 19; held by: owner of 77
   because   the token's history is not the one that this row expects [verify_lineage]
   because   the prefix is not the request's own tokens [verify_token]
   expected  position 12, lineage 0x0000000000000001, slot 78, fingerprint \
0xfffffffffffffffe
   found     position 12, lineage 0xffffffffffffffff, fingerprint \
0x00000000000000ab, written by decode of request "writer" in forward 40
   first     position 8 is the first whose record is not the request's token
   look at   the allocator; the two requests' rows of req_to_token"""


def test_explain(tmp_path: Path) -> None:
    document = incident(tmp_path, with_tokens=False)
    assert explain(document | {"time": "T"}) == GOLDEN_TEXT
    more = explain(document | {"dropped": 3})
    assert "1 violation(s), 3 more not recorded" in more
    old = explain(document | {"forward_mode": None})
    assert "  forward 42 (of unknown mode)  mode raise" in old


GOLDEN_RUN = """\
1 to 3. use after free
   request   "reader" (target pool, found by verify, batch row 1)
   where     positions 12 to 14, slots 78 to 80, pages 19 to 20; held by: owner
   because   the slot held nothing when it was read [verify_freed]
   found     a freed slot: its last owner was request "writer", it was freed before \
forward 40
   look at   who freed the slot: `found` has its last owner, and when

4. use after free
"""


def test_explain_knows_the_kinds_by_name() -> None:
    kinds = (WriterKind.POISON, WriterKind.NONE)
    assert [kind.name.lower() for kind in kinds] == [POISON, NONE]
    assert Launch.SWEEP.name.lower() == SWEEP


def test_explain_puts_consecutive_positions_together(tmp_path: Path) -> None:
    poison = pack_word3(40, WriterKind.POISON, WRITER)
    freed = {"REASONS": Reason.VERIFY_FREED, "FOUND_WORD3": poison}
    places = [(78, 12), (79, 13), (80, 14), (90, 20)]
    entries = [entry(SLOT=s, POSITION=p, **freed) for s, p in places]
    report = reporter(report_dir=tmp_path)
    report.report(entries, dropped=0, owner_of=lambda slot: Owner("owner"))
    text = explain(report.incidents[0])
    assert GOLDEN_RUN in text
    assert "4 violation(s)" in text


def test_explain_says_what_a_sweep_looked_at(tmp_path: Path) -> None:
    """Not the number of the run of cached slots."""
    report = reporter(report_dir=tmp_path)
    swept = entry(TAG=Launch.SWEEP, SERIAL=0, BATCH_ROW=3, EXPECTED_SLOT=-1)
    (found,) = report.report([swept], dropped=0, owner_of=owner_of)
    assert (found.batch_row, found.branch) == (-1, -1)
    text = explain(report.incidents[0])
    assert "no request (target pool, found by sweep, prefix cache)" in text
    phase = entry(REASONS=Reason.PHASE, SERIAL=0, BATCH_ROW=-1, POSITION=-1, SLOT=-1)
    report.report([phase], dropped=0, owner_of=owner_of)
    assert "found by verify, no row)" in explain(report.incidents[1])


def test_explain_shows_tokens_where_the_report_has_them(tmp_path: Path) -> None:
    text = explain(incident(tmp_path, with_tokens=True))
    assert "found     token 101, position 12" in text


# Reasons, what else their ring entries have, and the lines between `where` and `look`.
PARTS: list[tuple[Reason, dict[str, int], list[str]]] = [
    (
        Reason.WRITE_TOKEN,
        {"EXPECTED_WORD0": pack_word0(17, 12), "FOUND_WORD3": FREED},
        [
            "because   the input token differs from the one that was published (the "
            "prompt's, then the sampled ones), or from the oracle's [write_token]",
            "expected  {17}, position 12, as published",
            "found     {101}, position 12, in the forward's inputs",
        ],
    ),
    (
        Reason.WRITE_POSITION,
        {"EXPECTED_WORD0": pack_word0(101, 13), "FOUND_WORD3": 0},
        [
            "because   the forward got another position than its row says "
            "[write_position]",
            "expected  {101}, position 13, as published",
            "found     {101}, position 12, in the forward's inputs",
        ],
    ),
    (
        Reason.WRITE_FOREIGN,
        {"EXPECTED_WORD0": pack_word0(17, 12), "FOUND_WORD0": pack_word0(101, 3)},
        [
            "because   the forward wrote into a slot that it does not own "
            "[write_foreign]",
            "writes    [token 17, ]position 12, lineage 0x0000000000000001; by the row "
            "it belongs into slot 78",
            "slot held [token 101, ]position 3, lineage 0xffffffffffffffff, written by "
            'decode of request "writer" in forward 40',
        ],
    ),
    (
        Reason.WRITE_FOREIGN | Reason.WRITE_TOKEN,
        {"EXPECTED_WORD0": pack_word0(17, 12)},
        [
            "because   the forward wrote into a slot that it does not own "
            "[write_foreign]",
            "because   the input token differs from the one that was published (the "
            "prompt's, then the sampled ones), or from the oracle's [write_token]",
            "expected  {17}, position 12, as published",
            "found     {101}, position 12, in the forward's inputs",
            'slot held written by decode of request "writer" in forward 40',
        ],
    ),
    (
        Reason.WRITE_SCRATCH,
        {"EXPECTED_WORD0": pack_word0(17, 12), "SLOT": 0, "FOUND_WORD3": 0},
        [
            "because   a live token was written to the scratch page [write_scratch]",
            "writes    [token 17, ]position 12, lineage 0x0000000000000001; by the row "
            "it belongs into slot 78",
            "slot held no record was read: this slot has none",
        ],
    ),
    (
        Reason.WRITE_ALIAS,
        {
            "EXPECTED_WORD0": pack_word0(17, 12),
            "FOUND_WORD0": pack_word0(101, 3),
            "TAG": Launch.TAIL,
        },
        [
            "because   two tokens of one forward went to the same slot [write_alias]",
            "writes    [token 17, ]position 12, lineage 0x0000000000000001",
            "slot has  [token 101, ]position 3, lineage 0xffffffffffffffff, written by "
            'decode of request "writer" in forward 40',
        ],
    ),
    (
        Reason.READ_SET,
        {"FOUND_WORD0": 0, "FOUND_WORD3": 0},
        [
            "because   attention read a slot that the request's table does not name "
            "[read_set]",
            "expected  position 12, slot 78",
            "found     no record was read: this slot has none",
        ],
    ),
    (
        Reason.READ_SET,
        {"FOUND_WORD0": 0, "FOUND_WORD3": 0, "EXPECTED_SLOT": -1},
        [
            "because   attention read a slot that the request's table does not name "
            "[read_set]",
            "expected  position 12, an unknown slot",
            "found     no record was read: this slot has none",
        ],
    ),
    (
        Reason.CARRIED_STATE,
        {"FOUND_WORD0": 0, "FOUND_WORD3": 0, "TAG": Launch.CARRIED},
        [
            "because   a draft starts from another state than was computed for it "
            "[carried_state]",
            "expected  a state with sum 0x0000000000000001",
            "found     sum 0xffffffffffffffff",
        ],
    ),
    (
        Reason.LOGITS_ROW,
        {"FOUND_WORD0": 0, "FOUND_WORD3": 0, "TAG": Launch.DRAWN},
        [
            "because   the output head read another hidden state than the token is due "
            "from [logits_row]",
            "expected  a state with sum 0x0000000000000001",
            "found     sum 0xffffffffffffffff",
        ],
    ),
    (
        Reason.SAMPLED_TOKEN,
        {
            "EXPECTED_WORD0": pack_word0(3, 12),
            "FOUND_WORD0": pack_word0(7, 12),
            "FOUND_WORD3": 0,
            "TAG": Launch.DRAWN,
        },
        [
            "because   the request's sampling parameters do not choose this token from "
            "the logits [sampled_token]",
            "expected  {3}, position 12, by the announced parameters",
            "found     {7}, position 12, as sampled",
        ],
    ),
    (
        Reason.GRAMMAR_MASK | Reason.SAMPLED_TOKEN,
        {
            "EXPECTED_WORD0": pack_word0(9, 3),
            "FOUND_WORD0": 0,
            "FOUND_WORD3": 0,
            "TAG": Launch.DRAWN,
        },
        [
            "because   the grammar mask belongs to another request or an earlier "
            "state, or forbids the token [grammar_mask]",
            "because   the request's sampling parameters do not choose this token from "
            "the logits [sampled_token]",
            "expected  a grammar mask of the request with serial 9 after 3 tokens",
            "found     no grammar mask",
        ],
    ),
    (
        Reason.STATE_FOLDS,
        {
            "EXPECTED_WORD0": pack_word0(TOKEN_MASK, 44),
            "FOUND_WORD0": POISON_WORD,
            "FOUND_FINGERPRINT": 3,
            "TAG": Launch.TAIL | OF_STATE,
        },
        [
            "because   a layer has folded another number of tokens into its state than "
            "the row has [state_folds]",
            "expected  45 tokens folded",
            "found     0 tokens, by counter 3 of the slot",
        ],
    ),
    (
        Reason.READ_SET | Reason.ROW_OWNER,
        {"EXPECTED_SLOT": 5, "TAG": Launch.VERIFY | OF_STATE, **UNKNOWN_TOKENS},
        [
            "because   the layers get another slot than the row's [read_set]",
            "because   another request wrote the state [row_owner]",
            "expected  [token None, ]position 12, lineage 0x0000000000000001, slot 5, "
            "fingerprint 0xfffffffffffffffe",
            "found     [token None, ]position 12, lineage 0xffffffffffffffff, "
            "fingerprint 0x00000000000000ab, written by decode of request "
            '"writer" in forward 40',
        ],
    ),
    (
        Reason.PHASE,
        {"EXPECTED_WORD0": Phase.AFTER_VERIFY, "FOUND_WORD0": Phase.IDLE},
        [
            "because   the canary's own launches ran out of order [phase]",
            "expected  phase after_verify",
            "found     phase idle",
        ],
    ),
]


@pytest.mark.parametrize("with_tokens", [False, True])
@pytest.mark.parametrize(("reasons", "columns", "lines"), PARTS, ids=str)
def test_explain_says_what_each_reason_is_about(
    reasons: Reason, columns: dict[str, int], lines: list[str], with_tokens: bool
) -> None:
    report = reporter(report_tokens=with_tokens)
    report.report([entry(REASONS=reasons, **columns)], owner_of=owner_of)
    text = explain(report.incidents[0])
    withheld = "token withheld (--kv-canary-report-tokens shows it)"
    due = [
        re.sub(r"\[(token \w+, )\]", r"\1" if with_tokens else "", line)
        for line in lines
    ]
    due = [
        re.sub(r"\{(\d+)\}", r"token \1" if with_tokens else withheld, line)
        for line in due
    ]
    *said, look_at = [line.strip() for line in text.splitlines()[6:]]
    assert said == due
    assert look_at.startswith("look at   ")


def test_explain_prints_no_control_characters() -> None:
    """No request id of a client forges a line or controls a terminal."""
    evil = "x\n2. nothing is wrong\x1b[2J\u2028\ud800\x9b1m"
    serials = SerialMap()
    serials.add(READER, evil)
    serials.add(WRITER, evil)
    settings = CanaryConfig(mode=CanaryMode.LOG, real_data=RealData.ALL)
    report = create_reporter(settings, page_size=4, serials=serials)
    report.report([entry()], dropped=0, owner_of=lambda slot: Owner(f"request {evil}"))
    document = json.loads(json.dumps(report.incidents[0]))
    text = explain(document)
    assert text.isascii() and text.replace("\n", "").isprintable()
    assert len(text.splitlines()) == len(GOLDEN_TEXT.splitlines()) - 1
    assert f"   request   {json.dumps(evil)} (target" in text
    assert f"decode of request {json.dumps(evil)} in" in text


def test_explain_command(tmp_path: Path) -> None:
    document = incident(tmp_path, with_tokens=False)
    (file,) = tmp_path.iterdir()
    bad = tmp_path / "bad.json"

    def run(*files: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "sglang.srt.kv_canary.explain"]
        return subprocess.run(
            [*command, *files], capture_output=True, text=True, timeout=60
        )

    good = run(file)
    assert (good.returncode, good.stderr) == (0, "")
    assert good.stdout == explain(document) + "\n"
    bad.write_bytes(b"[" * 100_000)
    wrong = run(bad)
    assert wrong.returncode == 1
    assert wrong.stderr == f"{bad}: not an incident file: nested too deeply\n"


def refusal(file: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What `explain` says against a file, in one line."""
    assert main([str(file)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"{file}: ") and len(err.splitlines()) == 1
    return err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not an incident file, or cut"),
        (b"{", "not an incident file, or cut"),
        (b"[]", "no JSON object"),
        (b"null", "no JSON object"),
        (b"\xff\xfe{}", "not UTF-8 text"),
        (b'{"violations": [1]}', "not an incident file: "),
        (b'{"violations": []}', "violations must be a list"),
        (b'{"violations": {"a": 1}}', "violations must be a list"),
        (b'{"violations": [' + b"9" * 5000 + b"]}", "digits"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"violations": [' + b"[" * 900 + b"]" * 902 + b"}", "not an incident file"),
    ],
)
def test_a_file_that_is_no_incident(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, words: str
) -> None:
    file = tmp_path / "bad.json"
    file.write_bytes(content)
    assert words in refusal(file, capsys)


def test_a_file_that_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "cannot be read: No such file" in refusal(tmp_path / "none", capsys)
    assert "not a regular file" in refusal(tmp_path, capsys)
    assert "not a regular file" in refusal(Path("/dev/zero"), capsys)


FOREIGN = [None, True, -1, 10**30, 1e300, float("nan"), "x", "\n", [], [1], [[]], {}]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a document, with each of its keys."""
    keys = value if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


def test_a_document_with_any_value_changed_is_explained_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = incident(tmp_path, with_tokens=True)
    file = tmp_path / "changed.json"
    for container, key in list(places(document)):
        before = container[key]
        for foreign in FOREIGN:
            container[key] = foreign
            file.write_text(json.dumps(document))
            if main([str(file)]):
                err = capsys.readouterr().err
                assert err.startswith(f"{file}: not an incident file")
                assert len(err.splitlines()) == 1
        container[key] = before


def test_slots_far_apart_take_no_memory(tmp_path: Path) -> None:
    """A list of all numbers between them would have a million million."""
    document = incident(tmp_path, with_tokens=False)
    (first,) = document["violations"]
    second = first | {"position": first["position"] + 1, "slot": 10**12}
    text = explain(document | {"violations": [first, second]})
    assert f"slots {first['slot']}, {10**12}" in text


def test_a_reader_that_leaves_costs_no_traceback(tmp_path: Path) -> None:
    incident(tmp_path, with_tokens=False)
    (file,) = tmp_path.iterdir()
    for unbuffered in ("", "-u"):
        module = "sglang.srt.kv_canary.explain"
        command = f"{sys.executable} {unbuffered} -m {module}"
        shell = f"{command} {f'{file} ' * 500} | head -n 1"
        done = subprocess.run(
            ["bash", "-c", f"{shell}; exit ${{PIPESTATUS[0]}}"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (READER_GONE, "")
        assert len(done.stdout.splitlines()) == 1


def test_what_was_healed() -> None:
    report = reporter()
    found = report.examine(
        [entry()],
        owner_of=lambda slot: Owner("owner"),
        mode_of=lambda violation: "decode",
        branch_of=lambda violation: None,
        details=lambda violation: {},
    )
    about = {
        "rid": "r\n1",
        "pool": "target",
        "tokens": 26,
        "output_tokens": 22,
        "sent": 7,
    }
    outcome = {
        "recomputed": [about],
        "ended": [about | {"rid": "r2"}],
        "num_recomputed": 1,
        "num_ended": 1,
        "cached_tokens_cut": 16,
        "pages_watched": [3, 8],
    }
    document = report.publish(found, outcome=outcome)
    assert document is not None and document["healing"] == outcome
    assert explain(document).splitlines()[-3:] == [
        "healed: 1 request(s) recomputed, 1 ended, 16 cached token(s) dropped, pages "
        "watched: 3, 8",
        '   "r\\n1" runs again with 26 tokens (target pool); 7 of 22 output tokens '
        "were sent before",
        '   "r2" ended with an error with 26 tokens (target pool); 7 of 22 output '
        "tokens were sent before",
    ]
    assert report.publish([]) is None


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
