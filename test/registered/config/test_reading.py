"""docs/reading.md lists files that exist, each once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="cpu")

REPO = Path(__file__).resolve().parents[3]
ROOTS = {
    "srt": REPO / "python" / "sglang",
    "kv_canary": REPO / "kv-canary" / "python",
}
ROW = re.compile(r"^\| `([^`]+\.py)` \| (.+) \|$", re.MULTILINE)
ROWS = ROW.findall((REPO / "docs" / "reading.md").read_text(encoding="utf-8"))


def test_there_are_rows_and_no_file_is_listed_twice() -> None:
    files = [file for file, _ in ROWS]
    assert len(files) > 40
    assert len(set(files)) == len(files)


@pytest.mark.parametrize(("file", "sentence"), ROWS)
def test_the_file_exists_and_has_a_sentence(file: str, sentence: str) -> None:
    assert (ROOTS[file.partition("/")[0]] / file).is_file()
    assert sentence.endswith(".")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
