"""Compiles grammars beside the scheduler loop, for the rank that decides.

Owns threads, the order of compilations and their deadlines. Knows nothing of a grammar
library or of requests beyond their ids and clients.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.constrained.base_grammar import (
    Cancellation,
    CompilationCancelledError,
    CompilerUnavailableError,
    Grammar,
    GrammarBackend,
    GrammarLimitError,
    GrammarTooComplexError,
)
from sglang.srt.constrained.compile_queue import FairQueue
from sglang.srt.utils.fair_turns import QueueFullError

if TYPE_CHECKING:
    from sglang.srt.constrained.grammar_library import GrammarKey, GrammarLibrary

logger = logging.getLogger(__name__)

# A source that was too complex is refused unseen for so long: compiling it again would
# cost its CPU time again.
TOO_COMPLEX_SECONDS = 60.0
_MAX_REFUSALS = 1024
_MAX_RENEWED = 64
# Of a compilation; any other is a fault of the engine.
_EXPECTED_ERRORS = (
    ValueError,
    CompilerUnavailableError,
    CompilationCancelledError,
    GrammarLimitError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerLimits:
    """How much compiles at a time, and for whom.

    Fields:
        threads: compilations at a time.
        share: compilations at a time of one client.
        max_waiting: sources of one client that may wait for a compiler.
        timeout_s: a request waits at most this long for its grammar.
    """

    threads: int = 3
    share: int = 2
    max_waiting: int = 256
    timeout_s: float = 30.0


class Settled(NamedTuple):
    """A request that need not wait longer.

    Fields:
        error: why it has no grammar.
        fresh: a compiled grammar: of the request alone, if it resumes, else one to
            install in the library first. None with an error, and where the request
            starts from what the library has.
    """

    rid: str
    error: Exception | None = None
    fresh: Grammar | None = None


@dataclass(eq=False, slots=True)
class _Job:
    """A source to compile, and the requests that wait for it (rid -> deadline).

    Fields:
        tokens: of the one request that resumes after them; None: a new grammar.
        is_renewal: goes on without anybody who waits.
    """

    key: GrammarKey
    tokens: Sequence[int] | None = None
    is_renewal: bool = False
    waiting: dict[str, float] = field(default_factory=dict)
    cancellation: Cancellation = field(default_factory=Cancellation)


_Outcome = Grammar | Exception


class GrammarManager:
    """Compiles the grammars of waiting requests; for the scheduler's thread only.

    Args:
        backend: compiles; called from worker threads.
        library: what it has is not compiled again until it is worn; read here only.
    """

    def __init__(
        self,
        backend: GrammarBackend,
        library: GrammarLibrary,
        *,
        limits: CompilerLimits | None = None,
    ) -> None:
        self._backend = backend
        self._library = library
        self._limits = limits or CompilerLimits()
        self._queue: FairQueue[_Job] = FairQueue(
            share=self._limits.share, max_per_client=self._limits.max_waiting
        )
        # Of new grammars; those of requests that resume have no key of their own.
        self._jobs: dict[GrammarKey, _Job] = {}
        self._job_by_rid: dict[str, _Job] = {}
        # Requests whose grammar the library may have: (key, client) by rid.
        self._hits: dict[str, tuple[GrammarKey, str]] = {}
        self._settled: list[Settled] = []
        # Compiled again, and installed by the next request.
        self._renewed: dict[GrammarKey, Grammar] = {}
        # Errors of sources, each until a time.
        self._refusals: OrderedDict[GrammarKey, tuple[ValueError, float]]
        self._refusals = OrderedDict()
        self._done: SimpleQueue[tuple[_Job, _Outcome]] = SimpleQueue()
        # Daemons: a compilation must not keep a process alive that wants to exit.
        for i in range(self._limits.threads):
            threading.Thread(
                target=self._work, name=f"grammar-{i}", daemon=True
            ).start()

    def submit(self, rid: str, kind: str, source: str, *, client: str = "") -> None:
        """Ask for a grammar; a later `poll` settles it (the next one, if it can)."""
        key = (kind, source)
        refusal = self._refusals.get(key)
        if refusal is not None and time.monotonic() < refusal[1]:
            self._settled.append(Settled(rid, error=refusal[0]))
        elif key in self._renewed or self._library.has(key):
            self._hits[rid] = (key, client)
        else:
            self._compile(rid, key, client)

    def resume(
        self, rid: str, kind: str, source: str, tokens: Sequence[int], *, client: str
    ) -> None:
        """Ask for a grammar of its own for a request that has followed `tokens`."""
        job = _Job((kind, source), tokens=tokens)
        self._wait(rid, job, partial(self._queue.put, client, job))

    def poll(self) -> list[Settled]:
        """Requests that need not wait longer.

        The caller carries them out in this order before it calls anything else here:
        installs what is fresh, then forks what the library has.
        """
        settled, self._settled = self._settled, []
        settled += self._settle_hits()
        while not self._done.empty():
            job, outcome = self._done.get()
            settled += self._finish(job, outcome)
        settled += self._expired()
        return settled

    def cancel(self, rid: str) -> None:
        """Forget a request. What compiles for nobody else is dropped or killed."""
        self._hits.pop(rid, None)
        self._settled = [item for item in self._settled if item.rid != rid]
        job = self._job_by_rid.pop(rid, None)
        if job is not None:
            del job.waiting[rid]
            self._drop_if_unwanted(job)

    def num_waiting(self) -> int:
        """Requests that `poll` has not returned yet."""
        return len(self._job_by_rid) + len(self._hits) + len(self._settled)

    def num_compiling(self) -> int:
        """Sources that compile or wait for a compiler."""
        return len(set(self._job_by_rid.values()) | set(self._jobs.values()))

    def shutdown(self) -> None:
        """End the threads; kill what compiles; close the backend."""
        self._queue.close()
        for job in {*self._jobs.values(), *self._job_by_rid.values()}:
            job.cancellation.cancel()
        self._backend.close()

    # -- the scheduler's thread ------------------------------------------------------

    def _compile(self, rid: str, key: GrammarKey, client: str) -> None:
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = _Job(key)
            self._wait(rid, job, partial(self._queue.put, client, job))
        else:
            self._wait(rid, job, partial(self._queue.join, client, job))

    def _wait(self, rid: str, job: _Job, enqueue: Callable[[], None]) -> None:
        try:
            enqueue()
        except QueueFullError as error:
            self._drop_if_unwanted(job)
            self._settled.append(Settled(rid, error=_try_again(str(error))))
            return
        job.waiting[rid] = time.monotonic() + self._limits.timeout_s
        self._job_by_rid[rid] = job

    def _settle_hits(self) -> list[Settled]:
        """Requests of one key come together: after the first, the library has it."""
        hits, self._hits = self._hits, {}
        by_key: dict[GrammarKey, list[tuple[str, str]]] = {}
        for rid, (key, client) in hits.items():
            by_key.setdefault(key, []).append((rid, client))
        settled: list[Settled] = []
        fresh: list[Settled] = []
        for key, asking in by_key.items():
            rids = [rid for rid, _ in asking]
            if key in self._renewed:
                fresh += _first_installs(rids, self._renewed.pop(key))
            elif self._library.has(key):
                settled += [Settled(rid) for rid in rids]
                if self._library.is_worn(key):
                    self._renew(key, client=asking[0][1])
            else:
                for rid, client in asking:
                    self._compile(rid, key, client)
        # Those that install come last: others start from what may go for it.
        return settled + fresh

    def _renew(self, key: GrammarKey, *, client: str) -> None:
        """Compile a worn grammar again; until then it serves."""
        if key in self._jobs:
            return
        job = self._jobs[key] = _Job(key, is_renewal=True)
        try:
            self._queue.put(client, job)
        except QueueFullError:
            del self._jobs[key]  # a later request asks again

    def _finish(self, job: _Job, outcome: _Outcome) -> list[Settled]:
        if self._jobs.get(job.key) is job:
            del self._jobs[job.key]
        rids = list(job.waiting)
        job.waiting.clear()
        for rid in rids:
            del self._job_by_rid[rid]
        if isinstance(outcome, Exception):
            is_new = job.tokens is None and not job.is_renewal
            if isinstance(outcome, ValueError) and is_new:
                self._refuse(job.key, outcome)
            return [Settled(rid, error=outcome) for rid in rids]
        if not rids and job.is_renewal:
            self._renewed[job.key] = outcome
            while len(self._renewed) > _MAX_RENEWED:
                del self._renewed[next(iter(self._renewed))]
        return _first_installs(rids, outcome)

    def _refuse(self, key: GrammarKey, error: ValueError) -> None:
        is_complex = isinstance(error, GrammarTooComplexError)
        lasts = TOO_COMPLEX_SECONDS if is_complex else float("inf")
        self._refusals[key] = (error, time.monotonic() + lasts)
        self._refusals.move_to_end(key)
        while len(self._refusals) > _MAX_REFUSALS:
            self._refusals.popitem(last=False)

    def _drop_if_unwanted(self, job: _Job) -> None:
        if job.waiting or job.is_renewal:
            return
        if self._jobs.get(job.key) is job:
            del self._jobs[job.key]
        if not self._queue.discard(job):
            job.cancellation.cancel()

    def _expired(self) -> list[Settled]:
        now = time.monotonic()
        late = [r for r, job in self._job_by_rid.items() if job.waiting[r] < now]
        expired = []
        for rid in late:
            kind = self._job_by_rid[rid].key[0]
            self.cancel(rid)
            error = _try_again(
                f"{kind} was not compiled within {self._limits.timeout_s:g} seconds"
            )
            expired.append(Settled(rid, error=error))
        return expired

    # -- worker threads --------------------------------------------------------------

    def _work(self) -> None:
        while (turn := self._queue.take()) is not None:
            client, job = turn
            try:
                outcome: _Outcome = self._run(job)
            except Exception as error:
                # A dead worker would leave every later request waiting.
                outcome = error
                if not isinstance(error, _EXPECTED_ERRORS):
                    logger.exception("compiling a %s failed", job.key[0])
            finally:
                self._queue.release(client)
            self._done.put((job, outcome))

    def _run(self, job: _Job) -> _Outcome:
        if job.tokens is not None:
            return self._backend.resume(*job.key, job.tokens)
        try:
            return self._backend.compile(*job.key, cancellation=job.cancellation)
        except CompilerUnavailableError as error:
            logger.warning("compiling a %s once more: %s", job.key[0], error)
            return self._backend.compile(*job.key, cancellation=job.cancellation)


def _first_installs(rids: Sequence[str], grammar: Grammar) -> list[Settled]:
    """The first request brings `grammar` to the library, where the others find it."""
    return [
        Settled(rid, fresh=grammar if i == 0 else None) for i, rid in enumerate(rids)
    ]


def _try_again(message: str) -> CompilerUnavailableError:
    return CompilerUnavailableError(f"{message}; try again later")
