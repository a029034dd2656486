"""The shape of the drafts of each iteration.

Rank 0 chooses, because costs depend on time, and sends an index into the ladder with
the input of each step. A record keeps the indices, so that a replay repeats them.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from sglang.srt.arg_groups.adaptive_hook import draft_ladder
from sglang.srt.configs.draft_layout import CATCH_UP_TOKENS
from sglang.srt.managers.scheduler.shape_chooser import PLAIN, ShapeChooser
from sglang.srt.managers.scheduler.step_costs import StepCosts
from sglang.srt.managers.scheduler.warm_up_scenes import decoding_scenes, long_scenes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang.srt.configs.draft_layout import TreeShape
    from sglang.srt.managers.batch.forward_result import GenerationBatchResult
    from sglang.srt.managers.batch.req import Req
    from sglang.srt.managers.batch.schedule_batch import LaunchRecord
    from sglang.srt.managers.messages.io_struct import GenerateReq
    from sglang.srt.managers.scheduler.warm_up_scenes import SceneLimits
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

# Writes the requests of a rehearsal.
Scenes = Callable[["SceneLimits"], "Iterator[list[GenerateReq]]"]


class ShapePolicy(Protocol):
    """Chooses indices of a ladder."""

    def choose(self, rows: int, behind: Callable[[], int]) -> int:
        """Return the index for the next iteration.

        Args:
            rows: requests that decode. behind: returns the tokens of all of them that
                the draft has to catch up before it drafts.
        """


class FixedShape:
    """Always the same shape."""

    def __init__(self, index: int) -> None:
        self._index = index

    def choose(self, rows: int, behind: Callable[[], int]) -> int:
        return self._index


class ShapeTable:
    """Shapes by batch size.

    Args:
        rows: (from this batch size on, index), ascending, the first from 1.
    """

    def __init__(self, rows: list[tuple[int, int]]) -> None:
        self._rows = rows

    def choose(self, rows: int, behind: Callable[[], int]) -> int:
        return [index for size, index in self._rows if size <= max(rows, 1)][-1]


class ShapesInTurn:
    """Every shape in turn."""

    def __init__(self, count: int) -> None:
        self._indices = itertools.cycle(range(count))

    def choose(self, rows: int, behind: Callable[[], int]) -> int:
        return next(self._indices)


class DraftsAfterPauses:
    """One draft after each of these numbers of plain iterations, in turn."""

    def __init__(self, pauses: Sequence[int]) -> None:
        turns = [index for n in pauses for index in (*(PLAIN,) * n, 1)]
        self._indices = itertools.cycle(turns)

    def choose(self, rows: int, behind: Callable[[], int]) -> int:
        return next(self._indices)


class RunningBatches(Protocol):
    """The batches of a scheduler: `BatchSelector`."""

    def decoding(self) -> list[Req]:
        """Return the requests that decode, or are about to."""

    def behind(self) -> int:
        """As in `ShapePolicy.choose`."""


class DraftShapes:
    """The ladder of an engine, and the policy that chooses from it.

    Attributes:
        ladder: None, plain decoding, then the shapes by ascending number of nodes.
        policy: replaced by tests and replays.
        is_adaptive: whether iterations may differ.
    """

    def __init__(self, server_args: ServerArgs) -> None:
        self.ladder: tuple[TreeShape | None, ...] = (None,)
        self._indices: dict[TreeShape | None, int] = {None: PLAIN}
        self.is_adaptive = server_args.speculative_adaptive
        self._decodes = (
            self.is_adaptive and server_args.disaggregation_mode != "prefill"
        )
        self._chooser: ShapeChooser | None = None
        # When the last result was processed, if that was a decode step's.
        self._decoded_at: float | None = None
        self.policy: ShapePolicy = FixedShape(PLAIN)
        if server_args.speculative_algorithm is None:
            return
        self._lead = server_args.draft_lead
        found = draft_ladder(server_args)
        self.ladder = (None, *found.shapes)
        self._indices = {shape: i for i, shape in enumerate(self.ladder)}
        if found.table is not None:
            rows = [(size, self._indices[shape]) for size, shape in found.table]
            self.policy = ShapeTable(rows)
        else:
            self.policy = FixedShape(len(found.shapes))

    def rehearsals(self) -> list[tuple[ShapePolicy, Scenes]]:
        """Return policies that an engine tries before it is ready, besides its own, and
        with which requests: every shape, changes between them, and pauses after which
        each number of tokens is caught up at once."""
        if not self.is_adaptive:
            return []
        # Until costs are measured, the policy is the last shape.
        count, untried = len(self.ladder), len(self.ladder) - self.measures
        widths = [shape.accept_width for shape in self.ladder if shape is not None]
        pauses = [width - self._lead for width in (*widths, CATCH_UP_TOKENS)]
        return [
            *((FixedShape(index), decoding_scenes) for index in range(untried)),
            (ShapesInTurn(count), decoding_scenes),
            (DraftsAfterPauses(pauses), long_scenes),
        ]

    @property
    def measures(self) -> bool:
        """Whether the choice depends on costs, which are measured before the engine is
        ready (`learn`)."""
        return self._decodes and not isinstance(self.policy, ShapeTable)

    def learn(self, costs: Mapping[int, Sequence[float]], *, device: str) -> None:
        """Choose by these costs from now on: seconds of each index by batch size.
        Without any, the shape stays that of the flags."""
        if costs:
            chooser = ShapeChooser(self.ladder, StepCosts(costs, adds=device != "cpu"))
            self.policy = self._chooser = chooser
        elif self.measures:
            logger.warning(
                "--speculative-adaptive: no costs were measured (--skip-server-warmup, "
                "or too few KV slots or too short a context for some iterations), so "
                "every iteration has the shape of the flags; a table in "
                "--speculative-adaptive-config needs none"
            )

    def choose(self, batches: RunningBatches) -> int:
        """Return the index for the next iteration."""
        reqs = batches.decoding() if self.is_adaptive else []
        if self.is_adaptive and not reqs:
            return PLAIN
        return self.policy.choose(len(reqs), batches.behind)

    def observe(self, launched: LaunchRecord, result: GenerationBatchResult) -> None:
        """Learn from a result, before it is processed."""
        chooser = self._chooser
        if chooser is None or self.policy is not chooser:
            return
        now, before = time.perf_counter(), self._decoded_at
        self._decoded_at = now if launched.is_decode else None
        if not launched.is_decode:
            chooser.on_begun(len(launched.reqs))
            return
        lens, accepted = result.accept_lens, []
        if lens is not None:
            accepted = [lens[row] - 1 for row in launched.live_rows()]
        chooser.observe(
            self._indices[launched.shape],
            accepted,
            rows=len(launched.reqs),
            seconds=None if before is None else now - before,
            caught_up=launched.caught_up,
        )

    def on_idle(self) -> None:
        """Note that nothing runs: the next iteration begins late."""
        self._decoded_at = None
