"""Forked pytest workers run every test once, and report what happens to each."""

from __future__ import annotations

import collections
import os
import resource
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.roomy_stack import on_roomy_stack

register_cpu_ci(est_time=4, suite="cpu")

OUTCOMES = """
    import os, signal, warnings
    import pytest

    @pytest.fixture(scope="module")
    def world():
        log("made")
        yield
        log("gone")

    def log(text):
        with open(os.environ["LOG"], "a") as file:
            file.write(f"{os.path.basename(__file__)} {text}\\n")

    @pytest.mark.parametrize("i", range(5))
    def test_passes(world, i, tmp_path):
        print("printed to nobody")
        log(f"pass {i}")

    def test_fails(world):
        print("printed before")
        warnings.warn("a warning")
        assert 1 + 1 == 3

    @pytest.fixture
    def bad():
        yield
        raise ValueError("in teardown")

    def test_teardown(bad):
        pass

    @pytest.mark.skip(reason="not now")
    def test_skipped():
        pass

    @pytest.mark.xfail(strict=True)
    def test_expected():
        raise RuntimeError
"""
CRASHES = """
    import os, signal

    def test_before():
        pass

    def test_dies():
        os.kill(os.getpid(), signal.SIGKILL)

    def test_after():
        pass

    def test_leaves():
        os._exit(0)

    def test_last():
        pass
"""


def run(
    folder: Path, files: dict[str, str], *flags: str
) -> tuple[collections.Counter[str], str, list[str]]:
    """Words of the closing line with their counts, the output, and the tests' log."""
    for name, text in files.items():
        (folder / name).write_text(textwrap.dedent(text))
    command = [sys.executable, "-m", "pytest", *files, "-q", "--rootdir", str(folder)]
    command += ["-p", "sglang.test.forked_workers", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *flags],
        cwd=folder,
        env={**os.environ, "LOG": str(folder / "log"), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    *_, closing = done.stdout.splitlines()
    counts = collections.Counter[str]()
    for part in closing.partition(" in ")[0].split(", "):
        number, word = part.split()
        counts[word.removesuffix("s")] += int(number)
    log = folder / "log"
    return counts, done.stdout, log.read_text().split("\n") if log.exists() else []


@pytest.mark.parametrize("slices", [(), ("--fork-slices=a_test.py=3",)])
def test_outcomes_are_those_of_one_process(
    tmp_path: Path, slices: tuple[str, ...]
) -> None:
    files = {f"{letter}_test.py": OUTCOMES for letter in "abc"}
    flags = [flag.replace("=a", f"={tmp_path}/a") for flag in slices]
    alone, _, log = run(tmp_path, files)
    (tmp_path / "log").unlink()
    forked, output, forked_log = run(tmp_path, files, "--forks=2", *flags)
    assert forked == alone
    assert alone["passed"] == 18 and alone["failed"] == alone["error"] == 3
    assert "E       assert (1 + 1) == 3" in output and "printed before" in output
    assert "printed to nobody" not in output

    def of_tests(lines: list[str]) -> list[str]:
        return sorted(line for line in lines if " pass " in line)

    assert of_tests(forked_log) == of_tests(log)
    # A file's fixture is made once on each worker that runs a part of it.
    made = collections.Counter(line for line in forked_log if line.endswith(" made"))
    assert made["b_test.py made"] == made["c_test.py made"] == 1
    assert 1 <= made["a_test.py made"] <= (2 if slices else 1)
    gone = collections.Counter(line for line in forked_log if line.endswith(" gone"))
    assert {k.replace("gone", "made"): n for k, n in gone.items()} == made


def test_a_dead_worker_fails_its_test_alone(tmp_path: Path) -> None:
    counts, output, _ = run(tmp_path, {"crash_test.py": CRASHES}, "--forks=2")
    assert counts == {"passed": 3, "failed": 2}
    assert "its process ended with exit code -9" in output
    assert "its process ended with exit code 0" in output


def test_the_first_failure_ends_the_run(tmp_path: Path) -> None:
    slow = "import time\ndef test_slow():\n    time.sleep(60)\n"
    files = {"fail_test.py": "def test_fails():\n    assert 0\n", "slow_test.py": slow}
    counts, _, _ = run(tmp_path, files, "--forks=2", "-x")
    assert counts == {"failed": 1}


def test_errors_of_the_collection_are_told(tmp_path: Path) -> None:
    files = {"broken_test.py": "import no_such_module\n", "crash_test.py": CRASHES}
    counts, output, _ = run(tmp_path, files, "--forks=2")
    assert counts["error"] == 1 and "no_such_module" in output


def faults_of_calls(depth: int) -> int:
    """Pages that the system gives for 200 calls which are made so deep."""
    if depth > 0:
        return faults_of_calls(depth - 1)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(200):
        call_down(3)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def call_down(count: int) -> None:
    if count > 0:
        call_down(count - 1)


def most_faults() -> int:
    return max(faults_of_calls(depth) for depth in range(400))


@pytest.mark.skipif(
    sys.version_info[:2] not in ((3, 11), (3, 12)) or sys.platform != "linux",
    reason="other stacks",
)
def test_a_loop_at_any_depth_takes_no_memory() -> None:
    with ThreadPoolExecutor(1) as thread:  # which has a stack of its own
        assert thread.submit(most_faults).result() >= 200
        assert thread.submit(on_roomy_stack, most_faults).result() < 50


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
