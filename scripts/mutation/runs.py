"""Runs one engine under traffic until it is idle or stopped, and records how it
ended.
"""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from kv_canary.reporter import CanaryViolation
from scripts.mutation.answers import Expected, has_wrong_end, wrong_tokens
from scripts.mutation.clients import ABORTS, Clients, WireClients
from scripts.mutation.damage import Damage
from scripts.mutation.front_clients import FrontClients
from scripts.mutation.worlds import ModelFolders, World, build
from sglang.srt.managers.scheduler.heal_check import HealingError
from sglang.test.harness import EngineHarness
from sglang.test.spec_accept import AcceptRecorder, predicted_acceptance

MAX_STEPS = 4000
# How the front names a difference between the tokens of the engine and an answer.
NAME = "kv_canary: output of request"
# Maximum rounds in which nothing runs although there is work, and the pause after each
# of them: a grammar compiles in another thread.
MAX_IDLE_ROUNDS = 600
IDLE_SECONDS = 0.001
# Seconds between two attempts to end a run after its time, because a handler in a task
# of the front may have caught the first one.
AGAIN_SECONDS = 0.5


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
    signal.setitimer(signal.ITIMER_PROF, seconds, AGAIN_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How a run ended.

    Fields:
        end: idle, violation (or a healing that went wrong), leak, error, stall, steps
            or time.
        detail: detail of an end that is not idle, or the first error of a client.
        steps: scheduler rounds. sent, wrong_sent: tokens that clients received, and how
        many differ from the right ones.
        wrong_ends: requests with too many or too few tokens, or another finish.
        verified: verifications and accepted tokens of each request.
        wrong_drafts: requests whose accept lengths the draft's oracle does not explain;
            checked only if `verified` is unexpected.
        retracted: number of retractions in a run that ended idle.
        healed: number of healings, likewise.
        failed: requests that the front ended with an error instead of an answer.
        named: how many of those errors are the canary's.
        lost: requests of a run that ended idle that nobody has answered.
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
    healed: int = 0
    failed: int = 0
    named: int = 0
    lost: int = 0


@dataclass(kw_only=True)
class Course:
    """A run in progress; what an error leaves of it is still judged."""

    world: World
    seed: int
    harness: EngineHarness | None = None
    clients: Clients | None = None
    recorder: AcceptRecorder | None = None
    steps: int = 0

    def serve(
        self, folders: ModelFolders, *, canary: bool, aborts: float
    ) -> tuple[str, str]:
        """Build the engine, and step until all is served; return the end and its
        detail.
        """
        world = self.world
        overlap = self.seed % 2 == 0
        self.harness = build(world, folders, overlap=overlap, canary=canary)
        if world.has_draft_oracle:
            self.recorder = AcceptRecorder(self.harness.scheduler)
        kind = FrontClients if world.has_front else WireClients
        self.clients = kind(self.harness, world, seed=self.seed, aborts=aborts)
        step: Callable[[], bool] = self.harness.scheduler.step
        if world.damage_every:
            step = Damage(self.harness, world, seed=self.seed).step
        return self._serve(self.harness, self.clients, step)

    def _serve(
        self, harness: EngineHarness, clients: Clients, step: Callable[[], bool]
    ) -> tuple[str, str]:
        idle_rounds = 0
        for self.steps in range(MAX_STEPS):
            has_work = harness.scheduler.has_work()
            clients.before_step(is_idle=not has_work)
            did_something = step()
            clients.receive()
            idle_rounds = 0 if did_something else idle_rounds + 1
            has_more = harness.io.requests or harness.scheduler.has_work()
            if not did_something and not has_more and clients.is_done:
                return "idle", ""
            if not did_something:
                time.sleep(IDLE_SECONDS)
            if idle_rounds > MAX_IDLE_ROUNDS and clients.is_done:
                return "stall", f"{idle_rounds} rounds without a batch"
        return "steps", f"{MAX_STEPS} rounds"

    def judge(self, end: str, detail: str, expected: Expected | None) -> Run:
        """Return how the run ended, compared with the right answers, if they are
        known.
        """
        received = {} if self.clients is None else self.clients.received
        verified = {name: one.verified for name, one in received.items()}
        pairs = (
            []
            if expected is None
            else [(one, expected.answers[name]) for name, one in received.items()]
        )
        failures = [one.failure for one in received.values() if one.failure]
        is_idle = end == "idle" and self.harness is not None
        wrong_drafts = retracted = healed = 0
        # All ranks take part in a snapshot.
        if is_idle and self.world.ranks == 1:
            assert self.harness is not None
            stats = self.harness.scheduler.stats_snapshot()
            retracted = stats.num_retracted_reqs
            healed = sum((stats.kv_canary_heals_total or {}).values())
        if is_idle and expected is not None and verified != expected.verified:
            wrong_drafts = self._wrong_drafts(list(received))
        return Run(
            end=end,
            detail=(detail or next(iter(failures), ""))[:400],
            steps=self.steps,
            sent=sum(len(one.output) for one in received.values()),
            wrong_sent=sum(wrong_tokens(*pair) for pair in pairs),
            wrong_ends=sum(has_wrong_end(*pair) for pair in pairs) if is_idle else 0,
            verified=verified,
            wrong_drafts=wrong_drafts,
            retracted=retracted,
            healed=healed,
            failed=len(failures),
            named=sum(NAME in failure for failure in failures),
            lost=sum(not one.is_answered for one in received.values())
            if is_idle
            else 0,
        )

    def _wrong_drafts(self, rids: Sequence[str]) -> int:
        if self.recorder is None or self.harness is None:
            return 0
        try:
            found = predicted_acceptance(self.recorder, self.harness, rids)
        except (AssertionError, LookupError, RuntimeError, ValueError):
            # The oracle assumes correct bookkeeping of an iteration, which the fault
            # broke.
            return len(rids)
        return len(found.differing)


def run_world(
    world: World,
    folders: ModelFolders,
    *,
    seed: int,
    canary: bool,
    expected: Expected | None,
    seconds: float = 10.0,
) -> Run:
    """Serve one world's traffic; half of the seeds with overlap.

    Args:
        expected: what a run without faults yields, or None to judge no answers.
    """
    course = Course(world=world, seed=seed)
    end, detail = _serve_in_time(
        course, folders, canary=canary, aborts=ABORTS, seconds=seconds
    )
    return course.judge(end, detail, expected)


def right_answers(
    world: World, folders: ModelFolders, *, seed: int, seconds: float
) -> Expected:
    """Serve a world's requests in its reference, without aborts.

    Raises:
        RuntimeError: the engine did not end idle.
    """
    course = Course(world=world.reference(), seed=1)
    course.seed = seed
    end, detail = _serve_in_time(
        course, folders, canary=False, aborts=0.0, seconds=seconds
    )
    if end != "idle":
        raise RuntimeError(f"{world.name}, seed {seed}: {end}: {detail}")
    assert course.clients is not None
    received = course.clients.received
    return Expected(
        answers={name: one.as_due() for name, one in received.items()}, verified={}
    )


def _serve_in_time(
    course: Course,
    folders: ModelFolders,
    *,
    canary: bool,
    aborts: float,
    seconds: float,
) -> tuple[str, str]:
    """Serve within a CPU time, and return the end whatever happens."""
    try:
        with time_limit(seconds):
            end, detail = course.serve(folders, canary=canary, aborts=aborts)
    except OutOfTimeError:
        end, detail = "time", ""
    except (CanaryViolation, HealingError) as error:
        end, detail = "violation", str(error)
    except Exception as error:
        end, detail = _named_error(error)
    if course.clients is not None:
        course.clients.receive()
        course.clients.close()
    return end, detail


def _named_error(error: Exception) -> tuple[str, str]:
    frames = traceback.extract_tb(error.__traceback__)
    where = frames[-1]
    place = f"{Path(where.filename).name}:{where.lineno} in {where.name}"
    end = "leak" if any(f.name == "check_idle" for f in frames) else "error"
    return end, f"{type(error).__name__} at {place}: {error}"
