"""Runs one engine under traffic until it is idle or stopped, and records how it
ended.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from kv_canary.reporter import CanaryViolation
from scripts.mutation.clients import Clients, has_wrong_end, wrong_tokens
from scripts.mutation.worlds import ModelFolders, World, build
from sglang.test.harness import EngineHarness
from sglang.test.spec_accept import AcceptRecorder, predicted_acceptance

MAX_STEPS = 4000
# Maximum rounds in which nothing runs although there is work.
MAX_IDLE_ROUNDS = 200


class OutOfTimeError(BaseException):
    """The CPU time limit was reached; no handler of the engine catches this."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Scope that ends with `OutOfTimeError` after the given CPU time; main thread
    only.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How a run ended.

    Fields:
        end: idle, violation, leak, error, stall, steps or time.
        detail: detail of an end that is not idle.
        steps: scheduler rounds. sent, wrong_sent: tokens that clients received, and how
        many differ from the oracle's.
        wrong_ends: requests with too many or too few tokens, or another finish.
        verified: verifications and accepted tokens of each request.
        wrong_drafts: requests whose accept lengths the draft's oracle does not explain;
            checked only if `verified` is unexpected.
        retracted: number of retractions in a run that ended idle.
    """

    end: str
    detail: str
    steps: int
    sent: int
    wrong_sent: int
    wrong_ends: int
    verified: dict[str, tuple[int, int]]
    wrong_drafts: int
    retracted: int


def run_world(
    world: World,
    folders: ModelFolders,
    *,
    seed: int,
    canary: bool,
    expected: dict[str, tuple[int, int]],
    seconds: float = 10.0,
) -> Run:
    """Serve one world's traffic; half of the seeds with overlap.

    Args:
        expected: `verified` of the undamaged run.
    """
    harness: EngineHarness | None = None
    clients: Clients | None = None
    recorder: AcceptRecorder | None = None
    steps = [0]
    try:
        with time_limit(seconds):
            harness = build(world, folders, overlap=seed % 2 == 0, canary=canary)
            if world.draft:
                recorder = AcceptRecorder(harness.scheduler)
            clients = Clients(harness, seed=seed, total=world.requests)
            end, detail = _serve(harness, clients, steps)
    except OutOfTimeError:
        end, detail = "time", ""
    except CanaryViolation as error:
        end, detail = "violation", str(error)
    except Exception as error:
        end, detail = _named_error(error)
    if clients is not None:
        clients.receive()
    asked = {} if clients is None else clients.asked
    verified = {rid: one.verified for rid, one in asked.items()}
    wrong_drafts = 0
    if end == "idle" and recorder is not None and verified != expected:
        assert harness is not None
        wrong_drafts = _wrong_drafts(recorder, harness, list(asked))
    retracted = 0
    if end == "idle" and harness is not None:
        retracted = harness.scheduler.stats_snapshot().num_retracted_reqs
    return Run(
        end=end,
        detail=detail[:400],
        steps=steps[0],
        sent=sum(len(one.output) for one in asked.values()),
        wrong_sent=sum(map(wrong_tokens, asked.values())),
        wrong_ends=sum(map(has_wrong_end, asked.values())) if end == "idle" else 0,
        verified=verified,
        wrong_drafts=wrong_drafts,
        retracted=retracted,
    )


def _serve(
    harness: EngineHarness, clients: Clients, steps: list[int]
) -> tuple[str, str]:
    """Step until all is served; return the end and its detail."""
    idle_rounds = 0
    for step in range(MAX_STEPS):
        steps[0] = step
        has_work = harness.scheduler.has_work()
        clients.before_step(is_idle=not has_work)
        did_something = harness.scheduler.step()
        idle_rounds = 0 if did_something else idle_rounds + 1
        has_more = harness.io.requests or harness.scheduler.has_work()
        if not did_something and not has_more and clients.is_done:
            return "idle", ""
        if idle_rounds > MAX_IDLE_ROUNDS and clients.is_done:
            return "stall", f"{idle_rounds} rounds without a batch"
    return "steps", f"{MAX_STEPS} rounds"


def _named_error(error: Exception) -> tuple[str, str]:
    frames = traceback.extract_tb(error.__traceback__)
    where = frames[-1]
    place = f"{Path(where.filename).name}:{where.lineno} in {where.name}"
    end = "leak" if any(f.name == "check_idle" for f in frames) else "error"
    return end, f"{type(error).__name__} at {place}: {error}"


def _wrong_drafts(
    recorder: AcceptRecorder, harness: EngineHarness, rids: Sequence[str]
) -> int:
    try:
        found = predicted_acceptance(recorder, harness, rids)
    except (AssertionError, LookupError, RuntimeError, ValueError):
        # The oracle assumes correct bookkeeping of an iteration, which the fault broke.
        return len(rids)
    return len(found.differing)
