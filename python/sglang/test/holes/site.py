"""An engine in which one fault is planted for one step, and what a fault is.

The faults wrap methods of the engine from outside, with the canary or without it, so
that a test can see both: that the canary names a fault, and what it does where nobody
looks. All are memory-safe, and need eager execution: a CUDA graph replays past them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum, Flag, auto
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

if TYPE_CHECKING:
    import random

    from kv_canary.checks import Reason
    from sglang.srt.managers.batch.req import Req
    from sglang.srt.managers.batch.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner

# Called with the wrapped method and its arguments.
Fault: TypeAlias = "Callable[..., Any]"

# A request with room for so many tokens takes part in the next steps, too.
ROOM = 16


class Where(Flag):
    """Engines that a fault can occur in."""

    PLAIN = auto()
    CHAIN = auto()
    TREE = auto()
    SPECULATION = CHAIN | TREE
    ALL = PLAIN | SPECULATION


class FoundBy(Enum):
    """Who finds a fault: the launch that it is planted in, the first one after it with
    a request that it harms, or the host that processes the result."""

    SAME = "that launch"
    NEXT = "the next launch of the request"
    HOST = "the result's processing"


class Changes(Enum):
    """The effect that clients would notice without the canary."""

    TOKENS = "wrong tokens"
    DRAFTS = "worse drafts"
    NOTHING = "nothing"


class Site:
    """An engine, and the fault that is planted in it.

    Attributes:
        rng: decides place and victim.
        batch: the batch that is launched; None between launches.
        harmed: request ids that the fault was done to; empty: not yet.
    """

    def __init__(
        self, scheduler: Scheduler, *, rng: random.Random, stack: ExitStack
    ) -> None:
        self.scheduler = scheduler
        self.rng = rng
        self.batch: ScheduleBatch | None = None
        self.harmed: tuple[str, ...] = ()
        self._stack = stack

    def watch_launches(self) -> None:
        """Know the batch that is launched, in every method that was wrapped before."""

        def launched(launch: Fault, batch: ScheduleBatch, *rest: Any) -> Any:
            self.batch = batch
            try:
                return launch(batch, *rest)
            finally:
                self.batch = None

        self.wrap(self.scheduler.worker, "forward_batch_generation", launched)

    @property
    def worker(self) -> EAGLEWorkerV2:
        """The worker of an engine that speculates."""
        worker = self.scheduler.worker
        assert isinstance(worker, EAGLEWorkerV2)
        return worker

    @property
    def target(self) -> ModelRunner:
        return self.scheduler.worker.model_runner

    @property
    def token_table(self) -> Tensor:
        return self.target.req_to_token_pool.token_table

    @property
    def is_decode(self) -> bool:
        """Whether the batch that is launched decodes, or drafts and verifies."""
        return self.batch is not None and self.batch.forward_mode.is_decode

    def wrap(self, owner: Any, method: str, fault: Fault) -> None:
        """Have `fault(original, *args)` called in place of a method of an object or of
        a class, as long as the fault is planted."""
        original, own = getattr(owner, method), vars(owner)
        before = own.get(method)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return fault(original, *args, **kwargs)

        def restore() -> None:
            if before is None:
                delattr(owner, method)
            else:
                setattr(owner, method, before)

        setattr(owner, method, wrapped)
        self._stack.callback(restore)

    def candidates(self) -> list[int]:
        """Rows of the batch that sample a token and run on after it, in random order;
        none once the fault was done."""
        if self.batch is None or self.harmed:
            return []
        reqs = self.batch.reqs
        rows = [i for i, req in enumerate(reqs) if runs_on(req) and not req.is_chunked]
        self.rng.shuffle(rows)
        return rows

    def pairs(self) -> list[tuple[int, int]]:
        """Two of the `candidates` each, every row with those after it."""
        rows = self.candidates()
        return [(a, b) for i, a in enumerate(rows) for b in rows[i + 1 :]]

    def harm(self, *rows: int) -> None:
        """Note that the fault is done to these rows of the batch."""
        assert self.batch is not None
        self.harmed = tuple(self.batch.reqs[row].rid for row in rows)


def runs_on(req: Req) -> bool:
    """Whether a request takes part in the next launches, however many tokens it gains
    in this one."""
    return not req.is_finished and len(req.tokens) + ROOM < req.max_total_len


@dataclass(frozen=True, slots=True, kw_only=True)
class HoleInjector:
    """A fault that changed tokens, or drafts, and was not seen once.

    Fields:
        plant: wraps the methods in which the fault is done at the first opportunity.
        where: engines that it can occur in.
        reasons: at least one of them must be reported of a harmed request.
        found_by: who reports it first.
        changes: what clients would notice.
        needs_all: whether only `--kv-canary-real-data all` sees it.
    """

    plant: Callable[[Site], None]
    where: Where
    reasons: Reason
    found_by: FoundBy = FoundBy.SAME
    changes: Changes = Changes.TOKENS
    needs_all: bool = False


@contextmanager
def planted(
    injector: HoleInjector, scheduler: Scheduler, *, rng: random.Random
) -> Iterator[Site]:
    """Scope in which the fault is done once, at the first opportunity."""
    with ExitStack() as stack:
        site = Site(scheduler, rng=rng, stack=stack)
        injector.plant(site)
        site.watch_launches()
        yield site


def changed(values: Tensor, rows: Sequence[int], by: int) -> Tensor:
    """A copy of `values` with `by` added at these rows."""
    other = values.clone()
    other[list(rows)] += by
    return other
