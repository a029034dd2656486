"""A grammar backend that compiles when it is told to, and helpers around a manager."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from sglang.srt.constrained.base_grammar import (
    Cancellation,
    CompilerUnavailableError,
    Grammar,
    GrammarLimitError,
    GrammarTooComplexError,
)
from sglang.srt.constrained.grammar_library import GrammarLibrary
from sglang.srt.constrained.grammar_manager import (
    CompilerLimits,
    GrammarManager,
    Settled,
)

WAIT_SECONDS = 30.0


class FakeGrammar:
    """Shares `worn`, the number of masks filled, with its copies; fails beyond `limit`
    of them."""

    def __init__(
        self, source: str, *, limit: int, worn: list[int] | None = None
    ) -> None:
        self.source = source
        self.limit = limit
        self.worn = [0] if worn is None else worn
        self.num_accepted = 0

    def accept(self, token_id: int) -> None:
        raise RuntimeError("not allowed")

    def fill_mask(self, bitmask_row: torch.Tensor) -> None:
        self.worn[0] += 1
        if not self.is_usable():
            raise GrammarLimitError("too many masks")
        bitmask_row.fill_(len(self.source))

    def is_terminated(self) -> bool:
        return False

    def rollback(self, n_tokens: int) -> None:
        raise ValueError("nothing to roll back")

    def fork(self) -> Grammar:
        return FakeGrammar(self.source, limit=self.limit, worn=self.worn)

    def is_usable(self) -> bool:
        return self.worn[0] <= self.limit

    def shared_bytes(self) -> int:
        return 100 + self.worn[0]


class SlowBackend:
    """Compiles when told to; counts its calls.

    Sources that begin with "slow" hold a compiler until `go_slow` or a cancellation.
    """

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go_slow = threading.Event()
        self.started: list[str] = []
        self.compiled: list[str] = []
        self.resumed: list[tuple[str, list[int]]] = []
        self.cancelled: list[str] = []
        self.deaths = 0
        self.max_masks = 10**9
        self.closed = False

    def compile(
        self, kind: str, source: str, *, cancellation: Cancellation | None = None
    ) -> Grammar:
        self.started.append(source)
        is_slow = source.startswith("slow")
        go = self.go_slow if is_slow else self.go
        stop = threading.Event()
        stops = nullcontext() if cancellation is None else cancellation.stops(stop.set)
        with stops:
            deadline = time.monotonic() + WAIT_SECONDS
            while not go.wait(0.002) and not stop.is_set():
                assert time.monotonic() < deadline
            if stop.is_set():
                self.cancelled.append(source)
        self.compiled.append(source)
        if source == "crash":
            raise KeyError("boom")
        if source == "complex":
            raise GrammarTooComplexError("too complex")
        if source.startswith("killed") and self.deaths:
            self.deaths -= 1
            raise CompilerUnavailableError("the compiler was ended by SIGKILL")
        if source.startswith("bad"):
            raise ValueError(f"invalid {kind}: {source}")
        return FakeGrammar(source, limit=self.max_masks)

    def compile_checked(self, kind: str, source: str) -> Grammar:
        self.compiled.append(source)
        return FakeGrammar(source, limit=self.max_masks)

    def resume(self, kind: str, source: str, tokens: Sequence[int]) -> Grammar:
        if source == "hopeless":
            raise GrammarLimitError("one step alone is too much")
        self.resumed.append((source, list(tokens)))
        return FakeGrammar(source, limit=self.max_masks)

    def close(self) -> None:
        self.closed = True


class World:
    """A manager with its library, and a caller that carries out what is settled."""

    def __init__(
        self,
        backend: SlowBackend,
        *,
        max_bytes: int = 10**9,
        renew_bytes: int = 10**9,
        limits: CompilerLimits | None = None,
    ) -> None:
        self.backend = backend
        self.library = GrammarLibrary(max_bytes=max_bytes, renew_bytes=renew_bytes)
        self.manager = GrammarManager(backend, self.library, limits=limits)
        self._keys: dict[str, tuple[str, str]] = {}
        self._resuming: set[str] = set()

    def submit(self, rid: str, source: str, *, client: str = "") -> None:
        self._keys[rid] = ("regex", source)
        self.manager.submit(rid, "regex", source, client=client)

    def resume(self, rid: str, source: str, tokens: list[int]) -> None:
        self._resuming.add(rid)
        self.manager.resume(rid, "regex", source, tokens, client="")

    def poll(self) -> dict[str, Grammar | Exception]:
        found: dict[str, Grammar | Exception] = {}
        for settled in self.manager.poll():
            found[settled.rid] = settled.error or self._carry_out(settled)
        self.library.trim()
        return found

    def _carry_out(self, settled: Settled) -> Grammar:
        if settled.rid in self._resuming:
            assert settled.fresh is not None
            return settled.fresh
        key = self._keys[settled.rid]
        if settled.fresh is not None:
            self.library.install(key, settled.fresh)
        return self.library.fork(key)

    def poll_until(self, n: int) -> dict[str, Grammar | Exception]:
        """Poll until `n` requests have come back."""
        found: dict[str, Grammar | Exception] = {}

        def poll() -> bool:
            found.update(self.poll())
            return len(found) >= n

        wait_for(poll, f"only {sorted(found)} came back")
        return found

    def ask(self, rid: str, source: str, *, client: str = "") -> Grammar | Exception:
        self.submit(rid, source, client=client)
        return self.poll_until(1)[rid]

    def close(self) -> None:
        self.backend.go.set()
        self.backend.go_slow.set()
        self.manager.shutdown()


def wait_for(condition: Callable[[], bool], message: str = "in vain") -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.002)
