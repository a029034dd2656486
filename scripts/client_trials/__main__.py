"""Runs unmodified clients against a server, as their own documentation uses them.

    python scripts/client_trials URL [--api-key KEY] [--only WORD]

Runs inside an environment of the clients and imports nothing of the product; trials of
packages that are missing are skipped. Except in the `auto` trials, `tool_choice` forces
every tool call, so a small model is enough: the trials judge the wire format, not the
model's text. Prints a line for each trial, then one line of JSON; exits with 1 if a
trial failed. The model needs a context of 4,096 tokens or more.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import sys
import time

import agent_trials
import library_trials
import openai_trials
from trial_world import NO_KEY, Site, Skipped, Trial

TRIALS = openai_trials.TRIALS + library_trials.TRIALS + agent_trials.TRIALS


def outcome(trial: Trial, site: Site) -> tuple[str, str]:
    """Return the client's version, and "ok", "skipped: ..." or the failure."""
    try:
        version = importlib.metadata.version(trial.package)
    except importlib.metadata.PackageNotFoundError:
        return "-", "skipped: not installed"
    try:
        # Some clients print hints.
        with contextlib.redirect_stdout(sys.stderr):
            trial.run(importlib.import_module(trial.module), site)
    except Skipped as reason:
        return version, f"skipped: {reason}"
    except Exception as error:  # Anything a client raises is a finding.
        return version, f"{type(error).__name__}: {error}"
    return version, "ok"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="of the server, such as http://127.0.0.1:30000")
    parser.add_argument("--api-key", default=NO_KEY)
    parser.add_argument("--only", default="", help="a word of package and trial")
    options = parser.parse_args()
    site = Site(url=options.url.rstrip("/"), key=options.api_key, model="")
    (model,) = site.get("/v1/models")["data"]
    site = Site(url=site.url, key=site.key, model=model["id"])
    rows = []
    for trial in TRIALS:
        if options.only not in f"{trial.package} {trial.name}":
            continue
        began = time.monotonic()
        version, result = outcome(trial, site)
        seconds = time.monotonic() - began
        line = " ".join(result.split())[:300]
        print(
            f"{trial.package:20} {version:8} {trial.name:42} {seconds:6.1f} s  {line}",
            flush=True,
        )
        rows.append(
            {
                "client": trial.package,
                "version": version,
                "trial": trial.name,
                "result": line,
            }
        )
    print(json.dumps({"server": site.get("/version"), "trials": rows}))
    return int(any(not row["result"].startswith(("ok", "skipped")) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
