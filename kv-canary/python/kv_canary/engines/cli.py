"""`kv-canary`: what is checked in the installed engine, and a self-test."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kv_canary.engines.hooks import (
    Expectation,
    HookRecord,
    expected_modules,
    import_failures,
    problem_with,
)
from kv_canary.engines.host_table import HOSTS, Host
from kv_canary.engines.running import report_running
from kv_canary.engines.settings import PREFIX, Mode, SettingsError, read_settings
from kv_canary.engines.wheel_source import WheelError, WheelSource
from kv_canary.op import native_available, triton_available
from kv_canary.version import __version__

_PLUGIN = "kv_canary"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the CLI and return its exit code: 0 all well, 1 problems, 2 no engine.

    arguments defaults to sys.argv[1:].
    """
    parser = argparse.ArgumentParser(prog="kv-canary", description=__doc__)
    parser.add_argument(
        "--version", action="version", version=f"kv-canary {__version__}"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    asked = commands.add_parser(
        "doctor", help="which engine is there, what is attached where, what is not seen"
    ).add_mutually_exclusive_group()
    asked.add_argument(
        "--static",
        type=Path,
        metavar="WHEEL",
        help="check the names and signatures in a wheel that is not installed",
    )
    asked.add_argument(
        "--running",
        metavar="URL",
        help="ask a live server's KV_CANARY_METRICS_PORT whether it is checked",
    )
    selftest = commands.add_parser(
        "selftest", help="plant one fault of each class in the engine and name it"
    )
    selftest.add_argument("--seeds", type=int, default=1, help="of each fault")
    selftest.add_argument(
        "--heal",
        action="store_true",
        help="under KV_CANARY=heal: no answer may show a fault",
    )
    selftest.add_argument(
        "--engine", choices=[host.name for host in HOSTS], help="where several are"
    )
    # One model per process, because an engine never gives its memory back.
    selftest.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if getattr(args, "running", None):
        lines, code = report_running(args.running)
        print("\n".join(lines))
        return code
    if getattr(args, "static", None):
        return doctor_of_wheel(args.static)
    wanted = getattr(args, "engine", None)
    hosts = [host for host in HOSTS if wanted in (None, host.name) and host.version()]
    if not hosts:
        packages = [name for host in HOSTS for name in host.packages]
        print(
            f"engine: none found; looked for the packages {' and '.join(packages)} "
            f"beside {sys.executable}"
        )
        return 2
    if args.command == "doctor":
        return max(doctor(host) for host in hosts)
    if args.seeds < 1:
        parser.error(f"--seeds {args.seeds}: 1 or more")
    mode = Mode.HEAL if args.heal else Mode.LOG
    unable = [host.title for host in hosts if mode not in host.modes]
    if unable:
        parser.error(f"--heal: {unable[0]} does not compute requests again; see doctor")
    return max(run_selftest(host, args.model, args.seeds, mode) for host in hosts)


def doctor(host: Host) -> int:
    """Print what the plugin would do here, and return the exit code."""
    print(f"engine: {host.version()}")
    print(f"kernels: {_kernels()}")
    try:
        settings = read_settings(real_data=host.real_data, modes=host.modes)
    except SettingsError as error:
        print(f"settings: {error}")
        return 1
    print(f"settings: {PREFIX}={settings.mode_name}, real data {settings.real_data}")
    allowed = os.environ.get(host.plugins_variable)
    is_shut_out = bool(allowed) and _PLUGIN not in str(allowed).split(",")
    if is_shut_out:
        print(
            f"  MISSING {_PLUGIN} in {host.plugins_variable}={allowed!r}: this engine "
            "does not load the plugin, and nothing can say so later"
        )
    broken = _say_what_does_not_import(host)
    seen = [
        each for each in host.expectations if broken.isdisjoint(expected_modules(each))
    ]
    problems = len(host.expectations) - len(seen)
    for expected in seen:
        problems += _say(expected, "MISSING")
    for expected in host.optional:
        if broken.isdisjoint(expected_modules(expected)):
            _say(expected, "without")
    print(f"sees: layers of {', '.join(host.sees)}")
    print("refuses, as it cannot see them whole:")
    for limit in host.limits:
        print(f"  {limit.name}: {limit.why}")
    print(f"  {host.rest}")
    count = len(host.expectations)
    if problems:
        print(
            f"{problems} of {count} are not as expected: with {PREFIX}=raise this "
            "engine does not start, with log it runs unchecked"
        )
    else:
        print(f"all {count} are as expected")
    return 1 if problems or is_shut_out else 0


def doctor_of_wheel(path: Path) -> int:
    """Print how the source in a wheel differs from what the plugin expects, and return
    the exit code."""
    try:
        source = WheelSource(path)
    except WheelError as error:
        print(f"wheel: {error}")
        return 2
    hosts = [host for host in HOSTS if source.name in host.packages]
    if not hosts:
        known = ", ".join(name for host in HOSTS for name in host.packages)
        print(f"wheel: {path}: {source.name} is none of {known}")
        return 2
    print(f"wheel: {source.name} {source.version}, not run")
    (host,) = hosts
    found = [(each, source.problem_with(each)) for each in host.expectations]
    for expected, problem in found:
        _say_line(expected, problem, "MISSING")
    problems = sum(problem is not None for _, problem in found)
    for expected in host.optional:
        _say_line(expected, source.problem_with(expected), "without")
    print(f"{len(found) - problems} of {len(found)} are as expected")
    return 1 if problems else 0


def _say_what_does_not_import(host: Host) -> set[str]:
    """Print why modules do not import, a line per reason, and return these modules."""
    failures = import_failures([*host.expectations, *host.optional])
    by_reason: dict[str, list[str]] = {}
    for module, reason in failures.items():
        by_reason.setdefault(reason, []).append(module)
    for reason, modules in by_reason.items():
        more = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
        print(
            f"  BROKEN  {host.title} itself does not import here: {reason} "
            f"({modules[0]}{more})"
        )
    if failures:
        print(
            "          Mend that first. Often torch was replaced, or torchvision and "
            "torchaudio are built for another torch"
        )
    return set(failures)


def _say(expected: Expectation, otherwise: str) -> bool:
    """Print a line and return whether there is a problem."""
    problem = problem_with(expected)
    _say_line(expected, problem, otherwise)
    return problem is not None


def _say_line(expected: Expectation, problem: str | None, otherwise: str) -> None:
    verb = "reads" if isinstance(expected, HookRecord) else "wraps"
    state = f"{verb} {expected.place}: {expected.purpose}"
    print(f"  {'ok     ' if problem is None else otherwise} {problem or state}")


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


def run_selftest(
    host: Host, model: str | None, seeds: int, mode: Mode = Mode.LOG
) -> int:
    """Run the self-test of one model here, in the mode of the environment, or of each
    model in its own process."""
    if model is not None:
        test = importlib.import_module(f"kv_canary.faults.{host.name}.selftest")
        return 0 if test.run(model, seeds) else 1
    code = 0
    for kind in host.models:
        command = [sys.executable, "-m", "kv_canary.engines.cli", "selftest"]
        command += ["--engine", host.name, "--seeds", str(seeds), "--model", kind]
        env = {
            name: value
            for name, value in os.environ.items()
            if name != PREFIX and not name.startswith(PREFIX + "_")
        }
        env |= {PREFIX: mode.value, **host.self_test_environment}
        code = code or subprocess.run(command, env=env).returncode
    done = "named and healed" if mode is Mode.HEAL else "named"
    print(f"all faults were {done}" if code == 0 else f"NOT all faults were {done}")
    return code


if __name__ == "__main__":
    sys.exit(main())
