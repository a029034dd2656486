"""Plants one-line faults in the engine and reports the outcome of each.

    python scripts/mutation/run.py faults --count 120 --seed 1 --out faults.json
    python scripts/mutation/run.py tests --count 100 --only mem_cache.allocator
    python scripts/mutation/run.py faults --rerun faults.json --outcome never
    python scripts/mutation/run.py faults --list --only schedule_batch:281
    python scripts/mutation/run.py faults --show ID

`faults` plants each in engines that run under the canary, most on the mock model, and
sees whether it is named before a wrong token leaves. `tests` runs the tests of its
area. A table follows at the end, then one line of JSON; `--out` keeps all rows and,
after ctrl-C, those so far.

Outcomes of `faults`, the worst of all worlds first:

    never             wrong tokens were sent, and the canary named nothing
    after             wrong tokens were sent before it did
    before            named before a wrong token left: by the engine's report, or in
                      the error that the request gets from the front
    stopped           would change tokens or drafts, but a host guard, the leak check
                      or a limit stopped the engine first, or the front failed
    drafts unseen     right tokens by worse or other drafts, unnamed
    drafts named      the same, named
    lost              a request was never answered
    ends              right tokens, but too few or too many, or another finish
    hang, guard, leak stopped so; without that, neither tokens nor drafts change
                      (a hang is what the watchdog ends)
    named, no effect  named; without the canary neither tokens nor drafts change
    none              no effect that a client or the draft's oracle could see
"""

from __future__ import annotations

import argparse
import difflib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
REPO = Path(__file__).resolve().parents[2]
for source in ("kv-canary/python", "python", ""):
    if str(REPO / source) not in sys.path:
        sys.path.insert(0, str(REPO / source))

import torch  # noqa: E402

from scripts.mutation import campaign, report  # noqa: E402
from scripts.mutation.areas import AREAS  # noqa: E402
from scripts.mutation.choice import Fault, all_faults, only, sample  # noqa: E402
from scripts.mutation.targets import module_path  # noqa: E402


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("faults", "tests"))
    parser.add_argument("--count", type=int, help="a sample of so many (default: all)")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--only", action="append", help="MODULE or MODULE:LINE")
    parser.add_argument("--areas", nargs="+", help="such as streaming healing")
    parser.add_argument("--rerun", type=Path, help="the faults of an --out file")
    parser.add_argument("--outcome", action="append", help="with --rerun: of these")
    parser.add_argument("--list", action="store_true", help="name the faults only")
    parser.add_argument("--show", metavar="ID", help="print the fault as a diff")
    parser.add_argument("--out", type=Path, help="keep all rows, as JSON")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time")
    parser.add_argument("--world-seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--world-limit", type=float, default=10.0, help="CPU seconds")
    parser.add_argument("--test-limit", type=float, default=300.0, help="seconds")
    return parser.parse_args()


def chosen_faults(args: argparse.Namespace) -> list[Fault]:
    """Return the faults selected by the options.

    Raises:
        SystemExit: there are none.
    """
    areas = [area for area in AREAS if area.worlds or args.command == "tests"]
    unknown = set(args.areas or ()) - {area.name for area in areas}
    if unknown:
        names = ", ".join(area.name for area in areas)
        raise SystemExit(f"no area {', '.join(sorted(unknown))}; choose from {names}")
    found = all_faults([a for a in areas if args.areas is None or a.name in args.areas])
    if args.only:
        found = [fault for place in args.only for fault in only(found, place)]
    if args.rerun:
        rows = json.loads(args.rerun.read_text(encoding="utf-8"))["rows"]
        wanted = {
            r["id"] for r in rows if r["outcome"] in (args.outcome or [r["outcome"]])
        }
        found = [fault for fault in found if fault.mutant.id in wanted]
    if args.show:
        found = [fault for fault in found if fault.mutant.id == args.show]
    if args.count is not None:
        found = sample(found, count=args.count, seed=args.seed)
    if not found:
        raise SystemExit("no such fault; see --list")
    return found


def diff(fault: Fault) -> str:
    path = module_path(fault.mutant.module)
    before = path.read_text(encoding="utf-8").splitlines()
    after = fault.mutant.source.splitlines()
    parts = difflib.unified_diff(before, after, str(path), "fault", n=2, lineterm="")
    return "\n".join(parts)


def main() -> int:
    args = parse_args()
    faults = chosen_faults(args)
    if args.show or args.list:
        for fault in faults:
            mutant = fault.mutant
            print(f"{mutant.id}  {mutant.before}  ->  {mutant.after}")
            if args.show:
                print(diff(fault))
        return 0
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL if args.command == "faults" else logging.NOTSET)
    limits = campaign.Limits(
        jobs=args.jobs, world=args.world_limit, tests=args.test_limit
    )
    rows: list[dict[str, Any]] = []

    def on_row(row: dict[str, Any]) -> None:
        rows.append(row)
        print(
            f"{len(rows):4}/{len(faults)}  {row['outcome']:16} {row['id']}", flush=True
        )

    is_cut = False
    try:
        if args.command == "faults":
            campaign.promise_run(
                faults, seeds=args.world_seeds, limits=limits, on_row=on_row
            )
        else:
            campaign.test_run(faults, limits=limits, on_row=on_row)
    except KeyboardInterrupt:
        is_cut = True
    found = report.counts(rows, args.command) | {"is_cut": is_cut}
    if args.out:
        args.out.write_text(
            json.dumps({"counts": found, "rows": rows}, indent=1) + "\n",
            encoding="utf-8",
        )
    print("\n".join(report.table(rows, args.command)))
    print(json.dumps(found))
    return 130 if is_cut else 0


if __name__ == "__main__":
    sys.exit(main())
