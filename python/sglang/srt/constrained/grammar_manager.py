"""Compiles grammars outside the scheduler loop, on the rank that decides.

Owns threads, the order of compilations and their deadlines. Knows nothing about a
concrete grammar library, or about requests beyond their ids and clients.
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

# How long a source that was too complex is rejected without compiling it: a retry would
# cost the same CPU time again.
TOO_COMPLEX_SECONDS = 60.0
_MAX_REFUSALS = 1024
_MAX_RENEWED = 64
# Expected errors of a compilation; any other is a bug in the engine.
_EXPECTED_ERRORS = (
    ValueError,
    CompilerUnavailableError,
    CompilationCancelledError,
    GrammarLimitError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerLimits:
    """How much is compiled at a time, and for which clients.

    Fields:
        threads: maximum concurrent compilations.
        share: maximum concurrent compilations of one client.
        max_waiting: maximum sources of one client that may wait for a compiler.
        timeout_s: maximum seconds that a request waits for its grammar.
    """

    threads: int = 3
    share: int = 2
    max_waiting: int = 256
    timeout_s: float = 30.0


class Settled(NamedTuple):
    """A request that no longer needs to wait.

    Fields:
        error: why the request has no grammar, if it failed.
        fresh: a compiled grammar: the request's own if it resumes, else one to install
            in the library first. None with an error, or if the request starts from the
            library's grammar.
    """

    rid: str
    error: Exception | None = None
    fresh: Grammar | None = None


@dataclass(eq=False, slots=True)
class _Job:
    """A source to compile, and the requests that wait for it (rid -> deadline).

    Fields:
        tokens: tokens after which a single request resumes, or None for a new grammar.
        is_renewal: whether to continue even if no request waits.
    """

    key: GrammarKey
    tokens: Sequence[int] | None = None
    is_renewal: bool = False
    waiting: dict[str, float] = field(default_factory=dict)
    cancellation: Cancellation = field(default_factory=Cancellation)


_Outcome = Grammar | Exception


class GrammarManager:
    """Compiles the grammars of waiting requests; use only from the scheduler's thread.

    Args:
        backend: compiler, called from worker threads.
        library: its grammars are not compiled again until they are worn; only read
            here.
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
        # Jobs of new grammars; jobs of resuming requests have no key.
        self._jobs: dict[GrammarKey, _Job] = {}
        self._job_by_rid: dict[str, _Job] = {}
        # Requests whose grammar may be in the library: (key, client) by rid.
        self._hits: dict[str, tuple[GrammarKey, str]] = {}
        self._settled: list[Settled] = []
        # Renewed grammars, installed by the next request.
        self._renewed: dict[GrammarKey, Grammar] = {}
        # Errors of sources, each with its expiry time.
        self._refusals: OrderedDict[GrammarKey, tuple[ValueError, float]]
        self._refusals = OrderedDict()
        self._done: SimpleQueue[tuple[_Job, _Outcome]] = SimpleQueue()
        # Daemons: a compilation must not keep an exiting process alive.
        for i in range(self._limits.threads):
            threading.Thread(
                target=self._work, name=f"grammar-{i}", daemon=True
            ).start()

    def submit(self, rid: str, kind: str, source: str, *, client: str = "") -> None:
        """Ask for a grammar; a later `poll` settles it, if possible the next one."""
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
        """Ask for a private grammar for a request that has followed `tokens`."""
        job = _Job((kind, source), tokens=tokens)
        self._wait(rid, job, partial(self._queue.put, client, job))

    def poll(self) -> list[Settled]:
        """Return the requests that no longer need to wait.

        Before calling anything else here, the caller must carry them out in this order:
        install fresh grammars, then fork from the library.
        """
        settled, self._settled = self._settled, []
        settled += self._settle_hits()
        while not self._done.empty():
            job, outcome = self._done.get()
            settled += self._finish(job, outcome)
        settled += self._expired()
        return settled

    def cancel(self, rid: str) -> None:
        """Forget a request. Compilations that no other request needs are dropped or
        killed.
        """
        self._hits.pop(rid, None)
        self._settled = [item for item in self._settled if item.rid != rid]
        job = self._job_by_rid.pop(rid, None)
        if job is not None:
            del job.waiting[rid]
            self._drop_if_unwanted(job)

    def num_waiting(self) -> int:
        """Number of requests that `poll` has not returned yet."""
        return len(self._job_by_rid) + len(self._hits) + len(self._settled)

    def num_compiling(self) -> int:
        """Number of sources being compiled or waiting for a compiler."""
        return len(set(self._job_by_rid.values()) | set(self._jobs.values()))

    def shutdown(self) -> None:
        """End the threads, kill compilations, and close the backend."""
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
        """Settle requests by key: after the first of a key, the library has its
        grammar.
        """
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
        # Requests that install a grammar come last: others start from grammars that may
        # be evicted for it.
        return settled + fresh

    def _renew(self, key: GrammarKey, *, client: str) -> None:
        """Compile a worn grammar again; it serves until then."""
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
    """Let the first request install `grammar` in the library, where the others find
    it.
    """
    return [
        Settled(rid, fresh=grammar if i == 0 else None) for i, rid in enumerate(rids)
    ]


def _try_again(message: str) -> CompilerUnavailableError:
    return CompilerUnavailableError(f"{message}; try again later")
