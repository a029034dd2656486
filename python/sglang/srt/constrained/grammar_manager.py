"""Compiles grammars beside the scheduler loop, caches them, fills a batch's masks.

Owns threads, cache and time limits. Knows nothing of a grammar library or of requests
beyond their ids.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

from sglang.srt.constrained.base_grammar import (
    Grammar,
    GrammarBackend,
    GrammarTimeoutError,
)

logger = logging.getLogger(__name__)

_Key = tuple[str, str]
_Outcome = Grammar | ValueError


@dataclass(slots=True)
class _Job:
    """A key being compiled and the requests that wait for it (rid -> deadline)."""

    waiting: dict[str, float] = field(default_factory=dict)


class GrammarManager:
    """Compiles the grammars of waiting requests; for the scheduler's thread only."""

    def __init__(
        self,
        backend: GrammarBackend,
        *,
        max_cached: int = 128,
        timeout_s: float = 30.0,
        n_threads: int = 2,
    ) -> None:
        """Start the worker threads.

        Args:
            backend: compiles; called from worker threads.
            max_cached: compiled grammars and errors kept; the least recently used
                one is evicted.
            timeout_s: a request waits at most this long for its grammar.
            n_threads: worker threads; with 0, only `compile_now` compiles.
        """
        self._backend = backend
        self._timeout_s = timeout_s
        self._max_cached = max_cached
        self._cache: OrderedDict[_Key, _Outcome] = OrderedDict()
        self._jobs: dict[_Key, _Job] = {}
        self._key_by_rid: dict[str, _Key] = {}
        self._ready: list[tuple[str, _Outcome]] = []
        self._todo: SimpleQueue[_Key | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[_Key, _Outcome]] = SimpleQueue()
        # Daemons: a compilation must not keep a process alive that wants to exit.
        self._threads = [
            threading.Thread(target=self._work, name=f"grammar-{i}", daemon=True)
            for i in range(n_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, rid: str, kind: str, source: str) -> None:
        """Ask for a grammar; a later `poll` returns it (the next one where cached)."""
        key = (kind, source)
        cached = self._cache.get(key)
        if cached is not None:
            self._cache.move_to_end(key)
            self._ready.append((rid, _fresh(cached)))
            return
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = _Job()
            if self._threads:
                self._todo.put(key)
        job.waiting[rid] = time.monotonic() + self._timeout_s
        self._key_by_rid[rid] = key

    def poll(self) -> list[tuple[str, Grammar | ValueError]]:
        """Return (rid, its own grammar or the error) of requests that are settled."""
        ready, self._ready = self._ready, []
        while not self._done.empty():
            key, outcome = self._done.get()
            self._remember(key, outcome)
            for rid in self._jobs.pop(key, _Job()).waiting:
                del self._key_by_rid[rid]
                ready.append((rid, _fresh(outcome)))
        if self._key_by_rid:
            ready.extend(self._expired())
        return ready

    def compile_now(self, rid: str) -> Grammar:
        """Return the grammar of a waiting request; compile it in this thread if needed.

        For a manager without threads and a source that is known to be good: the checks
        that bound its time and memory are skipped.

        Raises:
            ValueError: it is not a grammar after all.
        """
        for i, (ready_rid, outcome) in enumerate(self._ready):
            if ready_rid == rid and not isinstance(outcome, ValueError):
                del self._ready[i]
                return outcome
        key = self._key_by_rid[rid]
        cached = self._cache.get(key)
        if cached is None or isinstance(cached, ValueError):
            cached = self._backend.compile_checked(*key)
            self._remember(key, cached)
        self.cancel(rid)
        return cached.fork()

    def cancel(self, rid: str) -> None:
        """Forget a request; its compilation goes on and is cached."""
        key = self._key_by_rid.pop(rid, None)
        if key is not None:
            job = self._jobs[key]
            job.waiting.pop(rid)
            if not self._threads and not job.waiting:
                del self._jobs[key]
        self._ready = [item for item in self._ready if item[0] != rid]

    def num_waiting(self) -> int:
        """Return the number of requests submitted and not yet returned by `poll`."""
        return len(self._key_by_rid) + len(self._ready)

    def num_compiling(self) -> int:
        """Sources being compiled or waiting for it, requests that left included."""
        return len(self._jobs)

    def shutdown(self) -> None:
        """End the threads after their current compilation; close the backend."""
        for _ in self._threads:
            self._todo.put(None)
        self._backend.close()

    def fill_batch_mask(
        self, grammars: Sequence[Grammar | None], out: torch.Tensor
    ) -> dict[int, str]:
        """Write the rows' masks into the first rows of `out`, host int32 [>= R, words].

        A row without a grammar allows everything.

        Returns:
            Rows whose grammar met a resource limit, with its message. Such a row allows
            EOS only; the scheduler should end its request with the message.
        """
        failed: dict[int, str] = {}
        for i, grammar in enumerate(grammars):
            row = out[i]
            if grammar is None:
                row.fill_(-1)
                continue
            try:
                grammar.fill_mask(row)
            except RuntimeError as error:
                self._backend.fill_eos_mask(row)
                failed[i] = str(error)
        return failed

    def _work(self) -> None:
        while (key := self._todo.get()) is not None:
            outcome: _Outcome
            try:
                outcome = self._backend.compile(*key)
            except ValueError as error:
                outcome = error
            except Exception as error:
                # A dead worker would leave every later request waiting.
                logger.exception("compiling a %s failed", key[0])
                outcome = ValueError(f"{key[0]} could not be compiled: {error!r}")
            self._done.put((key, outcome))

    def _remember(self, key: _Key, outcome: _Outcome) -> None:
        if isinstance(outcome, GrammarTimeoutError):
            return  # may succeed when the machine is less busy
        self._cache[key] = outcome
        self._cache.move_to_end(key)
        while len(self._cache) > self._max_cached:
            self._cache.popitem(last=False)

    def _expired(self) -> list[tuple[str, _Outcome]]:
        now = time.monotonic()
        late = [
            rid
            for rid, key in self._key_by_rid.items()
            if self._jobs[key].waiting[rid] < now
        ]
        expired: list[tuple[str, _Outcome]] = []
        for rid in late:
            key = self._key_by_rid.pop(rid)
            del self._jobs[key].waiting[rid]
            message = f"{key[0]} was not compiled within {self._timeout_s:g} seconds"
            expired.append((rid, ValueError(message)))
        return expired


def _fresh(outcome: _Outcome) -> _Outcome:
    return outcome if isinstance(outcome, ValueError) else outcome.fork()
