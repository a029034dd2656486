"""Training of the three drafts side by side on one machine within a given time: the
target generates its text once, then each draft is trained in a separate process.

Knows the order and the clock, not the content of the scripts.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from lab.demo_model.paths import ASSETS, BUILD, PACK

# Script -> folder of its run, share of the training time.
TASKS = {
    "train_eagle3": ("eagle3", 1.0),
    "train_eagle": ("eagle", 0.8),
    "train_draft_lm": ("draft", 0.55),
}
# Seconds for loading before the training and measuring after it.
MARGIN_SECONDS = 18.0


def start(script: str, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-u", "-m", f"lab.demo_model.{script}", *arguments]
    return subprocess.Popen(command)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--assets", type=Path, default=ASSETS)
    parser.add_argument("--pack", type=Path, default=PACK)
    parser.add_argument("--text", type=Path, default=BUILD / "draft_text")
    parser.add_argument("--out", type=Path, default=BUILD / "drafts")
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=3072)
    parser.add_argument("--seconds", type=float, default=145.0)
    args, extra = parser.parse_known_args()
    deadline = time.monotonic() + args.seconds
    common = ["--assets", str(args.assets), "--pack", str(args.pack)]
    common += ["--device", args.device]
    if not (args.text / "train.npz").is_file():
        writer = start(
            "draft_text", *common, "--rows", str(args.rows), "--out", str(args.text)
        )
        if writer.wait() != 0:
            raise RuntimeError("draft_text.py failed; see its output above")
    left = deadline - time.monotonic() - MARGIN_SECONDS
    running = {}
    for script, (name, share) in TASKS.items():
        arguments = [*common, "--text", str(args.text), "--out", str(args.out / name)]
        arguments += ["--seconds", f"{left * share:.1f}", *extra]
        if args.resume is not None:
            arguments += ["--resume", str(args.resume / name)]
        running[script] = start(script, *arguments)
    failed = [script for script, process in running.items() if process.wait() != 0]
    if failed:
        raise RuntimeError(f"{', '.join(failed)} failed; see the output above")


if __name__ == "__main__":
    main()
