"""Plants one fault of each class in the installed vLLM, and reports which were
named."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from kv_canary.engines.settings import Mode
from kv_canary.faults.vllm import load_planters, state_planters
from kv_canary.faults.vllm.healed import run_healed
from kv_canary.faults.vllm.host import (
    CONNECTORS,
    MODELS,
    WITH_STATES,
    VllmHost,
    why_not_run,
    write_model,
)
from kv_canary.faults.vllm.load_planters import run_load_fault
from kv_canary.faults.vllm.planters import Outcome, faults_of, run_fault
from kv_canary.faults.vllm.state_planters import run_state_fault


def run(kind: str, seeds: int) -> bool:
    """Run the faults of one model in this process, under `KV_CANARY=log` or `heal`.

    Prints a line per fault, then a line of JSON; or why the model cannot be run here.
    Returns whether no fault went unnamed.
    """
    why_not = why_not_run(kind)
    if why_not:
        print(f"{kind}: not run: {why_not}")
        return True
    named: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        host = VllmHost(write_model(Path(folder), kind))
        run_one, names = _faults_of(host, kind)
        if host.canary.mode is Mode.HEAL:
            run_one = partial(run_healed, run_one)
        for name in names:
            outcomes = [run_one(host, name, seed) for seed in range(seeds)]
            count = named[name] = sum(outcome.named for outcome in outcomes)
            found = list(dict.fromkeys(d for o in outcomes for d in o.found))
            print(f"{name:32} {count}/{seeds}  {'; '.join(found[:2])}")
            for seed, outcome in enumerate(outcomes):
                if not outcome.named:
                    print(f"  seed {seed}: due {sorted(outcome.due)[:2]}, named:")
                    print("".join(f"    {line}\n" for line in outcome.lines[:4]))
        print(host.canary.summary())
        mode = host.canary.mode.value
        record = {
            **host.about(),
            "what": kind,
            "mode": mode,
            "seeds": seeds,
            "named": named,
        }
    print(json.dumps(record), flush=True)
    return all(count == seeds for count in named.values())


def _faults_of(
    host: VllmHost, kind: str
) -> tuple[Callable[[VllmHost, str, int], Outcome], Iterable[str]]:
    """Return what plants the faults of a model, and their names."""
    if kind in CONNECTORS:
        return run_load_fault, load_planters.PLANTERS
    if kind in WITH_STATES:
        return run_state_fault, state_planters.PLANTERS
    return run_fault, faults_of(host, kind)


KINDS = tuple(MODELS)
