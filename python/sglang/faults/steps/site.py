"""An engine in which one fault is planted for one step.

The faults wrap methods of the engine from outside, with or without the canary. A test
sees both that the canary names a fault and what the fault does without it. All faults
are memory-safe and need eager execution, because a CUDA graph replays past them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from sglang.faults.wrapping import wrap
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

if TYPE_CHECKING:
    import random

    from sglang.srt.managers.batch.req import Req
    from sglang.srt.managers.batch.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner

# Called with the wrapped method and its arguments.
Fault: TypeAlias = "Callable[..., Any]"

# A request with room for this many tokens also takes part in the next steps.
ROOM = 16


class FaultSite:
    """An engine, and the fault that is planted in it.

    Attributes:
        rng: decides place and victim.
        batch: the batch that is launched; None between launches.
        harmed: ids of requests that the fault was done to; empty until then.
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
        """Keep track of the launched batch, for every method wrapped before this
        call.
        """

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
        """Call `fault(original, *args)` instead of a method of an object or class while
        the fault is planted.
        """
        self._stack.callback(wrap(owner, method, fault))

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


@contextmanager
def planted(
    plant: Callable[[FaultSite], None], scheduler: Scheduler, *, rng: random.Random
) -> Iterator[FaultSite]:
    """Scope in which the fault of a planter is done once, at the first opportunity."""
    with ExitStack() as stack:
        site = FaultSite(scheduler, rng=rng, stack=stack)
        plant(site)
        site.watch_launches()
        yield site


def changed(values: Tensor, rows: Sequence[int], by: int) -> Tensor:
    """A copy of `values` with `by` added at these rows."""
    other = values.clone()
    other[list(rows)] += by
    return other
