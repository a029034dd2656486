"""The benchmark of drafts on real text from command line to last line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang.test import forked_process
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import is_full

register_cpu_ci(est_time=6, suite="cpu")

REPO = Path(__file__).resolve().parents[3]
SCRIPT = REPO / "benchmark" / "e2e" / "bench_spec_text.py"


def run_script(folder: Path, rows: list[dict[str, Any]], *options: str) -> Any:
    heldout = folder / "heldout.jsonl"
    heldout.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, str(SCRIPT), "--heldout", str(heldout)]
    command += ["--prompts", str(len(rows)), "--new-tokens", "12", "--trees", "1,3,4"]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPO / "python"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    return forked_process.run([*command, *options], env=environment, timeout=120)


def test_rows_of_every_form(tmp_path: Path) -> None:
    rows = [
        {"category": "coding", "turns": ["def add(a, b):", "and now subtract"]},
        {"category": "ids", "ids": list(range(40, 80))},
        {"category": "ids", "ids": list(range(90, 100))},
        {"category": "coding", "text": "import os\n" * 200},
    ]
    done = run_script(tmp_path, rows, "--concurrency", "1", "2", "--rounds", "2")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    found = {(bool(row["tree"]), row["rows"]): row for row in document["results"]}
    assert len(found) == 4
    # --rounds 2: two prompts with one in flight, all four with two.
    assert [found[True, rows]["prompts"] for rows in (1, 2)] == [2, 4]
    assert [row["same"] for row in found.values()] == [1.0] * 4
    lengths = found[True, 2]["by_category"]
    assert set(lengths) == {"coding", "ids"}
    assert min(lengths.values()) <= found[True, 2]["accept_length"]
    assert 1.0 < found[True, 2]["accept_length"] <= max(lengths.values())


@pytest.mark.skipif(not is_full(), reason="runs with SGLANG_TEST_FULL=1")
def test_a_prompt_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    done = run_script(tmp_path, [{"ids": [5, 6, 100_000]}])
    assert done.returncode != 0
    assert "prompt 0 is refused" in done.stderr
    assert "100000" in done.stderr


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
