"""Runs the registered tests: `python test/run_suite.py --hw cpu [--full]`.

A test file registers itself with `register_cpu_ci` / `register_cuda_ci`; the calls are
read from the source with `ast`, so their arguments are literals. Files that need the
whole machine run alone, the others share pytest workers. `--full` runs the whole
counts, the tests of `lab/`, and the suites `real`, `fleet` and `engines`, whose tests
are skipped where their models or packages are missing. A whole run with `--full` or
under the canary writes `docs/soak/<name>.json`.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
FOLDERS = (REPO / "test" / "registered", REPO / "lab" / "tests")
SUITES = {
    "cpu": ("cpu", "cpu-serial", "real", "fleet", "engines", "lab"),
    "cuda": ("cuda", "cuda-serial", "lab"),
}
# Tests of real models, of packages that make test does not install, and of tools that
# are not part of the product. They run with --full, or with --suite.
ONLY_FULL = ("real", "fleet", "engines", "lab")
PARALLEL = ("cpu", "cuda")
# Where no GPU is, one process collects and forks the workers. A file's fixtures are
# shared by keeping it on one of them, unless it takes longer than a worker's share of
# all divided by so many. CUDA does not survive a fork; there kernels compile once for
# all processes, and xdist hands out the tests one by one.
PIECES_OF_A_SHARE = 4
CALLS = {"cpu": "register_cpu_ci", "cuda": "register_cuda_ci"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TestFile:
    path: Path
    suite: str
    est_time: float
    full_time: float | None = None

    def seconds(self, *, full: bool) -> float:
        return self.full_time if full and self.full_time else self.est_time


def registrations(path: Path, hardware: str) -> list[TestFile]:
    """The registrations of `path` for `hardware`; every test file must have one."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found, names = [], set()
    for node in tree.body:
        call = node.value if isinstance(node, ast.Expr) else None
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            continue
        names.add(call.func.id)
        if call.func.id == CALLS[hardware]:
            arguments = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
            if arguments["suite"] not in SUITES[hardware]:
                raise SystemExit(
                    f"{path}: unknown suite {arguments['suite']!r}; "
                    f"choose from {', '.join(SUITES[hardware])}"
                )
            found.append(TestFile(path=path, **arguments))
    if not names & set(CALLS.values()):
        raise SystemExit(f"{path}: not registered; call register_cpu_ci or _cuda_ci")
    return found


def forked(files: list[TestFile], workers: int, *, full: bool) -> list[str]:
    """Options that run `files` in `workers` forked processes."""
    seconds = {str(test.path): test.seconds(full=full) for test in files}
    piece = sum(seconds.values()) / workers / PIECES_OF_A_SHARE
    options = ["-p", "no:xdist", "-p", "sglang.test.forked_workers"]
    options += ["--forks", str(workers)]
    for path, cost in seconds.items():
        if cost > piece:
            options += ["--fork-slices", f"{path}={math.ceil(cost / piece)}"]
    return options


def run_pytest(
    files: list[TestFile], *, hardware: str, workers: int, full: bool, canary: bool
) -> tuple[int, str]:
    """Exit code and closing line of one pytest run over `files`."""
    command = [sys.executable, "-m", "pytest", *(str(f.path) for f in files)]
    command += ["-p", "no:cacheprovider", "--durations=8"]
    if workers > 1 and hardware == "cpu":
        command += forked(files, workers, full=full)
    elif workers > 1:
        # In the order given: by default files of few tests would come last, however
        # long these take.
        command += ["-n", str(workers), "--dist", "worksteal"]
        command += ["--no-loadscope-reorder"]
    if full:
        command += ["--timeout=3000"]
    env = dict(os.environ)
    # Workers and hundreds of servers import the same files, and compile them once.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    if workers > 1:
        env.setdefault("OMP_NUM_THREADS", "1")
    if full:
        env["SGLANG_TEST_FULL"] = "1"
    if canary:
        env["SGLANG_TEST_KV_CANARY"] = "1"
    process = subprocess.Popen(
        command, cwd=REPO, env=env, text=True, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    closing = ""
    for line in process.stdout:
        print(line, end="", flush=True)
        if re.search(r"\d+ (passed|failed|error)", line):
            closing = line.strip(" =\n")
    return process.wait(), closing


def write_soak(name: str, report: dict[str, object]) -> Path:
    path = REPO / "docs" / "soak" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return path


def commit() -> str:
    result = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=REPO, capture_output=True, text=True
    )
    return result.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hw", choices=sorted(SUITES), required=True)
    parser.add_argument("--suite", help="one suite only")
    parser.add_argument(
        "--full", action="store_true", help="whole counts (under 60 min)"
    )
    parser.add_argument(
        "--canary", action="store_true", help="every engine runs under the KV canary"
    )
    # Two more than cores: some tests wait for processes or clocks.
    parser.add_argument("--workers", type=int, default=(os.cpu_count() or 1) + 2)
    parser.add_argument("--match", default="", help="only paths that contain this text")
    parser.add_argument(
        "--skip", nargs="*", default=[], help="no paths that contain one of these texts"
    )
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [
            *(str(REPO / source) for source in ("python", "kv-canary/python")),
            *filter(None, [os.environ.get("PYTHONPATH")]),
        ]
    )
    every = [
        test
        for folder in FOLDERS
        for path in sorted(folder.rglob("test_*.py"))
        for test in registrations(path, args.hw)
        if args.match in str(path) and args.suite in (None, test.suite)
        if args.full or args.suite or test.suite not in ONLY_FULL
        if not any(text in str(path) for text in args.skip)
    ]
    if not every:
        print(f"no test is registered for --hw {args.hw} with these filters")
        return 1
    began = time.time()
    code, closings = 0, {}
    for suite in SUITES[args.hw]:
        files = sorted(
            (t for t in every if t.suite == suite),
            key=lambda t: -t.seconds(full=args.full),
        )
        if not files:
            continue
        workers = args.workers if suite in PARALLEL else 1
        print(f"suite {suite}: {len(files)} files, {workers} worker(s)", flush=True)
        result, closings[suite] = run_pytest(
            files,
            hardware=args.hw,
            workers=workers,
            full=args.full,
            canary=args.canary,
        )
        code = code or result
    seconds = round(time.time() - began, 1)
    print(
        f"{args.hw}: {'passed' if code == 0 else 'FAILED'} in {seconds} s", flush=True
    )
    for suite, closing in closings.items():
        print(f"  {suite}: {closing}", flush=True)
    if (args.full or args.canary) and not args.match:
        report: dict[str, object] = {
            "commit": commit(),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "python": platform.python_version(),
            "skipped_paths": args.skip,
            "counts": "whole" if args.full else "those of make test",
            "passed": code == 0,
            "seconds": seconds,
            "seeds": "fixed in the tests; hypothesis derandomized",
            "suites": closings,
        }
        name = f"suite-{args.hw}" + ("-canary" if args.canary else "")
        print(f"wrote {write_soak(name, report).relative_to(REPO)}")
    return code


if __name__ == "__main__":
    sys.exit(main())
