"""Keeps a scheduler's decisions of its last forwards, to be replayed later.

A forward costs two tuples of references to existing arrays. The log has two
generations; each begins with a checkpoint of the host's records, from which a replay
can continue, and is dropped once the next one is full.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sglang.srt.replay.recording.checkpoint import save_checkpoint
from sglang.srt.replay.recording.identity import adapter_flags, describe_origin
from sglang.srt.replay.recording.log import LoggedLaunch, Noted, Round
from sglang.srt.replay.recording.record_file import Checkpoint, Origin, encode_record
from sglang.srt.replay.recording.written import to_record

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.managers.batch.req import Req
    from sglang.srt.managers.batch.schedule_batch import LaunchRecord, ScheduleBatch
    from sglang.srt.managers.messages.io_struct import GenerateReq, StepInput
    from sglang.srt.mem_cache.page_ledger import IntArray
    from sglang.srt.replay.recording.source import RecordedScheduler

logger = logging.getLogger(__name__)

# Saving a tree takes about a microsecond per run: the larger the tree, the more
# forwards share that cost.
RUNS_PER_FORWARD = 2
# Maximum length of a generation that cannot be followed by another one.
MAX_GENERATIONS = 4
# Minimum interval between records of the same kind of incident: writing one delays the
# next step.
QUIET_SECONDS = 60.0


@dataclass(slots=True, kw_only=True)
class Generation:
    """A part of the log. If `checkpoint` is None, it begins with the engine or where no
    checkpoint could be saved (`obstacle`).

    Fields:
        before: slots taken and given back between the generation before it and its
            checkpoint, which contains them.
    """

    checkpoint: Checkpoint | None = None
    obstacle: str | None = None
    rounds: list[Round] = field(default_factory=list)
    requests: dict[int, Noted] = field(default_factory=dict)
    num_launches: int = 0
    due: int
    before: tuple[list[IntArray], list[IntArray]] = ([], [])

    def continued_rounds(self) -> list[Round]:
        """The rounds as they follow the generation before: the first launch has the
        slots of `before` too."""
        rounds = list(self.rounds)
        taken, given = self.before
        for i, round_ in enumerate(rounds):
            launch = round_.launch
            if launch is not None:
                joined = launch._replace(
                    taken=taken + launch.taken, given=given + launch.given
                )
                rounds[i] = round_._replace(launch=joined)
                break
        return rounds


class Recorder:
    """The recorder of one scheduler.

    Args:
        scheduler: the scheduler, at the point where recording begins.
        num_forwards: minimum number of the newest forwards in the log.
        has_tokens: whether records contain the requests' own tokens.
        rank: rank of this process.
    """

    def __init__(
        self,
        scheduler: RecordedScheduler,
        *,
        num_forwards: int,
        has_tokens: bool,
        rank: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._num_forwards = num_forwards
        self._has_tokens = has_tokens
        self._rank = rank
        self._clock = clock
        self._last_record: float | None = None
        self._managers = scheduler.worker.canary_managers()
        self._journal = scheduler.cache.allocator.keep_journal()
        self._older: Generation | None = None
        self._newer = Generation(due=num_forwards)
        # The current round until its launch, or None after that.
        self._inputs: StepInput | None = None
        self._resolves = False
        self._accepted: list[int] = []
        self._origin: Origin | None = None

    # -- the log -------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether a new generation should begin with the next round."""
        return self._newer.num_launches >= self._newer.due

    def begin_generation(self) -> None:
        """Save a checkpoint and begin a new generation with it; nothing may be in
        flight.
        """
        obstacle = self._scheduler.why_not_saved()
        newer, limit = self._newer, MAX_GENERATIONS * self._num_forwards
        if obstacle is not None and newer.num_launches < limit:
            newer.due = newer.num_launches + 1
            return
        checkpoint = None
        if obstacle is None:
            self._scheduler.catch_up()
            checkpoint = save_checkpoint(self._scheduler)
            self._scheduler.worker.on_checkpoint()
        runs = (
            0
            if checkpoint is None or checkpoint.tree is None
            else len(checkpoint.tree.runs)
        )
        live = [req.serial for req in self._scheduler.unfinished]
        self._older, self._newer = (
            newer,
            Generation(
                checkpoint=checkpoint,
                obstacle=obstacle,
                requests={
                    serial: newer.requests[serial]
                    for serial in live
                    if serial in newer.requests
                },
                due=max(self._num_forwards, runs // RUNS_PER_FORWARD),
                before=self._journal.drain(),
            ),
        )

    def begin_round(self, inputs: StepInput, *, resolves: bool) -> None:
        """Record the input of a round before any of it is carried out."""
        self._inputs = inputs
        self._resolves = resolves

    def end_round(self, *, is_kept: bool) -> None:
        """End a round without a launch; drop it unless `is_kept`, because it changed
        nothing.
        """
        if is_kept:
            self._newer.rounds.append(self._close(None))
        self._inputs = None

    def _close(self, launch: LoggedLaunch | None) -> Round:
        """Close and return the current round, which is over or has its launch."""
        round_ = self._open_round(launch)
        self._inputs = None
        if self._accepted:
            self._accepted = []
        return round_

    def _open_round(self, launch: LoggedLaunch | None = None) -> Round:
        inputs = self._inputs
        assert inputs is not None
        return Round(
            inputs.requests,
            inputs.grammars,
            inputs.shape,
            self._resolves,
            self._accepted,
            launch,
        )

    def on_request(self, request: GenerateReq, req: Req) -> None:
        """Record an accepted request."""
        noted = Noted(request=request, tokens=req.tokens, prompt_len=req.prompt_len)
        self._newer.requests[req.serial] = noted
        if self._inputs is not None:
            self._accepted.append(req.serial)

    def on_end(self, req: Req) -> None:
        """Record the end of a request."""
        noted = self._newer.requests.get(req.serial)
        if noted is not None and req.finish_reason is not None:
            reason = req.finish_reason
            noted.end = (reason.type, req.output_len, reason.status_code)

    def on_revived(self, req: Req) -> None:
        """Undo the recorded end of a request."""
        noted = self._newer.requests.get(req.serial)
        if noted is not None:
            noted.end = None

    def on_launch(self, batch: ScheduleBatch, launched: LaunchRecord) -> None:
        """Record a batch that is about to be launched."""
        taken, given = self._journal.drain()
        launch = LoggedLaunch(
            batch.forward_mode,
            [manager.next_forward for manager in self._managers],
            batch.serials,
            launched.starts,
            launched.ends,
            taken,
            given,
        )
        self._newer.rounds.append(self._close(launch))
        self._newer.num_launches += 1

    # -- records -------------------------------------------------------------------

    @property
    def launches(self) -> list[LoggedLaunch]:
        """Return the launches in the log, oldest first."""
        rounds = [*(self._older.rounds if self._older else ()), *self._newer.rounds]
        return [r.launch for r in rounds if r.launch is not None]

    def rid_of(self, serial: int) -> str:
        """Return the id of a request in the log."""
        for generation in (self._newer, self._older):
            if generation is not None and serial in generation.requests:
                return generation.requests[serial].request.rid
        return f"serial {serial}"

    def record_for(self, *, is_new_kind: bool) -> bytes | None:
        """Return the record to write next to an incident, or None if one of its kind
        was written recently.

        A failure to build one is logged, and the incident is reported without it.
        """
        now, last = self._clock(), self._last_record
        if not is_new_kind and last is not None and now - last < QUIET_SECONDS:
            return None
        self._last_record = now
        try:
            return self.encode()
        except Exception as error:
            # The incident must be reported, and the engine must continue.
            logger.error("kv_canary: no record of this incident: %r", error)
            return None

    def encode(self) -> bytes:
        """Encode the current log as a file."""
        if self._origin is None:
            self._origin = describe_origin(
                self._scheduler, rank=self._rank, has_tokens=self._has_tokens
            )
        adapters = self._scheduler.worker.model_runner.adapters
        origin = replace(
            self._origin,
            server_args=self._origin.server_args | adapter_flags(adapters),
        )
        older, newer = self._older, self._newer
        later = newer.continued_rounds()
        if older is None or older.obstacle is not None and newer.obstacle is None:
            older = Generation(
                due=0, checkpoint=newer.checkpoint, obstacle=newer.obstacle
            )
            later = newer.rounds
        under_way = [] if self._inputs is None else [self._open_round()]
        return encode_record(
            to_record(
                origin=origin,
                checkpoint=older.checkpoint,
                obstacle=older.obstacle,
                requests={**older.requests, **newer.requests},
                rounds=[*older.rounds, *later, *under_way],
                managers=self._managers,
            )
        )
